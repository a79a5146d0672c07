"""What the enumeration of test_rules.py must reject."""

import pytest
import torch
from proofs.toy_chain import ToyChain, assert_target_distribution, assert_wrong_distribution
from support.providers import provider, verify

# The enumeration itself.


def test_cell_boundaries_of_another_verifier_are_only_a_hint():
    """`like` is a verifier of other models here; the boundaries are measured all the same."""
    toy, other = ToyChain(gamma=1), ToyChain(gamma=1, seed=99)
    realized = toy.realized_by(toy.verifier("cpp"), like=other.verifier("cpp"))
    assert_target_distribution(realized, toy)


@pytest.mark.parametrize("with_like", [False, True])
@pytest.mark.parametrize(
    ("token", "words"), [(3, "outside of the vocabulary of 3"), (0, "falls|not constant")]
)
@pytest.mark.parametrize("gamma", [0, 2])
def test_the_enumeration_rejects_a_cdf_that_ends_below_1(gamma, token, words, with_like):
    toy = ToyChain(gamma=gamma)
    right = toy.verifier("cpp")

    def wrong(drafts, uniforms):
        tokens, accepted = right(drafts, uniforms)
        late = uniforms[:, -1] > 1 - 1e-6
        tokens[late, accepted[late].long()] = token
        return tokens, accepted

    with pytest.raises(ValueError, match=words):
        toy.realized_by(wrong, like=right if with_like else None)


# Correct kernels that are called wrongly. Wrong kernels are in the ledger of mutants.


def changed(**new):
    return lambda a: {**a, **{k: f(a) for k, f in new.items()}}


def filtered_before_the_mask(a):
    """Top-k among all tokens, of which the mask then leaves some: as a sampler of logits would."""
    target = a["target"].clamp(max=2.0)
    kept = target >= target.topk(a["top_k"], -1).values[..., -1:]
    allowed = torch.stack([a["bitmask"][..., 0] >> t & 1 == 1 for t in range(4)], -1)
    some = (kept & allowed).any(-1, keepdim=True)
    return {**a, "target": target.where(kept | ~some, -torch.inf), "top_k": 0}


# Rule token never reads Q where P is 0, so the same mask of both may be forgotten there.
MASK_FORGOTTEN = (
    dict(v=4, mask="both", draft="sampled"),
    changed(draft_bitmask=lambda a: None),
)
CALLS = {
    "sparse probabilities that were not renormalised": (
        dict(draft="sparse"), changed(draft=lambda a: 0.8 * a["draft"])),
    "a sparse id counted once": (
        dict(draft="sparse"), changed(ids=lambda a: a["ids"].masked_fill(
            torch.tensor([False, False, False, True]), -1))),
    "a sparse draft whose ids are ranks": (
        dict(draft="sparse"), changed(ids=lambda a: torch.tensor([0, -1, 1, 0]).expand(
            a["ids"].shape).contiguous())),
    "a mapped draft compared by column": (
        dict(v=4, draft="mapped"), changed(columns=lambda a: None)),
    "wide ids taken for missing drafts": (
        dict(draft="wide"), changed(tokens=lambda a: torch.where(
            a["tokens"] >= 3, -1, a["tokens"]))),
    "a narrow draft filled with zeros as logits": (
        dict(draft="narrow"), changed(draft=lambda a: torch.nn.functional.pad(a["draft"], (0, 1)))),
    "probabilities that were not renormalised": (
        dict(kind="probs"), changed(draft=lambda a: 0.8 * a["draft"])),
    "a Q that is too small by 1e-4": (
        dict(kind="probs"), changed(draft=lambda a: (1 - 1e-4) * a["draft"])),
    "unfiltered logits for drafts of filtered ones": (
        dict(v=4, draft="sampled", draft_filters=dict(temperature=0.6, top_k=2)),
        changed(sampled=lambda a: None)),
    "a draft temperature other than the one sampled with": (
        dict(draft="sampled", draft_filters=dict(temperature=0.6)),
        changed(sampled=lambda a: (*a["sampled"][:2], 0.7))),
    "a mask that came after the filters": (
        dict(v=4, mask="target", target_filters=dict(top_k=2)), filtered_before_the_mask),
    "a whole distribution for argmax drafts": (
        dict(draft="none"), changed(draft=lambda a: torch.zeros(len(a["target"]), 2, 3))),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "rule"),
    [(c, rule) for c in CALLS.values() for rule in ("token", "block")]
    + [(MASK_FORGOTTEN, "block")],
    ids=[f"{c}-{rule}" for c in CALLS for rule in ("token", "block")]
    + ["a masked draft verified without its mask-block"],
)
def test_the_enumeration_rejects(call, rule):
    options, change = call
    toy = ToyChain(**options, rule=rule)

    def run(drafts, uniforms):
        a = change({"tokens": drafts, **toy.arguments(drafts, "cpp")})
        # Ids of a wide draft may be out of range here, so status is not looked at.
        return verify(provider("verify_chain", "cpp"), uniforms=uniforms, **a)[:2]

    realized = toy.realized_by(run, steps=24)
    assert_wrong_distribution(realized, toy)
