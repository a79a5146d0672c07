"""`ablate="residual"`: the distribution of its texts, how calls say it, and what is refused."""

import numpy as np
import proofs
import pytest
import torch
from specdec_hf.drafting.drafter import Drafter
from specdec_hf.loop.drafted import verify_without_residual
from support import hf_models
from support.toy_chain import (
    ToyChain,
    assert_joint_distribution,
    assert_wrong_distribution,
    lossy_joint_distribution,
    rejection_mass,
)

from specdec_kernels import verify_chain

FORMS = {
    "logits": {"v": 4},
    "one-hot": {"v": 3, "draft": "none"},
    "filtered": {"v": 4, "kind": "probs", "target_filters": {"temperature": 0.7, "top_p": 0.8}},
}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 5, "ablate": "residual"}


def ablated_masses(p, q):
    """Each token is accepted with min(P, Q), and a recovered token is drawn from P."""
    accepted = torch.minimum(p, q)
    return accepted, rejection_mass(accepted, p)


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

    return proofs.enumerate_distribution(run, toy.draft_probs, toy.target_probs)


@pytest.mark.parametrize("form", FORMS)
def test_the_emitted_tokens_have_the_distribution_of_the_formula(form):
    """Enumerated; the control is the op itself, whose tokens have the target's distribution."""
    toy = ToyChain(**FORMS[form])
    want = lossy_joint_distribution(toy, ablated_masses)
    found = realized(toy, verify_without_residual)
    assert_joint_distribution(found, want)
    assert_wrong_distribution(found, toy)
    with pytest.raises(AssertionError, match="P\\(y1"):
        assert_joint_distribution(realized(toy, verify_chain), want)


def test_accepted_drafts_are_those_of_rule_token_and_faults_are_kept():
    generator = torch.Generator().manual_seed(2)
    p, q = torch.randn(200, 4, 9, generator=generator), torch.randn(200, 3, 9, generator=generator)
    tokens = torch.randint(9, (200, 3), generator=generator)
    q[0, 1] = torch.nan
    arguments = {
        "seeds": torch.arange(200), "positions": torch.full((200,), 7), "with_accept_probs": True,
    }  # fmt: skip
    token = verify_chain(p, tokens, q, **arguments)
    ablated = verify_without_residual(p, tokens, q, **arguments)
    assert ablated.num_accepted.tolist() == token.num_accepted.tolist()
    assert set(token.num_accepted.tolist()) == {0, 1, 2, 3}
    assert ablated.status.tolist() == token.status.tolist()
    torch.testing.assert_close(ablated.accept_probs, token.accept_probs, equal_nan=True)
    last = token.num_accepted.long()[:, None]
    full = last[:, 0] == 3
    assert (ablated.tokens == token.tokens)[full].all(), "the bonus token is not ablated"
    assert (ablated.tokens.gather(1, last) != token.tokens.gather(1, last)).any()


def run(lengths=(9, 6), **settings):
    settings = {"num_assistant_tokens": 4, "max_new_tokens": 24, **settings}
    return hf_models.decode(hf_models.tiny("llama"), lengths, **settings)


class Same(Drafter):
    """Drafts the last token again and again, without a distribution."""

    def propose(self, history, limits):
        return np.repeat(history.last(1), max(int(limits.max()), 1), axis=1)


DRAFTERS = {"model": lambda: hf_models.perturbed("llama", 0.3), "copies": Same}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_call_is_verified_without_the_residual_and_says_so(drafter):
    rounds = []
    settings = {**SAMPLED, "drafter": DRAFTERS[drafter]()}
    out = run(trace=rounds.append, **settings)
    assert (out.stats.rule, out.stats.lossless, out.stats.tree) == ("token", False, "")
    [note] = [note for note in out.stats.notes if "ablate='residual'" in note and "lossy" in note]
    assert "biased" in note
    assert out.stats.drafted > out.stats.accepted
    unlike = 0
    for traced in rounds:
        arguments = (traced.logits, traced.draft_token_ids, traced.distribution)
        options = {
            "seeds": traced.seeds, "positions": torch.from_numpy(traced.lengths),
            "temperature": 0.8, "top_k": 20,
        }  # fmt: skip
        ablated = verify_without_residual(*arguments, **options).tokens.tolist()
        token = verify_chain(*arguments, **options).tokens.tolist()
        for step in traced.steps:
            count = len(step.tokens)
            assert step.tokens == ablated[step.sequence][:count]
            unlike += step.tokens != token[step.sequence][:count]
    assert unlike, "the control: rule token would have given another text"
    again = run(**{**settings, "seed": out.stats.seeds})
    assert again.sequences.tolist() == out.sequences.tolist()


def test_the_default_drafter_drafts_chains():
    stats = run(**{**SAMPLED, "drafter": "auto", "num_assistant_tokens": None}).stats
    assert (stats.drafter, stats.rule, stats.lossless) == ("suffix_automaton", "token", False)
    assert any("ablate='residual' is for chains, got trees of " in note for note in stats.notes)


def test_calls_without_drafts_or_ablation_are_lossless():
    assert run(**{**SAMPLED, "drafter": None}).stats.lossless
    stats = run(**{**SAMPLED, "drafter": "prompt_lookup", "ablate": None}).stats
    assert (stats.lossless, [note for note in stats.notes if "ablate" in note]) == (True, [])


REFUSED = {
    "name": ({"ablate": "bonus"}, "ablate must be None or 'residual', got 'bonus'"),
    "greedy": ({"do_sample": False}, "ablate='residual' needs do_sample=True: greedy decoding"),
    "rule": ({"rule": "block"}, "rule must be 'auto' or 'token' with ablate='residual', got 'blo"),
    "lossy rule": ({"rule": "typical"}, "rule must be 'auto' or 'token' with ablate='residual', "),
    "tree": (
        {"tree": (2,), "num_assistant_tokens": None},
        "ablate='residual' is for chains, got trees of ",
    ),
    "beams": ({"num_beams": 2, "do_sample": False}, "ablate must be None with num_beams=2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_such_residual_is_refused_by_name(case):
    changed, message = REFUSED[case]
    with pytest.raises(ValueError) as raised:
        run(drafter=hf_models.perturbed("llama"), **{**SAMPLED, **changed})
    assert message in str(raised.value)
