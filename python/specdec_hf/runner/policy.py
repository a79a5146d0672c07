"""How forwards through a `SpecRunner` run: their widths, their masks, and what runs them.

A width is how many tokens a row a forward has, padding included: kernels and compiled graphs then
see few shapes. Padding follows the tokens of each row. It repeats the last one, its logits are
dropped, and its keys and values lie beyond the committed tokens, where the next forward overwrites
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Kernels for a few tokens are fastest at these widths; wider forwards are not padded.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
# The forwards of a sequence alone that need no mask; see `SpecRunner`.
FIRST, SINGLE = "first tokens", "single token"
# CUDA graphs see at least this many slots, and else a power of two.
LEAST_SLOTS = 1024


@dataclass(frozen=True)
class ForwardPolicy:
    """How the forwards through a `SpecRunner` run.

    Attributes:
        omits_mask: the kinds of forwards without a mask, `FIRST` and `SINGLE`: only those that the
            self-check has seen of the model.
        compiled: runs forwards other than those of long prompts in the model's place, or None; see
            runner/compiled. They are padded to one of `BUCKETS`.
        few_slots: whether they see one of few numbers of slots, as CUDA graphs do.
        one_by_one: whether prompts of very different lengths may be read so.
    """

    omits_mask: frozenset[str] = frozenset()
    compiled: Callable[..., Any] | None = None
    few_slots: bool = False
    one_by_one: bool = True

    def width(self, size: int) -> int:
        """The width of a forward of ``size`` tokens a row."""
        return size if self.compiled is None else width_of(size)

    def keeps_all(self, width: int) -> bool:
        """Whether a forward of this width gives the logits of all its tokens, wanted or not."""
        return self.few_slots and not is_long(width)

    def visible(self, slots: int) -> int:
        """How many slots a forward sees that needs the first ``slots``."""
        return max(LEAST_SLOTS, 1 << (slots - 1).bit_length()) if self.few_slots else slots


AS_THE_MODEL = ForwardPolicy()


def width_of(size: int) -> int:
    """The next of `BUCKETS`; forwards wider than all of them are not padded."""
    return next((width for width in BUCKETS if width >= size), size)


def is_long(size: int) -> bool:
    """Whether forwards of so many tokens a row are bound by arithmetic, as those of prompts."""
    return size > BUCKETS[-1]


def padded(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Tokens [B, n, ...] with the last of each row repeated up to [B, width, ...]."""
    missing = width - tokens.shape[1]
    if missing == 0:
        return tokens
    return torch.cat([tokens, tokens[:, -1:].expand(-1, missing, *tokens.shape[2:])], dim=1)
