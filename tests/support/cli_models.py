"""A tiny random model with a byte tokenizer on disk: a folder, a snapshot of the hub, a GGUF file.

The command line runs on it within this process.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from pathlib import Path

import gguf
import pytest
import torch
from specdec_hf.cli.app import app
from support import encoder_models, hf_models
from support.toy_tokenizers import END, TEMPLATE, tokenizer
from typer import testing

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
    encoder_models.build(name, END + 1, seed).save_pretrained(path)
    tokenizer(None).save_pretrained(path)
    return path


def write_gguf(path: Path) -> Path:
    """A GGUF file of a tiny llama with the same tokenizer."""
    model = hf_models.build("llama", vocab_size=END + 1)
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
    made = tokenizer()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(made.convert_ids_to_tokens(list(range(END + 1))))
    writer.add_token_types([1] * END + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(END)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        count = heads.get(name.split(".")[-2])
        order = torch.arange(len(weight))
        if count:  # llama.cpp rotates neighbours, Transformers rotates halves
            order = order.view(count, 2, -1).transpose(1, 2).flatten()
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)), weight[order].float().numpy()
        )
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
