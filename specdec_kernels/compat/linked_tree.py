"""Trees as linked lists, as SGLang has them; see sglang.py for the terms.

`parents` [B, N] int64 is the parent of each node here, -1 for the root and for nodes without one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import conversion
from ..arguments.checks import check_matrix, check_vector, require, shape
from .indices import check_in_range


class Descent:
    """The way down the trees of a batch, one child of each sequence at a time.

    node: [B], the last accepted node, and index [B], its `retrieve_index`.
    child: [B], the child of it that is tried next; -1 if there is none.
    """

    def __init__(
        self,
        predicts: Tensor,
        accept_index: Tensor,
        accept_token_num: Tensor,
        candidates: Tensor,
        retrieve_index: Tensor,
        retrieve_next_token: Tensor,
        retrieve_next_sibling: Tensor,
    ) -> None:
        conversion.require_tensors(
            predicts=predicts, accept_index=accept_index, accept_token_num=accept_token_num,
            candidates=candidates,
        )  # fmt: skip
        require(candidates.dim() == 2, f"candidates must be [B, N], got {shape(candidates)}")
        b, n = candidates.shape
        require(n >= 1, f"candidates must have at least the root, got {shape(candidates)}")
        device, of = candidates.device, "candidates"
        check_matrix("candidates", candidates, "[B, N]", (b, n), torch.int64, device, of)
        check_links(retrieve_index, retrieve_next_token, retrieve_next_sibling, b, n, device, of)
        check_in_range("retrieve_index", retrieve_index, b * n)
        check_in_range("retrieve_next_token", retrieve_next_token, n, begin=-1)
        check_in_range("retrieve_next_sibling", retrieve_next_sibling, n, begin=-1)
        check_vector("predicts", predicts, predicts.numel(), torch.int32, device, of)
        require(
            len(predicts) >= b * n,
            f"predicts must have at least {b * n} entries, got {shape(predicts)}",
        )
        require(
            accept_index.dim() == 2 and accept_index.shape[1] >= 1,
            f"accept_index must be [B, S] with S >= 1, got {shape(accept_index)}",
        )
        s = accept_index.shape[1]
        check_matrix("accept_index", accept_index, "[B, S]", (b, s), torch.int32, device, of)
        check_vector("accept_token_num", accept_token_num, b, torch.int32, device, of)
        self._predicts, self._accept_index, self._number = predicts, accept_index, accept_token_num
        self._candidates, self._index = candidates, retrieve_index
        self._first_child, self._sibling = retrieve_next_token, retrieve_next_sibling
        self.sequences = torch.arange(b, device=device)
        self.node = torch.zeros_like(self.sequences)
        self.index = retrieve_index[:, 0]
        self.child = retrieve_next_token[:, 0]
        self._accepted = torch.zeros_like(self.sequences)

    @property
    def room(self) -> Tensor:
        """[B] bool, whether `accept_index` has room for another node."""
        return self._accepted < self._accept_index.shape[1] - 1

    @property
    def tried(self) -> Tensor:
        """[B] bool, whether there is a child to try, and room for it."""
        return (self.child >= 0) & self.room

    @property
    def token(self) -> Tensor:
        """[B], the token of the child."""
        return self._at_child(self._candidates)

    def uniform_of(self, uniforms: Tensor) -> Tensor:
        """[B], those of the last accepted nodes among [B, N]."""
        return uniforms[self.sequences, self.node]

    def advance(self, accepted: Tensor) -> None:
        """Goes to the children that are accepted [B] bool, and elsewhere to the next siblings."""
        self._write(accepted, self.token)
        child, tried = self.child.clamp(min=0), self.tried
        following = torch.where(
            accepted, self._at_child(self._first_child), self._at_child(self._sibling)
        )
        self.index = torch.where(accepted, self._at_child(self._index), self.index)
        self.node = torch.where(accepted, child, self.node)
        self._accepted = self._accepted + accepted
        at = (self.sequences, self._accepted)
        self._accept_index[at] = torch.where(accepted, self.index.int(), self._accept_index[at])
        self.child = torch.where(tried, following, -1)

    def finish(self, tokens: Tensor) -> None:
        """Writes the last tokens [B] and the number of accepted nodes."""
        self._write(torch.ones_like(tokens, dtype=torch.bool), tokens)
        self._accept_index[:, 0] = self._index[:, 0].int()
        self._number.copy_(self._accepted)

    def _write(self, where: Tensor, tokens: Tensor) -> None:
        before = self._predicts[self.index]
        self._predicts[self.index] = torch.where(where, tokens.int(), before)

    def _at_child(self, values: Tensor) -> Tensor:
        return values[self.sequences, self.child.clamp(min=0)]


def write_path_(
    nodes: Tensor,
    tokens: Tensor,
    accepted: Tensor,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    retrieve_index: Tensor,
) -> None:
    """Writes paths that are known as a whole, as `Descent` does step by step.

    nodes: [B, S], those of each path from the root on; only the first `accepted` [B] + 1 count.
    tokens: [B, S], the token that follows each of them.
    """
    steps = torch.arange(nodes.shape[1], device=nodes.device)
    last = accepted[:, None].long()
    reached = torch.minimum(steps, last)  # further steps write the last one again
    index = retrieve_index.gather(1, nodes.gather(1, reached))
    predicts[index] = tokens.gather(1, reached).to(predicts.dtype)
    accept_index.copy_(torch.where(steps <= last, index.to(accept_index.dtype), accept_index))
    accept_token_num.copy_(accepted)


def parents_of(selected_index: Tensor, parent_list: Tensor, topk: int) -> Tensor:
    """`parents` of the nodes that EAGLE selected; -1 where the parent is not selected before."""
    group = selected_index // topk
    if parent_list.shape[1]:
        wanted = parent_list.gather(1, group.clamp(0, parent_list.shape[1] - 1))
    else:
        wanted = torch.full_like(group, -1)
    same = selected_index[:, None, :] == wanted[:, :, None]
    same &= torch.ones_like(same[0]).tril(-1)  # only nodes before
    parents = torch.where(group == 0, 0, _first(same) + 1)
    parents = torch.where((group > 0) & ~same.any(-1), -1, parents)
    return torch.nn.functional.pad(parents, (1, 0), value=-1)


def parents_of_links(retrieve_next_token: Tensor, retrieve_next_sibling: Tensor) -> Tensor:
    """`parents` of the nodes that the links lead to; -1 for the others, too."""
    b, n = retrieve_next_token.shape
    numbers = torch.arange(n, device=retrieve_next_token.device).expand(b, n)
    parents, elder = (_inverse(x, numbers) for x in (retrieve_next_token, retrieve_next_sibling))
    for _ in range(n.bit_length()):  # the elder is twice as far each time
        parents = torch.where(parents < 0, _where_linked(parents, elder), parents)
        elder = _where_linked(elder, elder)
    return parents


def _inverse(links: Tensor, numbers: Tensor) -> Tensor:
    """Which node each node is linked from, -1 if none."""
    b, n = links.shape
    out = links.new_full((b, n + 1), -1)
    out.scatter_(1, torch.where(links < 0, n, links), numbers)
    return out[:, :n]


def _where_linked(values: Tensor, links: Tensor) -> Tensor:
    """The values at the links, -1 where there is none."""
    return torch.where(links < 0, -1, values.gather(1, links.clamp(min=0)))


def ancestors_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(`parents`, depths [B, N]) of a mask [B, N, N]: row i attends to its ancestors."""
    n = mask.shape[-1]
    before = mask.tril(-1)
    numbers = torch.arange(1, n + 1, device=mask.device)
    parents = (before * numbers).max(-1).values - 1 if n else before.sum(-1)
    return parents, before.sum(-1)


def link_(
    parents: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
) -> None:
    """Writes the links of the trees in place."""
    b, n = parents.shape
    numbers = torch.arange(n, device=parents.device)
    retrieve_index.copy_(numbers + n * torch.arange(b, device=parents.device)[:, None])
    retrieve_next_token.copy_(_first(parents[:, None, :] == numbers[:, None]))
    siblings = (parents[:, :, None] == parents[:, None, :]) & (parents >= 0)[:, :, None]
    retrieve_next_sibling.copy_(_first(siblings & torch.ones_like(siblings[0]).triu(1)))


def _first(mask: Tensor) -> Tensor:
    """The first place of [..., N] that is True, -1 if there is none."""
    if not mask.shape[-1]:
        return torch.full(mask.shape[:-1], -1, device=mask.device)
    return torch.where(mask.any(-1), mask.int().argmax(-1), -1)


def check_links(
    index: Tensor, child: Tensor, sibling: Tensor, b: int, n: int, device: torch.device, of: str
) -> None:
    """The links must be tensors [B, N] int64."""
    for name, t in (
        ("retrieve_index", index),
        ("retrieve_next_token", child),
        ("retrieve_next_sibling", sibling),
    ):
        conversion.require_tensor(t, name)
        check_matrix(name, t, "[B, N]", (b, n), torch.int64, device, of)
