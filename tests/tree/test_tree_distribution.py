"""The distribution of what `verify_tree` emits is the target's: enumerated through the kernels.

Uniforms divide into cells in each of which a verifier emits the same tokens. The enumeration adds
up the weights of all cells of all drafts. Drafts are drawn in the way that each rule is designed
for. At the end are drafts and calls for which a rule is not lossless, which this method rejects;
verifiers with one wrong step are in the ledger of mutants.
"""

import proofs
import pytest
import torch
from proofs import SIGNIFICANCE, assert_close, chi_square, lineage
from proofs.toy_chain import TOLERANCE, assert_target_distribution, assert_wrong_distribution
from proofs.toy_tree import DRAWN, ToyTree
from support.providers import (
    FAST_PROVIDERS,
    SHIM_PROVIDERS,
    provider,
    sample,
    verify_tree,
)

pytestmark = pytest.mark.slow

RATIO = ["multi_draft", "multi_draft_wor", "top_k_plus_one", "k_seq", "traversal"]
EVERY_RULE = [r for r in DRAWN if r != "greedy"]

# Name -> (rules, arguments of ToyTree). The other providers take the trees of TINY.
LOSSLESS = {
    "221": ([r for r in EVERY_RULE if r != "k_seq"], dict(tree="221")),
    "mixed-zeros": (EVERY_RULE, dict(tree="mixed", holes=True, seed=1)),
    "22": (EVERY_RULE, dict(tree="22", seed=2)),
    "equal": (EVERY_RULE, dict(tree="22", same=True, seed=5)),
    "bf16": (RATIO, dict(tree="22", dtype=torch.bfloat16, seed=6)),
    "probs-zeros": (RATIO, dict(tree="22", kind="probs", holes=True, seed=7)),
    "probs-filtered": (EVERY_RULE, dict(tree="21", v=4, kind="probs", seed=8,
                                        target_filters=dict(temperature=0.7, top_p=0.8))),
    "one-hot": (["multi_draft", "multi_draft_wor", "traversal"],
                   dict(tree="22", draft="none", how="independent", seed=9)),
    "sampled-both": (RATIO, dict(tree="22", draft="sampled", seed=11,
                                 draft_filters=dict(temperature=1.8, top_p=0.9),
                                 target_filters=dict(temperature=0.8, top_k=2, min_p=0.05))),
    "drafters": (["multi_draft", "multi_draft_wor", "traversal"],
                 dict(tree="22", drafters=2, seed=12)),
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
# Providers find rho of k_seq to 1e-6 only, so that their cells differ a little from each other.
TINY = {
    "21": dict(tree="21", seed=5),
    "21-V2": dict(tree="21", v=2, seed=4),
    "22-V2": dict(tree="22", v=2, seed=1),
    "3-V3-zeros": dict(tree="3", holes=True, seed=2),
    "3-V4": dict(tree="3", v=4, seed=2),
    "sampled": dict(tree=[-1, -1], draft="sampled", draft_filters=dict(temperature=0.6, top_k=2)),
}
# Settings whose parts the others have too.
IN_ALL = ("22", "equal", "bf16", "probs-filtered", "missing", "ragged", "max-depth")
CASES = [
    pytest.param(r, s, id=f"{r}-{s}", marks=[pytest.mark.full] if s in IN_ALL else [])
    for s, (rules, _) in LOSSLESS.items()
    for r in rules
]


@pytest.mark.parametrize(("rule", "setting"), CASES)
def test_the_emitted_distribution_is_that_of_the_target(rule, setting):
    setting = ToyTree(rule, **LOSSLESS[setting][1])
    assert_target_distribution(setting.realized("cpp"), setting)


# In the setting of each rule that the reference has in `make test`, residuals hold several tokens.
OF_REFERENCE = {"target_only": "21", "traversal": "21", "k_seq": "21-V2"}


def slower():
    """(provider, rule, setting): one setting of each rule for the reference in `make test`."""
    for name in ("reference", *SHIM_PROVIDERS):
        for rule in EVERY_RULE:
            in_test = OF_REFERENCE.get(rule, "3-V4") if name == "reference" else None
            for setting in ("21-V2", "sampled") if rule == "k_seq" else TINY:
                if (rule, setting) == ("traversal", "3-V4"):
                    continue  # half a minute for what three siblings of three tokens show
                marks = [] if setting == in_test else [pytest.mark.full]
                yield pytest.param(name, rule, setting, marks=marks)


@pytest.mark.parametrize(("name", "rule", "setting"), [*slower()])
def test_slower_providers_emit_the_target_distribution(name, rule, setting):
    setting = ToyTree(rule, **TINY[setting])
    assert_target_distribution(setting.realized(name), setting)


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("name", [pytest.param("reference", marks=pytest.mark.full), "cpp"])
def test_accept_probs_are_the_measured_probabilities(name, rule):
    tree = "22" if name == "cpp" else [-1, -1]
    setting = ToyTree(rule, tree=tree, kind="probs", seed=2)
    decisions = setting.realized(name).decisions
    assert len(decisions.nodes) > 0
    probs = setting.verifier(name, outputs=5)(decisions.drafts, decisions.uniforms)
    probs = probs.gather(1, decisions.nodes[:, None])[:, 0].double()
    assert_close("accept_probs", probs, decisions.accept_probs, atol=TOLERANCE)


@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_rule_match_emits_the_tokens_of_plain_sampling(name):
    """The path ends only where no child has the token that plain sampling draws."""
    v, n, parents = 5, 100, [-1, -1, 0, 0, 1]
    generator = torch.Generator().manual_seed(5)
    # Logits given the token before; the last row is for none.
    table = torch.randn(v + 1, v, generator=generator)
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
        texts = {tuple(drafts[b, lineage(parents, m)].tolist()) for m in range(len(parents))}
        emitted = [x, y, z][: 1 + ((x,) in texts) + ((x, y) in texts)]
        assert got[1][b].tolist() == emitted + [-1] * (6 - len(emitted))
        assert int(got[2][b]) == len(emitted) - 1
    assert int(got[2].max()) == 2


def siblings_drawn(how, q, n, k, position=0):
    """Siblings [n, k], drawn by `sample`; the upper half of the position counts trials."""
    op = provider("sample", "cpp")
    rows, out = q.expand(n, -1), []
    for j in range(k):
        x = sample(op, rows, seeds=torch.arange(n), positions=position + (j << 32))[0]
        out.append(x)
        if how == "without_replacement":
            rows = rows.scatter(1, x[:, None], -torch.inf)
    return torch.stack(out, 1)


@pytest.mark.parametrize("rule", ["multi_draft", "multi_draft_wor", "k_seq", "traversal"])
def test_uniforms_of_the_kernel_give_the_target_distribution(rule):
    n, v, k = 50_000, 6, 3
    p, q = 1.5 * torch.randn(2, v, generator=torch.Generator().manual_seed(8))
    drafts = siblings_drawn(DRAWN[rule], q, n, k)
    got = verify_tree(
        provider("verify_tree", "cpp"), p.expand(n, k + 1, v), drafts,
        torch.full((n, k), -1), q.expand(n, 1, v), rule=rule, seeds=torch.arange(n),
        draft_rows=torch.zeros(n, k, dtype=torch.int32),
    )  # fmt: skip
    probs = p.double().softmax(-1)
    assert chi_square(got[1][:, 0], probs) > SIGNIFICANCE
    assert chi_square(got[1][got[2] == 1, 1], probs) > SIGNIFICANCE


# Negative controls.


@pytest.mark.parametrize("with_like", [False, True])
@pytest.mark.parametrize("rule", ["target_only", "multi_draft", "traversal"])
def test_a_cdf_that_ends_below_1_is_rejected(rule, with_like):
    setting = ToyTree(rule, tree="21")
    right, nodes = setting.verifier("cpp"), len(setting.parents)

    def wrong(drafts, uniforms):
        path, tokens = right(drafts, uniforms)
        late = (uniforms[:, nodes:] > 1 - 1e-5).any(-1)
        tokens[late, (tokens[late] >= 0).sum(-1) - 1] = setting.v
        return path, tokens

    with pytest.raises(ValueError, match="outside of the vocabulary"):
        proofs.enumerate_tree_distribution(
            wrong, setting.parents, setting.drafts, setting.weights, setting.target_probs,
            upward=rule == "traversal", steps=26, like=right if with_like else None,
        )  # fmt: skip


# A rule may be lossless for drafts that are drawn in another way than it was designed for:
# target_only and multi_draft_wor ignore a repeated draft, top_k_plus_one takes any tokens as top.
OTHERS = [("multi_draft_wor", "independent"), ("top_k_plus_one", "without_replacement"),
          ("target_only", "independent")]  # fmt: skip


@pytest.mark.parametrize(("rule", "how"), OTHERS)
def test_a_rule_is_lossless_for_drafts_drawn_in_another_way(rule, how):
    setting = ToyTree(rule, tree="3", v=4, how=how, seed=2)
    assert_target_distribution(setting.realized("cpp"), setting)


# Wrong calls of correct kernels: drafts that the rule is not lossless for, or wrong distributions.

CALLS = {
    "multi_draft of drafts without replacement": (
        "multi_draft", dict(how="without_replacement")),
    "multi_draft of the likeliest": ("multi_draft", dict(how="top")),
    "k_seq of drafts without replacement": ("k_seq", dict(how="without_replacement")),
    "k_seq of two distributions": ("k_seq", dict(drafters=2)),
    "top_k_plus_one of the likeliest": ("top_k_plus_one", dict(how="top")),
    "traversal of drafts without replacement": ("traversal", dict(how="without_replacement")),
    "greedy where tokens are sampled": ("greedy", {}),
    "typical": ("typical", dict(how="top")),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_is_rejected(call):
    rule, options = CALLS[call]
    setting = ToyTree(rule, **{"tree": "21", "seed": 2, **options})
    assert_wrong_distribution(setting.realized("cpp", steps=26), setting)


@pytest.mark.parametrize("rule", ["multi_draft", "multi_draft_wor", "traversal"])
def test_one_distribution_for_the_drafts_of_two_models_is_rejected(rule):
    setting = ToyTree(rule, tree=[-1, -1], v=4, drafters=2, seed=2)

    def change(arguments):
        rows = arguments["draft_rows"]
        return {**arguments, "draft_rows": rows - rows % 2}

    assert_wrong_distribution(setting.realized("cpp", steps=26, change=change), setting)
