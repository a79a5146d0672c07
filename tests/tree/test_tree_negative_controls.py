"""Negative controls: drafts and calls for which a tree rule is not lossless are rejected.

Verifiers with one wrong step are in the ledger of mutants.
"""

import proofs
import pytest
from support.toy_chain import assert_target_distribution, assert_wrong_distribution
from support.toy_tree import ToyTree

pytestmark = pytest.mark.slow


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
LOSSLESS = [("multi_draft_wor", "independent"), ("top_k_plus_one", "without_replacement"),
            ("target_only", "independent")]  # fmt: skip


@pytest.mark.parametrize(("rule", "how"), LOSSLESS)
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
