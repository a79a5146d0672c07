"""Training of draft models: where they begin, what they read, and what they write."""

import copy
import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from specdec_hf import ModelDrafter, generate
from specdec_hf.cli.weights import load_folder
from specdec_hf.lab.training.draft_model import (
    DraftLlama,
    DraftModelConfig,
    missed_by,
    project_output,
)
from specdec_hf.lab.training.kinds import KINDS
from specdec_hf.lab.training.losses import mean_loss
from specdec_hf.lab.training.model_card import _draw
from specdec_hf.lab.training.on_policy import OnPolicy, is_on_policy, write_answers
from specdec_hf.lab.training.pipeline import Pipeline, _read_curves
from specdec_hf.lab.training.settings import LOSSES, TrainingSettings
from specdec_hf.lab.training.states import check_output
from specdec_hf.lab.training.texts import is_held_out, read_conversations
from specdec_hf.lab.training.train import Curves, Recipe
from specdec_hf.lab.training.unrolled import Batch, covered_by, loss_of, unroll
from support import hf_models
from support.cli_models import END, tokenizer
from support.heads import TEXTS, Interrupted, Interrupting, rounds_of, text_batch
from transformers import AutoModelForCausalLM

from specdec_kernels import sample
from specdec_kernels.analysis import acceptance_rate

SMALL = TrainingSettings(
    head="draft_model", tokens=900, length=24, turn_length=8, steps=30, batch_size=4,
    learning_rate=5e-3, width=32, num_layers=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", vocab_size=END + 1)


def draft_llama(target, seed=0, layers=1):
    head = DraftLlama(DraftModelConfig.for_target(target, 32, layers), target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head.begin_as(target)
    head.borrow(target)
    return head.eval()


def random_batch(target, lengths, answers, seed=0):
    """Texts of random tokens, and the target's states over them."""
    generator = torch.Generator().manual_seed(seed)
    vocab = target.config.vocab_size
    tokens = torch.randint(0, vocab, (len(lengths), max(lengths)), generator=generator)
    with torch.no_grad():
        final = target.get_decoder()(tokens).last_hidden_state
    none = final[..., :0]
    return Batch(tokens, none, none, final, torch.tensor(lengths), torch.tensor(answers))


# Where it begins.


@pytest.mark.parametrize("width", [32, 16])
def test_the_embeddings_are_the_best_ones_of_their_width(target, width):
    """No other projection of the rows keeps more of the logits (Eckart-Young)."""
    rows = target.lm_head.weight.detach() * target.model.norm.weight.detach()
    projected = project_output(target, width)
    assert projected.shape == (len(rows), width)
    singular = torch.linalg.svdvals(rows.double())
    lost = (rows @ rows.T - projected @ projected.T).double()
    torch.testing.assert_close(
        torch.linalg.matrix_norm(lost), singular[width:].pow(4).sum().sqrt(), atol=2e-4, rtol=1e-4
    )


def test_a_draft_model_does_not_begin_by_repeating_the_last_token(target):
    """A tied output matrix of large embeddings would."""
    head, tokens = draft_llama(target), torch.arange(target.config.vocab_size)[None]
    repeated = head.logits(tokens).argmax(dim=-1) == tokens
    assert float(repeated.float().mean()) < 0.5


def test_widths_that_do_not_fit_are_refused(target):
    for width in (48, 64):
        with pytest.raises(ValueError, match=rf"multiple of 32 of at most 32, .* got {width}"):
            DraftModelConfig.for_target(target, width, 1)
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        DraftModelConfig.for_target(target, 32, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_caps_its_logits_is_refused(dtype, target, tmp_path):
    """Its probabilities are not those of its output matrix, so alpha would be of another target."""
    check_output(copy.deepcopy(target).to(dtype))
    capped = hf_models.build("gemma2", vocab_size=END + 1, final_logit_softcapping=1.0).to(dtype)
    with pytest.raises(ValueError, match="by its output matrix alone, and those of Gemma2"):
        trained(capped, tmp_path)
    assert not (tmp_path / "work" / "texts.jsonl").exists()


@pytest.mark.parametrize("share", [0.003, 0.03, 0.06])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_shifts_its_logits_is_refused(dtype, share, target):
    """By a bias of its output layer, and by as much in its forward."""
    shifted = copy.deepcopy(target).to(dtype)
    tokens = torch.arange(64)[None]
    size = share * float(shifted(tokens).logits.detach().abs().max())
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


@pytest.mark.parametrize("name", KINDS)
def test_no_head_is_made_for_a_target_with_an_output_bias(name, target):
    settings = dataclasses.replace(SMALL, head=name, draft_vocab_size=50)
    KINDS[name].make(target, settings)
    biased = copy.deepcopy(target).to(torch.bfloat16)
    biased.lm_head.bias = torch.nn.Parameter(torch.full((END + 1,), 0.01, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="LlamaForCausalLM has a bias of"):
        KINDS[name].make(biased, settings)


def test_neither_making_nor_starting_one_draws_from_the_callers_random_numbers(target):
    before = torch.get_rng_state()
    DraftLlama(DraftModelConfig.for_target(target, 32, 1), target)
    assert torch.equal(torch.get_rng_state(), before)


def test_training_unrolls_what_is_drafted(target):
    head = draft_llama(target)
    settings = {"max_new_tokens": 10, "gamma": 3}
    for texts, draft in rounds_of(target, ModelDrafter(head.llama), (9,), **settings)[1]:
        whole = [*texts[0], *draft.tokens[0].tolist()]
        (logits,) = unroll(head, text_batch(target, (), whole), 3)
        assert logits.shape[1] == len(whole) - 1
        drafted = logits[0, len(texts[0]) - 2 : len(whole) - 2].argmax(dim=-1)
        assert drafted.tolist() == draft.tokens[0].tolist()


# Texts of its own.


@pytest.mark.parametrize("share", [0.0, 0.1, 0.29, 0.5, 1.0])
def test_the_share_of_the_batches_is_exact(share):
    chosen = [is_on_policy(step, share) for step in range(1, 101)]
    assert sum(chosen) == round(100 * share)
    assert all(sum(chosen[:n]) <= n * share + 1e-6 for n in range(100))


def test_answers_are_drawn_one_token_after_the_other(target):
    """Each as from the whole text before it, whatever is written beside it."""
    llama = draft_llama(target).llama
    batch = random_batch(target, [9, 14, 12], [3, 6, 12])
    prompts, seeds = torch.tensor([3, 6, 11]), torch.tensor([-5, 7, 2**40])
    ends = torch.tensor([], dtype=torch.int64)
    tokens, lengths = write_answers(llama, batch.tokens, prompts, batch.lengths, ends, seeds)
    assert lengths.tolist() == [9, 14, 12]
    for b, (prompt, length) in enumerate(zip(prompts.tolist(), lengths.tolist(), strict=True)):
        assert torch.equal(tokens[b, :prompt], batch.tokens[b, :prompt])
        for place in range(prompt, length):
            logits = llama(tokens[b : b + 1, :place]).logits[:, -1].detach()
            want = sample(logits, seeds=seeds[b : b + 1], positions=torch.tensor([place]))
            assert tokens[b, place] == want.tokens
    end = int(tokens[1, 8])
    cut = write_answers(llama, batch.tokens, prompts, batch.lengths, torch.tensor([end]), seeds)
    first = next(n for n in range(6, 14) if tokens[1, n] == end)
    assert cut[1][1] == first + 1
    assert torch.equal(cut[0][1, : first + 1], tokens[1, : first + 1])


def test_the_target_scores_what_the_draft_model_wrote(target):
    head, batch = draft_llama(target), random_batch(target, [9, 14, 12], [3, 6, 12])
    change = OnPolicy(head, target, {1}, 0.5, seed=3)
    assert change(1, batch) is batch
    made = change(2, batch)
    assert made.answers.tolist() == [3, 6, 6]  # from the middle where there is no answer
    assert not torch.equal(made.tokens[0, 3:9], batch.tokens[0, 3:9])
    for b, length in enumerate(made.lengths.tolist()):
        alone = target.get_decoder()(made.tokens[b : b + 1, :length]).last_hidden_state
        torch.testing.assert_close(made.final[b, :length], alone[0].detach())
    assert not torch.equal(change(4, batch).tokens, made.tokens)  # other random numbers
    assert torch.equal(change(2, batch).tokens, made.tokens)


# Boosting.


def test_what_earlier_draft_models_get_right_does_not_count(target):
    batch = random_batch(target, [12, 9], [0, 0])
    heads = [draft_llama(target, seed) for seed in range(3)]
    with torch.no_grad():  # one that knows every third token of the target's
        choices = target.lm_head(batch.final).argmax(dim=-1)
    known = torch.zeros_like(choices, dtype=torch.bool)
    known[:, ::3] = True

    guess = torch.where(known, choices, (choices + 1) % target.config.vocab_size)
    knowing = SimpleNamespace(logits=torch.nn.functional.one_hot(guess, target.config.vocab_size))
    earlier = [heads[1].llama, lambda **inputs: knowing]
    missed = missed_by(earlier, batch.tokens, choices)
    own = heads[1].logits(batch.tokens).argmax(dim=-1) == choices
    assert torch.equal(missed, ~(own | known))
    loss, _ = loss_of(heads[0], batch, 1, "total_variation", earlier)
    target_probs = target.lm_head(batch.final).softmax(dim=-1)
    draft_probs = heads[0].logits(batch.tokens).softmax(dim=-1)
    variation = (target_probs - draft_probs).abs().sum(dim=-1)[:, 1:] / 2
    counts = missed[:, 1:] & batch.places(1)
    assert 0 < counts.sum() < batch.places(1).sum()
    assert abs(loss.item() - variation[counts].mean().item()) < 1e-5
    found = covered_by(earlier, batch, target.lm_head.weight)
    answers = batch.places(1, answers=True)
    assert found.tolist() == [(~missed[:, 1:] & answers).sum(), answers.sum()]


# The whole.


def trained(target, folder, after=10**6, settings=SMALL, **kwargs):
    progress = Interrupting("training", after)
    pipeline = Pipeline(target, tokenizer(), folder, settings, progress, **kwargs)
    return pipeline, pipeline.run(texts=[] if "source" in kwargs else TEXTS)


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory):
    """An unbroken run."""
    return trained(target, tmp_path_factory.mktemp("whole"))


def test_a_draft_model_learns_texts_by_heart_and_drafts_from_its_folder(target, whole):
    pipeline, head = whole
    losses, shared = pipeline.curves.losses, pipeline.curves.shared
    assert losses[-1][0] < losses[0][0] - 0.5
    assert shared[-1][0] > shared[0][0] + 0.1
    read, made = load_folder(pipeline.folder)
    assert made("the cat")["input_ids"] == tokenizer()("the cat")["input_ids"]
    for name, weight in AutoModelForCausalLM.from_pretrained(pipeline.folder).named_parameters():
        want = dict(head.llama.named_parameters())[name]
        torch.testing.assert_close(weight.float(), want.bfloat16().float())
    inputs = tokenizer()(TEXTS[0], return_tensors="pt", return_token_type_ids=False)
    settings = {"max_new_tokens": 12, "guard": False, "return_dict_in_generate": True}
    out = generate(target, **inputs, drafter=read, **settings)
    assert out.stats.drafted > 0
    assert torch.equal(
        out.sequences, generate(target, **inputs, drafter=None, **settings).sequences
    )


@pytest.mark.parametrize("loss", ["reverse_kl", "total_variation"])
def test_other_losses_raise_acceptance_too(loss, target, whole, tmp_path):
    settings = dataclasses.replace(SMALL, loss=loss)
    pipeline, _ = trained(target, tmp_path, settings=settings, source=whole[0].folder)
    shared = pipeline.curves.shared
    assert shared[-1][0] > shared[0][0] + 0.1
    assert pipeline.curves.losses[-1] != whole[0].curves.losses[-1]
    # Measured at every second step, and the loss changes after the 15th.
    curves = pipeline.curves
    assert curves.loss_steps == [*range(2, 15, 2), 15, *range(16, 31, 2)]
    assert curves.loss_names == ["forward_kl"] * 8 + [loss] * 8
    assert curves.steps == [*range(2, 31, 2)]
    before = whole[0].curves  # the same steps as far as the 14th
    assert curves.losses[:7] == before.losses[:7]
    assert before.loss_names == ["forward_kl"] * 15
    alone = 2 * before.losses[7][0] - curves.losses[7][0]  # its 16th step, with that loss
    assert abs(curves.losses[8][0] - alone) > 0.05
    figure = _draw(dataclasses.asdict(curves))
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["step 1, forward_kl", f"step 1, {loss}"]
    assert [len(line.get_xdata()) for line in lines] == [8, 8]
    assert not (tmp_path / "work" / "texts.jsonl").exists()


def test_what_was_measured_after_a_checkpoint_is_forgotten(whole):
    curves = copy.deepcopy(whole[0].curves)
    curves.cut(9)
    assert curves.loss_steps == curves.steps == [2, 4, 6, 8]
    assert {len(x) for x in dataclasses.asdict(curves).values()} == {4, 0}
    assert curves.covered == []


def test_a_run_of_an_earlier_version_names_the_losses_that_are_known(whole):
    written = dataclasses.asdict(whole[0].curves)
    del written["loss_names"]
    assert _read_curves(written, "forward_kl") == whole[0].curves
    assert set(_read_curves(written, "reverse_kl").loss_names) == {"loss without a name"}


def test_an_interrupted_run_on_its_own_texts_ends_with_the_same_weights(target, whole, tmp_path):
    settings = dataclasses.replace(SMALL, on_policy=0.3)
    source = whole[0].folder
    want, head = trained(target, tmp_path / "one", settings=settings, source=source)
    with pytest.raises(Interrupted):
        trained(target, tmp_path / "two", 17, settings=settings, source=source)
    again, other = trained(target, tmp_path / "two", settings=settings, source=source)
    assert again.curves == want.curves
    assert again.curves.losses[-1] != whole[0].curves.losses[-1]
    weights = other.state_dict()
    assert all(torch.equal(x, weights[name]) for name, x in head.state_dict().items())


def test_two_that_were_boosted_cover_more_than_two_that_were_not(target, whole, tmp_path):
    """Though the second one is better alone without boosting: it then knows what the first does."""
    source, first = whole[0].folder, whole[1].llama
    settings = dataclasses.replace(SMALL, steps=60)
    given = {"settings": settings, "source": source, "earlier": [first]}
    pipeline, boosted = trained(target, tmp_path / "boosted", **given)
    curves = pipeline.curves
    assert len(curves.covered) == len(curves.steps)
    run = json.loads((tmp_path / "boosted" / "work" / "run.json").read_text())
    assert run["curves"]["covered"] == curves.covered
    settings = dataclasses.replace(settings, seed=1)
    control, other = trained(target, tmp_path / "alone", settings=settings, source=source)
    texts = [one for one in read_conversations(whole[0].data / "texts.jsonl") if is_held_out(one)]
    covered = torch.zeros(2, 2)
    for one in texts:
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


def test_a_run_whose_texts_do_not_fit_is_refused(target, whole, tmp_path):
    source = whole[0].folder
    with pytest.raises(ValueError, match=r"must hold a run of train, and .* does not exist"):
        trained(target, tmp_path / "a", source=tmp_path)
    eagle = dataclasses.replace(SMALL, head="eagle3")
    with pytest.raises(ValueError, match="a run with head = eagle3, got draft_model"):
        trained(target, tmp_path / "b", settings=eagle, source=source)
    other = hf_models.build("llama", seed=1, vocab_size=END + 1)
    with pytest.raises(ValueError, match="was begun with another model"):
        trained(other, tmp_path / "c", source=source)
    trained(target, tmp_path / "d", source=source)
    with pytest.raises(ValueError, match="must hold texts of its own"):
        trained(target, tmp_path / "e", source=tmp_path / "d")
    with pytest.raises(ValueError, match="was begun with other reused texts"):
        trained(target, tmp_path / "d")


def test_a_draft_model_reads_the_texts_and_states_of_a_head(target, tmp_path):
    """Rows of a head's run hold states after layers, too; the final one is the same."""
    eagle = dataclasses.replace(SMALL, head="eagle3", steps=1, draft_steps=1, draft_vocab_size=50)
    head = trained(target, tmp_path / "head", settings=eagle)[0]
    settings = dataclasses.replace(SMALL, steps=3)
    own = tmp_path / "own"
    shutil.copytree(head.data, own / "work", ignore=shutil.ignore_patterns("states.*", "check*"))
    run = json.loads((own / "work" / "run.json").read_text())
    run |= {"settings": dataclasses.asdict(settings), "curves": dataclasses.asdict(Curves())}
    (own / "work" / "run.json").write_text(json.dumps(run))
    want = trained(target, own, settings=settings)[1].state_dict()
    given = {"settings": settings, "source": head.folder}
    pipeline, reading = trained(target, tmp_path / "reading", **given)
    assert not (pipeline.work / "states.bin").exists()
    for name, weight in reading.state_dict().items():
        assert torch.equal(weight, want[name]), name
    done = json.loads((head.data / "states.json").read_text())["batches"]
    (head.data / "states.json").write_text(json.dumps({"batches": done - 1}))
    with pytest.raises(ValueError, match=rf"states of all texts, .* {done - 1} of {done} batches"):
        trained(target, tmp_path / "torn", **given)
    for name in ("states.bin", "states.json"):  # interrupted before it had any
        (head.data / name).unlink()
    trained(target, tmp_path / "early", **given)
    assert not (head.data / "states.bin").exists(), "the other run could not go on with these"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "mse"}, "loss must be one of forward_kl, .*, got 'mse'"),
        ({"on_policy": 1.5}, r"on_policy must be in \[0, 1\], got 1.5"),
        ({"head": "eagle3", "on_policy": 0.5}, "on_policy must be 0 for eagle3, got 0.5"),
    ],
)
def test_wrong_settings_are_refused_before_texts_are_written(change, message, target, tmp_path):
    with pytest.raises(ValueError, match=message):
        trained(target, tmp_path, settings=dataclasses.replace(SMALL, **change))
    assert not (tmp_path / "work" / "texts.jsonl").exists()


# The losses: their values and gradients, and which of them is the acceptance rate.

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
    if name == "forward_kl":
        torch.testing.assert_close(
            want, torch.nn.functional.cross_entropy(exact[valid], labels[valid])
        )
    got = mean_loss(name, ours, labels.to(dtype), valid)
    (2 * want).backward()
    (2 * got).backward()
    assert abs(got.item() - want.item()) < tolerance
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=tolerance, rtol=0)
    assert float(ours.grad[~valid].abs().max()) == 0


def test_the_total_variation_is_one_less_alpha():
    """So the other losses are not: theirs differs on the same rows."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(64, 9, generator=generator, dtype=torch.float64)
    target = (3 * torch.randn(64, 9, generator=generator, dtype=torch.float64)).softmax(dim=-1)
    alpha = float(acceptance_rate(target, logits.softmax(dim=-1)).mean())
    valid = torch.ones(64, dtype=torch.bool)
    losses = {name: float(mean_loss(name, logits, target, valid)) for name in LOSSES}
    assert abs(losses.pop("total_variation") - (1 - alpha)) < 1e-6
    assert all(abs(loss - (1 - alpha)) > 0.1 for loss in losses.values())


def test_a_target_that_rounds_to_zero_has_a_finite_reverse_kl():
    target = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    logits = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    loss = mean_loss("reverse_kl", logits, target, torch.tensor([True]))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] > 0  # it drafts too much of what the target never says


def test_the_first_half_of_the_steps_has_the_forward_kl():
    recipe = Recipe(8, loss="total_variation")
    made = [recipe.loss_at(step, 8) for step in range(1, 9)]
    assert made == ["forward_kl"] * 4 + ["total_variation"] * 4
