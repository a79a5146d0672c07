"""The choice between the two caches."""

from __future__ import annotations

from typing import Any

from specdec_hf.cache.dynamic_cache import DynamicCacheAdapter
from specdec_hf.cache.protocol import RollbackCache
from specdec_hf.cache.spec_cache import SpecCache, unsupported_reason


def make_cache(model: Any, batch_size: int, capacity: int, kind: str = "auto") -> RollbackCache:
    """An empty cache for a model.

    Args:
        model: the model whose forward will fill it.
        batch_size: number of sequences B.
        capacity: slots to allocate at first; `SpecCache` grows beyond them.
        kind: "spec", "dynamic" (one sequence only), or "auto": "spec" where the model allows it.

    Raises:
        ValueError: unknown kind, or a kind that this model or batch size cannot use.
    """
    if kind not in ("auto", "spec", "dynamic"):
        raise ValueError(f"cache must be 'auto', 'spec' or 'dynamic', got {kind!r}")
    reason = unsupported_reason(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__}: {reason}")
    if kind == "spec" or (kind == "auto" and reason is None):
        return SpecCache(model, batch_size, capacity)
    if batch_size != 1:
        raise ValueError(
            f"cache='dynamic' needs batch size 1, got {batch_size}"
            + (f" (cache='spec' cannot be used: {reason})" if reason else "")
        )
    adapter = DynamicCacheAdapter(model)
    if not adapter.cache.is_croppable:
        raise ValueError(f"{type(model).__name__} keeps a state that cannot be rolled back")
    return adapter
