"""Biases, bans and penalties of tokens, in place on the rows of a round.

A row counts what the text holds before it: the output, and the drafts on the path to the row, as
plain decoding would after it had taken them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._ops import ops
from ..arguments import conversion, in_place
from ..arguments.conversion import Param
from ..arguments.validation import fake_kernel
from .verify_tree import Tree


def apply_penalties_(
    target: Tensor,
    draft_token_ids: Tensor | Tree,
    *,
    target_indptr: Tensor | None = None,
    token_counts: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    repetition_penalty: Param = 1.0,
    presence_penalty: Param = 0.0,
    frequency_penalty: Param = 0.0,
    bias_ids: Tensor | None = None,
    biases: Tensor | None = None,
    min_new_tokens: Tensor | None = None,
    eos_token_ids: Tensor | None = None,
) -> None:
    """Change target rows as logits processors would, each with the drafts before it as text.

    Call it before `verify_chain`, `verify_tree` or `sample` reads the rows. Only entries that
    change are touched: the counts of a sequence are read once for all its rows. Of a token the
    biases come first, then the ban of an end that comes too early, the repetition penalty, and the
    others. Each entry is computed in float32 and rounded once to the dtype of the rows.

    Args:
        target: [B, N+1, V] float32, bfloat16 or float16 logits, or ragged [R, V] with
            `target_indptr`, changed in place. The last dimension must be contiguous.
        draft_token_ids: [B, N] int32 or int64, the drafted tokens of a chain: row i follows the
            first i of them. Or a `Tree`: row 0 follows its root, row n+1 node n and what is above
            it. Ids outside [0, V) count nothing. [B, 0] has one row for each sequence.
        target_indptr: [B+1] int32 or int64, the first row of each sequence.
        token_counts: [B, V] int32, how often the output holds each token, drafts not included;
            below 0 counts as 0. None: nothing was generated.
        prompt_mask: [B, ceil(V/32)] int32, the tokens of the prompt, one bit each: bit v % 32 of
            word v // 32 is that of token v.
        repetition_penalty: scalar or [B] above 0. A logit of a token of the prompt or the output
            is divided by it, and multiplied where it is not positive.
        presence_penalty: scalar or [B], taken from the logit of each token of the output.
        frequency_penalty: scalar or [B], the same for each time that the output holds the token.
        bias_ids, biases: [B, K] int32 or int64 and [B, K] float32, what is added to the logit of
            some tokens: -inf bans one. Ids outside [0, V) are unused; equal ones add up.
        min_new_tokens, eos_token_ids: [B] and [E] int32 or int64. A row with fewer drafts before it
            than the sequence still has to generate gets -inf at each id that would end it.

    A penalty that is not finite, or a repetition penalty of 0 or less, in a tensor is a fault of
    the data: the rows of its sequence become NaN, which verifiers report as
    `Status.TARGET_INVALID`.

    Raises:
        RuntimeError: a shape, dtype, device or scalar is out of range; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of a tensor.

    Source: repetition: Keskar et al. 2019 (CTRL, arXiv 1909.05858), as Transformers computes it;
    presence and frequency: the API of OpenAI, as vLLM computes them.

    >>> target = torch.tensor([[[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]])
    >>> apply_penalties_(target, torch.tensor([[2]]), frequency_penalty=0.5, presence_penalty=1.0)
    >>> target
    tensor([[[1.0000, 2.0000, 3.0000],
             [1.0000, 2.0000, 1.5000]]])
    """
    conversion.require_tensor(target, "target")
    given = draft_token_ids
    tokens, parents = given if isinstance(given, Tree) else (given, None)
    conversion.require_tensor(tokens, "draft_token_ids")
    optional = {
        "parents": parents, "target_indptr": target_indptr, "token_counts": token_counts,
        "prompt_mask": prompt_mask, "bias_ids": bias_ids, "biases": biases,
        "min_new_tokens": min_new_tokens, "eos_token_ids": eos_token_ids,
    }  # fmt: skip
    conversion.require_tensors_or_none(**optional)
    in_place.check_leaf(target, "target")
    ops.apply_penalties_.default(
        target,
        tokens,
        parents,
        target_indptr,
        token_counts,
        prompt_mask,
        *conversion.vector_and_scalar(repetition_penalty, "repetition_penalty", 1.0),
        *conversion.vector_and_scalar(presence_penalty, "presence_penalty", 0.0),
        *conversion.vector_and_scalar(frequency_penalty, "frequency_penalty", 0.0),
        bias_ids,
        biases,
        min_new_tokens,
        eos_token_ids,
    )
    in_place.raise_versions([target])


@fake_kernel("apply_penalties_")
def _(*args: Any) -> None:
    """Nothing is returned."""
