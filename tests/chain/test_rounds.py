"""Several rounds of one sequence give the target's distribution with the library's own noise.

Under a rule that looks ahead (block, traversal), drafts beyond the last accepted one influence what
is emitted. The next round drafts at the positions of those drafts, so it may use neither the noise
that drew them nor their acceptance uniforms.
"""

import functools

import pytest
import torch
from proofs import SIGNIFICANCE, chi_square
from support.providers import provider, sample, verify, verify_tree

pytestmark = pytest.mark.slow  # 60,000 sequences each

GAMMA, LENGTH, N = 3, 4, 60_000
# Log-probabilities of the next token at the start, after token 0 and after token 1.
P = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]]).log()
Q = torch.tensor([[0.8, 0.2], [0.7, 0.3], [0.3, 0.7]]).log()


def target_probs():
    """[2^LENGTH] float64: probabilities of the first tokens; the first is the lowest bit."""
    out = torch.ones(2**LENGTH, dtype=torch.float64)
    for code in range(2**LENGTH):
        state = 0
        for i in range(LENGTH):
            token = code >> i & 1
            out[code] *= P[state, token].double().exp()
            state = token + 1
    return out / out.sum()


def chain(rule, target, tokens, draft, starts):
    out = verify(provider("verify_chain", "cpp"), target, tokens, draft, rule=rule,
                 seeds=torch.arange(N), positions=starts)  # fmt: skip
    return out[0], out[1]


def tree(rule, target, tokens, draft, starts):
    parents = torch.arange(-1, GAMMA - 1).expand(N, -1)
    out = verify_tree(provider("verify_tree", "cpp"), target, tokens, parents, draft, rule=rule,
                      seeds=torch.arange(N), positions=starts)  # fmt: skip
    return out[1], out[2]


@functools.cache
def rounds(rule, of_the_round):
    """[N] codes of the first LENGTH tokens.

    of_the_round: draft i is drawn at position start + ((i + 1) << 32), which no other round uses;
    else at its own position, which the next round may use again.
    """
    step = tree if rule in ("multi_draft", "traversal") else chain
    text = torch.zeros(N, LENGTH + GAMMA + 1, dtype=torch.int64)
    count, last = (torch.zeros(N, dtype=torch.int64) for _ in "cl")
    while int(count.min()) < LENGTH:
        state, rows, drafts, draft_rows = last, [P[last]], [], []
        for i in range(GAMMA):
            positions = count + ((i + 1) << 32) if of_the_round else count + i
            x = sample(provider("sample", "cpp"), Q[state], seeds=torch.arange(N),
                       positions=positions)[0]  # fmt: skip
            draft_rows.append(Q[state])
            drafts.append(x)
            state = x + 1
            rows.append(P[state])
        given = (torch.stack(part, 1) for part in (rows, drafts, draft_rows))
        tokens, accepted = step(rule, *given, count)
        emitted = accepted.long() + 1
        places = count[:, None] + torch.arange(GAMMA + 1)
        new = (torch.arange(GAMMA + 1) < emitted[:, None]) & (places < LENGTH)
        text[new.nonzero()[:, 0], places[new]] = tokens[new]
        unfinished = count < LENGTH
        last = torch.where(unfinished, tokens.gather(1, accepted.long()[:, None])[:, 0] + 1, last)
        count = torch.where(unfinished, count + emitted, count)
    return (text[:, :LENGTH] << torch.arange(LENGTH)).sum(-1)


# `make test` has the rules that look ahead.
@pytest.mark.parametrize(
    "rule",
    [
        *(pytest.param(r, marks=pytest.mark.full) for r in ("token", "multi_draft")),
        "block",
        "traversal",
    ],
)
def test_several_rounds_give_the_targets_distribution(rule):
    assert chi_square(rounds(rule, True), target_probs()) > SIGNIFICANCE


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_noise_that_the_next_round_uses_again_gives_another_distribution(rule):
    assert chi_square(rounds(rule, False), target_probs()) < SIGNIFICANCE
