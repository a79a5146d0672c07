"""Caches in the form of the program, without their last tokens."""

from __future__ import annotations

from specdec_hf.arguments import check_integer
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

Cache = tuple[tuple[Tensor, ...] | None, ...] | DynamicCache | EncoderDecoderCache | None


def prune_cache(cache: Cache, num_tokens_to_discard: int) -> Cache:
    """Drop the last tokens of a cache.

    Args:
        cache: a tuple of layers, each a tuple of keys and values [B, H, n, D], of which views are
            returned; or a `DynamicCache` of Transformers, which is changed in place. What an
            encoder gave (the third and fourth tensor of a layer) stays whole. None stays None.
        num_tokens_to_discard: at least 0.

    Returns:
        The cache without them.

    Raises:
        TypeError: a number that is no integer.
        ValueError: a cache of another kind, or more tokens than it holds.
        RuntimeError: a sliding window or a state that cannot be rolled back.
    """
    number = check_integer("num_tokens_to_discard", num_tokens_to_discard, 0)
    if isinstance(cache, tuple):
        return tuple(None if layer is None else _pruned(layer, number) for layer in cache)
    if isinstance(cache, DynamicCache | EncoderDecoderCache):
        _check_held(number, cache.get_seq_length())
        if number:
            cache.crop(-number)
    elif cache is not None:
        raise ValueError(
            f"cache must be None, a tuple of layers or a DynamicCache, got {type(cache).__name__}"
        )
    return cache


def _pruned(layer: tuple[Tensor, ...], number: int) -> tuple[Tensor, ...]:
    for x in layer[:2]:
        _check_held(number, x.shape[2])
    return (*(x[:, :, : x.shape[2] - number] for x in layer[:2]), *layer[2:])


def _check_held(number: int, num_tokens: int) -> None:
    if number > num_tokens:
        raise ValueError(
            f"num_tokens_to_discard must be at most the {num_tokens} tokens of the cache, "
            f"got {number}"
        )
