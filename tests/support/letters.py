"""Tokenizers of made-up letters: one token for each, or tokens for pairs of them too."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@cache
def letters(names: str) -> Any:
    """One token for each letter, numbered in their order."""
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(names)}, unk_token=names[0]))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token=None)


@cache
def pairs(vocab_size: int) -> Any:
    """The first half of the tokens are letters, and each other one is a pair that they merge to."""
    names = letters_of(vocab_size)
    core = Tokenizer(
        models.BPE(
            {one: i for i, one in enumerate([*names, *map("".join, _merges(vocab_size))])},
            _merges(vocab_size),
        )
    )
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token=None)


def letters_of(vocab_size: int) -> str:
    """The letters of `pairs`."""
    return "".join(chr(0x4E00 + i) for i in range((vocab_size + 1) // 2))


def _merges(vocab_size: int) -> list[tuple[str, str]]:
    names = letters_of(vocab_size)
    return [(names[i], names[(i + 1) % len(names)]) for i in range(vocab_size // 2)]
