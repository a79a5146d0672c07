"""Several rounds of one sequence with the library's own noise: no coin may be seen twice.

A rule that looks ahead (block, traversal) lets drafts beyond the last accepted one shape what is
emitted. The next round stands where they stood, so it may use neither their noise nor their coins.
"""

import functools

import pytest
import torch
from support.providers import (
    SIGNIFICANCE,
    chi_square,
    philox_uniforms,
    provider,
    sample,
    verify,
    verify_tree,
)

GAMMA, LENGTH, N = 3, 4, 200_000
# Of the next token after none, 0 and 1.
P = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]]).log()
Q = torch.tensor([[0.8, 0.2], [0.7, 0.3], [0.3, 0.7]]).log()
AHEAD = {"token": False, "multi_draft": False, "block": True, "traversal": True}


def target_law():
    """[2^LENGTH] float64 of the first tokens, the first token the lowest bit."""
    out = torch.ones(2**LENGTH, dtype=torch.float64)
    for code in range(2**LENGTH):
        state = 0
        for i in range(LENGTH):
            token = code >> i & 1
            out[code] *= P[state, token].double().exp()
            state = token + 1
    return out / out.sum()


def chain(rule, target, tokens, draft, starts, uniforms):
    out = verify(provider("verify_chain", "cpp"), target, tokens, draft, rule=rule,
                 seeds=torch.arange(N), positions=starts, uniforms=uniforms)  # fmt: skip
    return out[0], out[1]


def tree(rule, target, tokens, draft, starts, uniforms):
    parents = torch.arange(-1, GAMMA - 1).expand(N, -1)
    out = verify_tree(provider("verify_tree", "cpp"), target, tokens, parents, draft, rule=rule,
                      seeds=torch.arange(N), positions=starts, uniforms=uniforms)  # fmt: skip
    return out[1], out[2]


def absolute_uniforms(starts):
    """What the verifier would draw if every coin belonged to a position, not to a round."""
    coins = [philox_uniforms(torch.arange(N), starts + i, 0) for i in range(GAMMA)]
    coins.append(philox_uniforms(torch.arange(N), starts, 1))
    return torch.stack([torch.from_numpy(c) for c in coins], 1)


@functools.cache
def rounds(rule, of_the_round, absolute_coins=False):
    """[N] codes of the first LENGTH tokens.

    of_the_round: drafts take the noise of lanes above 2^32 of where the round starts; else that of
    their own positions, which the next round may take again.
    """
    step = tree if rule in ("multi_draft", "traversal") else chain
    text = torch.zeros(N, LENGTH + GAMMA + 1, dtype=torch.int64)
    count, last = (torch.zeros(N, dtype=torch.int64) for _ in "cl")
    while int(count.min()) < LENGTH:
        state, rows, drafts, laws = last, [P[last]], [], []
        for i in range(GAMMA):
            positions = count + ((i + 1) << 32) if of_the_round else count + i
            x = sample(provider("sample", "cpp"), Q[state], seeds=torch.arange(N),
                       positions=positions)[0]  # fmt: skip
            laws.append(Q[state])
            drafts.append(x)
            state = x + 1
            rows.append(P[state])
        given = (torch.stack(part, 1) for part in (rows, drafts, laws))
        uniforms = absolute_uniforms(count) if absolute_coins else None
        tokens, accepted = step(rule, *given, count, uniforms)
        emitted = accepted.long() + 1
        slots = count[:, None] + torch.arange(GAMMA + 1)
        new = (torch.arange(GAMMA + 1) < emitted[:, None]) & (slots < LENGTH)
        text[new.nonzero()[:, 0], slots[new]] = tokens[new]
        open_ = count < LENGTH
        last = torch.where(open_, tokens.gather(1, accepted.long()[:, None])[:, 0] + 1, last)
        count = torch.where(open_, count + emitted, count)
    return (text[:, :LENGTH] << torch.arange(LENGTH)).sum(-1)


@pytest.mark.parametrize("rule", AHEAD)
def test_several_rounds_give_the_target_law(rule):
    assert chi_square(rounds(rule, AHEAD[rule]), target_law()) > SIGNIFICANCE


@pytest.mark.parametrize("rule", ["token", "multi_draft"])
def test_rules_that_do_not_look_ahead_may_use_either_noise(rule):
    assert chi_square(rounds(rule, True), target_law()) > SIGNIFICANCE


@pytest.mark.parametrize(
    ("rule", "absolute_coins"), [("block", False), ("block", True), ("traversal", False)]
)
def test_rejects_drafts_whose_noise_the_next_round_uses_again(rule, absolute_coins):
    assert chi_square(rounds(rule, False, absolute_coins), target_law()) < SIGNIFICANCE
