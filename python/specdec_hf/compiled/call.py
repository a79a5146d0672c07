"""The compiled forward of one call, and what the call reports of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from specdec_hf.cache.own_logits import PASSING, one_line
from specdec_hf.cache.protocol import Runner
from specdec_hf.cache.spec_runner import FIRST, SpecRunner
from specdec_hf.cache.widths import Widths
from specdec_hf.compiled.borrow import borrow_graphs
from specdec_hf.compiled.forward import compiled_forward
from specdec_hf.compiled.recordings import Borrower


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


class Replays(Protocol):
    """What replays forwards as CUDA graphs."""

    @property
    def reason(self) -> str:
        """Why it records none any more, or ""."""
        ...

    def __len__(self) -> int:
        """The number of CUDA graphs."""
        ...


class Compiled(Protocol):
    """What runs in a model's place, with the model's arguments."""

    @property
    def graphs(self) -> int:
        """The number of graphs that torch.compile made."""
        ...

    @property
    def cuda_graphs(self) -> Replays | None:
        """The forwards that are replayed; None where the device has none."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's forward."""
        ...


class CompiledCall:
    """A compiled forward in one call: it counts graphs, and runs the model where it fails.

    Args:
        model: what runs after a failure.
        forward: in its place.
        stats: of the call.
        note: told of a failure.
    """

    def __init__(
        self, model: Any, forward: Compiled, stats: CompileStats, note: Callable[[str], None]
    ) -> None:
        self.model, self.forward, self.stats, self.note = model, forward, stats, note

    def __call__(self, **inputs: Any) -> Any:
        if not self.stats.eager:
            before = self.forward.graphs
            try:
                output = self.forward(**inputs)
                if self.forward.cuda_graphs is not None:
                    self._count(self.forward.cuda_graphs, output)
                return output
            except PASSING:
                raise
            except Exception as error:
                run_eagerly(self.model, self.stats, f"a compiled forward raised {one_line(error)}")
                self.note(f"{type(self.model).__name__} runs eagerly: {self.stats.eager}")
            finally:
                self.stats.graphs = self.forward.graphs
                self.stats.recompilations += self.forward.graphs - before
        return self.model(**inputs)

    def _count(self, graphs: Replays, output: Any) -> None:
        self.stats.cuda_graphs = len(graphs)
        self.stats.replayed += getattr(output, "replayed", False)
        if graphs.reason and not self.stats.without_cuda_graphs:
            run_without_graphs(self.model, self.stats, graphs.reason, self.note)


def use_compiled(
    model: Any,
    runner: Runner,
    *,
    tree: bool,
    check: bool,
    note: Callable[[str], None],
    borrower: Borrower | None,
) -> CompileStats:
    """Let the forwards of a runner run compiled, or warn why they run eagerly.

    Args:
        model: that of the runner.
        runner: its cache is empty, or filled by a prefill.
        tree: whether trees will be fed.
        check: whether the first use of a model compares logits with the model's own.
        note: told of a forward that fails later in the call.
        borrower: the call, to which CUDA graphs and their buffers are lent until it ends; None
            runs without.
    """
    stats = CompileStats()
    if not isinstance(runner, SpecRunner):
        run_eagerly(model, stats, f"compiled forwards need cache='spec', got {runner.kind!r}")
        return stats
    try:
        forward = compiled_forward(model)
    except ValueError as error:
        run_eagerly(model, stats, str(error))
        return stats
    before = forward.warm_ups.seconds
    reason = forward.warm_up(model, padded=len(runner.lengths) > 1, tree=tree, check=check)
    if reason is None:
        policy = runner.policy
        policy = replace(
            policy,
            widths=policy.widths or Widths(few_slots=forward.cuda_graphs is not None),
            omits_mask=policy.omits_mask & {FIRST},
            compiled=CompiledCall(model, forward, stats, note),
        )
        runner.run_with(policy)
        without = borrow_graphs(forward, model, runner, borrower, tree=tree, check=check)
        stats.cuda_graphs = len(forward.cuda_graphs or ())
        if without:
            run_without_graphs(model, stats, without, note)
    else:
        run_eagerly(model, stats, reason)
    stats.graphs, stats.seconds = forward.graphs, forward.warm_ups.seconds - before
    return stats


def run_eagerly(model: Any, stats: CompileStats, reason: str) -> None:
    """Say why the forwards of a call run without graphs."""
    stats.eager = reason
    warnings.warn(f"{type(model).__name__} runs eagerly: {reason}", stacklevel=2)


def run_without_graphs(
    model: Any, stats: CompileStats, reason: str, note: Callable[[str], None]
) -> None:
    """Say why the forwards of a call on a CUDA device replay no CUDA graphs."""
    stats.without_cuda_graphs = reason
    note(f"{type(model).__name__} runs without CUDA graphs: {reason}")
