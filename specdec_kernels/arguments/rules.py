"""The names that ops take as numbers: acceptance rules, kinds of rows, noise streams and methods.

Public functions take names; the schemas of the ops take the index of the name in its tuple here,
because PyTorch's stable ABI leaks every string that a native op is called with. The order of a
tuple is that of the C++ enumeration that its comment names.
tests/project/test_schemas.py compares both. docs/rules.md gives the formula of each rule. The file
is a link in specdec_host too, so it must not import torch.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, get_args, get_type_hints

# enum class Rule, csrc/include/specdec/chain.h
Rule = Literal[
    "token", "block", "greedy", "match", "typical", "lenient", "synthetic", "top_beta"
]  # fmt: skip
RULES: tuple[Rule, ...] = get_args(Rule)
# The output follows the target's distribution; that of greedy follows it at temperature 0.
LOSSLESS_RULES: tuple[Rule, ...] = ("token", "block", "greedy", "match")
# The acceptance probability depends on the draft distribution Q.
RULES_READING_DRAFT: tuple[Rule, ...] = ("token", "block", "lenient")

# Those of chains that the Triton kernels have; CUDA kernels and the CPU have all.
TRITON_RULES: tuple[Rule, ...] = ("token", "block", "greedy", "match", "lenient")

# enum class TreeRule, csrc/include/specdec/tree.h
TreeRule = Literal[
    "greedy", "match", "target_only", "multi_draft", "multi_draft_wor", "top_k_plus_one",
    "k_seq", "traversal", "typical",
]  # fmt: skip
TREE_RULES: tuple[TreeRule, ...] = get_args(TreeRule)
ALL_RULES = tuple(dict.fromkeys((*RULES, *TREE_RULES)))  # each name once
LOSSLESS_TREE_RULES: tuple[TreeRule, ...] = tuple(r for r in TREE_RULES if r != "typical")
TREE_RULES_READING_DRAFT: tuple[TreeRule, ...] = (
    "multi_draft", "multi_draft_wor", "top_k_plus_one", "k_seq", "traversal",
)  # fmt: skip


class Parameter(NamedTuple):
    """A parameter that one rule reads; calls with another rule leave it at its default."""

    rule: str
    default: float


class TypicalParameters:
    """Those of chains and trees, with their types in the schemas."""

    __slots__ = ()

    typical_epsilon: Annotated[float, Parameter("typical", 0.09)]
    typical_delta: Annotated[float, Parameter("typical", 0.3)]


class ChainParameters(TypicalParameters):
    """Those of chains; csrc/arguments/chain.h has their order in the schema and their ranges."""

    __slots__ = ()

    lenience: Annotated[float, Parameter("lenient", 1.0)]
    top_beta_rank: Annotated[int, Parameter("top_beta", 1)]
    top_beta_distance: Annotated[float, Parameter("top_beta", 0.0)]


CHAIN_PARAMETERS: dict[str, Parameter] = {
    name: annotated.__metadata__[0]
    for name, annotated in get_type_hints(ChainParameters, include_extras=True).items()
}

# enum class Kind, csrc/include/specdec/draft.h
Kind = Literal["logits", "probs"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# enum class Noise, csrc/arguments/sample.h
Noise = Literal["residual", "draft", "shared"]
NOISES: tuple[Noise, ...] = get_args(Noise)
# enum class Method, csrc/arguments/sample.h
Method = Literal["cdf", "gumbel"]
METHODS: tuple[Method, ...] = get_args(Method)
