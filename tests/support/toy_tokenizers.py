"""Tokenizers that are made in memory, one for each way in which decoders join tokens."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

PIECES = ["▁", "▁Hello", "▁the", "cat", "ab", "b", "▁ab", "!", "\n", "\N{REPLACEMENT CHARACTER}"]
PIECES += ["é", "▁▁", "a"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = "ab▁\n"  # of `small_pieces`
BEFORE_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def made(core: Tokenizer) -> PreTrainedTokenizerFast:
    core.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def numbered(pieces) -> dict[str, int]:
    return {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}


def strips() -> decoders.Decoder:
    """The decoder of Llama 2, Mistral 7B v0.1, TinyLlama and Phi-3."""
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip


def sentence_piece(pieces=(*PIECES, *BYTES)) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE(numbered(pieces), [], byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = strips()
    return made(core)


def small_pieces(count: int) -> PreTrainedTokenizerFast:
    """Of Llama's kind with many words of few letters, so that stop strings end within tokens."""
    lengths = itertools.count(1)
    words = ("".join(word) for n in lengths for word in itertools.product(ALPHABET, repeat=n))
    return sentence_piece(itertools.islice(words, count - 2))


def metaspace() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE(numbered(PIECES), []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made(core)


def word_piece() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", "hello", "##ing", "##s", "cat", ".", "n", "'", "##t", "do", "not"]
    core = Tokenizer(models.WordPiece(numbered(pieces), unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    return made(core)


def byte_level() -> PreTrainedTokenizerFast:
    """Bytes, words, and tokens that end within a character or begin within one."""
    words = [BEFORE_WORDS.pre_tokenize_str(x)[0][0] for x in (" the", "é", "你好", "😄", " .")]
    two = words[2]
    parts = [two[1:4], two[:4], two[2:5], "Ġ" + two[:2]]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(numbered([*letters, *words, *parts]), []))
    core.pre_tokenizer, core.decoder = BEFORE_WORDS, decoders.ByteLevel()
    return made(core)


def suffixed() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE(numbered(["a</w>", "b", "c</w>", "d"]), []))
    core.decoder = decoders.BPEDecoder()
    return made(core)


def without_decoder() -> PreTrainedTokenizerFast:
    return made(Tokenizer(models.WordLevel(numbered("abc"), "a")))


KINDS = {
    "sentence_piece": sentence_piece, "metaspace": metaspace, "word_piece": word_piece,
    "byte_level": byte_level, "suffixed": suffixed, "without_decoder": without_decoder,
    "byt5": ByT5Tokenizer,  # in Python, and what is no character has no text
}  # fmt: skip


def byte_ids(tokenizer, text: str) -> list[int]:
    """A text in bytes, for the kinds that have a token for each."""
    if isinstance(tokenizer, ByT5Tokenizer):
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    byte_fallback = "<0x00>" in tokenizer.get_vocab()
    names = [BYTES[byte] for byte in text.encode()]
    if not byte_fallback:
        names = list(BEFORE_WORDS.pre_tokenize_str(text)[0][0])
    return [tokenizer.convert_tokens_to_ids(name) for name in names]


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *args, **kwargs):
        return self.tokenizer(*args, **kwargs)

    def decode(self, ids, **kwargs):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **kwargs)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = 257  # "</s>"; the ids below are bytes, and one merge, without which GGUF files do not do


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, and ``</s>``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "ab"])}
    core = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["</s>"])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>")
    made.chat_template = template
    return made


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
