"""What `analyze` makes of rounds and trees: speed, oracles, operations, encoders."""

import itertools

import pytest
import torch
from hf.test_analysis import measured_by
from specdec_hf import ModelDrafter, PromptLookupDrafter
from specdec_hf.drafters.lookahead import LookaheadDrafter
from specdec_hf.drafters.merge import TrieDrafter
from specdec_hf.drafters.token_recycling import TokenRecyclingDrafter
from specdec_hf.heads.eagle3.drafter import Eagle3Drafter
from specdec_hf.lab.analysis.measure import Measurement
from specdec_hf.lab.analysis.operations import measure_operations
from specdec_hf.lab.analysis.replay import replay, rule_for, write_text
from specdec_hf.lab.analysis.speed import compare_speed, compare_with_oracle
from specdec_hf.lab.analysis.tables import tables_of
from specdec_hf.loop.round_record import RoundRecord
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.trees import TrieTree
from support import cli_models, encoder_models, hf_models
from support.heads import head_for
from support.hf_models import one_thread  # noqa: F401  # autouse here

GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SAMPLING = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def measurement(sampling=GREEDY, tokens=20, **options):
    """A measurement of the tiny model whose tokens are bytes."""
    tokenizer = cli_models.tokenizer()
    model = hf_models.build("llama", vocab_size=cli_models.END + 1)
    inputs = tokenizer("ab ab ab ab", return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return Measurement(model, tokenizer, [inputs], sampling, tokens, [2, 4], **options)


def tables_by_title(found, temperature=0.0):
    return {table.title: table for table in tables_of({temperature: found}, "tiny", "letters")}


# Speed.


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


def test_rounds_without_drafts_count_as_plain_ones():
    plain = calls((0, 9.0, 0, 0, 1), (0, 1.0, 0, 0, 1))
    fast = calls((0, 9.0, 0, 0, 1), (0, 1.0, 0, 0, 1), (0.4, 1.6, 0.0, 4, 2))
    speed = compare_speed(plain, fast, alpha=0.5, gamma=4, temperature=1.0)
    assert speed.drafting == 0.5
    assert speed.expected_tokens == pytest.approx((1 + 1.9375) / 2)
    assert speed.expected == pytest.approx((1 + 1.9375) / 3)
    nothing = calls((0, 9.0, 0, 0, 1), (0, 1.0, 0, 0, 1))
    assert compare_speed(plain, nothing, alpha=0.5, gamma=4, temperature=1.0) is None


# Section 3.5.


def logged(*rounds):
    """Statistics of one call whose rounds have drafted and accepted so many tokens."""
    log = [RoundRecord(0.0, *[1.0] * 5, [0], [0], [1])]
    log += [RoundRecord(0.0, *[1.0] * 5, [n], [a], [a + 1]) for n, a in rounds]
    return [SpecStats(round_log=log)]


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
    assert tables_by_title([found])["Section 3.5: what each schedule leaves of an oracle for γ"]


def test_a_schedule_that_a_drafter_lacks_something_for_is_left_out_by_name():
    made = measurement(schedules=["confidence", "heuristic"])
    found = made.analyze("copies", PromptLookupDrafter(), made.write_texts())
    assert list(found.refused) == ["confidence"]
    assert "heuristic" in [one.schedule for one in found.scheduled]
    table = tables_by_title([found])["Section 3.5: what each schedule leaves of an oracle for γ"]
    assert "Left out: copies: " in table.note


# Operations.


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


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["eagle3", "token_recycling", "lookahead", "merged"])
def test_a_tree_is_accepted_as_often_as_the_target_draws_one_of_its_children(name, sampling):
    model = hf_models.tiny("llama")
    arguments = {"do_sample": sampling is SAMPLING, "max_new_tokens": 16}
    arguments |= sampling if sampling is SAMPLING else {}
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
    assert {token.drafter for token in explained if token.accept_prob is not None} == {"recycling"}
    assert all(token.p == (token.kind != "rejected") for token in explained)
    assert "".join(token.text for token in said)
    # The trees that are drawn are those that were measured.
    accepted = [
        node for tree in found.first_trees for node in tree.nodes if node.kind == "accepted"
    ]
    assert len(accepted) == stats.accepted > 0
    assert {node.token for node in accepted} <= {token.token for token in said}
    drafted = sum(len(tree.nodes) for tree in found.first_trees)
    assert drafted == stats.drafted
    # SpecInfer's table is that of the trials.
    tables = tables_by_title([found])
    (title,) = (title for title in tables if title.startswith("SpecInfer"))
    at_root, in_rounds = tables[title].rows
    left = 1.0
    for share, shown in zip(stats.acceptance_by_trial, in_rounds[3:], strict=False):
        left *= 1 - share
        assert shown == f"{1 - left:.0%}"
    assert at_root[2] == "root, texts"
    expected = next(table for title, table in tables.items() if title.startswith("Table 4"))
    assert expected.rows[0][7:9] == ("-", "-")


# Encoder-decoders.


class CountingSteps:
    """A clock that goes on by one with every look at it."""

    def __init__(self, monkeypatch):
        self.count = itertools.count()
        monkeypatch.setattr("specdec_hf.lab.analysis.encoders.perf_counter", self)

    def __call__(self):
        return float(next(self.count))


@pytest.mark.parametrize("name", encoder_models.TEXT_MODELS)
def test_an_encoder_decoder_is_measured_on_the_text_of_its_decoder(name):
    model, drafter = encoder_models.tiny(name), encoder_models.perturbed(name)
    inputs = encoder_models.texts((9,))
    arguments = {"do_sample": True, "max_new_tokens": 12, **SAMPLING}
    text = write_text(model, inputs, arguments, 1)
    assert text.tokens[: text.begin].tolist() == [encoder_models.START]
    assert len(text.tokens) == text.begin + 12
    measured = measured_by(replay(ModelDrafter(drafter), model, text, SAMPLING))

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
    made = Measurement(
        model, Letters(), [encoder_models.texts((9,))], GREEDY, 8, [2], schedules=()
    )  # fmt: skip
    texts = made.write_texts()
    CountingSteps(monkeypatch)
    found = made.analyze("perturbed", drafter, texts)
    assert (found.encoders[2].target, found.encoders[2].drafter) == (1, 1)
    assert texts[0].encoders.target > 0 == texts[0].encoders.drafter
    assert not model.get_encoder()._forward_hooks
    assert not model.get_encoder()._forward_pre_hooks
    assert found.answers[0][0][0].kind == "plain"
    assert sum(len([t for t in said if t.kind != "rejected"]) for said in found.answers[0]) == 8


class Letters:
    """A tokenizer that writes every token as a letter."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(ord("a") + token % 26) for token in tokens)
