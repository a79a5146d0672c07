"""The law of the emitted tokens, through the real kernels: every cell of every random input.

The negative controls at the end are verifiers that are wrong in the ways others shipped; the same
machinery must reject each.
"""

import numpy as np
import pytest
import torch
from scipy import stats
from support.providers import (
    ALL_PROVIDERS,
    FAST_PROVIDERS,
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
    "probs-point-mass": dict(v=4, kind="probs", draft="none"),
    "point-mass": dict(draft="none"),
    "point-mass-filtered": dict(v=4, draft="none", target_filters=dict(temperature=0.7, top_p=0.8)),
    "sampled": dict(v=4, draft="sampled", draft_filters=dict(temperature=0.6, top_k=2)),
    "sampled-top-p": dict(v=4, draft="sampled", draft_filters=dict(temperature=1.8, top_p=0.7)),
    "sampled-both": dict(v=4, draft="sampled", draft_filters=dict(temperature=1.8, top_k=3, min_p=0.1),
                         target_filters=dict(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05)),
    "sampled-greedy": dict(draft="sampled", draft_filters=dict(temperature=0.0)),
    "hot": dict(target_filters=dict(temperature=2.5)),
    "top-k": dict(v=4, target_filters=dict(top_k=2)),
    "top-p": dict(v=4, target_filters=dict(top_p=0.75)),
    "min-p": dict(v=4, target_filters=dict(min_p=0.3)),
    "greedy": dict(rule="greedy", target_filters=dict(temperature=0.0)),
    "temperature-zero": dict(target_filters=dict(temperature=0.0)),
}  # fmt: skip


@pytest.mark.parametrize("setting", LOSSLESS)
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_the_emitted_law_is_the_targets(name, setting):
    setting = ToyChain(**LOSSLESS[setting])
    law = setting.realized(name, steps=28 if name == "reference" else 36)
    assert_target_distribution(law, setting)
    if setting.draft != "none" and setting.rule == "token":
        want = analysis.mean_accepted(setting.draft_probs, setting.target_probs)
        assert law.mean_accepted == pytest.approx(want, abs=TOLERANCE)


SMALL = {
    "logits": dict(),
    "probs-zeros": dict(kind="probs", holes=True),
    "point-mass-filtered": dict(draft="none", target_filters=dict(temperature=0.8, top_k=2)),
    "sampled": dict(draft="sampled", draft_filters=dict(temperature=0.6, top_k=2)),
}


@needs_triton
@pytest.mark.parametrize("setting", SMALL)
def test_the_emitted_law_is_the_targets_in_the_interpreter(setting):
    setting = ToyChain(**{**SMALL[setting], "gamma": 1})
    run, like = (setting.verifier(name) for name in ("triton", "cpp"))
    assert_target_distribution(
        testing.enumerate_distribution(
            run, setting.draft_probs, setting.target_probs, steps=24, like=like
        ),
        setting,
    )


def test_edges_learnt_from_another_verifier_are_not_believed():
    """A wrong teacher: the edges of the verifier itself are measured all the same."""
    setting, other = ToyChain(gamma=1), ToyChain(gamma=1, seed=99)
    law = testing.enumerate_distribution(
        setting.verifier("cpp"),
        setting.draft_probs,
        setting.target_probs,
        like=other.verifier("cpp"),
    )
    assert_target_distribution(law, setting)


def test_cells_are_the_products_they_should_be():
    """gamma = 2, V = 3, dense tables: 9 drafts, at most 4 coin cells and 3 tokens each."""
    law = ToyChain().realized("cpp")
    assert 9 * 3 <= law.cells <= 9 * 4 * 3


def with_decoys(run):
    """Doubles the batch: every other sequence has other tables, filters and temperature 0."""

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


def test_parameters_of_one_sequence_leave_its_neighbours_law_alone():
    setting = ToyChain(v=4, target_filters=dict(temperature=0.7, top_k=3, top_p=0.9, min_p=0.02))
    op = provider("verify_chain", "cpp")

    def run(drafts, uniforms):
        def call(arguments):
            twice = (x.repeat_interleave(2, 0) for x in (drafts, uniforms))
            tokens, coins = twice
            return verify(op, tokens=tokens, uniforms=coins, **arguments)

        out = with_decoys(call)(setting.arguments(drafts, "cpp"))
        return out[0][::2], out[1][::2]

    assert_target_distribution(
        testing.enumerate_distribution(run, setting.draft_probs, setting.target_probs), setting
    )


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_law_survives_a_missing_draft_and_a_draft_row_that_is_not_finite(name, rule):
    setting = ToyChain(rule=rule)
    last = setting.gamma - 1
    op = provider("verify_chain", name)
    for poison in (False, True):

        def run(drafts, uniforms, poison=poison):
            arguments = setting.arguments(drafts, name)
            tokens = drafts.clone()
            if poison:
                arguments["draft"][:, last] = torch.nan
            else:
                tokens[:, last] = -1
            return verify(op, tokens=tokens, uniforms=uniforms, **arguments)[:2]

        assert_target_distribution(
            testing.enumerate_distribution(
                run, setting.draft_probs, setting.target_probs, steps=23
            ),
            setting,
        )


EDGES = {  # target row, draft row, coin, whether draft 0 stands
    "P=0 is never accepted": ([0.0, 1.0], [0.5, 0.5], 0.0, False),
    "P=Q is always accepted": ([0.3, 0.7], [0.3, 0.7], 1 - 2.0**-53, True),
    "Q=0<P is always accepted": ([0.1, 0.9], [0.0, 1.0], 1 - 2.0**-53, True),
    "P=Q=0 is rejected": ([0.0, 1.0], [0.0, 1.0], 0.0, False),
    "equality is rejected": ([0.25, 0.75], [0.5, 0.5], 0.5, False),
    "below equality is accepted": ([0.25, 0.75], [0.5, 0.5], 0.5 - 2.0**-20, True),
}


def edge_stands(op, p, q, coin, kind):
    p, q = torch.tensor(p), torch.tensor(q)
    if kind == "logits":
        p, q = p.log(), q.log()
    out = verify(
        op, torch.stack([p, p])[None], torch.zeros(1, 1, dtype=torch.int64), q[None, None],
        kind=kind, uniforms=torch.tensor([[coin, 0.5]], dtype=torch.float64),
    )  # fmt: skip
    return bool(out[1][0])


# The logarithms of logits are rounded, so equality is tried on probabilities only.
BOTH = [(e, k) for e in EDGES for k in ("probs", "logits") if (e[:8], k) != ("equality", "logits")]


@pytest.mark.parametrize(("edge", "kind"), BOTH)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_the_test_is_strict(name, edge, kind):
    p, q, coin, stands = EDGES[edge]
    assert edge_stands(provider("verify_chain", name), p, q, coin, kind) == stands


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
    assert stats.binomtest(hits, n, alpha).pvalue > SIGNIFICANCE
    assert chi_square(got[0][:, 0], p.double().softmax(-1)) > SIGNIFICANCE


def drawn_drafts(n, q, positions):
    """Drafts from the draft stream of the library's own sampler."""
    return sample(provider("sample", "cpp"), q.expand(n, len(q)), positions=positions)[0]


def streams_law(n=100_000, v=6):
    generator = torch.Generator().manual_seed(8)
    p, q = 1.5 * torch.randn(2, v, generator=generator)
    return n, p, q, torch.arange(n)


def test_own_streams_draft_accept_and_residual_give_the_target_law():
    n, p, q, positions = streams_law()
    got = verify(
        provider("verify_chain", "cpp"), p.expand(n, 2, -1), drawn_drafts(n, q, positions)[:, None],
        q.expand(n, 1, -1), positions=positions,
    )  # fmt: skip
    assert chi_square(got[0][:, 0], p.double().softmax(-1)) > SIGNIFICANCE
    both = (got[1] == 1).nonzero()[:, 0]
    assert chi_square(got[0][both, 1], p.double().softmax(-1)) > SIGNIFICANCE


# Negative controls.


def toy(accept=None, residual=None):
    """Rule `token` in float64 for probabilities; `accept` and `residual` replace its two parts."""
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
    "acceptance of the likelier": dict(accept=lambda u, p, q: q <= p),
}


def toy_law(**parts):
    setting = ToyChain(gamma=1, kind="probs")
    run = toy(**parts)

    def call(drafts, uniforms):
        return verify(run, tokens=drafts, uniforms=uniforms, **setting.arguments(drafts, "cpp"))[:2]

    return testing.enumerate_distribution(
        call, setting.draft_probs, setting.target_probs, steps=26
    ), setting


def test_the_machinery_passes_a_correct_toy():
    assert_target_distribution(*toy_law())


@pytest.mark.parametrize("wrong", WRONG)
def test_the_machinery_rejects(wrong):
    assert_wrong_distribution(*toy_law(**WRONG[wrong]))


def test_the_edge_table_rejects_a_comparison_that_is_not_strict():
    loose = toy(accept=lambda u, p, q: u * q <= p)
    wrong = [e for e, (p, q, u, ok) in EDGES.items() if edge_stands(loose, p, q, u, "probs") != ok]
    assert set(wrong) == {"P=0 is never accepted", "P=Q=0 is rejected", "equality is rejected"}


def test_rejects_raw_logits_as_q_where_filtered_ones_were_drawn():
    setting = ToyChain(v=4, draft="sampled", draft_filters=dict(temperature=0.6, top_k=2))
    assert_wrong_distribution(
        setting.realized("cpp", change=lambda a: {**a, "sampled": None}), setting
    )


def test_rejects_a_full_q_for_argmax_drafts():
    setting = ToyChain(draft="none")
    full = ToyChain()
    law = setting.realized("cpp", change=lambda a: {**a, "draft": torch.zeros(1).expand(
        len(a["target"]), full.gamma, 3).contiguous()})  # fmt: skip
    assert_wrong_distribution(law, setting)


def test_rejects_a_q_that_was_not_renormalised():
    setting = ToyChain(kind="probs")
    assert_wrong_distribution(
        setting.realized("cpp", change=lambda a: {**a, "draft": 0.8 * a["draft"]}), setting
    )


def test_rejects_a_draft_temperature_that_is_not_the_one_sampled_with():
    setting = ToyChain(draft="sampled", draft_filters=dict(temperature=0.6))
    wrong = setting.realized("cpp", change=lambda a: {**a, "sampled": (*a["sampled"][:2], 0.7)})
    assert_wrong_distribution(wrong, setting)


@pytest.mark.parametrize("fault", ["coin of the draft's noise", "residual of the draft's uniform"])
def test_rejects_noise_that_draft_and_verifier_share(fault):
    n, p, q, positions = streams_law()
    if fault.startswith("coin"):
        # The draft is drawn by the race; its own noise then decides whether it stands.
        drawn = sample(provider("sample", "cpp"), q[None].expand(n, -1).contiguous(),
                       positions=positions, noise="shared")[0]  # fmt: skip
        noise = shared_noise(n, len(q)).gather(1, drawn[:, None])[:, 0]
        uniforms = torch.stack([1 - (-noise).exp(), torch.rand(n).double()], 1)
    else:
        drawn = drawn_drafts(n, q, positions)
        same = torch.from_numpy(philox_uniforms(0, positions.numpy(), 2))
        coin = torch.from_numpy(philox_uniforms(0, positions.numpy(), 0))
        uniforms = torch.stack([coin, same], 1)
    got = verify(
        provider("verify_chain", "cpp"), p.expand(n, 2, -1), drawn[:, None], q.expand(n, 1, -1),
        uniforms=uniforms,
    )  # fmt: skip
    assert chi_square(got[0][:, 0], p.double().softmax(-1)) < SIGNIFICANCE


def shared_noise(n, v):
    words = philox_words(0, np.arange((v + 3) // 4), np.arange(n)[:, None], 3)
    words = words.reshape(n, -1)[:, :v]
    return torch.from_numpy(-np.log1p(-(words + 0.5) * 2.0**-32))
