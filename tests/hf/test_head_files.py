"""Files of heads: read back as they were written, and refused by name where they are damaged."""

import json
from functools import partial

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from specdec_hf.heads.blockwise import BlockwiseHeads, load_blockwise, save_blockwise
from specdec_hf.heads.dflash import load_dflash
from specdec_hf.heads.eagle import load_eagle, save_eagle
from specdec_hf.heads.eagle3.files import load_head, save_head
from specdec_hf.heads.exit_head import load_exit, save_exit
from specdec_hf.heads.medusa import MedusaHeads, load_medusa, save_medusa
from specdec_hf.heads.pass_head import load_pass, save_pass
from specdec_hf.heads.peagle import load_peagle
from specdec_hf.schedules.base import MAX_DRAFT_LENGTH
from support import block_heads, hf_models, published_heads
from support.heads import eagle_head, exit_head, head_for, parallel_heads, pass_head
from support.published_heads import MEDUSA_WEIGHTS

WEIGHTS = "model.safetensors"


def with_its_own_output(target):
    head = head_for(target)
    head.lm_head, head.own_lm_head = head.lm_head + 1, True
    return head


# How a head is made, written and read.
HEADS = {
    "eagle3": (head_for, save_head, load_head),
    "eagle3 with its own output": (with_its_own_output, save_head, load_head),
    "eagle": (eagle_head, save_eagle, load_eagle),
    "medusa": (partial(parallel_heads, MedusaHeads), save_medusa, load_medusa),
    "blockwise": (partial(parallel_heads, BlockwiseHeads), save_blockwise, load_blockwise),
    "exit": (exit_head, save_exit, load_exit),
    "pass": (pass_head, save_pass, load_pass),
}
PUBLISHED = {
    "speculators": (published_heads.speculators, load_head),
    "published medusa": (published_heads.medusa, load_medusa),
    "dflash": (block_heads.dflash, load_dflash),
    "peagle": (block_heads.peagle, load_peagle),
}


@pytest.fixture(scope="module")
def target():
    return hf_models.tiny("llama")


def write(kind, target, folder):
    """Write a head; returns the function that reads such heads."""
    if kind in PUBLISHED:
        publish, load = PUBLISHED[kind]
        publish(target, folder)
        return load
    make, save, load = HEADS[kind]
    save(make(target), folder, torch.float32)
    return load


def fields_of(head):
    return head.config.to_dict() if hasattr(head.config, "to_dict") else head.config


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_read_back_as_it_was_written(kind, target, tmp_path):
    head = HEADS[kind][0](target)
    read = write(kind, target, tmp_path)(tmp_path)
    state = head.state_dict()
    assert fields_of(read) == fields_of(head)
    assert read.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[name]) for name, x in read.state_dict().items())
    if kind in ("exit", "pass"):
        assert load_file(tmp_path / WEIGHTS).keys() == state.keys()
    else:
        assert read.tokens.tolist() == head.tokens.tolist()
        assert read.own_lm_head == head.own_lm_head == ("own" in kind)
    if "own" in kind:
        assert torch.equal(read.lm_head, head.lm_head)


def change(held, changes):
    """Give names other values; None takes one away, and a function is called with the value."""
    for name, value in changes.items():
        other = value(held[name]) if callable(value) else value
        held.pop(name, None)
        if other is not None:
            held[name] = other


def inside(name, value):
    return {"transformer_layer_config": lambda fields: fields | {name: value}}


def drafting(tokens):
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": tokens}]}}


def outputs(*shape):
    return {f"{k}.1.weight": torch.zeros(*shape) for k in range(4)}


AUX = "aux_hidden_state_layer_ids"
TYPE = "speculators_model_type"
SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0] * 4,
}
LAYERS = "eagle_aux_hidden_state_layer_ids"
GATE = "layers.0.mlp.gate"
NARROW = {"fc.weight": torch.zeros(32, 144), "embed_tokens.weight": None}
NORM = "midlayer.hidden_norm.weight"
# The kind of head, changed fields of config.json, changed tensors, and the message.
DAMAGED = [
    ("eagle3", {}, {"fc.weight": None}, "lacks fc.weight"),
    ("eagle3", {}, {"medusa": torch.zeros(1)}, "holds medusa, which no EAGLE-3 head has"),
    ("eagle3", {}, {"fc.weight": torch.zeros(3, 2)}, r"fc.w.* must be \[32, 96\], got \[3, 2\]"),
    ("eagle3", {}, {"fc.weight": lambda x: x / 0}, "fc.weight .* must be finite"),
    ("eagle3", {}, {"d2t": lambda x: 0 * x + 5}, r"d2t must lead to .* got 5 to 70, 66 of 66"),
    ("eagle3", {}, {"layers.0.hidden_norm.weight": torch.ones(32)}, f"holds {NORM} in two spell"),
    ("eagle", {}, {"fc.bias": None}, "lacks fc.bias"),
    ("eagle", {}, {"layers.0.input_layernorm.weight": torch.ones(32)}, "which no EAGLE head has"),
    ("eagle", {"bias": "no"}, {}, "bias must be true or false, got 'no'"),
    ("eagle", {"num_hidden_layers": 2}, {}, "num_hidden_layers of a head must be 1, got 2"),
    ("eagle3", {"hidden_size": None}, {}, "must hold hidden_size"),
    ("eagle3", {"hidden_size": "32"}, {}, "hidden_size must be an integer, got '32'"),
    ("eagle3", {"num_hidden_layers": 2}, {}, "num_hidden_layers of a head must be 1, got 2"),
    ("eagle3", {"rms_norm_eps": "x"}, {}, "rms_norm_eps must be above 0, got 'x'"),
    ("eagle3", {"norm_before_residual": "false"}, {}, "norm_before_residual must.*, got 'false'"),
    ("eagle3", {"eagle_config": [1]}, {}, r"eagle_config must be an object, got \[1\]"),
    ("eagle3", {"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, {}, "rope_p.*'foo'"),
    ("speculators", {}, {f"{GATE}_proj.weight": None, f"{GATE}.weight": torch.zeros(1)},
     "lacks midlayer.mlp.gate_proj.weight and holds midlayer.mlp.gate.weight"),
    ("speculators", {}, {"layers.0.self_attn.q_proj.bias": torch.zeros(48)},
     "holds midlayer.self_attn.q_proj.bias, which no EAGLE-3 head has"),
    ("speculators", {"target_hidden_size": 48}, NARROW, "lacks embed_tokens.weight"),
    ("speculators", {}, {"t2d": lambda x: x.roll(1)}, "t2d of .* must mark the tokens of d2t and"),
    ("speculators", {"speculators_model_type": "mtp"}, {}, "model_type .* eagle3, got 'mtp'"),
    ("speculators", {"transformer_layer_config": None}, {}, "must hold transformer_layer_config"),
    ("speculators", {"norm_before_residual": None}, {}, "must hold norm_before_residual"),
    ("speculators", {"fc_norm": True}, {}, "fc_norm of a head must be False, got True"),
    ("speculators", inside("model_type", "qwen3"), {}, "model_type.* must be llama, got 'qwen3'"),
    ("speculators", {LAYERS: 3}, {}, "layer_ids must list integers, got 3"),
    ("published medusa", {}, {"1.0.linear.bias": None}, "lacks 1.0.linear.bias"),
    ("published medusa", {}, {"1.0.gate": torch.ones(1)}, "holds 1.0.gate, which no MedusaHeads"),
    ("published medusa", {}, {"2.1.weight": torch.ones(9, 32)}, r"2.1.* \[67, 32\], got \[9, 32\]"),
    ("published medusa", {}, {"3.1.weight": None}, "lacks 3.1.weight"),
    ("published medusa", {"medusa_num_heads": 5}, {}, "lacks 4.0.linear.bias, 4.0.linear.weight"),
    ("published medusa", {"medusa_num_layers": None}, {}, "must hold medusa_num_layers"),
    ("published medusa", {"medusa_num_layers": 10**9}, {}, r"num_layers must be .*, got 10{9}"),
    ("published medusa", {"medusa_num_heads": 1025}, {}, r"be .* in \[1, 1024\], got 1025"),
    ("published medusa", {}, {"1024.1.weight": torch.ones(1)}, r"be .* in \[1, 1024\], got 1025"),
    ("blockwise", {"num_heads": 1025}, {}, r"num_heads must be .* in \[1, 1024\], got 1025"),
    ("published medusa", {}, {"d2t": torch.ones(3)}, "must hold vocab_size"),
    ("published medusa", {"vocab_size": 67}, outputs(3, 32), "vocab_size = 67 rows, got 3"),
    ("dflash", {TYPE: None}, {}, "dflash head must hold speculators_model_type: .* convert"),
    ("dflash", {TYPE: "dflash2"}, {}, "speculators_model_type .* be dflash, got 'dflash2'"),
    ("dflash", {"transformer_layer_config": 3}, {}, "must hold transformer_layer_config"),
    ("dflash", inside("model_type", "qwen3_next"), {}, "must be llama or qwen3, got 'qwen3_next'"),
    ("dflash", inside("num_hidden_layers", 3), {}, "layer"),
    ("dflash", inside("attention_bias", True), {}, "attention_bias of a head must be False"),
    ("dflash", inside("hidden_act", "gelu"), {}, "hidden_act of a head must be silu, got 'gelu'"),
    ("dflash", inside("layer_types", ["chunked_attention"] * 2), {}, "'chunked_attention'"),
    ("dflash", {"transformer_layer_config": lambda inner: inner | SLIDING}, {},
     "sliding_window must be an integer, got None"),
    ("dflash", inside("rope_parameters", LONG), {}, "rope_parameters must turn the whole of a"),
    ("dflash", {"target_hidden_size": 64}, {}, "must be its hidden_size 32, got 64"),
    ("dflash", {AUX: [1, 1]}, {}, r"ids must list different integers, got \[1, 1\]"),
    ("dflash", {AUX: None}, {}, "ids must list different integers, got None"),
    ("dflash", {AUX: [0, -1]}, {}, "ids must be at least 0, got -1"),
    ("dflash", {"mask_token_id": None}, {}, "must hold mask_token_id"),
    ("dflash", {"mask_token_id": 67}, {}, r"mask_token_id must be .* in \[0, 66\], got 67"),
    ("dflash", {"draft_vocab_size": 68}, {}, r"draft_vocab_size must be .* in \[1, 67\], got 68"),
    ("dflash", {"block_size": 1}, {}, r"block_size must be .* in \[2, 1025\], got 1$"),
    ("dflash", {"block_size": 1026}, {}, r"block_size must be .* in \[2, 1025\], got 1026"),
    ("dflash", {"block_size": 1025, "sample_from_anchor": True}, {},
     r"block_size must be .* in \[1, 1024\], got 1025"),
    ("dflash", {"sample_from_anchor": 1}, {}, "sample_from_anchor must be true or false, got 1"),
    ("dflash", {}, {"hidden_norm.weight": None}, "lacks hidden_norm.weight"),
    ("dflash", {}, {"d2t": None}, "lacks d2t"),
    ("dflash", {}, {"markov.weight": torch.ones(1)}, "markov.weight, which no DFlashHead has"),
    ("peagle", {TYPE: "eagle3"}, {}, "be peagle, got 'eagle3', which drafter eagle3 reads"),
    ("speculators", {TYPE: "dflash"}, {}, "be eagle3, got 'dflash', which drafter dflash reads"),
    ("peagle", {LAYERS: None}, {}, "ids must list different integers, got None"),
    ("peagle", {"norm_before_fc": True, "fc_norm": True}, {}, "false with fc_norm, got both"),
    ("peagle", {"norm_before_residual": "no"}, {}, "norm_before_residual must be .*, got 'no'"),
    ("peagle", drafting(0), {}, r"speculative_tokens must be .* in \[1, 1024\], got 0"),
    ("peagle", drafting(1025), {}, r"speculative_tokens must be .* in \[1, 1024\], got 1025"),
    ("peagle", {"fc_norm": True}, {}, "lacks fc_norm.0.weight, fc_norm.1.weight"),
    ("peagle", {}, {"mask_hidden": None}, "lacks mask_hidden"),
    ("peagle", {}, {"mask_hidden": torch.ones(64)}, r"must be \[1, 1, 64\], got \[64\]"),
    ("peagle", {}, {"t2d": lambda x: x.roll(1)}, "t2d of .* must mark the tokens of d2t and"),
    ("exit", {"layer": None}, {}, "must hold layer"),
    ("exit", {}, {"norm.weight": None}, "lacks norm.weight"),
    ("exit", {}, {"fc.weight": torch.ones(2)}, "holds fc.weight, which no ExitHead has"),
    ("pass", {"num_embeddings": None}, {}, "must hold num_embeddings"),
    ("pass", {"num_embeddings": 1024}, {}, r"must be .* in \[1, 1023\], got 1024"),
    ("pass", {"num_embeddings": 4}, {}, r"embeddings of .* must be \[4, 32\], got \[3, 32\]"),
    ("pass", {}, {"bias": torch.ones(2)}, "holds bias, which no PassHead has"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "tensors", "message"), DAMAGED)
def test_a_damaged_head_is_refused_by_name(kind, fields, tensors, message, target, tmp_path):
    load = write(kind, target, tmp_path)
    file = tmp_path / (MEDUSA_WEIGHTS if "medusa" in kind else WEIGHTS)
    config, held = json.loads((tmp_path / "config.json").read_text()), load_file(file)
    change(config, fields)
    change(held, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(held, file)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("dflash", {"block_size": 1025}),
        ("dflash", {"block_size": 1024, "sample_from_anchor": True}),
        ("peagle", drafting(1024)),
    ],
)
def test_a_head_may_draft_as_many_tokens_as_a_call(kind, fields, target, tmp_path):
    load, path = write(kind, target, tmp_path), tmp_path / "config.json"
    config = json.loads(path.read_text())
    change(config, fields)
    path.write_text(json.dumps(config))
    assert load(tmp_path).config.num_drafts == MAX_DRAFT_LENGTH


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (WEIGHTS, None, "model.safetensors is missing"),
        (WEIGHTS, "x", "cannot read .*safetensors"),
        ("config.json", None, "cannot read a head's .*config.json"),
        ("config.json", "[]", "config.json must hold an object, got list"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(name, content, message, target, tmp_path):
    load = write("eagle3", target, tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "weights", "name"),
    [
        ("eagle3", WEIGHTS, "pytorch_model.bin"),
        ("eagle3", WEIGHTS, "model.pt"),
        ("published medusa", MEDUSA_WEIGHTS, "medusa_lm_head.pt"),
    ],
)
def test_a_pickle_is_refused_with_the_way_to_convert_it(
    kind, weights, name, target, tmp_path, monkeypatch
):
    load = write(kind, target, tmp_path)
    want = load(tmp_path).state_dict()
    torch.save(load_file(tmp_path / weights), tmp_path / name)
    (tmp_path / weights).unlink()
    with pytest.raises(ValueError, match=r"is a pickle, .* convert it") as refusal:
        load(tmp_path)
    command = str(refusal.value).split("where you trust it: ")[1]
    monkeypatch.chdir(tmp_path)
    exec(command, {"torch": torch, "safetensors": safetensors})
    assert all(torch.equal(x, want[key]) for key, x in load(tmp_path).state_dict().items())
