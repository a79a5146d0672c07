"""What `analyze` measures: acceptance on texts, what the residual does, rounds, trees, encoders."""

import math

import numpy as np
import pytest
import torch
from specdec_hf import ModelDrafter, PromptLookupDrafter
from specdec_hf.drafters.lookahead import LookaheadDrafter
from specdec_hf.drafters.merge import TrieDrafter
from specdec_hf.drafters.token_recycling import TokenRecyclingDrafter
from specdec_hf.drafting.drafter import Drafter
from specdec_hf.heads.eagle3.drafter import Eagle3ChainDrafter, Eagle3Drafter
from specdec_hf.lab.analysis import figures
from specdec_hf.lab.analysis.acceptance import MeasuredAcceptance
from specdec_hf.lab.analysis.encoders import EncoderSeconds
from specdec_hf.lab.analysis.measure import Measurement
from specdec_hf.lab.analysis.operations import measure_operations
from specdec_hf.lab.analysis.replay import replay, rule_for, write_text
from specdec_hf.lab.analysis.residual import ablate_residual, chi_square, draw_experiment
from specdec_hf.lab.analysis.speed import compare_speed, compare_with_oracle
from specdec_hf.loop.round_record import RoundRecord
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.trees import TrieTree
from support import cli_models, encoder_models, hf_models
from support.clocks import Clock
from support.heads import expected_logits, head_for

from specdec_kernels.analysis import acceptance_rate, tree_acceptance

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
    nothing = measured_by([])
    assert math.isnan(nothing.alpha)
    assert nothing.to_dict()["alpha"] is None
    assert nothing.to_dict()["first_children"] == [None] * 5


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


def test_the_targets_token_is_among_the_k_likeliest_of_the_drafter():
    """SpecInfer's table for greedy decoding, and for sampling by the acceptance of siblings."""
    model, text = text_of(GREEDY)
    drafter = hf_models.perturbed("llama", 0.5)
    measured = measured_by(replay(ModelDrafter(drafter), model, text, GREEDY), greedy=True)
    drafted, p = rows_of(drafter, text).argmax(-1), rows_of(model, text).softmax(-1)
    share = p[torch.arange(24), drafted] / p.amax(-1)
    # Lenience compares the probabilities before the argmax.
    wanted = [float((share >= l).double().mean()) for l in measured.lenience]
    assert [mean for mean, _ in measured.estimates()] == pytest.approx(wanted)
    assert wanted[0] == measured.alpha < wanted[-1]
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


def test_encoders_come_before_the_rounds():
    """That of the drafter runs while the call begins, before the first round."""
    encoders = EncoderSeconds(0.5, 0.25)
    for began, offset in ((0.75, 0.5), (0.1, 0.65)):
        row = figures.Timeline("a", [RoundRecord(began, *[0.0] * 5, [0], [0], [1])], encoders)
        assert row.offset == pytest.approx(offset)


HOT = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def measurement(sampling=GREEDY, tokens=20, **options):
    """A measurement of the tiny model whose tokens are bytes."""
    tokenizer = cli_models.tokenizer()
    model = hf_models.build("llama", vocab_size=cli_models.END + 1)
    inputs = tokenizer("ab ab ab ab", return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return Measurement(model, tokenizer, [inputs], sampling, tokens, [2, 4], **options)


def calls(*rounds):
    """Statistics of one call whose rounds are (draft, verify, accept, drafted, emitted)."""
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
    assert speed.drafting == 1
    assert speed.expected_tokens == 1.9375
    assert speed.expected_paper == pytest.approx(1.9375 / 1.4)
    assert speed.expected == pytest.approx(1.9375 / 1.8)
    assert speed.measured == pytest.approx(6 / 3.6)
    assert speed.measured_tokens == 3
    # Rounds without drafts count as plain ones.
    plain = calls((0, 9.0, 0, 0, 1), (0, 1.0, 0, 0, 1))
    fast = calls((0, 9.0, 0, 0, 1), (0, 1.0, 0, 0, 1), (0.4, 1.6, 0.0, 4, 2))
    speed = compare_speed(plain, fast, alpha=0.5, gamma=4, temperature=1.0)
    assert speed.drafting == 0.5
    assert speed.expected_tokens == pytest.approx((1 + 1.9375) / 2)
    assert speed.expected == pytest.approx((1 + 1.9375) / 3)
    assert compare_speed(plain, plain, alpha=0.5, gamma=4, temperature=1.0) is None


def logged(*rounds):
    """Statistics of one call whose rounds have drafted and accepted so many tokens."""
    return calls((1, 1, 1, 0, 1), *((1, 1, 1, drafted, kept + 1) for drafted, kept in rounds))


def test_an_oracle_pays_for_accepted_drafts_alone():
    longest = logged((16, 3), (16, 0), (16, 2))  # emits 8 tokens
    schedules = {"two": logged((2, 2), (2, 0), (2, 0), (2, 2)), "none": logged((0, 0))}
    oracle, two, none = compare_with_oracle(longest, schedules, cost=0.1)
    assert (oracle.drafted, oracle.tokens) == (5 / 3, 8 / 3)
    assert oracle.factor == pytest.approx(8 / (3 + 0.1 * 5))
    assert (two.drafted, two.tokens) == (2, 2)
    assert two.factor == pytest.approx(8 / (4 + 0.1 * 8))
    assert two.share == pytest.approx(two.factor / oracle.factor)
    assert (none.factor, none.drafted) == (1, 0)
    assert compare_with_oracle(logged(), schedules, cost=0.1) == []
    oracle, two, none = compare_with_oracle(longest, schedules, cost=1.5)
    assert (oracle.drafted, oracle.factor, none.share) == (0, 1, 1)  # plain decoding is best
    assert two.share == two.factor < 1


def test_no_schedule_beats_the_oracle_of_a_greedy_text():
    made = measurement(schedules=["heuristic", "confidence"])
    drafter = ModelDrafter(hf_models.with_noise(made.model, 0.1))
    found = made.analyze("noisy", drafter, made.write_texts())
    oracle, *others = found.scheduled
    assert [one.schedule for one in others] == [
        "constant, γ = 2", "constant, γ = 4", "heuristic", "confidence"
    ]  # fmt: skip
    # Here the cost is measured.
    plain = {name: found.calls[gamma] for name, gamma in (("2", 2), ("4", 4))}
    longest = made._decode_all(drafter, num_assistant_tokens=16)
    for cost in (0.0, 0.1, 0.9, 1.1):
        for one in compare_with_oracle(longest, plain, cost):
            assert one.share <= 1 + 1e-12
    assert oracle.drafted < others[1].drafted


def linear_operations(model, skipped=()):
    """Two for each weight of a matrix that multiplies a token."""
    layers = (m for name, m in model.named_modules() if name not in skipped)
    return sum(2 * m.weight.numel() for m in layers if isinstance(m, torch.nn.Linear))


def test_operations_of_a_draft_step_are_counted():
    model = hf_models.build("llama", layers=4)
    arguments = {"do_sample": False, "max_new_tokens": 6}
    text = write_text(model, hf_models.prompts((9,)), arguments, 0)
    small = hf_models.build("llama", layers=1)
    share = measure_operations(ModelDrafter(small), model, text, GREEDY)
    assert share == pytest.approx(linear_operations(small) / linear_operations(model), rel=0.1)
    assert measure_operations(ModelDrafter(model), model, text, GREEDY) == pytest.approx(1)
    copying = measure_operations(PromptLookupDrafter(min_ngram=1), model, text, GREEDY)
    assert copying in (0, None)
    tree = TokenRecyclingDrafter()
    assert measure_operations(tree, model, text, GREEDY) is None


# Trees.


def tree_drafters(model):
    return {
        "eagle3": Eagle3Drafter(head_for(model, noise=0.1)),
        "token_recycling": TokenRecyclingDrafter(),
        "lookahead": LookaheadDrafter(),
        "merged": TrieDrafter(
            [PromptLookupDrafter(min_ngram=1), ModelDrafter(hf_models.with_noise(model, 0.2))],
            TrieTree(3, 3, 9),
        ),
    }


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["eagle3", "token_recycling", "lookahead", "merged"])
def test_a_tree_is_accepted_as_often_as_the_target_draws_one_of_its_children(name, sampling):
    model = hf_models.tiny("llama")
    arguments = {"do_sample": sampling is HOT, "max_new_tokens": 16}
    arguments |= sampling if sampling is HOT else {}
    text = write_text(model, hf_models.prompts((9,)), arguments, 3)
    drafter = tree_drafters(model)[name]
    assert rule_for(drafter) == "target_only"
    positions, rates, firsts = list(replay(drafter, model, text, sampling)), [], []
    measured = measured_by(positions, greedy=sampling is GREEDY)
    with torch.inference_mode():
        logits = model(torch.from_numpy(text.tokens)[None]).logits[0].double()
    for position in positions:
        row = logits[position.index - 1]
        p = (row / (sampling["temperature"] or 1e-9)).softmax(-1)
        if position.draft is None:
            continue
        tokens, parents = position.draft.tokens[0].tolist(), position.draft.parents[0].tolist()
        below = {t for t, above in zip(tokens, parents, strict=True) if above == -1 and t >= 0}
        if not below:
            continue
        assert set(position.children) == below
        assert position.q is None
        rates.append(float(p[list(below)].sum()))
        firsts.append(float(p[position.children[0]]))
    assert len(rates) == measured.drafted > 2
    assert measured.alpha == pytest.approx(sum(rates) / len(rates), abs=1e-5)
    shares = [mean for mean, _ in measured.first_estimates()]
    assert shares[0] == pytest.approx(sum(firsts) / len(firsts), abs=1e-5)
    assert shares == sorted(shares)
    assert all(one is None for one in measured.to_dict()["lenience"][1].values() if one != 0.5)


def test_everything_is_measured_of_a_tree_that_has_a_meaning_for_it():
    made = measurement()
    texts = made.write_texts()
    found = made.analyze("recycling", TokenRecyclingDrafter(), texts)
    assert found.trees
    assert found.operations is None
    (speed,) = found.speeds
    assert speed.gamma == TokenRecyclingDrafter().depth
    assert speed.alpha is speed.expected is speed.expected_tokens is None
    assert speed.measured_tokens > 1
    (stats,) = found.calls[speed.gamma]
    assert stats.rule == "target_only"
    # Every token is explained, and the text is that of plain decoding.
    explained = [token for one in found.answers[0] for token in one]
    said = [token for token in explained if token.kind != "rejected"]
    assert [token.token for token in said] == texts[0].tokens[texts[0].begin :].tolist()
    # The trees that are drawn are those that were measured.
    accepted = [
        node for tree in found.first_trees for node in tree.nodes if node.kind == "accepted"
    ]
    assert len(accepted) == stats.accepted > 0
    assert {node.token for node in accepted} <= {token.token for token in said}
    drafted = sum(len(tree.nodes) for tree in found.first_trees)
    assert drafted == stats.drafted


# Encoder-decoders.


@pytest.mark.parametrize("name", encoder_models.TEXT_MODELS)
def test_an_encoder_decoder_is_measured_on_the_text_of_its_decoder(name):
    model, drafter = encoder_models.tiny(name), encoder_models.perturbed(name)
    inputs = encoder_models.texts((9,))
    arguments = {"do_sample": True, "max_new_tokens": 12, **HOT}
    text = write_text(model, inputs, arguments, 1)
    assert text.tokens[: text.begin].tolist() == [encoder_models.START]
    assert len(text.tokens) == text.begin + 12
    measured = measured_by(replay(ModelDrafter(drafter), model, text, HOT))

    def probs(one):
        decoder = torch.from_numpy(text.tokens)[None]
        with torch.inference_mode():
            logits = one(**inputs, decoder_input_ids=decoder).logits[0].double()
        return (logits[text.begin - 1 : -1] / 0.8).softmax(-1)

    wanted = torch.minimum(probs(model), probs(drafter)).sum(-1).mean()
    assert measured.alpha == pytest.approx(float(wanted), abs=1e-5)
    assert measured.drafted == 12


def test_encoders_are_timed_once_a_call(monkeypatch):
    model, drafter = encoder_models.tiny("t5"), ModelDrafter(encoder_models.perturbed("t5"))
    inputs, tokenizer = [encoder_models.texts((9,))], cli_models.tokenizer()
    made = Measurement(model, tokenizer, inputs, GREEDY, 8, [2], schedules=())
    texts = made.write_texts()
    monkeypatch.setattr("specdec_hf.lab.analysis.encoders.perf_counter", Clock())
    found = made.analyze("perturbed", drafter, texts)
    assert (found.encoders[2].target, found.encoders[2].drafter) == (1, 1)
    assert texts[0].encoders.target > 0 == texts[0].encoders.drafter
    assert not model.get_encoder()._forward_hooks
    assert not model.get_encoder()._forward_pre_hooks
    assert found.answers[0][0][0].kind == "plain"
    assert sum(len([t for t in said if t.kind != "rejected"]) for said in found.answers[0]) == 8
