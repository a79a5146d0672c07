"""Tokenizers that are made in memory, one for each way in which decoders join tokens; and a tiny
model with one of bytes on disk: a folder, a snapshot of the hub, a GGUF file.

The command line runs on it within this process.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from specdec_hf.cli.app import app
from support import hf_models
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from typer import testing

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
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    return decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])


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


PROMPTS = '{"question_id": 1, "category": "x", "turns": ["Say yes.", "Say no."]}\n'
# For each call it would make the parsers of all commands, which takes longer than most calls.
testing._get_command = functools.cache(testing._get_command)


def write_folder(path: Path, template: str | None = TEMPLATE, **settings: int) -> Path:
    """A model folder in the Hugging Face layout."""
    hf_models.build("llama", vocab_size=END + 1, **settings).save_pretrained(path)
    tokenizer(template).save_pretrained(path)
    return path


def write_encoder_decoder(path: Path, name: str = "t5", seed: int | None = None) -> Path:
    """A folder of a tiny encoder-decoder, whose tokenizer has no chat template."""
    hf_models.encoder_decoder(name, END + 1, seed).save_pretrained(path)
    tokenizer(None).save_pretrained(path)
    return path


def write_gguf(path: Path, kind: str = "F32", **fields: Any) -> Path:
    """Of a tiny llama with the same tokenizer; matrices of whole blocks of a type are stored so."""
    import gguf  # noqa: PLC0415  # the tests of tokenizers do without it

    model = hf_models.build("llama", vocab_size=END + 1, **fields)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokenizer().convert_ids_to_tokens(list(range(END + 1))))
    writer.add_token_types([1] * END + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(END)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        count = heads.get(name.split(".")[-2])
        rows = weight.float()
        if count:  # llama.cpp rotates neighbours, Transformers rotates halves
            rows = rows.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
        own = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        own = own if weight.shape[-1] % gguf.GGML_QUANT_SIZES[own][0] == 0 else own.F32
        data = gguf.quantize(rows.numpy(), own)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The model folder, which tests share and must not change."""
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def home(folder, tmp_path, monkeypatch):
    """A folder to work in, where the model is called `tiny` and some prompts `prompts.jsonl`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(folder)
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    return tmp_path


def environment(**variables):
    """Of a process of its own, which finds the modules that this one does."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)} | (
        variables
    )


def invoke(*arguments, input=None):
    """Run the command line in this process."""
    return testing.CliRunner().invoke(app, [str(a) for a in arguments], input=input)


def succeed(*arguments, input=None):
    """Run a command that must succeed."""
    result = invoke(*arguments, input=input)
    assert result.exit_code == 0, result.output
    return result


def reported(place, *arguments, input=None):
    """The report that a command writes into a folder, and its result; it must succeed."""
    result = succeed(*arguments, "--json", place / "out.json", input=input)
    return json.loads((place / "out.json").read_text()), result


def answered(place, *arguments):
    """The first answer in the report of the command ``generate``."""
    report, _ = reported(place, "generate", *arguments)
    return report["prompts"][0]["turns"][0]


def says(result, words):
    """Whether the output holds these words, whatever its line breaks."""
    return words in " ".join(result.output.split())


def masked(text, *hidden):
    """A printed text in one line without what the clock decides: # for a number, ## for several.

    Args:
        hidden: parts that are left out, too.
    """
    text = " ".join(text.split())
    for part in (*hidden, r"(, \d+% of drafts accepted)?; another --drafter may gain", "─+"):
        text = re.sub(part, "", text)
    text = re.sub(r"(?<![\w:])(?<![A-Za-z]-)\d+(?:[.,]\d+)*(?:e[+-]\d+)?", "#", text)
    one = r"[+-]?#[#x%/-]*"
    numbers = rf"(?<!\S){one}(?: (?:{one}|[±-]))+(?!\S)"
    return re.sub(numbers, "##", " ".join(text.split()))


def one_line_error(*arguments, code=2, input=None):
    """The one line that a failing command prints."""
    result = invoke(*arguments, input=input)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.output.strip().splitlines()
    assert len(lines) == 1, result.output
    assert lines[0].startswith("error: ")
    return lines[0]
