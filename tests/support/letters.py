"""A tokenizer whose tokens are single letters."""

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
