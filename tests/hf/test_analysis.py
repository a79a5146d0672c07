"""What `analyze` measures: acceptance on texts, the residual, every token."""

import math

import numpy as np
import pytest
import torch
from specdec_hf import ModelDrafter, PromptLookupDrafter, SpeculativeDecoder
from specdec_hf.cli.explain import Explainer
from specdec_hf.drafting.drafter import Drafter
from specdec_hf.heads.eagle3.drafter import Eagle3ChainDrafter
from specdec_hf.lab.analysis.acceptance import MeasuredAcceptance
from specdec_hf.lab.analysis.replay import replay, write_text
from specdec_hf.lab.analysis.residual import ablate_residual, chi_square, draw_experiment
from specdec_hf.loop.streaming import run_stream
from support import cli_models, hf_models
from support.heads import expected_logits, head_for
from support.hf_models import one_thread  # noqa: F401  # autouse here

from specdec_kernels.analysis import acceptance_rate, tree_acceptance

SAMPLING = {"temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
FILTERED = {"temperature": 0.6, "top_k": 20, "top_p": 1.0, "min_p": 0.0}


def text_of(sampling, seed=2, tokens=24):
    model = hf_models.tiny("llama")
    arguments = {"do_sample": True, "max_new_tokens": tokens, **sampling}
    return model, write_text(model, hf_models.prompts((9,)), arguments, seed)


def rows_of(model, text):
    """Logits [n, V] at every position of the answer, by one plain forward."""
    with torch.inference_mode():
        logits = model(torch.from_numpy(text.tokens)[None]).logits[0].double()
    return logits[text.begin - 1 : -1]


def measured_by(positions, *, greedy=False):
    """The acceptance that the positions of one text give."""
    measured = MeasuredAcceptance(greedy=greedy)
    measured.begin_text()
    for position in positions:
        measured.add(position)
    return measured


# Acceptance.


def test_alpha_of_a_model_is_that_of_two_plain_forwards():
    model, text = text_of(FILTERED)
    drafter = hf_models.perturbed("llama", 0.3)
    measured = measured_by(replay(ModelDrafter(drafter), model, text, FILTERED))

    def probs(logits):
        keep = logits >= logits.topk(20).values[:, -1:]
        return torch.where(keep, logits / 0.6, -math.inf).softmax(-1)

    p, q = probs(rows_of(model, text)), probs(rows_of(drafter, text))
    for column, l in enumerate(measured.lenience):
        wanted = acceptance_rate(p, q, "lenient", lenience=l)
        assert measured.estimates()[column][0] == pytest.approx(float(wanted.mean()), abs=1e-5)
    error = float(torch.minimum(p, q).sum(-1).std()) / math.sqrt(len(p))
    assert measured.estimates()[0][1] == pytest.approx(error, rel=1e-3)
    assert measured.drafted == measured.positions == 24
    # Definition 3.2 and Appendix A.2, from their formulas.
    assert measured.divergence[0] == pytest.approx(1 - measured.alpha, abs=1e-12)
    least = torch.where(p > 0, q / p, math.inf).amin(-1)
    assert measured.rejection[0] == pytest.approx(float(least.mean()), abs=1e-5)
    assert measured.rejection[0] < measured.alpha
    # Negative control: the unfiltered distributions have another acceptance rate.
    p, q = ((rows_of(m, text) / 0.6).softmax(-1) for m in (model, drafter))
    assert abs(float(torch.minimum(p, q).sum(-1).mean()) - measured.alpha) > 1e-3


def test_a_copying_drafter_counts_as_one_hot_and_only_where_it_drafts():
    model, text = text_of(SAMPLING, tokens=40)
    positions = list(replay(PromptLookupDrafter(min_ngram=1), model, text, SAMPLING))
    measured, rates = measured_by(positions), []
    for position in positions:
        if position.q is not None:
            copied = int(position.q.argmax())
            assert float(position.q[copied]) == 1
            assert copied in text.tokens[: position.index]
            rates.append(float(position.p[copied]))
    assert 0 < len(rates) == measured.drafted < measured.positions == 40
    assert measured.alpha == pytest.approx(np.mean(rates))


def test_a_head_drafts_from_the_states_of_all_tokens_before():
    model, text = text_of(FILTERED)
    tokens, head = text.tokens.tolist(), head_for(model, noise=0.1)
    first, *others = replay(Eagle3ChainDrafter(head), model, text, FILTERED)
    assert first.q is None  # as in a call, whose first round reads the prompt
    assert len(others) == 23
    for position in others[::5]:
        logits = expected_logits(model, head, tokens[: position.index], [])
        full = torch.full((model.config.vocab_size,), -math.inf)
        full[head.tokens] = logits
        keep = full >= full.topk(20).values[-1]
        wanted = torch.where(keep, full.double() / 0.6, -math.inf).softmax(-1)
        torch.testing.assert_close(position.q, wanted, rtol=1e-4, atol=1e-6)


class Peeking(Drafter):
    """Drafts the next token of the array that it is given, and remembers what it saw."""

    name = "peeking"
    candidates = 3

    def __init__(self):
        self.seen, self.observed = [], []

    def propose(self, history, limits):
        length = int(history.lengths[0])
        self.seen.append(history.tokens[0, length:].tolist())
        return [[int(history.tokens[0, length])]]

    def observe(self, history, candidates):
        self.observed.append(candidates.ids.shape)


def test_a_drafter_does_not_see_the_text_that_follows():
    model, text = text_of(SAMPLING)
    drafter = Peeking()
    drafted = [int(p.q.argmax()) for p in replay(drafter, model, text, SAMPLING)]
    assert not any(map(sum, drafter.seen))
    assert drafted == [0] * 24
    assert drafter.observed == [(1, 1, 3)] * 24


def greedy_text(tokens=24):
    model = hf_models.tiny("llama")
    arguments = {"do_sample": False, "max_new_tokens": tokens}
    return model, write_text(model, hf_models.prompts((9,)), arguments, 0)


def test_lenience_at_argmax_compares_probabilities_before_the_argmax():
    model, text = greedy_text()
    drafter = hf_models.perturbed("llama", 0.5)
    measured = measured_by(replay(ModelDrafter(drafter), model, text, GREEDY), greedy=True)
    drafted = rows_of(drafter, text).argmax(-1)
    p = rows_of(model, text).softmax(-1)
    share = p[torch.arange(24), drafted] / p.amax(-1)
    wanted = [float((share >= l).double().mean()) for l in measured.lenience]
    assert [mean for mean, _ in measured.estimates()] == pytest.approx(wanted)
    assert wanted[0] == measured.alpha < wanted[-1]


def test_the_targets_token_is_among_the_k_likeliest_of_the_drafter():
    """SpecInfer's table for greedy decoding, and for sampling by the acceptance of siblings."""
    model, text = greedy_text()
    drafter = hf_models.perturbed("llama", 0.5)
    measured = measured_by(replay(ModelDrafter(drafter), model, text, GREEDY), greedy=True)
    ranked = rows_of(drafter, text).argsort(-1, descending=True)
    chosen = torch.from_numpy(text.tokens[text.begin :])[:, None]
    wanted = [float((ranked[:, :k] == chosen).any(-1).double().mean()) for k in range(1, 6)]
    found = [mean for mean, _ in measured.first_estimates()]
    assert found == pytest.approx(wanted)
    assert found[0] == pytest.approx(measured.alpha)
    assert found[0] < found[-1]

    model, text = text_of(FILTERED)
    positions = list(replay(ModelDrafter(drafter), model, text, FILTERED))
    measured = measured_by(positions)
    for k, (mean, _) in enumerate(measured.first_estimates(), start=1):
        rates = [tree_acceptance(x.p, x.q, k, "multi_draft") for x in positions]
        assert mean == pytest.approx(float(torch.stack(rates).mean()))
    # A copying drafter has no other tokens than the one it copied.
    measured = measured_by(replay(PromptLookupDrafter(min_ngram=1), model, text, FILTERED))
    assert measured.drafted > 0
    assert math.isnan(measured.first_estimates()[0][0])


def test_nothing_drafted_has_no_alpha():
    measured = measured_by([])
    assert math.isnan(measured.alpha)
    assert measured.to_dict()["alpha"] is None
    assert measured.to_dict()["first_children"] == [None] * 5


# The residual.


def test_the_ablation_is_exact_on_a_small_example():
    """P = (1/2, 1/2), Q = (3/4, 1/4): a rejection in 1/4, recovered always token 1."""
    p, q = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.75, 0.25]).double()
    effect = ablate_residual(p, q)
    assert effect.rejection == 0.25
    assert effect.recovered == 0.5
    assert effect.correct == 0
    assert effect.ablated == 0.125  # (5/8, 3/8) in place of (1/2, 1/2)
    assert ablate_residual(p, p).ablated == 0


def test_drawn_tokens_follow_p_with_the_residual_and_not_without():
    model, text = text_of(FILTERED, tokens=24)
    drafter = ModelDrafter(hf_models.perturbed("llama", 0.3))
    drafts = [x for x in replay(drafter, model, text, FILTERED) if x.q is not None]
    worst = max(drafts, key=lambda x: ablate_residual(x.p, x.q).ablated)
    drawn = draw_experiment(worst, FILTERED, 5000, seed=9)
    assert drawn.exact.correct < 1e-12
    assert drawn.exact.ablated > 0.05
    assert drawn.correct.p_value > 1e-3
    assert drawn.ablated.p_value < 1e-9


def test_chi_square_counts_rare_tokens_together():
    probs = torch.tensor([0.5, 0.3, 0.19, 0.005, 0.003, 0.002], dtype=torch.float64)
    counts = torch.tensor([520, 270, 190, 12, 5, 3])
    ours = chi_square(counts, probs)
    pairs = [(520, 500), (270, 300), (190, 190), (12, 5), (8, 5)]
    assert ours.degrees == 4
    assert ours.statistic == pytest.approx(sum((o - e) ** 2 / e for o, e in pairs))
    assert ours.p_value == pytest.approx(0.00393959649111513)  # of scipy.stats.chisquare
    assert chi_square(torch.tensor([10, 0]), torch.tensor([1.0, 0.0])).p_value == 1


# Every token.


def explained(drafter, prompt="ab ab ab ab", temperature=0.7, seed=1):
    """The rounds of an answer of a tiny model: explained, as steps, as traced; its tokenizer."""
    tokenizer = cli_models.tokenizer()
    model = hf_models.build("llama", vocab_size=cli_models.END + 1)
    inputs = tokenizer(prompt, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    arguments = {"do_sample": temperature > 0, "max_new_tokens": 28}
    explainer = Explainer(tokenizer, inputs["input_ids"][0].tolist(), "drafty", sampling)
    rounds = []
    decoder = SpeculativeDecoder(
        drafter(model), num_assistant_tokens=4, rule="token", guard=False, seed=seed,
        trace=lambda traced: (explainer(traced), rounds.append(traced)),
    )  # fmt: skip
    if temperature:
        arguments |= sampling
    stream = decoder.stream(model, **inputs, **arguments)
    steps, _ = run_stream(stream, lambda step: None)
    return explainer.rounds, steps, rounds, tokenizer


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 0.7])
def test_every_emitted_token_is_explained(temperature):
    rounds, steps, _, tokenizer = explained(ModelDrafter, temperature=temperature)
    assert all(token.kind != "rejected" for said in rounds for token in said)  # P equals Q
    rounds, steps, _, tokenizer = explained(Noisy, temperature=temperature)
    kinds = {token.kind for said in rounds for token in said}
    assert kinds >= {"accepted", "rejected", "recovered"}
    for said, step in zip(rounds, steps, strict=True):
        emitted = [token for token in said if token.kind != "rejected"]
        assert [token.token for token in emitted] == step.tokens
        assert [token.kind for token in emitted] == step.kinds
        for token, logprob in zip(emitted, step.logprobs, strict=True):
            assert token.p == pytest.approx(math.exp(logprob), rel=1e-4)
        for token in said:
            assert (token.uniform is None) == (temperature == 0)
            if token.drafter:
                assert token.accept_prob == pytest.approx(min(1, token.p / token.q), rel=1e-4)
                decided = (0.5 if token.uniform is None else token.uniform) < token.accept_prob
                assert token.kind == ("accepted" if decided else "rejected")
            assert (token.residual is not None) == (token.kind == "recovered")
            assert (token.q is not None) == (token.kind not in ("bonus", "plain"))
    text = "".join(t.text for said in rounds for t in said if t.kind != "rejected")
    whole = tokenizer.decode([t for step in steps for t in step.tokens])
    assert [c for c in text if c != "�"] == [c for c in whole if c != "�"]


def test_the_residual_of_a_recovered_token_is_that_of_its_row():
    rounds, _, traced, _ = explained(Noisy)
    checked = 0
    for said, one in zip(rounds, traced, strict=True):
        if said[-1].kind == "recovered":
            row = len(said) - 2
            p = (one.logits[0, row].double() / 0.7).softmax(-1)
            q = (one.distribution.logits[0, row].double() / 0.7).softmax(-1)
            residual = (p - q).clamp(min=0)
            wanted = float(residual[said[-1].token] / residual.sum())
            assert said[-1].residual == pytest.approx(wanted, rel=1e-4)
            end = float(residual[: said[-1].token + 1].sum() / residual.sum())
            assert end - wanted - 1e-5 < said[-1].uniform < end + 1e-5
            assert said[-1].q == pytest.approx(float(q[said[-1].token]), rel=1e-4)
            checked += 1
    assert checked > 3


class Noisy(ModelDrafter):
    """The target with noise on its weights."""

    def __init__(self, model):
        super().__init__(hf_models.build("llama", vocab_size=cli_models.END + 1))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in self.model.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(0.05 * weight.std() * noise)
