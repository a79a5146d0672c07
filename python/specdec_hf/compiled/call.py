"""The compiled forward of one call, and what the call reports of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from specdec_hf.cache.own_logits import PASSING, one_line
from specdec_hf.cache.protocol import RollbackCache
from specdec_hf.cache.spec_cache import SpecCache
from specdec_hf.cache.widths import Widths
from specdec_hf.compiled.forward import compiled_forward


@dataclass
class CompileStats:
    """What ``compile=True`` did in one call.

    Attributes:
        graphs: graphs of the model that exist, those of earlier calls included.
        seconds: how long the warm-up of this call took, with its self-check; 0 after the first
            call with a model.
        recompilations: graphs that were made after the warm-up.
        eager: why forwards ran eagerly, empty where they did not.
        drafts: the same for each draft model and each EAGLE-3 head of the call.
    """

    graphs: int = 0
    seconds: float = 0.0
    recompilations: int = 0
    eager: str = ""
    drafts: list[CompileStats] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class Compiled(Protocol):
    """What runs in a model's place, with the model's arguments."""

    @property
    def graphs(self) -> int:
        """The number of graphs that were made."""
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
                return self.forward(**inputs)
            except PASSING:
                raise
            except Exception as error:
                run_eagerly(self.model, self.stats, f"a compiled forward raised {one_line(error)}")
                self.note(f"{type(self.model).__name__} runs eagerly: {self.stats.eager}")
            finally:
                self.stats.graphs = self.forward.graphs
                self.stats.recompilations += self.forward.graphs - before
        return self.model(**inputs)


def use_compiled(
    model: Any,
    cache: RollbackCache,
    *,
    tree: bool,
    check: bool,
    note: Callable[[str], None],
) -> CompileStats:
    """Let the forwards through a cache run compiled, or warn why they run eagerly.

    Args:
        model: the model that the cache was made for.
        cache: empty, or filled by a prefill.
        tree: whether trees will be fed.
        check: whether the first use of a model compares logits with the model's own.
        note: told of a forward that fails later in the call.
    """
    stats = CompileStats()
    if not isinstance(cache, SpecCache):
        run_eagerly(model, stats, f"compiled forwards need cache='spec', got {cache.kind!r}")
        return stats
    try:
        forward = compiled_forward(model)
    except ValueError as error:
        run_eagerly(model, stats, str(error))
        return stats
    before = forward.warm_ups.seconds
    reason = forward.warm_up(model, padded=len(cache.lengths) > 1, tree=tree, check=check)
    stats.graphs, stats.seconds = forward.graphs, forward.warm_ups.seconds - before
    if reason is not None:
        run_eagerly(model, stats, reason)
        return stats
    cache.compiled = CompiledCall(model, forward, stats, note)
    cache.widths = cache.widths or Widths()
    cache.omits_mask = frozenset()
    return stats


def run_eagerly(model: Any, stats: CompileStats, reason: str) -> None:
    """Say why the forwards of a call run without graphs."""
    stats.eager = reason
    warnings.warn(f"{type(model).__name__} runs eagerly: {reason}", stacklevel=2)
