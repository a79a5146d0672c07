"""How the forwards of a call run: by the model, on packed weights, or compiled as CUDA graphs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.packed.model import PackedModel, PackedStats, pack_for_call


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
        drafts: the same for each draft model and each EAGLE-3 head of the call.
    """

    graphs: int = 0
    seconds: float = 0.0
    recompilations: int = 0
    eager: str = ""
    cuda_graphs: int = 0
    replayed: int = 0
    without_cuda_graphs: str = ""
    drafts: list[CompileStats] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def compiles_on(device: torch.device) -> bool:
    """Whether ``compile=True`` makes graphs for a model on a device."""
    return device.type == "cuda"


# The packed model, and what was packed.
Packing = tuple[PackedModel | None, PackedStats | None]


def pack_for(model: Any, compile: bool | None) -> Packing:
    """The packed model of a model, and what to report; see `Options.compile`."""
    if model.device.type != "cpu":
        record_of(model).packed = None  # it would keep the weights that were on the CPU
    if compile is False or compiles_on(model.device):
        return None, None
    return pack_for_call(model)
