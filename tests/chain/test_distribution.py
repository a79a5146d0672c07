"""Emitted tokens have the target's distribution: rules token and greedy, in every kernel.

Toy models are enumerated over every draft and every cell of the uniforms, so the comparison is
exact to 1e-6. The negative controls at the end are verifiers with faults that other projects have
shipped; the same enumeration must reject each.
"""

import numpy as np
import pytest
import torch
from scipy.special import bdtr, bdtrc
from support.providers import (
    ALL_PROVIDERS,
    ENUMERATED_PROVIDERS,
    SIGNIFICANCE,
    chi_square,
    needs_triton,
    philox_uniforms,
    philox_words,
    provider,
    sample,
    verify,
)
from support.toy_chain import (
    BOUNDARY_PROVIDER,
    TOLERANCE,
    ToyChain,
    assert_target_distribution,
    assert_wrong_distribution,
    logit_tables,
)

from specdec_kernels import analysis, reference, testing
from specdec_kernels.arguments.chain import ChainArguments

LOSSLESS = {
    "logits": dict(),
    "gamma0": dict(gamma=0),
    "gamma1-V5": dict(v=5, gamma=1),
    "gamma3-V2": dict(v=2, gamma=3),
    "bf16": dict(dtype=torch.bfloat16),
    "f16": dict(dtype=torch.float16),
    "zeros": dict(v=4, holes=True),
    "equal": dict(same=True),
    "probs": dict(kind="probs"),
    "probs-zeros": dict(kind="probs", holes=True),
    "probs-filtered": dict(v=4, kind="probs", target_filters=dict(temperature=0.7, top_p=0.8)),
    "probs-one-hot": dict(v=4, kind="probs", draft="none"),
    "one-hot": dict(draft="none"),
    "one-hot-filtered": dict(v=4, draft="none", target_filters=dict(temperature=0.7, top_p=0.8)),
    "sampled": dict(v=4, draft="sampled", draft_filters=dict(temperature=0.6, top_k=2)),
    "sampled-top-p": dict(v=4, draft="sampled", draft_filters=dict(temperature=1.8, top_p=0.7)),
    "sampled-both": dict(v=4, draft="sampled",
                         draft_filters=dict(temperature=1.8, top_k=3, min_p=0.1),
                         target_filters=dict(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05)),
    "sampled-greedy": dict(draft="sampled", draft_filters=dict(temperature=0.0)),
    "hot": dict(target_filters=dict(temperature=2.5)),
    "top-k": dict(v=4, target_filters=dict(top_k=2)),
    "top-p": dict(v=4, target_filters=dict(top_p=0.75)),
    "min-p": dict(v=4, target_filters=dict(min_p=0.3)),
    "greedy": dict(rule="greedy", target_filters=dict(temperature=0.0)),
    "temperature-zero": dict(target_filters=dict(temperature=0.0)),
}  # fmt: skip


@pytest.mark.parametrize("form", LOSSLESS)
@pytest.mark.parametrize("name", ENUMERATED_PROVIDERS)
def test_emitted_tokens_have_the_targets_distribution(name, form):
    toy = ToyChain(**LOSSLESS[form])
    realized = toy.realized(name, steps=28 if name == "reference" else 36)
    assert_target_distribution(realized, toy)
    if toy.draft != "none" and toy.rule == "token":
        want = analysis.mean_accepted(toy.draft_probs, toy.target_probs)
        assert realized.mean_accepted == pytest.approx(want, abs=TOLERANCE)


SMALL = {
    "logits": dict(),
    "probs-zeros": dict(kind="probs", holes=True),
    "one-hot-filtered": dict(draft="none", target_filters=dict(temperature=0.8, top_k=2)),
    "sampled": dict(draft="sampled", draft_filters=dict(temperature=0.6, top_k=2)),
}


@needs_triton
@pytest.mark.parametrize("form", SMALL)
def test_emitted_tokens_have_the_targets_distribution_in_triton(form):
    toy = ToyChain(**{**SMALL[form], "gamma": 1})
    run, like = (toy.verifier(name) for name in ("triton", "cpp"))
    assert_target_distribution(
        testing.enumerate_distribution(run, toy.draft_probs, toy.target_probs, steps=24, like=like),
        toy,
    )


def test_cell_boundaries_of_another_verifier_are_only_a_hint():
    """`like` is a verifier of other models here; the boundaries are measured all the same."""
    toy, other = ToyChain(gamma=1), ToyChain(gamma=1, seed=99)
    realized = testing.enumerate_distribution(
        toy.verifier("cpp"),
        toy.draft_probs,
        toy.target_probs,
        like=other.verifier("cpp"),
    )
    assert_target_distribution(realized, toy)


def test_the_number_of_cells_is_that_of_decisions_and_tokens():
    """gamma = 2, V = 3, dense tables: 9 drafts, each at most 4 decisions times 3 tokens."""
    realized = ToyChain().realized("cpp")
    assert 9 * 3 <= realized.cells <= 9 * 4 * 3


def with_decoys(run):
    """Double the batch with sequences of other tables, other filters and temperature 0."""

    def doubled(arguments):
        n = len(arguments["target"])
        both = {k: torch.stack([arguments[k], arguments[k].flip(0)], 1).flatten(0, 1)
                for k in ("target", "draft")}  # fmt: skip
        mixed = {
            "temperature": torch.tensor([0.7, 0.0]).repeat(n),
            "top_k": torch.tensor([3, 1], dtype=torch.int32).repeat(n),
            "top_p": torch.tensor([0.9, 0.2]).repeat(n),
            "min_p": torch.tensor([0.02, 0.9]).repeat(n),
        }
        return run({**arguments, **both, **mixed})

    return doubled


def test_parameters_of_one_sequence_do_not_change_its_neighbours_distribution():
    toy = ToyChain(v=4, target_filters=dict(temperature=0.7, top_k=3, top_p=0.9, min_p=0.02))
    op = provider("verify_chain", "cpp")

    def run(drafts, uniforms):
        def call(arguments):
            tokens, both = (x.repeat_interleave(2, 0) for x in (drafts, uniforms))
            return verify(op, tokens=tokens, uniforms=both, **arguments)

        out = with_decoys(call)(toy.arguments(drafts, "cpp"))
        return out[0][::2], out[1][::2]

    assert_target_distribution(
        testing.enumerate_distribution(run, toy.draft_probs, toy.target_probs), toy
    )


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", ENUMERATED_PROVIDERS)
def test_a_missing_draft_or_an_invalid_draft_row_keeps_the_targets_distribution(name, rule):
    toy = ToyChain(rule=rule)
    last = toy.gamma - 1

    def verifier(name, poison):
        op = provider("verify_chain", name)

        def run(drafts, uniforms):
            arguments = toy.arguments(drafts, name)
            tokens = drafts.clone()
            if poison:
                arguments["draft"][:, last] = torch.nan
            else:
                tokens[:, last] = -1
            return verify(op, tokens=tokens, uniforms=uniforms, **arguments)[:2]

        return run

    for poison in (False, True):
        like = None if name == BOUNDARY_PROVIDER else verifier(BOUNDARY_PROVIDER, poison)
        realized = testing.enumerate_distribution(
            verifier(name, poison), toy.draft_probs, toy.target_probs, like=like
        )
        assert_target_distribution(realized, toy)


EDGES = {  # target row, draft row, uniform, whether draft 0 is accepted
    "P=0 is never accepted": ([0.0, 1.0], [0.5, 0.5], 0.0, False),
    "P=Q is always accepted": ([0.3, 0.7], [0.3, 0.7], 1 - 2.0**-53, True),
    "Q=0<P is always accepted": ([0.1, 0.9], [0.0, 1.0], 1 - 2.0**-53, True),
    "P=Q=0 is rejected": ([0.0, 1.0], [0.0, 1.0], 0.0, False),
    "equality is rejected": ([0.25, 0.75], [0.5, 0.5], 0.5, False),
    "below equality is accepted": ([0.25, 0.75], [0.5, 0.5], 0.5 - 2.0**-20, True),
}


def edge_accepts(op, p, q, u, kind):
    p, q = torch.tensor(p), torch.tensor(q)
    if kind == "logits":
        p, q = p.log(), q.log()
    out = verify(
        op, torch.stack([p, p])[None], torch.zeros(1, 1, dtype=torch.int64), q[None, None],
        kind=kind, uniforms=torch.tensor([[u, 0.5]], dtype=torch.float64),
    )  # fmt: skip
    return bool(out[1][0])


# The logarithms of logits are rounded, so equality is tried on probabilities only.
BOTH = [(e, k) for e in EDGES for k in ("probs", "logits") if (e[:8], k) != ("equality", "logits")]


@pytest.mark.parametrize(("edge", "kind"), BOTH)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_the_acceptance_test_is_strict(name, edge, kind):
    p, q, u, accepted = EDGES[edge]
    assert edge_accepts(provider("verify_chain", name), p, q, u, kind) == accepted


def test_rule_match_accepts_as_often_as_its_formula():
    """Shared noise: alpha = sum_x 1 / sum_y max(P_y/P_x, Q_y/Q_x)."""
    n, v = 200_000, 7
    p, q = logit_tables(torch.Generator().manual_seed(4), v, 1)[0], torch.linspace(0, 2, v)
    positions = torch.arange(n)
    draft = sample(provider("sample", "cpp"), q.expand(n, v), positions=positions, noise="shared")
    got = verify(
        provider("verify_chain", "cpp"), p.expand(n, 2, v), draft[0][:, None], rule="match",
        positions=positions,
    )  # fmt: skip
    alpha = float(analysis.acceptance_rate(*(x.double().softmax(-1) for x in (p, q)), rule="match"))
    hits = int(got[1].sum())
    assert min(bdtr(hits, n, alpha), bdtrc(hits - 1, n, alpha)) > SIGNIFICANCE
    assert chi_square(got[0][:, 0], p.double().softmax(-1)) > SIGNIFICANCE


def drawn_drafts(n, q, positions):
    """Drafts of the library's own sampler, with noise="draft"."""
    return sample(provider("sample", "cpp"), q.expand(n, len(q)), positions=positions)[0]


def models_and_positions(n=100_000, v=6):
    generator = torch.Generator().manual_seed(8)
    p, q = 1.5 * torch.randn(2, v, generator=generator)
    return n, p, q, torch.arange(n)


def test_the_ops_own_noise_streams_give_the_targets_distribution():
    n, p, q, positions = models_and_positions()
    got = verify(
        provider("verify_chain", "cpp"), p.expand(n, 2, -1), drawn_drafts(n, q, positions)[:, None],
        q.expand(n, 1, -1), positions=positions,
    )  # fmt: skip
    assert chi_square(got[0][:, 0], p.double().softmax(-1)) > SIGNIFICANCE
    both = (got[1] == 1).nonzero()[:, 0]
    assert chi_square(got[0][both, 1], p.double().softmax(-1)) > SIGNIFICANCE


# Negative controls.


def token_verifier(accept=None, residual=None):
    """Rule token in float64 on probabilities; `accept` and `residual` replace its two steps."""
    accept = accept or (lambda u, p, q: u * q < p)
    residual = residual or (lambda p, q: (p - q).clamp(min=0))

    def run(*args):
        a = ChainArguments(*args)
        tokens, uniforms = a.draft_token_ids, a.uniforms
        n, gamma = tokens.shape
        out = torch.full((n, gamma + 1), -1)
        accepted = torch.zeros(n, dtype=torch.int32)
        p, q = (x.double() for x in (a.target, a.draft))
        for b in range(n):
            i = 0
            while i < gamma:
                x = int(tokens[b, i])
                if not accept(uniforms[b, i], p[b, i, x], q[b, i, x]):
                    break
                out[b, i] = x
                i += 1
            weights = p[b, i] if i == gamma else residual(p[b, i], q[b, i])
            weights = weights if weights.sum() > 0 else p[b, i]
            out[b, i] = reference.pick(weights, float(uniforms[b, -1]))
            accepted[b] = i
        return out, accepted, torch.zeros(n, dtype=torch.int32), torch.zeros(n, gamma + 1)

    return run


WRONG = {
    "residual from P itself": dict(residual=lambda p, q: p),
    "residual without the clamp": dict(residual=lambda p, q: (p - q).abs()),
    "residual of Q - P": dict(residual=lambda p, q: (q - p).clamp(min=0)),
    "acceptance P": dict(accept=lambda u, p, q: u < p),
    "acceptance off by 1e-4": dict(accept=lambda u, p, q: u * q < p * (1 - 1e-4)),
    "acceptance wherever Q <= P": dict(accept=lambda u, p, q: q <= p),
}


def enumerated(**parts):
    toy = ToyChain(gamma=1, kind="probs")
    run = token_verifier(**parts)

    def call(drafts, uniforms):
        return verify(run, tokens=drafts, uniforms=uniforms, **toy.arguments(drafts, "cpp"))[:2]

    return testing.enumerate_distribution(call, toy.draft_probs, toy.target_probs, steps=26), toy


def test_the_enumeration_passes_a_correct_verifier():
    assert_target_distribution(*enumerated())


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
        testing.enumerate_distribution(
            wrong, toy.draft_probs, toy.target_probs, like=right if with_like else None
        )


@pytest.mark.parametrize("wrong", WRONG)
def test_the_enumeration_rejects_a_verifier_with(wrong):
    assert_wrong_distribution(*enumerated(**WRONG[wrong]))


def test_the_edge_cases_reject_a_comparison_that_is_not_strict():
    loose = token_verifier(accept=lambda u, p, q: u * q <= p)
    wrong = [e for e, (p, q, u, ok) in EDGES.items() if edge_accepts(loose, p, q, u, "probs") != ok]
    assert set(wrong) == {"P=0 is never accepted", "P=Q=0 is rejected", "equality is rejected"}


def test_the_enumeration_rejects_unfiltered_draft_logits_for_drafts_of_filtered_ones():
    toy = ToyChain(v=4, draft="sampled", draft_filters=dict(temperature=0.6, top_k=2))
    assert_wrong_distribution(toy.realized("cpp", change=lambda a: {**a, "sampled": None}), toy)


def test_the_enumeration_rejects_a_full_draft_distribution_for_argmax_drafts():
    toy = ToyChain(draft="none")

    def full_draft(arguments):
        shape = len(arguments["target"]), toy.gamma, toy.v
        return {**arguments, "draft": torch.zeros(shape)}

    realized = toy.realized("cpp", change=full_draft)
    assert_wrong_distribution(realized, toy)


def test_the_enumeration_rejects_draft_probabilities_that_were_not_renormalised():
    toy = ToyChain(kind="probs")
    assert_wrong_distribution(
        toy.realized("cpp", change=lambda a: {**a, "draft": 0.8 * a["draft"]}), toy
    )


def test_the_enumeration_rejects_a_draft_temperature_other_than_the_one_sampled_with():
    toy = ToyChain(draft="sampled", draft_filters=dict(temperature=0.6))
    wrong = toy.realized("cpp", change=lambda a: {**a, "sampled": (*a["sampled"][:2], 0.7)})
    assert_wrong_distribution(wrong, toy)


@pytest.mark.parametrize(
    "fault", ["acceptance by the draft's noise", "residual by the draft's uniform"]
)
def test_the_chi_square_test_rejects_noise_that_drafter_and_verifier_share(fault):
    n, p, q, positions = models_and_positions()
    if fault.startswith("acceptance"):
        # Gumbel-max sampling draws the draft, and its noise then decides acceptance as well.
        drawn = sample(provider("sample", "cpp"), q[None].expand(n, -1).contiguous(),
                       positions=positions, noise="shared")[0]  # fmt: skip
        noise = shared_noise(n, len(q)).gather(1, drawn[:, None])[:, 0]
        uniforms = torch.stack([1 - (-noise).exp(), torch.rand(n).double()], 1)
    else:
        drawn = drawn_drafts(n, q, positions)
        same = torch.from_numpy(philox_uniforms(0, positions.numpy(), 2))
        accept = torch.from_numpy(philox_uniforms(0, positions.numpy(), 0))
        uniforms = torch.stack([accept, same], 1)
    got = verify(
        provider("verify_chain", "cpp"), p.expand(n, 2, -1), drawn[:, None], q.expand(n, 1, -1),
        uniforms=uniforms,
    )  # fmt: skip
    assert chi_square(got[0][:, 0], p.double().softmax(-1)) < SIGNIFICANCE


def shared_noise(n, v):
    words = philox_words(0, np.arange((v + 3) // 4), np.arange(n)[:, None], 3)
    words = words.reshape(n, -1)[:, :v]
    return torch.from_numpy(-np.log1p(-(words + 0.5) * 2.0**-32))
