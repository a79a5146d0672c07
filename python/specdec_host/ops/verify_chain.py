"""Verification of a chain of drafted tokens. specdec_kernels/ops/verify_chain.py has the terms."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec_host import _library
from specdec_host.arguments import conversion
from specdec_host.arguments.arrays import Array, Param, require_array, require_array_or_none
from specdec_host.arguments.draft_forms import Draft, DraftMap, map_columns, split_draft
from specdec_host.arguments.rules import KINDS, RULES, Kind, Rule
from specdec_host.arguments.values import number_of, require_flag


class Verdict(NamedTuple):
    """The result of `verify_chain`, with the fields of `specdec_kernels.Verdict`."""

    tokens: NDArray[Any]
    num_accepted: NDArray[np.int32]
    status: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    accept_probs: NDArray[np.float32]

    def rows(self) -> NDArray[np.int64]:
        """[B, gamma+1]: the target row that gave each emitted token, then -1."""
        return np.where(self.tokens >= 0, np.arange(self.tokens.shape[1]), -1)


def verify_chain(
    target: Array,
    draft_token_ids: Array,
    draft: Draft = None,
    *,
    kind: Kind = "logits",
    rule: Rule = "token",
    temperature: Param = 1.0,
    top_k: int | Array = 0,
    top_p: Param = 1.0,
    min_p: Param = 0.0,
    token_bitmask: Array | None = None,
    seeds: Array,
    positions: Array,
    target_indptr: Array | None = None,
    uniforms: Array | None = None,
    draft_map: DraftMap | None = None,
    draft_rows: Array | None = None,
    lenience: float = 1.0,
    typical_epsilon: float = 0.09,
    typical_delta: float = 0.3,
    top_beta_rank: int = 1,
    top_beta_distance: float = 0.0,
    synthetic_rates: Array | None = None,
    eos_token_ids: Array | None = None,
    max_new_tokens: Array | None = None,
    with_logprobs: bool = True,
    with_accept_probs: bool = False,
) -> Verdict:
    """Decide which drafted tokens are accepted, and sample the recovered or bonus token.

    The arguments are those of `specdec_kernels.verify_chain`, with arrays in place of tensors, and
    so are the bits of the results. specdec_kernels/ops/verify_chain.py documents both.

    Raises:
        RuntimeError: a shape, dtype or scalar is out of range, or a parameter that the rule
            does not read differs from its default; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of an array.

    >>> target = np.array([[[0.0, 9.0], [9.0, 0.0]]], dtype=np.float32)
    >>> one = np.zeros(1, dtype=np.int64)
    >>> v = verify_chain(target, np.array([[1]]), rule="greedy", seeds=one, positions=one)
    >>> v.tokens.tolist(), v.num_accepted.tolist()
    ([[1, 0]], [1])
    """
    rows, ids, *statistics = split_draft(draft)
    return Verdict(
        *_library.verify_chain(
            require_array(target, "target"),
            require_array(draft_token_ids, "draft_token_ids"),
            rows,
            ids,
            map_columns(draft_map),
            *statistics,
            require_array_or_none(draft_rows, "draft_rows"),
            number_of(kind, "kind", KINDS),
            number_of(rule, "rule", RULES),
            *conversion.sampling(temperature, top_k, top_p, min_p),
            require_array_or_none(token_bitmask, "token_bitmask"),
            require_array(seeds, "seeds"),
            require_array(positions, "positions"),
            require_array_or_none(target_indptr, "target_indptr"),
            require_array_or_none(uniforms, "uniforms"),
            conversion.require_number(lenience, "lenience"),
            conversion.require_number(typical_epsilon, "typical_epsilon"),
            conversion.require_number(typical_delta, "typical_delta"),
            conversion.require_integer(top_beta_rank, "top_beta_rank"),
            conversion.require_number(top_beta_distance, "top_beta_distance"),
            require_array_or_none(synthetic_rates, "synthetic_rates"),
            require_array_or_none(eos_token_ids, "eos_token_ids"),
            require_array_or_none(max_new_tokens, "max_new_tokens"),
            require_flag(with_logprobs, "with_logprobs"),
            require_flag(with_accept_probs, "with_accept_probs"),
        )
    )
