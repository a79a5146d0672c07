"""The law of what `verify_tree` emits, through the real kernels: every cell of every random input.

Drafts are drawn in the way that each rule says it is for; see tests/test_tree_controls.py for the
verifiers that this machinery rejects.
"""

import pytest
import torch
from support.providers import (
    FAST_PROVIDERS,
    SHIM_PROVIDERS,
    SIGNIFICANCE,
    assert_close,
    assert_outputs_equal,
    chi_square,
    needs_triton,
    provider,
    sample,
    verify,
    verify_tree,
)
from support.toy_chain import TOLERANCE, ToyChain
from support.toy_tree import DRAWN, ToyTree, assert_target_distribution

from specdec_kernels import analysis
from specdec_kernels.analysis import lineage

RATIO = ["multi_draft", "multi_draft_wor", "top_k_plus_one", "k_seq", "traversal"]
EVERY_RULE = [r for r in DRAWN if r != "greedy"]

# The rules each stands for, and the setting. Slower providers take the ones of TINY.
LOSSLESS = {
    "221": ([r for r in EVERY_RULE if r != "k_seq"], dict(tree="221")),
    "312": ([r for r in EVERY_RULE if r != "k_seq"], dict(tree="312", seed=1)),
    "mixed-zeros": (EVERY_RULE, dict(tree="mixed", holes=True, seed=1)),
    "22": (EVERY_RULE, dict(tree="22", seed=2)),
    "V4-zeros": (EVERY_RULE, dict(tree="21", v=4, holes=True, seed=3)),
    "V5": (EVERY_RULE, dict(tree="3", v=5, seed=4)),
    "equal": (EVERY_RULE, dict(tree="22", same=True, seed=5)),
    "bf16": (RATIO, dict(tree="22", dtype=torch.bfloat16, seed=6)),
    "probs-zeros": (RATIO, dict(tree="22", kind="probs", holes=True, seed=7)),
    "probs-filtered": (EVERY_RULE, dict(tree="21", v=4, kind="probs", seed=8,
                                        target_filters=dict(temperature=0.7, top_p=0.8))),
    "point-mass": (["multi_draft", "multi_draft_wor", "traversal"],
                   dict(tree="22", draft="none", how="independent", seed=9)),
    "sampled": (RATIO, dict(tree="22", v=4, draft="sampled", seed=10,
                            draft_filters=dict(temperature=0.6, top_k=2))),
    "sampled-both": (RATIO, dict(tree="22", draft="sampled", seed=11,
                                 draft_filters=dict(temperature=1.8, top_p=0.9),
                                 target_filters=dict(temperature=0.8, top_k=2, min_p=0.05))),
    "drafters": (["multi_draft", "multi_draft_wor", "traversal"],
                 dict(tree="22", drafters=2, seed=12)),
    "three-of-two-drafters": (["multi_draft", "multi_draft_wor", "traversal"],
                              dict(tree="3", v=4, drafters=2, holes=True, seed=13)),
    "missing": ([r for r in EVERY_RULE if r != "top_k_plus_one"],
                dict(tree="22", missing=(3,), seed=14)),
    "missing-group": (EVERY_RULE, dict(tree="22", missing=(2, 3), seed=14)),
    "ragged": (EVERY_RULE, dict(tree="mixed", ragged=True, seed=15)),
    "max-depth": (EVERY_RULE, dict(tree="22", max_depth=1, seed=16)),
    "eos": (EVERY_RULE, dict(tree="21", eos_token_ids=torch.tensor([1]), seed=17)),
    "duplicates": (["target_only"], dict(tree="221", how="independent", seed=18)),
    "greedy": (["greedy"], dict(tree="221", target_filters=dict(temperature=0.0))),
    "temperature-zero": (EVERY_RULE, dict(tree="21", how="independent",
                                          target_filters=dict(temperature=0.0))),
}  # fmt: skip
# rho is known to 1e-6 only, so that no other provider has quite the cells of k_seq.
TINY = {
    "21": dict(tree="21", seed=5),
    "21-V2": dict(tree="21", v=2, seed=4),
    "22-V2": dict(tree="22", v=2, seed=1),
    "3-V3-zeros": dict(tree="3", holes=True, seed=2),
    "sampled": dict(tree=[-1, -1], draft="sampled", draft_filters=dict(temperature=0.6, top_k=2)),
}
CASES = [pytest.param(r, s, id=f"{r}-{s}") for s, (rules, _) in LOSSLESS.items() for r in rules]


@pytest.mark.parametrize(("rule", "setting"), CASES)
def test_the_emitted_law_is_the_targets(rule, setting):
    setting = ToyTree(rule, **LOSSLESS[setting][1])
    assert_target_distribution(setting.realized("cpp"), setting)


@pytest.mark.parametrize(
    ("rule", "setting"),
    [(r, s) for r in EVERY_RULE for s in TINY if r != "k_seq" or s in ("21-V2", "sampled")],
)
@pytest.mark.parametrize("name", ["reference", *SHIM_PROVIDERS])
def test_the_emitted_law_of_slower_providers_is_the_targets(name, rule, setting):
    setting = ToyTree(rule, **TINY[setting])
    assert_target_distribution(setting.realized(name), setting)


@needs_triton
@pytest.mark.parametrize("rule", DRAWN)
def test_the_emitted_law_is_the_targets_in_the_interpreter(rule):
    filters = dict(temperature=0.0) if rule == "greedy" else {}
    setting = ToyTree(rule, tree=[-1, -1], v=2, target_filters=filters)
    assert_target_distribution(setting.realized("triton", steps=26), setting)


def test_cells_learnt_from_another_verifier_are_not_believed():
    """A wrong teacher: the cells of the verifier itself are measured all the same."""
    setting, other = (ToyTree("multi_draft", tree="21", seed=s) for s in (0, 99))
    law = analysis.enumerate_tree_distribution(
        setting.verifier("cpp"), setting.parents, setting.drafts, setting.weights, setting.target_probs,
        like=other.verifier("cpp"),
    )  # fmt: skip
    assert_target_distribution(law, setting)


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_acceptance_is_the_measured_chance(name, rule):
    tree = "22" if name == "cpp" else [-1, -1]
    setting = ToyTree(rule, tree=tree, kind="probs", seed=2)
    trials = setting.realized(name).trials
    assert len(trials.nodes) > 0
    told = setting.verifier(name, outputs=5)(trials.drafts, trials.uniforms)
    assert_close("accept_probs", told.gather(1, trials.nodes[:, None])[:, 0].double(), trials.edges,
          atol=TOLERANCE)  # fmt: skip


def uniforms_of_a_grid(n, columns, seed=0):
    """[n, columns] float64, multiples of 1/64: often at an edge."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 64, (n, columns), generator=generator).double() / 64


LIKE_A_CHAIN = {"multi_draft": "token", "k_seq": "token", "multi_draft_wor": "token",
                "traversal": "block"}  # fmt: skip


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("rule", LIKE_A_CHAIN)
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_one_draft_a_position_is_the_rule_of_a_chain_bit_for_bit(name, rule, kind):
    setting = ToyChain(gamma=3, kind=kind, rule=LIKE_A_CHAIN[rule], holes=True, seed=4)
    drafts = analysis.joint_distribution(setting.draft_probs).nonzero()
    drafts = drafts.repeat(4 if name == "reference" else 40, 1)
    n, gamma = drafts.shape
    uniforms = uniforms_of_a_grid(n, gamma + 1)
    arguments = setting.arguments(drafts, name)
    want = verify(provider("verify_chain", name), tokens=drafts, uniforms=uniforms, **arguments)
    wide = torch.zeros(n, 2 * gamma + 1, dtype=torch.float64)
    wide[:, :gamma] = uniforms[:, :gamma]
    wide[:, gamma:] = uniforms[:, gamma:]  # of the chain, one draw wherever it is
    got = verify_tree(
        provider("verify_tree", name), tokens=drafts, uniforms=wide,
        parents=torch.arange(-1, gamma - 1).expand(n, -1), **{**arguments, "rule": rule},
    )  # fmt: skip
    path = torch.where(torch.arange(gamma) < got[2][:, None], torch.arange(gamma), -1)
    assert torch.equal(got[0], path)
    assert_outputs_equal("verify_chain", (got[1], got[2], got[3], got[4], got[5]), want)


@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_rule_match_gives_what_plain_sampling_gives(name):
    """Every token of the path and the one after it, for any drafts; it ends only where it must."""
    v, n, parents = 5, 100, [-1, -1, 0, 0, 1]
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(v + 1, v, generator=generator)  # of the token before; the last row of none
    drafts = torch.randint(0, v, (n, len(parents)), generator=generator)
    rows = torch.cat([torch.full((n, 1), v), drafts], 1)
    seeds, want, before = torch.arange(n), [], torch.full((n,), v)
    for position in range(3):
        before = sample(provider("sample", name), table[before], seeds=seeds, positions=position,
                        noise="shared", temperature=0.8)[0]  # fmt: skip
        want.append(before)
    got = verify_tree(
        provider("verify_tree", name), table[rows], drafts, torch.tensor(parents).expand(n, -1),
        rule="match", seeds=seeds, temperature=0.8,
    )  # fmt: skip
    for b, (x, y, z) in enumerate(torch.stack(want, 1).tolist()):
        points = {tuple(drafts[b, lineage(parents, m)].tolist()) for m in range(len(parents))}
        emitted = [x, y, z][: 1 + ((x,) in points) + ((x, y) in points)]
        assert got[1][b].tolist() == emitted + [-1] * (6 - len(emitted))
        assert int(got[2][b]) == len(emitted) - 1
    assert int(got[2].max()) == 2


def siblings_drawn(how, q, n, k, position=0):
    """[n, k] from the library's own draft stream, lane by lane."""
    op = provider("sample", "cpp")
    rows, out = q.expand(n, -1), []
    for j in range(k):
        x = sample(op, rows, seeds=torch.arange(n), positions=position + (j << 32))[0]
        out.append(x)
        if how == "without_replacement":
            rows = rows.scatter(1, x[:, None], -torch.inf)
    return torch.stack(out, 1)


@pytest.mark.parametrize("rule", ["multi_draft", "multi_draft_wor", "k_seq", "traversal"])
def test_own_noise_gives_the_target_law(rule):
    n, v, k = 100_000, 6, 3
    p, q = 1.5 * torch.randn(2, v, generator=torch.Generator().manual_seed(8))
    drafts = siblings_drawn(DRAWN[rule], q, n, k)
    got = verify_tree(
        provider("verify_tree", "cpp"), p.expand(n, k + 1, v), drafts,
        torch.full((n, k), -1), q.expand(n, 1, v), rule=rule, seeds=torch.arange(n),
        draft_rows=torch.zeros(n, k, dtype=torch.int32),
    )  # fmt: skip
    law = p.double().softmax(-1)
    assert chi_square(got[1][:, 0], law) > SIGNIFICANCE
    assert chi_square(got[1][got[2] == 1, 1], law) > SIGNIFICANCE
