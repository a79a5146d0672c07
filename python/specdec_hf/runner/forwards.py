"""How forwards run: by the model, on packed weights or compiled, and how wide.

A width is how many tokens a row a forward has, padding included: kernels and compiled graphs then
see few shapes. Padding follows the tokens of each row. It repeats the last one, its logits are
dropped, and its keys and values lie beyond the committed tokens, where the next forward overwrites
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.packed.linear import Stored
from specdec_hf.runner.packed.model import PackedModel, PackedStats, pack_for_call

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
            extras/compiled. They are padded to one of `BUCKETS`.
        few_slots: whether they see one of few numbers of slots, as CUDA graphs do.
        defers: whether they make positions and masks of chains themselves, as CUDA graphs do.
        one_by_one: whether prompts of very different lengths may be read so.
    """

    omits_mask: frozenset[str] = frozenset()
    compiled: Callable[..., Any] | None = None
    few_slots: bool = False
    defers: bool = False
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


@dataclass(eq=False)
class Borrower:
    """A call, to which buffers are lent until it ends: ``held`` is then False."""

    held: bool = True


@dataclass
class CompileStats:
    """What ``compile=True`` did in one call.

    Attributes:
        graphs: graphs of torch.compile for the model that exist, those of earlier calls included.
        seconds: how long the warm-up of this call took, with its self-check; 0 after the first
            call with a model.
        recompilations: graphs that were made after the warm-up.
        eager: why forwards ran eagerly, empty where they did not.
        cuda_graphs: forwards that are recorded as CUDA graphs, those of earlier calls included.
        replayed: forwards of the call that replayed one.
        without_cuda_graphs: why forwards on a CUDA device replayed none, empty where they did.
        verified: forwards of the call whose graph verified the drafts.
        verified_apart: why rounds verified beside the graph, empty where none had to.
        drafts: the same for each draft model and each EAGLE-3 head of the call.
    """

    graphs: int = 0
    seconds: float = 0.0
    recompilations: int = 0
    eager: str = ""
    cuda_graphs: int = 0
    replayed: int = 0
    without_cuda_graphs: str = ""
    verified: int = 0
    verified_apart: str = ""
    drafts: list[CompileStats] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def compiles_on(device: torch.device) -> bool:
    """Whether ``compile=True`` makes graphs for a model on a device."""
    return device.type == "cuda"


# The packed model, and what was packed.
Packing = tuple[PackedModel | None, PackedStats | None]


def pack_for(model: Any, compile: bool | None, rounding: Stored | None = None) -> Packing:
    """What `pack_for_call` gives where a model is packed; see `Options.compile`."""
    if model.device.type != "cpu":
        record_of(model).packed.clear()  # it would keep the weights that were on the CPU
    if compile is False or compiles_on(model.device):
        return None, None
    return pack_for_call(model, rounding)
