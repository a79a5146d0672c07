"""SGLang's verification of trees and the layouts that it builds for them, as of SGLang 0.5.23.

Sizes: B sequences, N nodes of a tree, V vocabulary, S the most tokens that a round emits. Node 0 is
the root here: the last token emitted before. A tree is a linked list: `retrieve_next_token` has the
first child of each node, `retrieve_next_sibling` its next sibling, -1 where there is none, and
`retrieve_index` its place among the B*N nodes of the batch. Earlier releases spell it `retrive_`;
the functions take both as keywords. Outputs are written in place once all arguments are checked,
and entries that SGLang leaves as they are stay as they are. Links and lengths out of range and a
full mask that is too short raise on the CPU; on a GPU their result is undefined, because to check
them the host would wait. docs/compat.md#sglang lists the differences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor

from ..arguments import conversion
from ..arguments.checks import check_matrix, check_typed, check_vector, require, shape
from ..ops.tree_layout import tree_attention
from ..ops.verify_chain import verify_chain
from .linked_tree import (
    Descent,
    ancestors_of,
    check_links,
    link_,
    parents_of,
    write_path_,
)

FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = 0, 1, 2
_LARGEST_UNIFORM = 1 - 2.0**-53

_P = ParamSpec("_P")


def _either_spelling(function: Callable[_P, None]) -> Callable[_P, None]:
    """Takes keywords that begin with `retrive_` too."""

    @functools.wraps(function)
    def renamed(*args: _P.args, **kwargs: _P.kwargs) -> None:
        names = {k.replace("retrive_", "retrieve_"): v for k, v in kwargs.items()}
        function(*args, **names)  # type: ignore[arg-type]

    return renamed


@_either_spelling
def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Goes down the tree from the root: the distribution of rule target_only of `verify_tree`.

    A child with token x is accepted if the uniform of its parent is at most the summed P of the
    siblings tried so far, x included, divided by threshold_acc, or if P(x) >= threshold_single. At
    thresholds of 1 this is lossless; below 1 it accepts more than P allows.

    Args:
        predicts: [B*N] int32, at each accepted node the token that follows it, written in place.
        accept_index: [B, S] int32, `retrieve_index` of the root and of the accepted nodes.
        accept_token_num: [B] int32, how many nodes were accepted, the root not counted.
        candidates: [B, N] int64, the tokens.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N] int64.
        uniform_samples: [B, N] float32 in [0, 1), one for each node, for its children.
        uniform_samples_for_final_sampling: [B] float32 in [0, 1), draws the last token.
        target_probs: [B, N, V] float32.
        draft_probs: [B, N, V] float32, zeros for a lossless result. P of each rejected token is
            written in it, and the last token is drawn from max(P - draft_probs, 0), or from P after
            S-1 accepted nodes. Acceptance does not depend on it.
        threshold_single, threshold_acc: in [0, 1].
        deterministic: without effect.

    Raises:
        RuntimeError: a shape, dtype, device or threshold is wrong.
        TypeError: an argument has a wrong type.
    """
    down = Descent(
        predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
        retrieve_next_sibling,
    )  # fmt: skip
    conversion.require_tensors(
        uniform_samples=uniform_samples, target_probs=target_probs, draft_probs=draft_probs,
        uniform_samples_for_final_sampling=uniform_samples_for_final_sampling,
    )  # fmt: skip
    (b, n), of = candidates.shape, (torch.float32, candidates.device, "candidates")
    require(target_probs.dim() == 3, f"target_probs must be [B, N, V], got {shape(target_probs)}")
    sizes = (b, n, target_probs.shape[2])
    check_matrix("uniform_samples", uniform_samples, "[B, N]", (b, n), *of)
    final = uniform_samples_for_final_sampling
    check_vector("uniform_samples_for_final_sampling", final, b, *of)
    for name, t in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        require(t.shape == sizes, f"{name} must be [B, N, V] = {list(sizes)}, got {shape(t)}")
        check_typed(name, t, *of)
    for name, threshold in (
        ("threshold_single", threshold_single),
        ("threshold_acc", threshold_acc),
    ):
        conversion.require_number(threshold, name)
        require(0 <= threshold <= 1, f"{name} must be in [0, 1], got {threshold}")

    mass = target_probs.new_zeros(b)
    siblings = candidates.new_full((b, n), -1)  # tokens tried since the last acceptance
    for i in range(n - 1):
        at = (down.sequences, down.node, down.token.clamp(0, sizes[2] - 1))
        known = down.tried & (down.token >= 0) & (down.token < sizes[2])
        p, before = target_probs[at], draft_probs[at]
        new = known & (p > 0) & (siblings != down.token[:, None]).all(-1)
        mass = mass + torch.where(new, p, 0.0)
        reached = down.uniform_of(uniform_samples) <= mass / max(threshold_acc, 1e-9)
        accepted = (new & reached) | (known & (p >= threshold_single))
        draft_probs[at] = torch.where(known & ~accepted, p, before)
        siblings[:, i] = torch.where(known, down.token, -1)
        siblings = torch.where(accepted[:, None], -1, siblings)
        mass = torch.where(accepted, 0.0, mass)
        down.advance(accepted)

    p = target_probs[down.sequences, down.node]
    subtracted = torch.where(down.room[:, None], draft_probs[down.sequences, down.node], 0.0)
    residual = (p - subtracted).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) == 0, p, residual)
    zeros = torch.zeros(b, dtype=torch.int64, device=p.device)
    drawn = verify_chain(
        residual[:, None], zeros.new_empty((b, 0)), kind="probs", seeds=zeros, positions=zeros,
        uniforms=final.double().clamp(0, _LARGEST_UNIFORM)[:, None], with_logprobs=False,
    )  # fmt: skip
    down.finish(drawn.tokens[:, 0])


@_either_spelling
def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Goes down the tree by the target's own tokens: the result of rule greedy of `verify_tree`.

    Args:
        target_predict: [B, N] int64, the target's argmax at each node.
        predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
            retrieve_next_sibling: as in `tree_speculative_sampling_target_only`.

    Raises:
        RuntimeError: a shape, dtype or device is wrong.
        TypeError: an argument is no tensor.

    >>> row = lambda *numbers: torch.tensor([numbers])
    >>> sizes = ((3,), (1, 3), (1,))
    >>> predicts, index, number = (torch.full(s, -1, dtype=torch.int32) for s in sizes)
    >>> verify_tree_greedy(predicts, index, number, row(5, 6, 7), row(0, 1, 2), row(1, -1, -1),
    ...                    row(-1, 2, -1), row(7, 0, 9))
    >>> predicts, index
    (tensor([ 7, -1,  9], dtype=torch.int32), tensor([[ 0,  2, -1]], dtype=torch.int32))
    """
    down = Descent(
        predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
        retrieve_next_sibling,
    )  # fmt: skip
    conversion.require_tensor(target_predict, "target_predict")
    (b, n), device = candidates.shape, candidates.device
    check_matrix("target_predict", target_predict, "[B, N]", (b, n), torch.int64, device,
                 "candidates")  # fmt: skip
    for _ in range(n - 1):
        down.advance(down.tried & (down.token == target_predict.take(down.index)))
    down.finish(target_predict.take(down.index))


@_either_spelling
def chain_speculative_sampling_triton(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
    *,
    block_verification: bool = False,
) -> None:
    """Verifies a chain that was sampled from draft_probs: rule token or block of `verify_chain`.

    Node i + 1 is the only child of node i, whatever the links say.

    Args:
        predicts, accept_index, accept_token_num, candidates, retrieve_index: as in
            `tree_speculative_sampling_target_only`; S is N.
        retrieve_next_token, retrieve_next_sibling: without effect.
        uniform_samples: [B, N-1] or wider, float32 in [0, 1), the acceptance uniform of each draft.
        uniform_samples_for_final_sampling: [B] float32 in [0, 1), draws the last token.
        target_probs: [B, N, V] float32.
        draft_probs: [B, N-1, V] or with more rows, float32: row i is what node i + 1 was sampled
            from.
        threshold_single, threshold_acc, deterministic: without effect.
        block_verification: rule block in place of rule token.

    Raises:
        RuntimeError: a shape, dtype or device is wrong.
        TypeError: an argument is no tensor.
    """
    Descent(
        predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
        retrieve_next_sibling,
    )  # fmt: skip
    final = uniform_samples_for_final_sampling
    conversion.require_tensors(
        uniform_samples=uniform_samples, target_probs=target_probs, draft_probs=draft_probs,
        uniform_samples_for_final_sampling=final,
    )  # fmt: skip
    (b, n), of = candidates.shape, (torch.float32, candidates.device, "candidates")
    check_matrix("accept_index", accept_index, "[B, N]", (b, n), torch.int32, *of[1:])
    require(target_probs.dim() == 3, f"target_probs must be [B, N, V], got {shape(target_probs)}")
    v = target_probs.shape[2]
    for name, t, rows in (("target_probs", target_probs, n), ("draft_probs", draft_probs, n - 1)):
        require(
            t.dim() == 3 and len(t) == b and t.shape[1] >= rows and t.shape[2] == v,
            f"{name} must be [B, at least {rows}, V] = [{b}, {rows}, {v}], got {shape(t)}",
        )
        check_typed(name, t, *of)
    require(
        uniform_samples.dim() == 2 and len(uniform_samples) == b
        and uniform_samples.shape[1] >= n - 1,
        f"uniform_samples must be [B, at least N-1] = [{b}, {n - 1}], got {shape(uniform_samples)}",
    )  # fmt: skip
    check_typed("uniform_samples", uniform_samples, *of)
    check_vector("uniform_samples_for_final_sampling", final, b, *of)
    zeros = torch.zeros(b, dtype=torch.int64, device=candidates.device)
    verdict = verify_chain(
        target_probs[:, :n], candidates[:, 1:], draft_probs[:, : n - 1], kind="probs",
        rule="block" if block_verification else "token", seeds=zeros, positions=zeros,
        uniforms=torch.cat([uniform_samples[:, : n - 1], final[:, None]], 1).double(),
        with_logprobs=False,
    )  # fmt: skip
    nodes = torch.arange(n, device=candidates.device).expand(b, n)
    write_path_(
        nodes, verdict.tokens, verdict.num_accepted, predicts, accept_index, accept_token_num,
        retrieve_index,
    )  # fmt: skip


@_either_spelling
def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """The mask, the positions and the links of EAGLE's trees; mask and positions are those of
    `tree_attention`.

    Node i + 1 is candidate `selected_index[b, i]`. Candidates 0 to topk - 1 are children of the
    root; candidate c beyond is a child of candidate `parent_list[b, c // topk]`.

    Args:
        parent_list: [B, topk * (depth-1) + 1] int64; with depth 1 it may have no columns.
        selected_index: [B, N-1] int64, ascending.
        verified_seq_len: [B] int64, tokens of each text before the tree.
        tree_mask: written in place. Mode 0 (FULL_MASK): bool, of each sequence [N, length + N] one
            after the other, of which the last N columns are written; mode 1 (QLEN_ONLY): bool
            [B, N, N]; mode 2 (QLEN_ONLY_BITPACKING): the bits of [B, N, N] in 1, 2 or 4 bytes for
            each node, lowest first. Any shape with at least so many entries.
        positions: at least B*N int64, written in place: length + depth of each node.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N] int64, written in place.
        topk: children of each expanded node.
        depth: levels of the tree.
        draft_token_num: N.
        tree_mask_mode: 0, 1 or 2.

    Raises:
        RuntimeError: a shape, dtype, device or number is wrong.
        TypeError: an argument has a wrong type.
    """
    conversion.require_tensors(
        parent_list=parent_list, selected_index=selected_index, verified_seq_len=verified_seq_len,
        tree_mask=tree_mask, positions=positions,
    )  # fmt: skip
    for name, number in (("topk", topk), ("depth", depth), ("draft_token_num", draft_token_num)):
        conversion.require_integer(number, name)
        require(number >= 1, f"{name} must be at least 1, got {number}")
    conversion.require_integer(tree_mask_mode, "tree_mask_mode")
    require(
        tree_mask_mode in (FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING),
        f"tree_mask_mode must be 0, 1 or 2, got {tree_mask_mode}",
    )
    n = draft_token_num
    of = (torch.int64, selected_index.device, "selected_index")
    b = len(selected_index) if selected_index.dim() else 0
    check_matrix("selected_index", selected_index, "[B, N-1]", (b, n - 1), *of)
    check_vector("verified_seq_len", verified_seq_len, b, *of)
    if depth > 1:
        columns = topk * (depth - 1) + 1
        check_matrix("parent_list", parent_list, "[B, topk*(depth-1)+1]", (b, columns), *of)
    _check_lengths(verified_seq_len)
    _check_out(positions, "positions", torch.int64, b * n)
    check_links(retrieve_index, retrieve_next_token, retrieve_next_sibling, b, n, *of[1:])
    if tree_mask_mode == QLEN_ONLY_BITPACKING:
        require(n <= 32, f"draft_token_num must be at most 32 in tree_mask_mode 2, got {n}")
        _check_out(tree_mask, "tree_mask", tree_mask.dtype, 0)
        tree_mask = tree_mask.view(-1).view(torch.uint8)
        _check_out(tree_mask, "tree_mask", torch.uint8, b * n * _bytes(n))
    else:
        columns = b * n
        if tree_mask_mode == FULL_MASK and tree_mask.device.type == "cpu":
            columns += int(verified_seq_len.sum())
        _check_out(tree_mask, "tree_mask", torch.bool, n * columns)

    parents = parents_of(selected_index, parent_list, topk)
    below = (parents[:, 1:] - 1).clamp(min=-1)  # as tree_attention numbers nodes, root left out
    mask, places = tree_attention(below, torch.zeros_like(verified_seq_len), slots=n)
    _write(positions, places + verified_seq_len[:, None])
    link_(parents, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    if tree_mask_mode == FULL_MASK:
        _write_into_full_mask(tree_mask, mask, verified_seq_len)
    elif tree_mask_mode == QLEN_ONLY:
        _write(tree_mask, mask)
    else:
        _write(tree_mask, _packed(mask))


@_either_spelling
def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """The positions and the links of the trees of a mask.

    The parent of a node is the last node before it that it attends to.

    Args:
        tree_mask: bool with at least B*N*N entries, [B, N, N] in row-major order.
        verified_seq_len: [B] int64, tokens of each text before the tree.
        positions, retrieve_index, retrieve_next_token, retrieve_next_sibling: as in
            `build_tree_kernel_efficient`.
        batch_size: B.
        draft_token_num: N.

    Raises:
        RuntimeError: a shape, dtype, device or number is wrong.
        TypeError: an argument has a wrong type.

    >>> mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    >>> places, *links = (torch.full((1, 3), -1) for _ in range(4))
    >>> reconstruct_indices_from_tree_mask(mask, torch.tensor([12]), places, *links, 1, 3)
    >>> places, links[1:]
    (tensor([[12, 13, 13]]), [tensor([[ 1, -1, -1]]), tensor([[-1,  2, -1]])])
    """
    conversion.require_tensors(
        tree_mask=tree_mask, verified_seq_len=verified_seq_len, positions=positions
    )
    for name, number in (("batch_size", batch_size), ("draft_token_num", draft_token_num)):
        conversion.require_integer(number, name)
        require(number >= 0, f"{name} must be at least 0, got {number}")
    b, n = batch_size, draft_token_num
    require(tree_mask.dtype == torch.bool, f"tree_mask must be bool, got {tree_mask.dtype}")
    require(
        tree_mask.numel() >= b * n * n,
        f"tree_mask must have at least {b * n * n} entries, got {shape(tree_mask)}",
    )
    check_vector("verified_seq_len", verified_seq_len, b, torch.int64, tree_mask.device,
                 "tree_mask")  # fmt: skip
    _check_lengths(verified_seq_len)
    _check_out(positions, "positions", torch.int64, b * n)
    check_links(retrieve_index, retrieve_next_token, retrieve_next_sibling, b, n, tree_mask.device,
                "tree_mask")  # fmt: skip
    mask = tree_mask.flatten()[: b * n * n].view(b, n, n)
    parents, depths = ancestors_of(mask)
    _write(positions, depths + verified_seq_len[:, None])
    link_(parents, retrieve_index, retrieve_next_token, retrieve_next_sibling)


def _check_lengths(verified_seq_len: Tensor) -> None:
    """Lengths must be at least 0. On a GPU this is not checked: the host would wait."""
    if verified_seq_len.device.type == "cpu" and len(verified_seq_len):
        shortest = int(verified_seq_len.min())
        require(shortest >= 0, f"verified_seq_len must be at least 0, got {shortest}")


def _check_out(out: Tensor, name: str, dtype: torch.dtype, entries: int) -> None:
    require(
        out.dtype == dtype and out.is_contiguous() and out.numel() >= entries,
        f"{name} must be contiguous {dtype} with at least {entries} entries, "
        f"got {out.dtype} {shape(out)}",
    )


def _write(out: Tensor, values: Tensor) -> None:
    """The values into the first entries."""
    out.view(-1)[: values.numel()].copy_(values.flatten())


def _write_into_full_mask(out: Tensor, mask: Tensor, lengths: Tensor) -> None:
    """The columns of the tree in the masks [N, length + N] of a batch, one after the other."""
    n, lengths = mask.shape[1], lengths[:, None, None]
    begin = n * (lengths + n).cumsum(0) - n * (lengths + n)
    at = torch.arange(n, device=mask.device)
    out.view(-1)[begin + at[:, None] * (lengths + n) + lengths + at] = mask


def _bytes(n: int) -> int:
    """The bytes of a packed row of n nodes."""
    return 1 if n <= 8 else 2 if n <= 16 else 4


def _packed(mask: Tensor) -> Tensor:
    """[B, N, 1, 2 or 4] uint8, the bits of each row of [B, N, N], lowest first."""
    n = mask.shape[-1]
    size = _bytes(n)
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, 8 * size - n))
    weights = 2 ** torch.arange(8, device=mask.device)
    return (bits.view(*mask.shape[:2], size, 8) * weights).sum(-1).to(torch.uint8)
