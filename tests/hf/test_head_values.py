"""Heads whose files hold values that no head has are refused by name, and not drafted with."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdec_hf.heads.files import load_head
from specdec_hf.heads.medusa import MedusaHeads
from specdec_hf.heads.parallel_files import load_medusa, save_medusa
from support import hf_models
from support.heads import head_folder, parallel_heads
from support.hf_models import one_thread  # noqa: F401  # autouse here


def twice(tensors):
    tensors["layers.0.hidden_norm.weight"] = tensors["midlayer.hidden_norm.weight"].clone()


def broken(name, change):
    def damage(tensors):
        tensors[name] = change(tensors[name])

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (broken("fc.weight", torch.Tensor.char), "fc.weight .* floating dtype, got torch.int8"),
        (broken("norm.weight", lambda x: x * torch.nan), "norm.weight .* must be finite"),
        (broken("fc.weight", lambda x: x / 0), "fc.weight .* must be finite"),
        (broken("d2t", lambda x: x + 0.7), "d2t must hold integers, got torch.float32"),
        (twice, "holds midlayer.hidden_norm.weight in two spellings"),
    ],
)
def test_wrong_tensors_are_refused_by_name(damage, message, tmp_path):
    path = head_folder(hf_models.tiny("llama"), tmp_path)
    tensors = load_file(path / "model.safetensors")
    damage(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_head(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be above 0, got 'x'"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be above 0, got True"),
        ({"rms_norm_eps": -5.0}, "rms_norm_eps must be above 0, got -5.0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be above 0, got 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be above 0, got nan"),
        ({"norm_before_residual": "false"}, "norm_before_residual must be .*, got 'false'"),
        ({"head_dim": "8"}, "head_dim must be an integer, got '8'"),
        ({"eagle_config": [1]}, r"eagle_config must be an object, got \[1\]"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "rope_parameters .*'foo'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.*factor"),
        ({"rope_parameters": None, "rope_theta": "a"}, "rope_parameters .*'rope_theta': 'a'"),
        ({"attention_dropout": "a"}, "attention_dropout"),
    ],
    ids=str,
)
def test_wrong_fields_are_refused_by_name(fields, message, tmp_path):
    path = head_folder(hf_models.tiny("llama"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ValueError, match=message):
        load_head(path)


@pytest.mark.parametrize("rows", [3, 100])
def test_output_matrices_of_other_sizes_than_the_vocabulary_are_refused(rows, tmp_path):
    target = hf_models.tiny("llama")
    head = parallel_heads(MedusaHeads, target, range(target.config.vocab_size))
    save_medusa(head, tmp_path, torch.float32)
    file = tmp_path / "medusa_lm_head.safetensors"
    tensors = load_file(file)
    for k in range(3):
        tensors[f"{k}.2.weight"] = torch.zeros(rows, target.config.hidden_size)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"must have vocab_size = \d+ rows, got {rows}"):
        load_medusa(tmp_path)
