"""How forwards through a `SpecRunner` run: their widths, their masks, and what runs them.

A width is how many tokens a row a forward has, padding included: kernels and compiled graphs then
see few shapes. Padding follows the tokens of each row. It repeats the last one, its logits are
dropped, and its keys and values lie beyond the committed tokens, where the next forward overwrites
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Kernels for a few tokens are fastest at these widths; wider forwards are not padded.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
# Attention on CPUs reads slots in blocks of this size. A whole block more, of hidden slots alone,
# changes no sum; a part of one may.
BLOCK = 512
# The forwards of a sequence alone that need no mask; see `SpecRunner`.
FIRST, SINGLE = "first tokens", "single token"
# CUDA graphs see at least this many slots, and else a power of two.
LEAST_SLOTS = 1024


@dataclass(frozen=True)
class Widths:
    """Which widths the forwards of a call have.

    Attributes:
        fixed: every forward has this many tokens a row; None is the next of `BUCKETS`.
        spare_blocks: with ``fixed``, blocks of slots that forwards see beyond those they need.
        few_slots: forwards see one of few numbers of slots, also without ``fixed``.
    """

    fixed: int | None = None
    spare_blocks: int = 0
    few_slots: bool = False

    def of(self, size: int) -> int:
        """The width of a forward of ``size`` tokens a row."""
        if self.fixed is not None:
            return self.fixed
        return next((width for width in BUCKETS if width >= size), size)

    def keeps_all(self, width: int) -> bool:
        """Whether a forward of this width gives the logits of all its tokens, wanted or not."""
        return self.fixed is not None or (self.few_slots and not is_long(width))

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """Begin and end of the forwards that ``size`` tokens a row are fed in."""
        step = self.fixed or size
        return ((begin, min(begin + step, size)) for begin in range(0, size, step))

    def visible(self, slots: int) -> int:
        """How many slots a forward sees that needs the first ``slots``."""
        if self.fixed is None:
            return max(LEAST_SLOTS, 1 << (slots - 1).bit_length()) if self.few_slots else slots
        return (-(-slots // BLOCK) + self.spare_blocks) * BLOCK


@dataclass(frozen=True)
class ForwardPolicy:
    """How the forwards through a `SpecRunner` run.

    Attributes:
        widths: which widths they have; None leaves each as wide as its tokens.
        omits_mask: the kinds of forwards without a mask, `FIRST` and `SINGLE`: only those that the
            self-check has seen of the model.
        compiled: runs forwards other than those of long prompts in the model's place, or None; see
            runner/compiled.
        one_by_one: whether prompts of very different lengths may be read so.
    """

    widths: Widths | None = None
    omits_mask: frozenset[str] = frozenset()
    compiled: Callable[..., Any] | None = None
    one_by_one: bool = True


AS_THE_MODEL = ForwardPolicy()


def is_long(size: int) -> bool:
    """Whether forwards of so many tokens a row gain nothing by a graph, as those of prompts."""
    return size > BUCKETS[-1]


def padded(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Tokens [B, n, ...] with the last of each row repeated up to [B, width, ...]."""
    missing = width - tokens.shape[1]
    if missing == 0:
        return tokens
    return torch.cat([tokens, tokens[:, -1:].expand(-1, missing, *tokens.shape[2:])], dim=1)
