"""Training of heads and draft models: each kind learns, and a run goes on as if unbroken."""

import copy
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from specdec_hf import ModelDrafter, generate
from specdec_hf.cli.weights import load_folder
from specdec_hf.heads.eagle3.config import HeadConfig
from specdec_hf.heads.eagle3.files import load_head, save_head
from specdec_hf.heads.eagle3.head import Eagle3Head
from specdec_hf.heads.shipped import TARGET, digest_of, read_sample
from specdec_hf.lab.training.kinds import KINDS
from specdec_hf.lab.training.model_card import _draw
from specdec_hf.lab.training.pipeline import Pipeline, Progress, _read_curves
from specdec_hf.lab.training.settings import TrainingSettings
from specdec_hf.lab.training.states import check_output
from specdec_hf.lab.training.texts import is_held_out, read_conversations
from specdec_hf.lab.training.train import Curves
from specdec_hf.lab.training.unrolled import acceptance_of, covered_by, loss_of, unroll
from support import hf_models
from support.cli_models import END, tokenizer
from support.heads import draft_llama, head_for, pass_head, rounds_of, text_batch

# Few different ones, so that a head can learn them by heart.
TEXTS = ["the cat sat on the mat and ate. ", "a dog ran over the hill and away. "] * 14
SMALL = TrainingSettings(
    tokens=900, length=24, turn_length=8, rows=8, steps=30, batch_size=4, learning_rate=5e-3,
    draft_vocab_size=30,
)  # fmt: skip
DRAFT_MODEL = dataclasses.replace(
    SMALL, head="draft_model", width=32, num_layers=1, draft_vocab_size=32000
)


class Interrupted(Exception):
    """A run was ended in the middle."""


class Interrupting(Progress):
    """Ends a run in the middle of a stage; its clock goes by the progress of training alone."""

    now, seconds = "", 0.0

    def __init__(self, stage="training", after=10**6):
        self.at, self.after = stage, after

    def monotonic(self):
        return self.seconds

    def stage(self, text, total):
        self.now = text

    def advance(self, done, text=""):
        self.seconds += 0.05 * (self.now == "training")
        if self.now == self.at and done >= self.after:
            raise Interrupted


def trained(model, folder, progress=None, settings=SMALL, texts=TEXTS, prompts=None, **kwargs):
    pipeline = Pipeline(model, tokenizer(), folder, settings, progress or Progress(), **kwargs)
    if prompts is not None:
        return pipeline, pipeline.run(prompts=prompts)
    return pipeline, pipeline.run(texts=[] if "source" in kwargs else texts)


def settings_of(kind):
    return DRAFT_MODEL if kind == "draft_model" else dataclasses.replace(SMALL, head=kind)


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", vocab_size=END + 1)


@pytest.fixture(scope="module")
def run_of(target, tmp_path_factory):
    """Makes an unbroken run of a kind once, on one thread: several sum otherwise."""
    made = {}

    def run(kind):
        if kind not in made:
            made[kind] = trained(target, tmp_path_factory.mktemp(kind), settings=settings_of(kind))
        return made[kind]

    return run


@pytest.fixture
def head_run(run_of):
    return run_of("eagle3")


@pytest.fixture
def model_run(run_of):
    return run_of("draft_model")


def same_weights(one, other):
    weights = other.state_dict()
    return all(torch.equal(x, weights[name]) for name, x in one.state_dict().items())


# Every kind.


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            x, marks=[] if x in ("eagle3", "blockwise", "draft_model") else pytest.mark.full
        )
        for x in KINDS
    ],
)
def test_a_head_learns_texts_by_heart(kind, target, run_of):
    """The loss falls, acceptance rises, the target stays as it is, and its folder drafts."""
    before = {key: weight.clone() for key, weight in target.state_dict().items()}
    pipeline, _ = run_of(kind)
    losses, shared = pipeline.curves.losses, pipeline.curves.shared
    assert len(losses[-1]) == (1 if KINDS[kind].single else 3)
    for step in range(len(losses[-1])):
        assert losses[-1][step] < losses[0][step] - 0.05
        assert shared[-1][step] > shared[0][step]
    assert all(torch.equal(weight, before[key]) for key, weight in target.state_dict().items())
    assert all(weight.grad is None for weight in target.parameters())
    inputs = tokenizer()(TEXTS[0], return_tensors="pt", return_token_type_ids=False)
    how = {"max_new_tokens": 12, "guard": False, "return_dict_in_generate": True}
    out = generate(target, **inputs, drafter=pipeline.folder, **how)
    assert out.stats.drafted > 0
    assert torch.equal(out.sequences, generate(target, **inputs, drafter=None, **how).sequences)


@pytest.mark.parametrize("kind", KINDS)
def test_no_head_is_made_for_a_target_with_an_output_bias(kind, target):
    settings = dataclasses.replace(settings_of(kind), draft_vocab_size=50)
    KINDS[kind].make(target, settings)
    biased = copy.deepcopy(target).to(torch.bfloat16)
    biased.lm_head.bias = torch.nn.Parameter(torch.full((END + 1,), 0.01, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="LlamaForCausalLM has a bias of"):
        KINDS[kind].make(biased, settings)


def test_training_unrolls_the_drafts_of_a_draft_model(target):
    head = draft_llama(target)
    settings = {"max_new_tokens": 10, "gamma": 3}
    for texts, draft in rounds_of(target, ModelDrafter(head.llama), (9,), **settings)[1]:
        whole = [*texts[0], *draft.tokens[0].tolist()]
        (logits,) = unroll(head, text_batch(target, (), whole), 3)
        assert logits.shape[1] == len(whole) - 1
        drafted = logits[0, len(texts[0]) - 2 : len(whole) - 2].argmax(dim=-1)
        assert drafted.tolist() == draft.tokens[0].tolist()


CUT_TEXTS = [[5, 9, 33, 2, 60, 9, 14, 8, 21, 40, 41], [7, 7, 30, 1, 2, 52, 3, 18]]
CUTS = [[0, 9, 4], [3, 6, 3]]


def look_ahead(name):
    """A model, embeddings for it, a batch of two texts with places to draft at, and an oracle."""
    model = hf_models.tiny(name)
    head = pass_head(model)
    head.borrow(model)
    padded = [text + [0] * (len(CUT_TEXTS[0]) - len(text)) for text in CUT_TEXTS]
    parts = [text_batch(model, (), text) for text in padded]
    given = [one.name for one in dataclasses.fields(parts[0]) if one.default is dataclasses.MISSING]
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in given}
    joined["lengths"] = torch.tensor([len(text) for text in CUT_TEXTS])

    @torch.no_grad()
    def direct(text):
        """Logits [L, V] at the embeddings after a text, without a cache."""
        rows = model.get_input_embeddings()(torch.tensor([text]))
        whole = torch.cat([rows, head.embeddings[None]], dim=1)
        return model(inputs_embeds=whole, use_cache=False).logits[0, len(text) :]

    return model, head, type(parts[0])(**joined, cuts=torch.tensor(CUTS)), direct


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_training_unrolls_what_a_look_ahead_drafts(name):
    """At several places of texts of different lengths in one forward, for a sliding window too."""
    model, head, batch, direct = look_ahead(name)
    unrolled = torch.stack(list(unroll(head, batch, 3)), dim=2)
    assert unrolled.shape == (2, 3, 3, 67)
    for b, c in np.ndindex(2, 3):
        got, cap = unrolled[b, c], getattr(model.config, "final_logit_softcapping", None)
        got = got if cap is None else torch.tanh(got / cap) * cap
        want = direct(CUT_TEXTS[b][: CUTS[b][c] + 1])
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_the_labels_are_the_targets_probabilities_at_the_drafted_places():
    """And those beyond the end of a text do not count."""
    target, head, batch, direct = look_ahead("llama")
    total, losses = loss_of(head, batch, 3)
    greedy, shared, count = acceptance_of(head, batch, 3, target.lm_head.weight)
    for k in range(1, 4):
        rows, hits, overlap = [], 0, 0.0
        for text, cuts in zip(CUT_TEXTS, CUTS, strict=True):
            for cut in (one for one in cuts if one + k < len(text)):
                with torch.no_grad():
                    labels = target(torch.tensor([text])).logits[0, cut + k].softmax(dim=-1)
                logits = direct(text[: cut + 1])[k - 1]
                rows.append(torch.nn.functional.cross_entropy(logits, labels))
                hits += int(logits.argmax() == labels.argmax())
                overlap += float(torch.minimum(logits.softmax(dim=-1), labels).sum())
        assert losses[k - 1].item() == pytest.approx(torch.stack(rows).mean().item(), rel=1e-4)
        assert (int(greedy[k - 1]), int(count[k - 1])) == (hits, len(rows))
        assert shared[k - 1].item() == pytest.approx(overlap, rel=1e-4)
    total.backward()
    assert float(head.embeddings.grad.abs().min(dim=1).values.max()) > 0
    assert all(weight.grad is None and weight.requires_grad for weight in target.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_caps_its_logits_is_refused(dtype, target, tmp_path):
    """Its probabilities are not those of its output matrix, so alpha would be of another target."""
    check_output(copy.deepcopy(target).to(dtype))
    capped = hf_models.build("gemma2", vocab_size=END + 1, final_logit_softcapping=1.0).to(dtype)
    with pytest.raises(ValueError, match="by its output matrix alone, and those of Gemma2"):
        trained(capped, tmp_path, settings=DRAFT_MODEL)
    assert not (tmp_path / "work" / "texts.jsonl").exists()


@pytest.mark.parametrize("share", [0.003, 0.03, 0.06])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_shifts_its_logits_is_refused(dtype, share, target):
    """By a bias of its output layer, and by as much in its forward."""
    shifted = copy.deepcopy(target).to(dtype)
    size = share * float(shifted(torch.arange(64)[None]).logits.detach().abs().max())
    bias = torch.nn.Parameter(torch.full((END + 1,), size, dtype=dtype))
    if share > torch.finfo(dtype).eps:
        shifted.lm_head.register_forward_hook(lambda layer, inputs, logits: logits + bias)
        with pytest.raises(ValueError, match=r"output matrix alone, .* differ by up to"):
            check_output(shifted)
        shifted.lm_head._forward_hooks.clear()
        check_output(shifted)
    shifted.lm_head.bias = bias
    with pytest.raises(ValueError, match=r"of LlamaForCausalLM has a bias of \(258,\)"):
        check_output(shifted)


# A run that was interrupted, that ended, or that begins from another one.


@pytest.mark.parametrize(
    ("stage", "after"),
    [
        pytest.param("texts", 300, marks=pytest.mark.full),
        pytest.param("hidden states", 300, marks=pytest.mark.full),
        ("training", 17),
    ],
)
def test_an_interrupted_run_ends_with_the_same_weights(stage, after, target, head_run, tmp_path):
    with pytest.raises(Interrupted):
        trained(target, tmp_path, Interrupting(stage, after))
    assert same_weights(trained(target, tmp_path)[1], head_run[1])


def test_a_finished_run_is_not_made_again_and_names_its_target(head_run, target):
    pipeline, head = head_run
    again, read = trained(target, pipeline.folder, Interrupting(after=1))
    assert again.curves == pipeline.curves
    assert again.curves.steps[-1] == 30
    assert same_weights(read, head)
    assert load_head(pipeline.folder).tokens.tolist() == head.tokens.tolist()
    written = json.loads((pipeline.folder / "config.json").read_text())
    assert written[TARGET] == digest_of(target)
    sample = read_sample(pipeline.folder, target.config.vocab_size)
    texts = read_conversations(pipeline.work / "texts.jsonl")
    assert list(sample.tokens) in [list(one.tokens) for one in texts if is_held_out(one)]


def test_a_trained_draft_model_is_a_model_with_its_tokenizer(model_run):
    pipeline, head = model_run
    read, made = load_folder(pipeline.folder)
    assert made("the cat")["input_ids"] == tokenizer()("the cat")["input_ids"]
    for name, weight in read.named_parameters():
        want = dict(head.llama.named_parameters())[name]
        torch.testing.assert_close(weight.float(), want.bfloat16().float())


@pytest.mark.full
def test_a_bounded_run_goes_on_as_if_unbroken_and_is_not_made_again(target, monkeypatch, tmp_path):
    """Of so many minutes of a clock; the steps that it was cut to stay."""

    def run(folder, after=10**6):
        clock = Interrupting(after=after)
        for module in ("pipeline", "train"):
            monkeypatch.setattr(f"specdec_hf.lab.training.{module}.time", clock)
        settings = dataclasses.replace(SMALL, steps=2000)
        return trained(target, tmp_path / folder, clock, settings, minutes=0.04)

    want, head = run("whole")
    assert want.curves.steps[0] == 20
    assert 30 < want.curves.steps[-1] < 100
    with pytest.raises(Interrupted):
        run("broken", 25)
    for folder, after in (("broken", 10**6), ("whole", 1), ("broken", 1)):
        pipeline, again = run(folder, after)
        assert pipeline.curves == want.curves
        assert same_weights(again, head)


def resumed(target, texts, folder, start, **changes):
    settings = dataclasses.replace(SMALL, steps=1, learning_rate=1e-6, **changes)
    return trained(target, folder, settings=settings, texts=texts, resume=start)[1]


def test_training_goes_on_from_a_head_with_another_draft_vocabulary(head_run, target, tmp_path):
    folder = head_run[0].folder
    start = load_head(folder)
    head = resumed(target, TEXTS, tmp_path / "a", folder, draft_vocab_size=20)
    assert len(head.tokens) == 20 != len(start.tokens)
    assert torch.equal(head.lm_head.float(), target.lm_head.weight[head.tokens])
    for name, weight in head.state_dict().items():
        assert torch.allclose(weight, start.state_dict()[name], atol=5e-6), name
    other = resumed(target, TEXTS, tmp_path / "b", None, draft_vocab_size=20).midlayer
    assert not torch.allclose(other.qkv_proj.weight, start.midlayer.qkv_proj.weight, atol=1e-3)
    kept = resumed(target, ["zz top " * 3, "quick fox "] * 30, tmp_path / "c", folder)
    assert kept.tokens.tolist() == start.tokens.tolist()
    with pytest.raises(ValueError, match="was begun with other resumed head: give the same"):
        resumed(target, TEXTS, tmp_path / "a", None, draft_vocab_size=20)


def test_heads_that_cannot_be_gone_on_with_are_refused_by_name(target, tmp_path):
    own, layers = head_for(target), Eagle3Head(HeadConfig.for_target(target, 9, (0, 1)))
    own.own_lm_head = True
    for head, folder in ((own, "own"), (layers, "layers")):
        save_head(head, tmp_path / folder)
    for folder, message, more in (
        ("own", "with the target's embeddings and output matrix, and .*own has its own", {}),
        ("layers", r"with layers = \(.*\), got \(0, 1\)", {}),
        ("missing", "cannot read a head.s .*missing.config.json: No such file", {}),
        ("own", "resume must be a head of kind eagle3, and Medusa heads", {"head": "medusa"}),
    ):
        with pytest.raises(ValueError, match=message):
            resumed(target, TEXTS, tmp_path / "out", tmp_path / folder, **more)
    assert not (tmp_path / "out" / "work" / "texts.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        (lambda model: model.model.layers[1].mlp.down_proj.weight.add_(1), {}, "another model"),
        (lambda model: model.double(), {}, "dtype = float32, got"),
        (lambda model: None, {"texts": ["another text "] * 40}, "other texts"),
        (lambda model: None, {"settings": dataclasses.replace(SMALL, seed=5)}, "seed = 0, got 5"),
    ],
)
def test_a_folder_begun_with_anything_else_is_refused(change, given, message, head_run):
    folder, model = head_run[0].folder, hf_models.build("llama", vocab_size=END + 1)
    with torch.no_grad():
        change(model)
    before = (folder / "work" / "run.json").read_text()
    with pytest.raises(ValueError, match=f"was begun with {message}"):
        trained(model, folder, **given)
    assert (folder / "work" / "run.json").read_text() == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"texts": ["hey you"]}, r"texts must be at least 20, .* got 1 of \d tokens"),
        ({"prompts": ["hey"] * 19}, r"prompts must be at least 20, .* got 19$"),
        ({"loss": "mse"}, "loss must be one of forward_kl, .*, got 'mse'"),
        ({"on_policy": 1.5}, r"on_policy must be in \[0, 1\], got 1.5"),
        ({"head": "eagle3", "on_policy": 0.5}, "on_policy must be 0 for eagle3, got 0.5"),
    ],
)
def test_a_wrong_run_is_refused_before_any_stage(given, message, target, tmp_path):
    data = {name: given[name] for name in given.keys() & {"texts", "prompts"}}
    changes = {name: given[name] for name in given.keys() - data.keys()}
    settings = dataclasses.replace(DRAFT_MODEL if changes else SMALL, **changes)
    with pytest.raises(ValueError, match=message):
        trained(target, tmp_path, settings=settings, **data)
    assert not list(tmp_path.glob("work/*.jsonl"))


# Draft models that learn from texts of another run, of their own, or what others miss.


@pytest.mark.parametrize("loss", ["reverse_kl", "total_variation"])
def test_other_losses_raise_acceptance_too(loss, target, model_run, tmp_path):
    settings = dataclasses.replace(DRAFT_MODEL, loss=loss)
    pipeline, _ = trained(target, tmp_path, settings=settings, source=model_run[0].folder)
    curves, before = pipeline.curves, model_run[0].curves
    assert curves.shared[-1][0] > curves.shared[0][0] + 0.1
    assert curves.losses[-1] != before.losses[-1]
    # Measured at every second step, and the loss changes after the 15th.
    assert curves.loss_steps == [*range(2, 15, 2), 15, *range(16, 31, 2)]
    assert curves.loss_names == ["forward_kl"] * 8 + [loss] * 8
    assert curves.steps == [*range(2, 31, 2)]
    assert curves.losses[:7] == before.losses[:7]
    assert before.loss_names == ["forward_kl"] * 15
    alone = 2 * before.losses[7][0] - curves.losses[7][0]  # its 16th step, with that loss
    assert abs(curves.losses[8][0] - alone) > 0.05
    lines = _draw(dataclasses.asdict(curves)).axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["step 1, forward_kl", f"step 1, {loss}"]
    assert [len(line.get_xdata()) for line in lines] == [8, 8]
    assert not (tmp_path / "work" / "texts.jsonl").exists()


def test_curves_are_cut_at_a_checkpoint_and_read_from_an_earlier_version(model_run):
    curves = copy.deepcopy(model_run[0].curves)
    written = dataclasses.asdict(curves)
    curves.cut(9)
    assert curves.loss_steps == curves.steps == [2, 4, 6, 8]
    assert {len(x) for x in dataclasses.asdict(curves).values()} == {4, 0}
    assert curves.covered == []
    del written["loss_names"]
    assert _read_curves(written, "forward_kl") == model_run[0].curves
    assert set(_read_curves(written, "reverse_kl").loss_names) == {"loss without a name"}


def test_an_interrupted_run_on_its_own_texts_ends_with_the_same_weights(
    target, model_run, tmp_path
):
    how = {
        "settings": dataclasses.replace(DRAFT_MODEL, on_policy=0.3), "source": model_run[0].folder,
    }  # fmt: skip
    want, head = trained(target, tmp_path / "one", **how)
    with pytest.raises(Interrupted):
        trained(target, tmp_path / "two", Interrupting(after=17), **how)
    again, other = trained(target, tmp_path / "two", **how)
    assert again.curves == want.curves
    assert again.curves.losses[-1] != model_run[0].curves.losses[-1]
    assert same_weights(head, other)


def test_two_that_were_boosted_cover_more_than_two_that_were_not(target, model_run, tmp_path):
    """Though the second one is better alone without boosting: it then knows what the first does."""
    source, first = model_run[0].folder, model_run[1].llama
    settings = dataclasses.replace(DRAFT_MODEL, steps=60)
    given = {"settings": settings, "source": source, "earlier": [first]}
    pipeline, boosted = trained(target, tmp_path / "boosted", **given)
    curves = pipeline.curves
    run = json.loads((tmp_path / "boosted" / "work" / "run.json").read_text())
    assert run["curves"]["covered"] == curves.covered
    assert len(curves.covered) == len(curves.steps)
    settings = dataclasses.replace(settings, seed=1)
    control, other = trained(target, tmp_path / "alone", settings=settings, source=source)
    texts = read_conversations(model_run[0].data / "texts.jsonl")
    covered = torch.zeros(2, 2)
    for one in filter(is_held_out, texts):
        batch = text_batch(target, (), one.tokens)
        for row, second in enumerate((boosted, other)):
            covered[row] += covered_by([first, second.llama], batch, target.lm_head.weight)
    with_boosting, without = (covered[:, 0] / covered[:, 1]).tolist()
    assert abs(with_boosting - curves.covered[-1]) < 0.05  # states are stored in bfloat16
    assert with_boosting > without + 0.05
    assert curves.greedy[-1][0] < control.curves.greedy[-1][0]
    for earlier in ([other.llama], []):
        with pytest.raises(ValueError, match="was begun with another draft model 1"):
            trained(target, tmp_path / "boosted", **{**given, "earlier": earlier})


def test_a_run_whose_texts_do_not_fit_is_refused(target, model_run, tmp_path):
    source = model_run[0].folder
    eagle = dataclasses.replace(SMALL, draft_vocab_size=32000)
    other = hf_models.build("llama", seed=1, vocab_size=END + 1)

    def refused(message, folder, model=target, settings=DRAFT_MODEL, **more):
        with pytest.raises(ValueError, match=message):
            trained(model, tmp_path / folder, settings=settings, **more)

    refused(r"must hold a run of train, and .* does not exist", "a", source=tmp_path)
    refused("a run with head = eagle3, got draft_model", "b", settings=eagle, source=source)
    refused("was begun with another model", "c", other, source=source)
    trained(target, tmp_path / "d", settings=DRAFT_MODEL, source=source)
    refused("must hold texts of its own", "e", source=tmp_path / "d")
    refused("was begun with other reused texts", "d")


def test_a_draft_model_reads_the_texts_and_states_of_a_head(target, tmp_path):
    """Rows of a head's run hold states after layers, too; the final one is the same."""
    eagle = dataclasses.replace(
        SMALL, steps=1, draft_steps=1, rows=DRAFT_MODEL.rows, draft_vocab_size=50
    )
    head = trained(target, tmp_path / "head", settings=eagle)[0]
    settings, own = dataclasses.replace(DRAFT_MODEL, steps=3), tmp_path / "own"
    shutil.copytree(head.data, own / "work", ignore=shutil.ignore_patterns("states.*", "check*"))
    run = json.loads((own / "work" / "run.json").read_text())
    run |= {"settings": dataclasses.asdict(settings), "curves": dataclasses.asdict(Curves())}
    (own / "work" / "run.json").write_text(json.dumps(run))
    want = trained(target, own, settings=settings)[1]
    given = {"settings": settings, "source": head.folder}
    pipeline, reading = trained(target, tmp_path / "reading", **given)
    assert not (pipeline.work / "states.bin").exists()
    assert same_weights(reading, want)
    done = json.loads((head.data / "states.json").read_text())["batches"]
    (head.data / "states.json").write_text(json.dumps({"batches": done - 1}))
    with pytest.raises(ValueError, match=rf"states of all texts, .* {done - 1} of {done} batches"):
        trained(target, tmp_path / "torn", **given)
    for name in ("states.bin", "states.json"):  # interrupted before it had any
        (head.data / name).unlink()
    trained(target, tmp_path / "early", **given)
    assert not (head.data / "states.bin").exists(), "the other run could not go on with these"
