"""Training: each kind of head learns, runs go on as if unbroken, and losses are their formulas."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from specdec_hf import ModelDrafter, generate
from specdec_hf.heads.eagle3.config import HeadConfig
from specdec_hf.heads.eagle3.files import load_head, save_head
from specdec_hf.heads.eagle3.head import Eagle3Head
from specdec_hf.heads.sample import read_sample
from specdec_hf.heads.shipped import TARGET, digest_of
from specdec_lab.training import pipeline
from specdec_lab.training.conversations import (
    ANSWERS,
    ChatFormat,
    TrainingText,
    answer_sampling,
    converse,
)
from specdec_lab.training.draft_model import project_output
from specdec_lab.training.kinds import KINDS
from specdec_lab.training.losses import mean_loss
from specdec_lab.training.on_policy import write_answers
from specdec_lab.training.pipeline import Pipeline, Progress
from specdec_lab.training.settings import LOSSES, TrainingSettings
from specdec_lab.training.states import check_output
from specdec_lab.training.texts import cut_texts, is_held_out, read_conversations
from specdec_lab.training.unrolled import acceptance_of, covered_by, loss_of, unroll
from support import hf_models
from support.cli_models import END, tokenizer
from support.hf_models import draft_llama, head_for, pass_head, rounds_of, text_batch

pytestmark = pytest.mark.training

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


def settings_of(kind):
    return DRAFT_MODEL if kind == "draft_model" else dataclasses.replace(SMALL, head=kind)


class Interrupting(Progress):
    now = ""

    def __init__(self, stage="training", after=10**6):
        self.at, self.after = stage, after

    def stage(self, text, total):
        self.now = text

    def advance(self, done, text=""):
        if self.now == self.at and done >= self.after:
            raise Interrupted


def trained(model, folder, progress=None, settings=SMALL, texts=TEXTS, **kwargs):
    pipeline = Pipeline(model, tokenizer(), folder, settings, progress or Progress(), **kwargs)
    return pipeline, pipeline.run(texts=[] if "source" in kwargs else texts)


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


def test_training_unrolls_the_drafts_of_a_draft_model(target):
    head = draft_llama(target)
    settings = {"max_new_tokens": 10, "gamma": 3}
    for texts, draft in rounds_of(target, ModelDrafter(head.llama), (9,), **settings)[1]:
        whole = [*texts[0], *draft.tokens[0].tolist()]
        (logits,) = unroll(head, text_batch(target, (), whole), 3)
        assert logits.shape[1] == len(whole) - 1
        drafted = logits[0, len(texts[0]) - 2 : len(whole) - 2].argmax(dim=-1)
        assert drafted.tolist() == draft.tokens[0].tolist()


def test_a_draft_model_begins_with_the_matrix_that_reads_the_targets_states():
    """Of the target's width, only the directions are others."""
    target = hf_models.build("llama")
    scale = target.model.norm.weight.data.uniform_(0.5, 2)
    rows = target.lm_head.weight.detach() * scale
    found = project_output(target, rows.shape[1])
    torch.testing.assert_close(found @ found.T, rows @ rows.T, rtol=1e-4, atol=1e-4)


CUT_TEXTS = [[5, 9, 33, 2, 60, 9, 14, 8, 21, 40, 41], [7, 7, 30, 1, 2, 52, 3, 18]]
CUTS = [[0, 9, 4], [3, 6, 3]]


def joined_batch(target):
    padded = [text + [0] * (len(CUT_TEXTS[0]) - len(text)) for text in CUT_TEXTS]
    parts = [text_batch(target, (), text) for text in padded]
    given = [one.name for one in dataclasses.fields(parts[0]) if one.default is dataclasses.MISSING]
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in given}
    joined["lengths"] = torch.tensor([len(text) for text in CUT_TEXTS])
    return dataclasses.replace(parts[0], **joined, cuts=torch.tensor(CUTS))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_labels_are_the_targets_probabilities_at_the_drafted_places(name):
    """Of a look-ahead at several places of a text at once. Those beyond its end do not count."""
    target = hf_models.tiny(name)
    head, batch, rows_of = pass_head(target), joined_batch(target), target.get_input_embeddings()
    head.borrow(target)
    total, losses = loss_of(head, batch, 3)
    greedy, shared, count = acceptance_of(head, batch, 3, target.lm_head.weight)
    for k in range(1, 4):
        rows, hits, overlap = [], 0, 0.0
        for text, cuts in zip(CUT_TEXTS, CUTS, strict=True):
            for cut in (one for one in cuts if one + k < len(text)):
                with torch.no_grad():  # at the embeddings after the text, without a cache
                    given = torch.cat([rows_of(torch.tensor(text[: cut + 1])), head.embeddings])
                    logits = target(inputs_embeds=given[None], use_cache=False).logits[0, cut + k]
                    labels = target(torch.tensor([text])).logits[0, cut + k].softmax(dim=-1)
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
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("capped", "by its output matrix alone, and those of Gemma2"),
        ("shifted", r"output matrix alone, .* differ by up to"),
        ("biased", r"of LlamaForCausalLM has a bias of \(258,\)"),
    ],
)
def test_a_target_of_other_logits_than_its_output_matrix_is_refused(kind, message, dtype, target):
    """Alpha would be that of another target."""
    check_output(copy.deepcopy(target).to(dtype))
    name = "gemma2" if kind == "capped" else "llama"
    more = {"final_logit_softcapping": 1.0} if kind == "capped" else {}
    model = hf_models.build(name, vocab_size=END + 1, **more).to(dtype)
    size = 0.03 * float(model(torch.arange(64)[None]).logits.detach().abs().max())
    if kind == "shifted":
        model.lm_head.register_forward_hook(lambda layer, inputs, logits: logits + size)
    if kind == "biased":
        model.lm_head.bias = torch.nn.Parameter(torch.full((END + 1,), size, dtype=dtype))
    with pytest.raises(ValueError, match=message):
        check_output(model)


@pytest.mark.parametrize(
    ("stage", "after"),
    [
        pytest.param("texts", 300, marks=pytest.mark.full),
        pytest.param("hidden states", 300, marks=pytest.mark.full), ("training", 17),
    ],
)  # fmt: skip
def test_an_interrupted_run_ends_with_the_same_weights(stage, after, target, head_run, tmp_path):
    with pytest.raises(Interrupted):
        trained(target, tmp_path, Interrupting(stage, after))
    assert same_weights(trained(target, tmp_path)[1], head_run[1])


def test_a_finished_run_is_not_made_again_and_names_its_target(head_run, target):
    pipeline, head = head_run
    again, read = trained(target, pipeline.folder, Interrupting(after=1))
    assert again.curves == pipeline.curves
    assert same_weights(read, head)
    written = json.loads((pipeline.folder / "config.json").read_text())
    assert written[TARGET] == digest_of(target)
    sample = read_sample(pipeline.folder, target.config.vocab_size)
    texts = read_conversations(pipeline.work / "texts.jsonl")
    assert list(sample.tokens) in [list(one.tokens) for one in texts if is_held_out(one)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_of_the_minutes_are_for_texts_and_the_others_for_training(
    dtype, target, tmp_path, monkeypatch
):
    """A run that goes on has what the one before it left; a text takes a minute here."""
    now, asked = [0.0], []

    def converse(*_, numbers, stop, **__):
        for number in numbers:
            now[0] += 60
            yield TrainingText(number, [1, 2, 3, 4, 5, 6], 3)
            if stop(0):
                return

    def train(*given, minutes, **_):
        recipe = given[5]
        asked.append((recipe.autocast, recipe.measure_every, round(minutes)))
        return SimpleNamespace(run=lambda: None)

    clock = SimpleNamespace(monotonic=lambda: now[0])
    for name, fake in (("converse", converse), ("Trainer", train), ("time", clock)):
        monkeypatch.setattr(pipeline, name, fake)
    model, settings = copy.deepcopy(target).to(dtype), dataclasses.replace(SMALL, steps=12)
    for _ in range(2):
        trained(model, tmp_path, settings=settings, texts=[], minutes=60)
    assert asked == [(None if dtype == torch.float32 else dtype, 1, 29)] * 2


def test_training_goes_on_from_a_head_with_another_draft_vocabulary(head_run, target, tmp_path):
    folder, start = head_run[0].folder, load_head(head_run[0].folder)
    settings = dataclasses.replace(SMALL, steps=1, learning_rate=1e-6, draft_vocab_size=20)
    head = trained(target, tmp_path, settings=settings, resume=folder)[1]
    assert len(head.tokens) == 20 != len(start.tokens)
    assert torch.equal(head.lm_head.float(), target.lm_head.weight[head.tokens])
    for name, weight in head.state_dict().items():
        assert torch.allclose(weight, start.state_dict()[name], atol=5e-6), name
    with pytest.raises(ValueError, match="was begun with other resumed head: give the same"):
        trained(target, tmp_path, settings=settings)


def test_what_no_run_can_begin_with_is_refused_by_name(target, model_run, tmp_path):
    own, layers = head_for(target), Eagle3Head(HeadConfig.for_target(target, 9, (0, 1)))
    own.own_lm_head = True
    for head, folder in ((own, "own"), (layers, "layers")):
        save_head(head, tmp_path / folder)
    medusa = dataclasses.replace(SMALL, head="medusa")
    source = {"settings": DRAFT_MODEL, "source": model_run[0].folder}
    reusing = trained(target, tmp_path / "reusing", **source)[0].folder
    for message, given in (
        ("with the target's embeddings and output matrix", {"resume": tmp_path / "own"}),
        (r"with layers = \(.*\), got \(0, 1\)", {"resume": tmp_path / "layers"}),
        ("resume must be a head of kind eagle3", {"resume": tmp_path, "settings": medusa}),
        (r"texts must be at least 20, .* got 1 of \d tokens", {"texts": ["hey you"]}),
        ("must hold a run of train, and .* does not exist", {**source, "source": tmp_path}),
        ("with head = eagle3, got draft_model", {**source, "settings": SMALL}),
        ("must hold texts of its own", {**source, "source": reusing}),
    ):
        with pytest.raises(ValueError, match=message):
            trained(target, tmp_path / "out", **given)
        assert not list((tmp_path / "out").rglob("*.jsonl"))
    with pytest.raises(ValueError, match=r"layer of Llama\w+ cannot start the head: The size"):
        own.begin_as(hf_models.build("llama", intermediate_size=40))
    with pytest.raises(ValueError, match="was begun with other reused texts"):
        trained(target, reusing, settings=DRAFT_MODEL)


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
    "change", [{"loss": "reverse_kl"}, {"loss": "total_variation"}, {"on_policy": 0.3}], ids=str
)
def test_other_losses_and_texts_of_its_own_raise_acceptance_too(
    change, target, model_run, tmp_path
):
    settings = dataclasses.replace(DRAFT_MODEL, **change)
    curves = trained(target, tmp_path, settings=settings, source=model_run[0].folder)[0].curves
    assert curves.shared[-1][0] > curves.shared[0][0] + 0.1
    assert curves.losses[-1] != model_run[0].curves.losses[-1]
    assert not (tmp_path / "work" / "texts.jsonl").exists()


def test_two_that_were_boosted_cover_more_than_two_that_were_not(target, model_run, tmp_path):
    """Though the second one is better alone without boosting: it then knows what the first does."""
    source, first = model_run[0].folder, model_run[1].llama
    settings = dataclasses.replace(DRAFT_MODEL, steps=60)
    given = {"settings": settings, "source": source, "earlier": [first]}
    pipeline, boosted = trained(target, tmp_path / "boosted", **given)
    curves = pipeline.curves
    settings = dataclasses.replace(settings, seed=1)
    control, other = trained(target, tmp_path / "alone", settings=settings, source=source)
    covered = torch.zeros(2, 2)
    for one in filter(is_held_out, read_conversations(model_run[0].data / "texts.jsonl")):
        batch = text_batch(target, (), one.tokens)
        for row, second in enumerate((boosted, other)):
            covered[row] += covered_by([first, second.llama], batch, target.lm_head.weight)
    with_boosting, without = (covered[:, 0] / covered[:, 1]).tolist()
    assert abs(with_boosting - curves.covered[-1]) < 0.05  # states are stored in bfloat16
    assert with_boosting > without + 0.05
    assert curves.greedy[-1][0] < control.curves.greedy[-1][0]
    with pytest.raises(ValueError, match="was begun with another draft model 1"):
        trained(target, tmp_path / "boosted", **{**given, "earlier": [other.llama]})


CHAT = ChatFormat((1, 2), (3, 4), frozenset({3}))


def conversations(model, numbers=range(7), **kwargs):
    settings = {"batch_size": 3, "length": 20, "turn_length": 8, "seed": 1} | kwargs
    made = converse(model, CHAT, numbers=iter(numbers), **settings)
    return {one.number: one for one in made}


def test_a_text_does_not_depend_on_those_written_beside_it(target):
    together, alone = conversations(target), conversations(target, batch_size=1)
    assert together == alone
    assert together.keys() == set(range(7))
    assert len({tuple(one.tokens) for one in together.values()}) == 7
    # Of a first turn the format follows, and its last token is not a part of it.
    assert max(one.answer - len(CHAT.before) - len(CHAT.between) for one in together.values()) == 7


def test_what_is_held_out_has_answers_of_all_kinds():
    held_out = [n for n in range(80) if is_held_out(TrainingText(n, [], 0))]
    assert {answer_sampling(number) for number in held_out} == set(ANSWERS)


def test_prompts_are_answered_as_generate_answers_them(target):
    prompts = [[5], [7, 9, 11, 6, 30, 31], [8, 8, 8]]
    made = conversations(target, range(3), prompts=prompts, batch_size=2)
    for number in (0, 2):
        one, given = made[number], [1, 2, *prompts[number], 3, 4]
        assert one.answer == len(given)
        want = target.generate(
            torch.tensor([given]), attention_mask=torch.ones(1, len(given)), do_sample=False,
            max_new_tokens=20 - len(given), eos_token_id=3,
        )  # fmt: skip
        assert one.tokens == want[0].tolist()


def test_the_format_is_that_of_the_chat_template(target):
    made = tokenizer()
    chat = ChatFormat.of(target, made)
    ids = made.apply_chat_template(
        [{"role": "user", "content": "hey"}], add_generation_prompt=True, return_dict=False
    )
    assert [*chat.before, *made("hey")["input_ids"], *chat.between] == ids
    assert END in chat.ends
    plain = ChatFormat.of(target, tokenizer(None))
    assert (plain.before, plain.between) == ((END,), ())


@pytest.mark.parametrize("count", [3, 45])
def test_training_reads_nothing_beside_what_is_held_out(count):
    """A token of a text of 1000 tells where it lies."""
    given = [list(range(1000 * n, 1000 * (n + 1))) for n in range(count)]
    pieces = list(cut_texts([[], *given], 24, 10**9))
    assert [token for one in pieces for token in one.tokens] == list(range(1000 * count))
    read, held = (
        {token for one in pieces if is_held_out(one) == kind for token in one.tokens}
        for kind in (False, True)
    )
    assert not read & held
    if count < 20:
        assert held == {1000 * n + k for n in range(count) for k in range(950, 1000)}
    else:
        assert held == {token for n in range(19, count, 20) for token in given[n]}
    assert sum(len(one.tokens) for one in cut_texts(given, 24, 1480)) == 1480


def test_an_answer_ends_with_an_end_token_or_with_its_most_tokens(target):
    tokens, prompts = torch.arange(24).view(2, 12), torch.tensor([2, 4])
    most, seeds = torch.tensor([5, 12]), torch.tensor([7, 8])
    never = torch.tensor([], dtype=torch.int64)
    written, lengths = write_answers(target, tokens, prompts, most, never, seeds)
    assert lengths.tolist() == [5, 12]
    assert torch.equal(written[0, 5:], tokens[0, 5:])
    assert torch.equal(written[1, :4], tokens[1, :4])
    end = written[1, 6:7]
    size = 5 + written[1, 4:].tolist().index(int(end))
    cut, lengths = write_answers(target, tokens, prompts, most, end, seeds)
    assert lengths[1] == size
    kept = torch.where(
        torch.arange(cut.shape[1]) < size, written[1, : cut.shape[1]], tokens[1, : cut.shape[1]]
    )
    assert torch.equal(cut[1], kept)


FORMULAS = {  # of P and the logarithm of Q
    "forward_kl": lambda p, log_q: -(p * log_q).sum(dim=-1),
    "reverse_kl": lambda p, log_q: (log_q.exp() * (log_q - p.log())).sum(dim=-1),
    "total_variation": lambda p, log_q: (p - log_q.exp()).abs().sum(dim=-1) / 2,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 0.02)])
def test_a_mean_loss_is_that_of_the_rows_that_count(name, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, generator=generator, dtype=torch.float64)
    labels = torch.randn(3, 5, 11, generator=generator, dtype=torch.float64).softmax(dim=-1)
    valid = torch.rand(3, 5, generator=generator) < 0.6
    exact, ours = logits.clone().requires_grad_(), logits.to(dtype).requires_grad_()
    want = FORMULAS[name](labels, exact.log_softmax(dim=-1))[valid].mean()
    got = mean_loss(name, ours, labels.to(dtype), valid)
    (2 * want).backward()
    (2 * got).backward()
    assert abs(got.item() - want.item()) < tolerance
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=tolerance, rtol=0)
    assert float(ours.grad[~valid].abs().max()) == 0


def test_a_target_that_rounds_to_zero_has_a_finite_reverse_kl():
    target = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    logits = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    loss = mean_loss("reverse_kl", logits, target, torch.tensor([True]))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] > 0  # it drafts too much of what the target never says
