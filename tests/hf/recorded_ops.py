"""A stand-in for CUDA graphs: it records the ops of a function on the CPU, and replays them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import pytest
import torch
from specdec_hf.drafters import model as draft_model
from specdec_hf.extras.compiled import compiled_call, forward
from specdec_hf.extras.compiled import head_step as compiled_step
from specdec_hf.heads.eagle_family import draft as head_draft
from specdec_hf.loop import begin, plan
from specdec_hf.runner import forwards
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrizations import weight_norm
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
        x.fill_(torch.nan if x.is_floating_point() else -1)


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
    for module in (forwards, compiled_call):
        monkeypatch.setattr(module, "BUCKETS", FEW_WIDTHS)
    monkeypatch.setattr(forwards, "LEAST_SLOTS", FEW_SLOTS)
    run_layers_as_they_are(monkeypatch)


def compile_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU stand in for a CUDA device: ``compile=True`` makes graphs, nothing is packed."""
    for module in (begin, plan, forwards, draft_model, head_draft):
        monkeypatch.setattr(module, "compiles_on", lambda device: True)


def run_layers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a compiled forward trace nothing, which takes most of its tests' time."""
    compile_on_cpu(monkeypatch)
    monkeypatch.setattr(forward.LayerGraphs, "of", lambda self, layer: _eagerly)


def _eagerly(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")


@contextmanager
def spied_reads(*allowed: tuple[Any, str]) -> Iterator[tuple[dict[str, int], list[str]]]:
    """Count the calls of some functions, and note the reads of tensors outside of them.

    Args:
        allowed: an object and the name of its function, in which reads are not noted.

    Yields:
        The calls by name, and the names of the methods that read elsewhere.
    """
    inside: list[bool] = []
    calls, others = dict.fromkeys((name for _, name in allowed), 0), list[str]()

    def counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            inside.append(True)
            try:
                return function(*args)
            finally:
                inside.pop()

        return call

    def spied(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not inside:
                others.append(name)
            return method(self, *args, **kwargs)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in allowed:
            patch.setattr(owner, name, counted(getattr(owner, name), name))
        for name in READS:
            patch.setattr(torch.Tensor, name, spied(getattr(torch.Tensor, name), name))
        yield calls, others


def _halve(module: torch.nn.Module) -> None:
    module.register_forward_hook(
        lambda module, args, out: (out[0] / 2, *out[1:]) if isinstance(out, tuple) else out / 2
    )


# What a llama gets, and why its own forwards run then.
REFUSED = pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model.lm_head, "forward", model.lm_head.forward), "was replaced"),
        (lambda model: model.train(), "it is in training mode"),
        (lambda model: _halve(model.model.layers[0]), "its module 'model.layers.0' has a hook"),
        (lambda model: _halve(model.lm_head), "its module 'lm_head' has a hook"),
        (lambda model: weight_norm(model.lm_head), "'lm_head' computes its weights from others"),
    ],
    ids=["patched", "training", "hook", "hook-of-linear", "weight-norm"],
)
# What makes another model of a llama.
CHANGES = pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "lm_head", torch.nn.Linear(32, 67, bias=False)),
        lambda model: model.resize_token_embeddings(80),
        lambda model: setattr(model.model.layers[0].self_attn, "scaling", 2.0),
        lambda model: setattr(model.config, "rms_norm_eps", 0.5),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.model.layers.insert(1, model.model.layers[1]),
    ],
    ids=["head", "embeddings", "attribute", "config", "attention", "layers"],
)


def leaving_out(names: Sequence[str], left_out: str) -> Callable[..., Any]:
    """A replay in which an input keeps the value of the recording, or outputs are not copied."""

    def replay(self: Any, inputs: Any) -> Any:
        pairs = zip(self._inputs, inputs, strict=True)
        tensors = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
        for name, (own, given) in zip_longest(names, tensors):
            if name != left_out:
                own.copy_(given)
        self._replay()
        return self.outputs if left_out == "copies" else [x.clone() for x in self.outputs]

    return replay
