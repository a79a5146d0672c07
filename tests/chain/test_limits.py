"""Emitted tokens end at an end-of-sequence token or at `max_new_tokens`.

Up to there they have the target's distribution, and nothing beyond it is read.
"""

import proofs
import pytest
import torch
from proofs import assert_close, assert_outputs_equal
from proofs.toy_chain import ToyChain, assert_joint_distribution
from support.providers import ALL_PROVIDERS, FAST_PROVIDERS, enumerated, provider, verify

from specdec_kernels import RULES, Status, reference

EOS = 1


def ending(p):
    """The tables of a model that gives only EOS after an EOS."""
    out = [p[0]]
    stop = torch.nn.functional.one_hot(torch.tensor(EOS), p[0].shape[-1]).double()
    ended = torch.zeros((), dtype=torch.bool)
    for table in p[1:]:
        ended = ended.unsqueeze(-1) | (torch.arange(len(stop)) == EOS)
        out.append(torch.where(ended.unsqueeze(-1), stop, table))
    return out


def continued(toy, name, p, **limits):
    """A verifier under limits, whose cut sequences continue with a draw from the tables `p`."""
    op = provider("verify_chain", name)
    limits = {k: torch.tensor(x) for k, x in limits.items()}
    most = limits.pop("max_new_tokens", None)

    def run(drafts, uniforms):
        n = len(drafts)
        each = None if most is None else most.expand(n)
        tokens, accepted, status, *_ = verify(
            op, tokens=drafts, uniforms=uniforms, max_new_tokens=each, **limits,
            **toy.arguments(drafts, "cpp"),
        )  # fmt: skip
        assert not status.any()
        emitted = (tokens >= 0).sum(-1)
        assert most is None or int(emitted.max()) <= int(most)
        for r in (emitted == accepted).nonzero()[:, 0].tolist():
            count = int(accepted[r])
            at_end = count == int(most or -1) or int(tokens[r, count - 1]) == EOS
            assert at_end
            assert (tokens[r, count:] == -1).all()
            row = p[count][tuple(tokens[r, :count].tolist())]
            tokens[r, count] = reference.pick(row, float(uniforms[r, -1]))
        return tokens, accepted

    return run


def realized(toy, name, p, **limits):
    like = continued(toy, "cpp", p, **limits) if name != "cpp" else None
    run = continued(toy, name, p, **limits)
    return proofs.enumerate_distribution(run, toy.draft_probs, p, steps=30, like=like)


FORMS = {
    "logits": dict(gamma=2),
    "one-hot": dict(gamma=2, draft="none"),
    "sparse": dict(gamma=2, draft="sparse"),
    "gamma3": dict(v=2, gamma=3),
}


@pytest.mark.parametrize(
    ("name", "rule", "form"),
    enumerated(
        [(r, f) for r in ("token", "block") for f in FORMS],
        [("token", "logits"), ("block", "sparse")],
    ),
)
def test_up_to_the_first_end_of_sequence_the_distribution_is_the_targets(name, rule, form):
    """Drafts and target rows after EOS are meaningless, and none of them may be emitted."""
    toy = ToyChain(**FORMS[form], rule=rule)
    p = ending(toy.target_probs)
    got = realized(toy, name, p, eos_token_ids=[EOS, 77])
    assert_joint_distribution(got, proofs.joint_distribution(p))


@pytest.mark.parametrize(
    ("name", "rule", "most"),
    enumerated(
        [(r, n) for r in ("token", "block") for n in (1, 2, 3)], [("token", 2), ("block", 1)]
    ),
)
def test_up_to_max_new_tokens_the_distribution_is_the_targets(name, rule, most):
    toy = ToyChain(rule=rule)
    got = realized(toy, name, toy.target_probs, max_new_tokens=most)
    assert_joint_distribution(got, proofs.joint_distribution(toy.target_probs))
    assert float(got.accepted[most + 1 :].sum()) == 0


def test_the_enumeration_rejects_an_end_of_sequence_that_is_ignored():
    toy = ToyChain()
    p = ending(toy.target_probs)
    got = proofs.enumerate_distribution(toy.verifier("cpp"), toy.draft_probs, p)
    with pytest.raises(AssertionError, match="P\\(y1"):
        assert_joint_distribution(got, proofs.joint_distribution(p))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_nothing_follows_an_accepted_end_of_sequence(name, rule):
    target = torch.zeros(3, 4, 9)
    target[..., 4] = target[:, 1, 7] = 90.0
    target[:, 1, 4] = 0.0
    drafts = torch.tensor([[4, 7, 4], [4, 7, 99], [4, 3, 4]])
    kw = dict(rule=rule, rates=torch.ones(3) if rule == "synthetic" else None)
    got = verify(provider("verify_chain", name), target, drafts, None,
                 eos_token_ids=torch.tensor([7, -1, 2**40]), **kw)  # fmt: skip
    third = [4, 3, 4, 4] if rule == "synthetic" else [4, 7, -1, -1]
    assert got[0].tolist() == [[4, 7, -1, -1], [4, 7, -1, -1], third]
    assert got[1].tolist() == [2, 2, 3 if rule == "synthetic" else 1]
    assert got[2].tolist() == [0, 0, 0]  # an id out of range after the end is never looked at
    assert_close("logprobs", got[3][:2], torch.zeros(2, 4), atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_max_new_tokens_counts_every_emitted_token(name, rule):
    target = torch.zeros(6, 3, 5)
    target[..., 2] = 90.0
    drafts = torch.full((6, 2), 2)
    most = torch.tensor([-(2**40), 0, 1, 2, 3, 2**40])
    kw = dict(rule=rule, rates=torch.ones(2) if rule == "synthetic" else None)
    got = verify(provider("verify_chain", name), target, drafts, max_new_tokens=most, **kw)
    assert (got[0] >= 0).sum(-1).tolist() == [0, 0, 1, 2, 3, 3]
    assert got[1].tolist() == [0, 0, 1, 2, 2, 2]
    assert not got[2].any()
    assert got[4].isnan().sum(-1).tolist()[:2] == [2, 2]


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_limits_and_wrong_ids_are_found_among_more_than_32_drafts(name):
    """The kernels for GPUs look at 32 drafts at a time."""
    target, drafts = torch.zeros(4, 41, 5), torch.full((4, 40), 2)
    target[..., 2] = 1.0
    target[0, 34, 3], drafts[0, 34] = 2.0, 3
    drafts[1, 36] = drafts[3, 5] = 9
    got = verify(provider("verify_chain", name), target, drafts, rule="greedy",
                 eos_token_ids=torch.tensor([3]),
                 max_new_tokens=torch.tensor([99, 99, 38, 99]))  # fmt: skip
    assert (got[0] >= 0).sum(-1).tolist() == [35, 37, 38, 6]
    assert got[1].tolist() == [35, 36, 38, 5]
    assert got[2].tolist() == [0, Status.DRAFT_OUT_OF_RANGE, 0, Status.DRAFT_OUT_OF_RANGE]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_nothing_is_read_where_nothing_may_be_emitted(name, rule):
    """An invalid row sets no status where its sequence may emit nothing."""
    target = torch.full((2, 2, 5), torch.nan)
    kw = dict(rule=rule, rates=torch.ones(1) if rule == "synthetic" else None)
    got = verify(provider("verify_chain", name), target, torch.tensor([[3], [99]]),
                 max_new_tokens=torch.zeros(2, dtype=torch.int64), **kw)  # fmt: skip
    assert [x.tolist() for x in got[:4]] == [[[-1] * 2] * 2, [0, 0], [0, 0], [[0.0] * 2] * 2]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_a_cut_chain_equals_the_shorter_chain(name, rule):
    """With a cut after draft 1, outputs are those of gamma = 2 without the bonus token."""
    target, drafts, q = proofs.chain_case(40, 3, 67, rule=rule).args()[:3]
    op = provider("verify_chain", name)
    drafts[2] = drafts[3]
    drafts[drafts == 66] = 65
    drafts[:, 1] = 66
    want = verify(op, target[:, :3], drafts[:, :2], q[:, :2], rule=rule)
    whole = want[1] == 2
    want[0][whole, 2] = -1
    want[3][whole, 2] = 0.0
    for limit in (
        dict(max_new_tokens=torch.full((40,), 2)),
        dict(eos_token_ids=torch.tensor([66])),
    ):
        got = verify(op, target, drafts, q, rule=rule, **limit)
        short = [x[:, : w.shape[1]] if x.dim() == 2 else x for x, w in zip(got, want, strict=True)]
        assert_outputs_equal("verify_chain", short, want)
        assert (got[0][:, 3] == -1).all()
