"""What `analyze` measures: acceptance on texts, what the residual does, rounds, trees."""

import math

import numpy as np
import pytest
import torch
from specdec_hf import ModelDrafter, PromptLookupDrafter
from specdec_hf.drafters.merge import TrieDrafter
from specdec_hf.drafting.drafter import StatelessDrafter
from specdec_hf.heads.eagle3.drafter import Eagle3Drafter
from specdec_hf.loop.statistics import RoundRecord, SpecStats
from specdec_hf.runner.module_copy import copied
from specdec_hf.runner.packed.blocks import rounded_linear
from specdec_hf.trees import TrieTree
from specdec_lab.analysis.acceptance import MeasuredAcceptance
from specdec_lab.analysis.operations import measure_operations
from specdec_lab.analysis.replay import replay, rule_for, write_text
from specdec_lab.analysis.residual import ablate_residual, chi_square, draw_experiment
from specdec_lab.analysis.speed import compare_speed, compare_with_oracle
from specdec_papers.token_recycling import TokenRecyclingDrafter
from support import hf_models
from support.hf_models import head_for

from specdec_kernels.analysis import acceptance_rate

pytestmark = pytest.mark.analysis

SAMPLING = {"temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
FILTERED = {"temperature": 0.6, "top_k": 20, "top_p": 1.0, "min_p": 0.0}


def text_of(sampling, seed=2, tokens=24):
    model = hf_models.tiny("llama")
    arguments = {"do_sample": False, "max_new_tokens": tokens}
    if sampling is not GREEDY:
        arguments |= {"do_sample": True, **sampling}
    return model, write_text(model, hf_models.prompts((9,)), arguments, seed)


def rows_of(model, text):
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


def test_alpha_of_a_model_is_that_of_two_plain_forwards():
    model, text = text_of(FILTERED)
    drafter = hf_models.perturbed("llama", 0.3)
    measured = measured_by(replay(ModelDrafter(drafter), model, text, FILTERED))
    drafter = copied(drafter, rounded_linear)  # what it drafts with

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
    assert measured_by([]).to_dict()["alpha"] is None


class Peeking(StatelessDrafter):
    """Drafts the next token of the array that it is given, and remembers what it saw."""

    name = "peeking"

    def __init__(self):
        self.seen = []

    def propose(self, history, limits):
        length = int(history.lengths[0])
        self.seen.append(history.tokens[0, length:].tolist())
        return [[int(history.tokens[0, length])]]


def test_a_drafter_does_not_see_the_text_that_follows():
    model, text = text_of(SAMPLING)
    drafter = Peeking()
    assert [int(p.q.argmax()) for p in replay(drafter, model, text, SAMPLING)] == [0] * 24
    assert not any(map(sum, drafter.seen))


def test_the_targets_token_is_among_the_k_likeliest_of_the_drafter():
    """SpecInfer's table for greedy decoding, and lenience before the argmax."""
    model, text = text_of(GREEDY)
    drafter = hf_models.perturbed("llama", 0.5)
    measured = measured_by(replay(ModelDrafter(drafter), model, text, GREEDY), greedy=True)
    drafter = copied(drafter, rounded_linear)  # what it drafts with
    drafted, p = rows_of(drafter, text).argmax(-1), rows_of(model, text).softmax(-1)
    share = p[torch.arange(24), drafted] / p.amax(-1)
    wanted = [float((share >= l).double().mean()) for l in measured.lenience]
    assert [mean for mean, _ in measured.estimates()] == pytest.approx(wanted)
    assert wanted[0] == measured.alpha < wanted[-1]
    ranked = rows_of(drafter, text).argsort(-1, descending=True)
    chosen = torch.from_numpy(text.tokens[text.begin :])[:, None]
    wanted = [float((ranked[:, :k] == chosen).any(-1).double().mean()) for k in range(1, 6)]
    assert [mean for mean, _ in measured.first_estimates()] == pytest.approx(wanted)
    assert wanted[0] < wanted[-1]


def test_a_token_is_always_among_the_likeliest_of_a_vocabulary_that_is_smaller_than_k():
    model = hf_models.build("llama", vocab_size=3)
    prompt, arguments = {"input_ids": torch.tensor([[1, 2]])}, {"do_sample": False}
    text = write_text(model, prompt, {**arguments, "max_new_tokens": 12}, 0)
    drafter = ModelDrafter(hf_models.with_noise(model, 1.0))
    measured = measured_by(replay(drafter, model, text, GREEDY), greedy=True)
    first, *_, fourth, fifth = (mean for mean, _ in measured.first_estimates())
    assert first < fourth == fifth == 1


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


def test_chi_square_counts_what_is_expected_fewer_than_five_times_with_the_first_token():
    probs = torch.tensor([0.5, 0.4, 0.097, 0.002, 0.001], dtype=torch.float64)
    ours = chi_square(torch.tensor([520, 390, 81, 5, 4]), probs)
    pairs = [(529, 503), (390, 400), (81, 97)]
    assert ours.degrees == 2
    assert ours.statistic == pytest.approx(sum((o - e) ** 2 / e for o, e in pairs))


HOT = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def calls(*rounds):
    log = [
        RoundRecord(0.0, draft, verify, accept, 0.0, 0.0, [drafted], [emitted - 1], [emitted])
        for draft, verify, accept, drafted, emitted in rounds
    ]
    return [SpecStats(round_log=log)]


def test_speed_follows_from_the_rounds_after_the_first():
    plain = calls((0, 9.0, 0, 0, 1), (0, 0.9, 0.1, 0, 1), (0, 1.0, 0.0, 0, 1))
    fast = calls((5, 9.0, 0, 4, 2), (0.4, 1.2, 0.2, 4, 3), (0.4, 1.3, 0.1, 4, 3))
    speed = compare_speed(plain, fast, alpha=0.5, gamma=4, temperature=1.0)
    assert speed.cost == pytest.approx(0.1)
    assert speed.verification == pytest.approx(1.4)
    assert speed.expected_tokens == 1.9375
    assert speed.expected_paper == pytest.approx(1.9375 / 1.4)
    assert speed.expected == pytest.approx(1.9375 / 1.8)
    assert speed.measured == pytest.approx(6 / 3.6)
    # Rounds without drafts count as plain ones.
    fast = calls((0, 9.0, 0, 0, 1), (0, 1.0, 0, 0, 1), (0.4, 1.6, 0.0, 4, 2))
    speed = compare_speed(plain, fast, alpha=0.5, gamma=4, temperature=1.0)
    assert speed.expected_tokens == pytest.approx((1 + 1.9375) / 2)
    assert speed.expected == pytest.approx((1 + 1.9375) / 3)
    assert compare_speed(plain, plain, alpha=0.5, gamma=4, temperature=1.0) is None


@pytest.mark.parametrize(("cost", "oracle"), [(0.5, (2, 3, 1.5)), (2.0, (0, 1, 1.0))])
def test_an_oracle_drafts_what_is_accepted_or_nothing_where_a_draft_costs_more_than_a_step(
    cost, oracle
):
    longest, always = calls(*[(0, 1.0, 0, 4, 3)] * 3), calls(*[(0, 1.0, 0, 4, 2)] * 3)
    best, constant = compare_with_oracle(longest, {"constant": always}, cost)
    assert (best.drafted, best.tokens, best.factor) == oracle
    assert constant.factor == 4 / (2 + 8 * cost)
    assert constant.share == constant.factor / best.factor


def tree_drafters(model):
    noisy = ModelDrafter(hf_models.with_noise(model, 0.2))
    return {
        "eagle3": Eagle3Drafter(head_for(model, noise=0.1)),
        "token_recycling": TokenRecyclingDrafter(),
        "merged": TrieDrafter([PromptLookupDrafter(min_ngram=1), noisy], TrieTree(3, 3, 9)),
    }


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["eagle3", "token_recycling", "merged"])
def test_a_tree_is_accepted_as_often_as_the_target_draws_one_of_its_children(name, sampling):
    model, text = text_of(sampling, seed=3, tokens=16)
    drafter = tree_drafters(model)[name]
    assert rule_for(drafter) == "target_only"
    positions, rates, firsts = list(replay(drafter, model, text, sampling)), [], []
    measured = measured_by(positions, greedy=sampling is GREEDY)
    probs = (rows_of(model, text) / (sampling["temperature"] or 1e-9)).softmax(-1)
    for position in positions:
        if position.draft is None:
            continue
        drafts = zip(position.draft.tokens[0].tolist(), position.draft.parents[0], strict=True)
        below = {token for token, parent in drafts if parent == -1 and token >= 0}
        if below:
            p = probs[position.index - text.begin]
            assert set(position.children) == below
            rates.append(float(p[list(below)].sum()))
            firsts.append(float(p[position.children[0]]))
    assert len(rates) == measured.drafted > 2
    assert measured.alpha == pytest.approx(sum(rates) / len(rates), abs=1e-5)
    share, _ = measured.first_estimates()[0]
    assert share == pytest.approx(sum(firsts) / len(firsts), abs=1e-5)


def test_operations_of_a_draft_step_are_counted():
    """Two for each weight of a matrix that multiplies a token."""
    model, small = hf_models.build("llama", layers=4), hf_models.build("llama", layers=1)
    arguments = {"do_sample": False, "max_new_tokens": 6}
    text = write_text(model, hf_models.prompts((9,)), arguments, 0)
    weights = [
        sum(m.weight.numel() for m in one.modules() if isinstance(m, torch.nn.Linear))
        for one in (small, model)
    ]
    share = measure_operations(ModelDrafter(small), model, text, GREEDY)
    assert share == pytest.approx(weights[0] / weights[1], rel=0.1)
    assert measure_operations(TokenRecyclingDrafter(), model, text, GREEDY) is None
