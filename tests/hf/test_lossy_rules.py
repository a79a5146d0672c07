"""The lossy rules and `ablate` in the loop: they reach the op, and calls say so.

What the rules themselves emit is enumerated in tests/chain and tests/tree.
"""

import math
from itertools import count

import numpy as np
import pytest
import torch
from proofs import toy_chain
from specdec_hf.drafting.drafter import StatelessDrafter
from specdec_hf.extras.own_rule import verify_without_residual
from specdec_hf.loop import drafted
from specdec_hf.rules import LOSSY_RULES
from support import hf_models

from specdec_kernels import RULES, TREE_RULES, verify_chain

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 5}
LENIENT = {"rule": "lenient", "lenience": 0.2}
TOP_BETA = {"rule": "top_beta", "top_beta_rank": 5, "top_beta_distance": 1.5}
TYPICAL = {"rule": "typical", "typical_epsilon": 0.02, "typical_delta": 0.6}
# Name -> the call, the arguments that the op takes, and others with which it decides otherwise.
CALLS = {
    "lenient": (
        {**SAMPLED, **LENIENT}, LENIENT, [{"rule": "token"}, {"lenience": 1.0}, {"lenience": 0.5}]
    ),
    "lenient greedy": (
        {"do_sample": False, **LENIENT}, {**LENIENT, "temperature": 0.0},
        [{"rule": "greedy"}, {"lenience": 1.0}, {"lenience": 0.01}],
    ),
    "typical": (
        {**SAMPLED, **TYPICAL}, TYPICAL,
        [{"rule": "match"}, {"typical_epsilon": 0.09}, {"typical_delta": 0.01}],
    ),
    "top_beta": (
        {**SAMPLED, **TOP_BETA}, TOP_BETA,
        [{"rule": "match"}, {"top_beta_rank": 2}, {"top_beta_distance": 0.3}],
    ),
    "top_beta of any distance": (
        {"do_sample": False, "rule": "top_beta", "top_beta_rank": 2},
        {"rule": "top_beta", "top_beta_rank": 2, "top_beta_distance": math.inf, "temperature": 0.0},
        [{"rule": "greedy"}, {"top_beta_rank": 4}, {"top_beta_distance": 0.3}],
    ),
}  # fmt: skip
CASES = {name: call for name, (call, _, _) in CALLS.items()}
DRAFTERS = {
    "model": lambda: hf_models.perturbed("llama", 0.3),
    "cascade": lambda: [hf_models.perturbed("llama", 0.3), hf_models.perturbed("llama", 0.5)],
    "random": lambda: "random",
}


def run(lengths=(9, 6), **settings):
    settings = {"num_assistant_tokens": 4, "max_new_tokens": 24, **settings}
    return hf_models.decode(hf_models.tiny("llama"), lengths, **settings)


def verdicts(rounds, verify=verify_chain, **arguments):
    sampling = {name: SAMPLED[name] for name in ("temperature", "top_k")}
    if "temperature" in arguments:
        sampling = {}
    return [
        verify(
            traced.logits, traced.draft_token_ids, traced.distribution, seeds=traced.seeds,
            positions=torch.from_numpy(traced.lengths), **{**sampling, **arguments},
        ).tokens.tolist()
        for traced in rounds
    ]  # fmt: skip


def emitted(traced):
    return {step.sequence: step.tokens for step in traced.steps}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("case", CASES)
def test_a_lossy_rule_reaches_the_op_with_its_parameters(case, drafter):
    call, asked, others = CALLS[case]
    rounds = []
    out = run(drafter=DRAFTERS[drafter](), trace=rounds.append, **call)
    assert (out.stats.rule, out.stats.drafted > 0) == (asked["rule"], True)
    decided = verdicts(rounds, **asked)
    for traced, tokens in zip(rounds, decided, strict=True):
        for b, mine in emitted(traced).items():
            assert mine == tokens[b][: len(mine)]
    for other in others if drafter == "model" else ():
        kept = ["temperature"] if "rule" in other else asked
        settings = {name: asked[name] for name in kept if name in asked}
        assert verdicts(rounds, **{**settings, **other}) != decided, other


def test_typical_reaches_the_op_of_trees_with_its_parameters(monkeypatch):
    trees, plain, original = [], [], drafted.verify_tree

    def verify_tree(*args, **kwargs):
        verdict = original(*args, **kwargs)
        if kwargs["rule"] == "typical":
            none = {"rule": "target_only", "typical_epsilon": 0.09, "typical_delta": 0.3}
            others = [
                original(*args, **{**kwargs, **other}).num_accepted.tolist()
                for other in (none, {"typical_epsilon": 0.5}, {"typical_delta": 0.0})
            ]
            trees.append((verdict.num_accepted.tolist(), others, kwargs))
        else:
            plain.append(kwargs["rule"])
        return verdict

    monkeypatch.setattr(drafted, "verify_tree", verify_tree)
    drafter = hf_models.perturbed("llama", 0.3)
    out = run(drafter=drafter, tree=(2, 2), num_assistant_tokens=None, **CASES["typical"])
    assert out.stats.accepted > 0 < len(trees)
    assert set(plain) == {"target_only"}  # the parameters of rule typical do not reach it
    for _, _, kwargs in trees:
        assert (kwargs["typical_epsilon"], kwargs["typical_delta"]) == (0.02, 0.6)
    for k in range(3):
        assert [others[k] for _, others, _ in trees] != [mine for mine, _, _ in trees]


@pytest.mark.parametrize("case", CASES)
def test_the_statistics_say_that_a_rule_is_lossy_in_one_note(case):
    settings = CASES[case]
    stats = run(drafter="prompt_lookup", **settings).stats
    assert not stats.lossless
    [note] = [note for note in stats.notes if "lossy" in note]
    assert note.startswith(f"rule {settings['rule']!r} with ")
    values = LOSSY_RULES[settings["rule"]] | {
        name: value for name, value in settings.items() if name in LOSSY_RULES[settings["rule"]]
    }
    assert all(f"{name}={value}" in note for name, value in values.items())
    for plain in ({**settings, "drafter": None}, {**SAMPLED, "drafter": "prompt_lookup"}):
        stats = run(**plain).stats
        assert stats.lossless
        assert not any("lossy" in note for note in stats.notes)


@pytest.mark.parametrize("case", ["lenient", "typical"])
def test_the_guard_measures_a_lossy_call_and_pauses_only_where_it_is_asked_to(case):
    """By a clock for which a phase takes longer each time, so that drafting never pays."""

    def stats(**settings):
        ticks = count()
        settings = {"max_new_tokens": 40, "guard": None, **settings}
        return run(
            drafter=hf_models.perturbed("llama", 0.3), clock=lambda: next(ticks) ** 2, **settings
        ).stats

    def pauses(stats):
        return any("drafting pauses" in note for note in stats.notes)

    def depends_on_timing(stats):
        start = f"drafting waits for the clock under rule {case!r}: the text depends on timing"
        return any(note.startswith(start) for note in stats.notes)

    by_default = stats(**CASES[case])
    assert by_default.benefit < 1
    assert not pauses(by_default)
    assert not depends_on_timing(by_default)
    assert pauses(stats(**SAMPLED, rule="match")), "the control, whose text drafts do not change"
    asked_for = stats(**{**CASES[case], "guard": True})
    assert pauses(asked_for)
    assert depends_on_timing(asked_for)
    notes = str(stats(**CASES[case], num_assistant_tokens_schedule="optimal").notes)
    assert f"schedule 'optimal' under rule {case!r}: the text depends on timing" in notes


@pytest.mark.parametrize("settings", [CASES["typical"], CASES["lenient"]], ids=["tree", "chains"])
def test_the_default_drafter_serves_lossy_rules(settings):
    settings = {**settings, "num_assistant_tokens": None, "guard": None}
    out = run(drafter="auto", **settings)
    trees = settings["rule"] == "typical"
    assert out.stats.drafter == ("auto" if trees else "suffix_automaton")
    assert out.stats.rule == settings["rule"]
    again = run(drafter="auto", **settings)
    assert again.sequences.tolist() == out.sequences.tolist()
    assert not any("timing" in note for note in out.stats.notes)


class Serves(StatelessDrafter):
    """Some rules alone, and drafts nothing."""

    def __init__(self, *rules):
        self.rules = rules

    def propose(self, history, limits):
        return None


def test_rule_auto_is_never_lossy():
    with pytest.raises(ValueError, match=r"Serves\.rules must be lossless rules, got typical"):
        run(drafter=Serves("typical", "token"), do_sample=True)
    assert {*LOSSY_RULES} < {*RULES, *TREE_RULES}
    for drafter in DRAFTERS.values():
        assert run(drafter=drafter(), **SAMPLED).stats.lossless


def test_lenient_needs_a_drafter_whose_distribution_can_be_compared():
    matching = Serves("match")
    assert run(drafter=matching, **CASES["typical"]).stats.rule == "typical"
    assert run(drafter="prompt_lookup", **TYPICAL, do_sample=False).stats.rule == "greedy"
    assert run(drafter=matching, **CASES["top_beta"]).stats.rule == "top_beta"
    with pytest.raises(ValueError, match="rule must be 'auto', 'match', 'typical', 'top_beta' wi"):
        run(drafter=matching, **CASES["lenient"])


# `ablate="residual"`: without the residual, which no rule of the ops is.

FORMS = {
    "logits": {"v": 4},
    "one-hot": {"v": 3, "draft": "none"},
    "filtered": {"v": 4, "kind": "probs", "target_filters": {"temperature": 0.7, "top_p": 0.8}},
}
ABLATED = {**SAMPLED, "ablate": "residual"}


def ablated_masses(p, q):
    """Each token is accepted with min(P, Q), and a recovered token is drawn from P."""
    accepted = torch.minimum(p, q)
    return accepted, toy_chain.rejection_mass(accepted, p)


def realized(toy, verify):
    def run(drafts, uniforms):
        arguments = toy.arguments(drafts, "cpp")
        del arguments["sampled"]
        zeros = torch.zeros(len(drafts), dtype=torch.int64)
        verdict = verify(
            arguments.pop("target"), drafts, arguments.pop("draft"), uniforms=uniforms,
            seeds=zeros, positions=zeros, **arguments,
        )  # fmt: skip
        return verdict.tokens, verdict.num_accepted

    return toy.realized_by(run)


@pytest.mark.parametrize("form", FORMS)
def test_the_emitted_tokens_have_the_distribution_of_the_formula(form):
    """Enumerated; the control is the op itself, whose tokens have the target's distribution."""
    toy = toy_chain.ToyChain(**FORMS[form])
    want = toy_chain.lossy_joint_distribution(toy, ablated_masses)
    found = realized(toy, verify_without_residual)
    toy_chain.assert_joint_distribution(found, want)
    toy_chain.assert_wrong_distribution(found, toy)
    with pytest.raises(AssertionError, match="P\\(y1"):
        toy_chain.assert_joint_distribution(realized(toy, verify_chain), want)


class Same(StatelessDrafter):
    def propose(self, history, limits):
        return np.repeat(history.last(1), max(int(limits.max()), 1), axis=1)


@pytest.mark.parametrize("drafter", ["model", "copies"])
def test_a_call_is_verified_without_the_residual_and_says_so(drafter):
    rounds = []
    settings = {**ABLATED, "drafter": Same() if drafter == "copies" else DRAFTERS[drafter]()}
    out = run(trace=rounds.append, **settings)
    assert (out.stats.rule, out.stats.lossless, out.stats.tree) == ("token", False, "")
    [note] = [note for note in out.stats.notes if "ablate='residual'" in note and "lossy" in note]
    assert "biased" in note
    assert out.stats.drafted > out.stats.accepted
    ablated, token = (verdicts(rounds, op) for op in (verify_without_residual, verify_chain))
    unlike = 0
    for traced, mine, others in zip(rounds, ablated, token, strict=True):
        for b, tokens in emitted(traced).items():
            assert tokens == mine[b][: len(tokens)]
            unlike += tokens != others[b][: len(tokens)]
    assert unlike, "the control: rule token would have given another text"
    again = run(**{**settings, "seed": out.stats.seeds})
    assert again.sequences.tolist() == out.sequences.tolist()
