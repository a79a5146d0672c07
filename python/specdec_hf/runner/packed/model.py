"""The packed model of a model: what runs in its place on a CPU, and why one cannot be made.

A forward multiplies by packed weights whatever the batch, and attends by `attend`. So the bits of a
token follow from the text before it alone: text with drafts is text without, in every dtype.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch
from torch import nn

from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.module_copy import MERGE, copied, copy_reason, structure_of
from specdec_hf.runner.packed.attention import attend_by
from specdec_hf.runner.packed.linear import (
    LinearWithPackedCopy,
    Stored,
    bytes_of,
    bytes_to_pack,
    refresh,
    unpacked_reason,
)

# Of the memory that is available: the rest is for the cache, and for other processes.
LARGEST_SHARE = 0.5
_making = threading.RLock()


@dataclass
class PackedStats:
    """What was packed for one call.

    Attributes:
        layers: linear layers with packed weights.
        blocks: of them, those that multiply by blocks, of a file or rounded to int8 for drafts.
        fused: decoder layers that run by `decoder_layers_`, or by `norm_qkv_rope` and
            `output_norm_mlp` where the cache is not the loop's own, layers differ or have several
            masks.
        bytes: of their packed copies, each once, those that other models share included.
        resident_bytes: memory of the whole process.
        seconds: how long packing took in this call; 0 after the first call with a model, unless
            its weights were changed.
        reason: why the model's own forwards run, empty where packed ones do.
        unpacked: modules with a matrix that stay as they are, by class; embeddings are left out.
        drafts: the same for each draft model and head of the call.
    """

    layers: int = 0
    blocks: int = 0
    fused: int = 0
    bytes: int = 0
    resident_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    unpacked: dict[str, int] = field(default_factory=dict)
    drafts: list[PackedStats] = field(default_factory=list)

    def refuse(self, reason: str) -> None:
        """Say why the model's own forwards run, unless a reason is known."""
        self.reason = self.reason or reason

    def report(self, model: Any, note: Callable[[str], None], *, asked: bool = False) -> None:
        """Leave a note where a user's model runs its own forwards, or linear layers are as before.

        It warns, too, where the caller ``asked`` for packed weights.
        """
        name = type(model).__name__
        if self.reason:
            note(f"{name} runs its own forwards: {self.reason}")
            if asked:
                warnings.warn(f"{name} runs its own forwards: {self.reason}", stacklevel=2)
        elif self.unpacked:
            merge = f"; {MERGE}" if any(map(_is_adapted, model.modules())) else ""
            listed = _listed(self.unpacked) + merge
            note(f"{name}: matrices of other classes than torch.nn.Linear are not packed: {listed}")
        if (file := record_of(model).blocks) is not None and not self.reason:
            file.report(self, model, note)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class OnlyPacked(nn.Module):
    """Base class of a linear layer that keeps packed weights alone; see in_place.py."""

    is_tied: bool  # whether another module holds the weight too

    @property
    def weight(self) -> torch.Tensor:
        """[N, K]: the tied weight, or a new tensor."""
        raise NotImplementedError

    @property
    def panels(self) -> torch.Tensor:
        """Those of the packed weight."""
        raise NotImplementedError


class PackedModel:
    """What runs in the place of a model.

    Args:
        model: that `copy_reason` allows; it is not changed.
        stored: see `LinearWithPackedCopy`.
        rounding: as ``stored``, but for drafts, whose panels stand for other weights.

    Attributes:
        model: the packed model, of the model's class.
        layers: those with a packed copy of a weight.
        kept: those that keep no other weight.
        fused: how many decoder layers run by the ops.
        unpacked: its modules with a matrix that are no plain linear layers, by class.
        invariant: whether no product and no attention of a token depends on other tokens than those
            before it.
        seconds: how long packing took in the last call, 0 where nothing was packed.
    """

    def __init__(
        self, model: nn.Module, stored: Stored | None = None, rounding: Stored | None = None
    ) -> None:
        from specdec_hf.runner.packed.decoder_layer import fuse  # noqa: PLC0415  # on a CPU

        self.seconds, self._stored, self.rounded = 0.0, rounding or stored, rounding is not None
        self.made_for = structure_of(model)
        self._others: dict[nn.Module, None] = {}  # each once, in order
        self._packed: dict[int, LinearWithPackedCopy] = {}
        self.model: Any = copied(model, self._replace).eval()
        self.layers = list(self._packed.values())
        self.kept = [m for m in self.model.modules() if isinstance(m, OnlyPacked)]
        attention = [m for m in self.model.modules() if "is_causal" in vars(m)]
        attends = [attend_by(module) for module in attention]
        self.fused = sum(fuse(module) for module in list(self.model.modules()) if all(attends))
        inside = {id(m) for other in self._others for m in other.modules()}
        rest = [m for m in self.model.modules() if id(m) not in inside and _multiplies(m)]
        self.unpacked = Counter(class_name(module) for module in (*self._others, *rest))
        # Attention without that mark is not Transformers' common one, and cannot be replaced.
        self.invariant = bool(attends) and all(attends) and not self.unpacked
        self.model.is_packed = True

    def _replace(self, module: Any) -> Any:
        if id(module) in self._packed:
            return self._packed[id(module)]
        if isinstance(module, OnlyPacked):
            return module
        if unpacked_reason(module) is None:
            self._packed[id(module)] = LinearWithPackedCopy(
                module, self._stored, apart=self.rounded
            )
            return self._packed[id(module)]
        if is_other_linear(module):
            self._others[module] = None
            return module  # with all that is inside
        return None

    def unfused(self, model: nn.Module) -> Any:
        """A copy of the model on these panels, whose attention and layers run as its own do."""
        return copied(model, self._replace).eval()

    def refresh(self) -> bool:
        """Pack again what has changed, and say whether anything has."""
        from specdec_hf.runner.packed.decoder_layer import refresh_fused  # noqa: PLC0415

        changed = refresh(self.layers)
        # Another packed_model may have packed again what this one shares.
        for module in self.model.modules():
            refresh_fused(module)
        return changed


def _multiplies(module: nn.Module) -> bool:
    """Whether a module has a matrix that is neither packed nor looked up."""
    if isinstance(module, LinearWithPackedCopy | OnlyPacked | nn.Embedding):
        return False
    return any(p is not None and p.ndim > 1 for p in module._parameters.values())


def class_name(module: nn.Module) -> str:
    """The name of a module's class, in full where it is that of PyTorch's linear layer."""
    kind = type(module)
    return kind.__name__ if kind.__name__ != "Linear" else f"{kind.__module__}.Linear"


def _is_adapted(module: Any) -> bool:
    """Whether a module of another library, such as PEFT, adds to the one that it holds."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def is_other_linear(module: Any) -> bool:
    """Whether a module is a linear layer of another library, such as a quantized or adapted one."""
    if type(module) is nn.Linear:
        return type(module.weight) is not nn.Parameter
    if isinstance(module, OnlyPacked):
        return False
    sized = {"in_features", "out_features"} <= vars(module).keys()
    return _is_adapted(module) or sized or isinstance(module, nn.Linear)


def packed_model_of(model: Any, rounding: Stored | None = None) -> PackedModel:
    """The packed model of a model, made at the first call and again where the model changed.

    Raises:
        ValueError: none can be made, or there is no memory for it; the message says why.
    """
    with _making:
        started = time.perf_counter()
        reason = copy_reason(model) or ("it is in training mode" if model.training else None)
        if reason is not None:
            raise ValueError(reason)
        record = record_of(model)
        made: PackedModel | None = record.packed.get(rounded := rounding is not None)
        if made is None or made.made_for != structure_of(model):
            record.packed = {} if made else record.packed  # all were made of the structure before
            check_packable(model, rounded=rounded)
            stored = record.blocks and record.blocks.pack
            with torch.inference_mode(False), torch.no_grad():
                made = record.packed[rounded] = PackedModel(model, stored, rounding)
            changed = True
        else:
            changed = made.refresh()
        made.seconds = time.perf_counter() - started if changed else 0.0
    return made


def check_packable(model: nn.Module, *, rounded: bool = False) -> None:
    """Raises ValueError for a model without a layer to pack, or too little memory for the copy."""
    refresh([])  # whether changed weights are seen at all
    layers: list[Any] = [m for m in model.modules() if unpacked_reason(m) is None]
    if not layers and not any(isinstance(m, OnlyPacked) for m in model.modules()):
        plain = (unpacked_reason(m) for m in model.modules() if type(m) is nn.Linear)
        others = Counter(class_name(m) for m in model.modules() if is_other_linear(m))
        listed = f", but {_listed(others)}" if others else ""
        raise ValueError(next(plain, None) or f"it has no plain linear layers{listed}")
    size, available = bytes_to_pack(layers), psutil.virtual_memory().available
    if rounded:  # two bytes of a scale for 32 of numbers, and no copy is shared
        size = sum(x.weight.numel() for x in layers) * 17 // 16
    if size > LARGEST_SHARE * available:
        raise ValueError(
            f"packed weights would take {size / 2**30:.3g} GiB, which is more than half of the "
            f"{available / 2**30:.3g} GiB of memory that are available; specdec_hf.pack_ keeps no "
            "second copy"
        )


def resident_bytes() -> int:
    """Memory of this process."""
    size: int = psutil.Process().memory_info().rss
    return size


def pack_for_call(model: Any, rounding: Stored | None = None) -> tuple[Any, PackedStats]:
    """The `PackedModel` of a model for one call, None where there is none, and what to report."""
    if model.device.type != "cpu":
        return None, PackedStats(reason="weights are packed on a CPU only")
    try:
        packed_model = packed_model_of(model, rounding)
    except ValueError as error:
        return None, PackedStats(reason=str(error))
    layers: list[LinearWithPackedCopy | OnlyPacked] = [*packed_model.layers, *packed_model.kept]
    return packed_model, PackedStats(
        layers=len(layers),
        blocks=sum(layer.panels.dtype == torch.uint8 for layer in layers),
        fused=packed_model.fused,
        bytes=bytes_of(layers),
        resident_bytes=resident_bytes(),
        seconds=packed_model.seconds,
        unpacked=dict(packed_model.unpacked),
    )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def is_packed(model: Any) -> bool:
    """Whether a model is a packed model, and not a user's own."""
    return "is_packed" in vars(model)
