"""A stand-in for CUDA graphs: it records the ops of a function on the CPU, and replays them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specdec_hf.drafters import model as draft_model
from specdec_hf.heads.pairs import draft as head_draft
from specdec_hf.heads.pairs import step as compiled_step
from specdec_hf.loop import begin, plan
from specdec_hf.runner import policy
from specdec_hf.runner.compiled import compiled_call, forward
from support.device_reads import spied_reads
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# Of forwards that are recorded: fewer than those of a device, whose recordings take less time.
FEW_WIDTHS, FEW_SLOTS = (1, 4, 64), 128
# What would wait for a device, or copy from the host.
FORBIDDEN = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "lift_fresh")


class FreedMemory(BaseException):
    """A replay reads what is freed: no fallback may hide it."""


class Place:
    """Where a tensor lies in memory of others, which it does not keep: a graph has the address."""

    def __init__(self, x: torch.Tensor) -> None:
        self._storage = StorageWeakRef(x.untyped_storage())
        self._layout = x.storage_offset(), x.shape, x.stride()
        self._like = x.new_empty(0)

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise FreedMemory(f"a tensor of shape {tuple(self._layout[1])}")
        return self._like.detach().set_(storage, *self._layout)


class Tape(TorchDispatchMode):
    """Notes each op with the tensors and numbers that it was called with, and its results.

    It keeps what the ops made, as the memory of a graph does, and nothing else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []
        self._others: dict[int, StorageWeakRef] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.overloadpacket.__name__ in FORBIDDEN:
            raise RuntimeError(f"{op} cannot be recorded")
        given = mapped(torch.Tensor, self._noted, (args, kwargs or {}))
        result = op(*args, **(kwargs or {}))
        for x in tensors_in(result):
            if (number := number_of(x)) not in self._others:
                self._made.add(number)
        self.ops.append((op, *given, [self._noted(x) for x in tensors_in(result)]))
        return result

    def _noted(self, x: torch.Tensor) -> torch.Tensor | Place:
        number = number_of(x)
        if number in self._made:
            # It may get other memory later; a graph keeps the address.
            return x.detach()
        # A number that has a weak reference is given to no other storage.
        self._others.setdefault(number, StorageWeakRef(x.untyped_storage()))
        return Place(x)


def number_of(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


class OpRecorder:
    """Replays ops on the tensors of the recording, as a CUDA graph does.

    Results go to the memory of the recording. A replay overwrites the outputs of all other
    recordings, as those of graphs may be that share memory.
    """

    def __init__(self) -> None:
        self.outputs: list[list[torch.Tensor]] = []
        self.replays = 0
        self.is_here = True

    def here(self) -> bool:
        return self.is_here

    def record(
        self, run: Callable[[], list[torch.Tensor]]
    ) -> tuple[list[torch.Tensor], Callable[[], None]]:
        with spied_reads() as (_, reads), Tape() as tape:
            outputs = run()
        if reads:
            raise RuntimeError(f"{reads[0]} cannot be recorded")
        mine = list(outputs)
        self.outputs.append(mine)
        overwrite(mine)  # a graph runs at its first replay

        def replay() -> None:
            self.replays += 1
            for others in self.outputs:
                if others is not mine:
                    overwrite(others)
            for op, *noted in tape.ops:
                args, kwargs, results = mapped(Place, Place.tensor, noted)
                write(results, op(*args, **kwargs))

        return outputs, replay


def overwrite(outputs: list[torch.Tensor]) -> None:
    for x in outputs:
        x.fill_(torch.nan)


def write(recorded: list[torch.Tensor], computed: Any) -> None:
    """Move results to the memory of the recording, where they are no views of it."""
    for old, new in zip(recorded, tensors_in(computed), strict=True):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)


def mapped(kind: type, function: Callable[[Any], Any], x: Any) -> Any:
    """`x` with `function` applied to all objects of a type in lists, tuples (as lists) and dicts.

    torch's `tree_map_only` does the same for more containers and took half of the tests' time.
    """
    if isinstance(x, kind):
        return function(x)
    if isinstance(x, list | tuple):
        return [mapped(kind, function, one) for one in x]
    return {k: mapped(kind, function, v) for k, v in x.items()} if isinstance(x, dict) else x


def tensors_in(result: Any) -> list[torch.Tensor]:
    """The tensors that an op gave: one, or those of a sequence."""
    if isinstance(result, torch.Tensor):
        return [result]
    return (
        [x for one in result for x in tensors_in(one)] if isinstance(result, list | tuple) else []
    )


def record_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record ops, and let layers run as they are: torch.compile gives no ops to record."""
    for module in (forward, compiled_step):
        monkeypatch.setattr(module, "recorder_for", lambda device: OpRecorder())
    for module in (policy, compiled_call):
        monkeypatch.setattr(module, "BUCKETS", FEW_WIDTHS)
    monkeypatch.setattr(policy, "LEAST_SLOTS", FEW_SLOTS)
    run_layers_as_they_are(monkeypatch)


def compile_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU stand in for a CUDA device: ``compile=True`` makes graphs, nothing is packed."""
    for module in (begin, plan, compiled_call, draft_model, head_draft):
        monkeypatch.setattr(module, "compiles_on", lambda device: True)


def run_layers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a compiled forward trace nothing, which takes most of its tests' time."""
    compile_on_cpu(monkeypatch)
    monkeypatch.setattr(forward.LayerGraphs, "of", lambda self, layer: _eagerly)


def _eagerly(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)
