"""Files of heads, also in the layouts of their publishers: read, drafting, written, and refused."""

import json
from functools import partial

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from specdec_hf import Eagle3Drafter, EagleChainDrafter, generate
from specdec_hf.heads.blockwise import BlockwiseHeads, load_blockwise, save_blockwise
from specdec_hf.heads.dflash import load_dflash
from specdec_hf.heads.eagle import load_eagle, save_eagle
from specdec_hf.heads.eagle3.config import HeadConfig
from specdec_hf.heads.eagle3.files import load_head, save_as_speculators, save_head
from specdec_hf.heads.exit_head import load_exit, save_exit
from specdec_hf.heads.medusa import MedusaHeads, load_medusa, save_medusa
from specdec_hf.heads.pass_head import load_pass, save_pass
from specdec_hf.heads.peagle import load_peagle
from specdec_hf.schedules.base import MAX_DRAFT_LENGTH
from support import block_heads, hf_models, published_heads
from support.heads import (
    eagle_head,
    exit_head,
    head_folder,
    head_for,
    parallel_heads,
    pass_head,
    rounds_of,
)  # fmt: skip
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
    return hf_models.build("llama", layers=8)  # so that the default layers are 2, 4 and 5


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
    torch.testing.assert_close(dict(read.state_dict()), dict(state), rtol=0, atol=0)
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


KINDS = ("authors", "specforge", "speculators")
READ = {"authors": (2, 4, 5), "specforge": (1, 3, 4), "speculators": (1, 3, 4)}


def first_logits(target, folder, kind, monkeypatch):
    """Logits after a prompt, as the drafter of a folder computes them and as they must be."""
    prompt = hf_models.prompts((9,))["input_ids"]
    seen = []
    logits = "specdec_hf.heads.pairs.draft.HeadDraft._logits"
    monkeypatch.setattr(logits, lambda self, x: seen.append(self.head.logits(x)) or seen[-1])
    out = generate(target, prompt, drafter=Eagle3Drafter(folder), max_new_tokens=3, guard=False)
    text = out[:, : prompt.shape[1] + 1]
    states = target(text, output_hidden_states=True).hidden_states
    features = torch.cat([states[n] for n in READ[kind]], dim=-1)[:, :-1]
    tensors = load_file(folder / "model.safetensors")
    rows = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight)
    other = kind == "speculators"
    want = published_heads.expected_logits(
        tensors, rows[text[:, 1:]], features, norm_before_residual=other,
        layer="layers.0" if other else "midlayer", **published_heads.layer_fields(target),
    )  # fmt: skip
    return seen[0][0, -1], want[0, -1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_head_computes_what_its_publisher_computes(kind, target, tmp_path, monkeypatch):
    """From the layers that each layout means, with its embeddings and its residual."""
    folder = getattr(published_heads, kind)(target, tmp_path)
    got, want = first_logits(target, folder, kind, monkeypatch)
    assert want.std() > 0.5
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("authors", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}),
        ("authors", {"norm_before_residual": True}),
        ("speculators", {"norm_before_residual": False}),
    ],
)
def test_a_wrong_reading_of_a_field_is_found(kind, fields, target, tmp_path, monkeypatch):
    """Negative control of the test above."""
    folder = getattr(published_heads, kind)(target, tmp_path, **fields)
    got, want = first_logits(target, folder, kind, monkeypatch)
    assert (got - want).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_head_is_written_back_as_it_was(kind, target, tmp_path):
    (tmp_path / "given").mkdir()
    folder = getattr(published_heads, kind)(target, tmp_path / "given")
    given, head = load_file(folder / "model.safetensors"), load_head(folder)
    if kind == "speculators":
        save_as_speculators(head, tmp_path / "made", target, torch.float32)
    else:
        save_head(head, tmp_path / "made", torch.float32)
    made = load_file(tmp_path / "made" / "model.safetensors")
    torch.testing.assert_close(made, given, rtol=0, atol=0)
    read = load_head(tmp_path / "made")
    assert read.config.to_dict() == head.config.to_dict()
    if kind == "speculators":
        fields = json.loads((tmp_path / "made" / "config.json").read_text())
        assert fields.keys() == json.loads((folder / "config.json").read_text()).keys() | {
            "tie_word_embeddings"
        }


EAGLE_FIELDS = ({}, {"bias": False}, {"qkv_bias": True})


def eagle_states(target, folder, monkeypatch):
    """Hidden states of the first chain that a head drafts, and what they must be."""
    seen, states = [], "specdec_hf.heads.pairs.draft.HeadDraft._logits"
    monkeypatch.setattr(states, lambda self, x: seen.append(x) or self._in_vocabulary(
        self._step.logits(x)))  # fmt: skip
    (text,), draft = rounds_of(target, EagleChainDrafter(folder), (9,), gamma=3)[1][0]
    tokens = torch.tensor([text + draft.tokens[0, :2].tolist()])
    final = target(tokens[:, : len(text)], output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(target.lm_head(final), target(tokens[:, : len(text)]).logits)
    rows = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    features = final[:, :-1]
    want = []
    for count in range(3):  # each draft reads the state that the head gave before it
        embeddings = rows[tokens[:, 1 : len(text) + count]]
        out = published_heads.expected_eagle_states(target, folder, embeddings, features)
        want.append(out[0, -1])
        features = torch.cat([features, out[:, -1:]], dim=1)
    return torch.stack([x[0, -1] for x in seen[:3]]), torch.stack(want)


@pytest.mark.parametrize("fields", EAGLE_FIELDS, ids=str)
def test_a_head_of_the_first_eagle_computes_what_its_authors_compute(
    fields, target, tmp_path, monkeypatch
):
    folder = published_heads.eagle(target, tmp_path, **fields)
    got, want = eagle_states(target, folder, monkeypatch)
    assert want.std() > 0.5
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize("fields", EAGLE_FIELDS, ids=str)
def test_a_head_of_the_first_eagle_is_written_back_as_it_was(fields, target, tmp_path):
    folder = published_heads.eagle(target, tmp_path / "given", **fields)
    head = load_eagle(folder)
    save_eagle(head, tmp_path / "made", torch.float32)
    given, made = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "made"))
    assert made.keys() == given.keys() - {published_heads.FREQUENCIES}
    assert all(torch.equal(x, given[name]) for name, x in made.items())
    assert load_eagle(tmp_path / "made").config.to_dict() == head.config.to_dict()


@pytest.mark.parametrize(
    ("load", "publish", "message"),
    [
        (load_eagle, "authors", "draft_vocab_size: it belongs to a head of EAGLE-3, .* eagle3 re"),
        (load_eagle, "speculators", "belongs to a head of the library speculators"),
        (load_head, "eagle", "must hold draft_vocab_size; heads of the first EAGLE, which drafter"),
    ],
)
def test_a_head_of_the_other_eagle_is_refused_by_name(load, publish, message, target, tmp_path):
    folder = getattr(published_heads, publish)(target, tmp_path)
    if publish == "speculators":
        config = json.loads((folder / "config.json").read_text())
        del config["draft_vocab_size"]
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_the_layers_are_written_in_both_spellings():
    config = HeadConfig.for_target(hf_models.tiny("llama"), 5, (1, 2)).to_dict()
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert HeadConfig.from_dict(config).layers == (1, 2)
    del config["eagle_aux_hidden_state_layer_ids"]
    assert HeadConfig.from_dict(config).layers == (1, 2)


def test_the_state_before_the_final_norm_is_refused_and_the_one_after_it_is_not(tmp_path):
    """Only training here writes heads that read the state after the norm, and it says so."""
    target, prompts = hf_models.tiny("llama"), hf_models.prompts((4,))
    folder = head_folder(target, tmp_path)
    plain = generate(target, **prompts, drafter=None, max_new_tokens=4)
    options = {**prompts, "drafter": f"eagle3_chain:{folder}", "max_new_tokens": 4}
    assert torch.equal(generate(target, **options), plain)
    config = json.loads((folder / "config.json").read_text())
    assert max(config["eagle_aux_hidden_state_layer_ids"]) == target.config.num_hidden_layers
    assert config.pop("final_state_after_norm")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"states after 2 layers, and must read .* model's 2"):
        generate(target, **options)
