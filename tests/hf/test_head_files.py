"""Files of heads in every layout: read, written back, and refused by the name of what is wrong."""

import json

import pytest
import safetensors.torch
import torch
from hf.published_heads import FREQUENCIES, LAYOUTS, MEDUSA_WEIGHTS, WEIGHTS, publish
from safetensors.torch import load_file, save_file
from specdec_hf.drafting.registry import class_of
from specdec_hf.heads.dflash import save_dflash
from specdec_hf.heads.eagle3.files import save_as_speculators
from specdec_hf.heads.peagle import save_peagle
from support import hf_models
from support.heads import MADE, folder_of

OWN = ("eagle3, trained here", "blockwise", "exit_head", "pass_head")
SAVE = {kind: save for kind, (_, save) in MADE.items()}
SAVE |= {"dflash": save_dflash, "peagle": save_peagle}


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", layers=8)  # so that the default layers are 2, 4 and 5


def kind_of(name):
    return name.partition(",")[0]


def load(name, folder):
    return class_of(kind_of(name)).load(folder)


def fields_of(head):
    return head.config.to_dict() if hasattr(head.config, "to_dict") else head.config


def write(name, target, folder):
    made = (
        publish(name, target, folder)
        if name in LAYOUTS
        else folder_of(kind_of(name), target, folder)
    )
    return made, made / (MEDUSA_WEIGHTS if kind_of(name) == "medusa" else WEIGHTS)


@pytest.mark.parametrize("name", [*LAYOUTS, *OWN])
def test_a_head_is_written_back_as_it_was(name, target, tmp_path):
    folder, file = write(name, target, tmp_path)
    head, given, again = load(name, folder), load_file(file), tmp_path / "again"
    if name == "eagle3, speculators":
        save_as_speculators(head, again, target, torch.float32)
    else:
        SAVE[kind_of(name)](head, again, torch.float32)
    given.pop(FREQUENCIES, None)
    torch.testing.assert_close(load_file(again / file.name), given, rtol=0, atol=0)
    assert fields_of(load(name, again)) == fields_of(head)
    old, new = (json.loads((one / "config.json").read_text()) for one in (folder, again))
    if "speculators_config" in old:
        inner = [one.pop("transformer_layer_config") for one in (old, new)]
        drafting = [one.pop("speculators_config")["proposal_methods"][0] for one in (old, new)]
        assert drafting[0].items() <= drafting[1].items()
        assert old.keys() == new.keys()
        assert {x: new[x] for x, given in old.items() if given is not None}.items() <= old.items()
        shared = inner[0].keys() & inner[1].keys() - {"sliding_window"}
        assert [inner[0][x] for x in shared] == [inner[1][x] for x in shared]


@pytest.mark.parametrize("kind", ["dflash", "peagle"])
def test_a_target_is_named_and_gives_the_rows_that_a_head_has_not(kind, target, tmp_path):
    """So that other readers of the layout find all weights in the file."""
    head = load(kind, publish(kind, target, tmp_path / "given"))
    head.own_lm_head = False
    SAVE[kind](head, tmp_path / "made", torch.float32, target)
    written = load_file(tmp_path / "made" / WEIGHTS)["lm_head.weight"]
    assert torch.equal(written, target.get_output_embeddings().weight[head.tokens])


def change(held, changes):
    """Give names other values; None takes one away, and a function is called with the value."""
    for name, value in changes.items():
        held[name] = value(held[name]) if callable(value) else value
    return {name: value for name, value in held.items() if value is not None}


def damage(name, target, folder, fields, tensors):
    folder, file = write(name, target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config, fields)))
    save_file(change(load_file(file), tensors), file)
    return folder


def inside(name, value):
    return {"transformer_layer_config": lambda fields: fields | {name: value}}


def drafting(tokens):
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": tokens}]}}


def outputs(*shape):
    return {f"{k}.1.weight": torch.zeros(*shape) for k in range(4)}


SPECULATORS = "eagle3, speculators"
TYPE = "speculators_model_type"
SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3, "long_factor": [1.0] * 3,
}  # fmt: skip
NARROW = {"fc.weight": torch.zeros(32, 144), "embed_tokens.weight": None}
NORM = "midlayer.hidden_norm.weight"
# The layout, changed fields of config.json, changed tensors, and the message.
DAMAGED = [
    # What tensors there are, and what they hold.
    ("peagle", {}, {"mask_hidden": None}, "lacks mask_hidden"),
    (SPECULATORS, {"target_hidden_size": 48}, NARROW, "lacks embed_tokens.weight"),
    ("exit_head", {}, {"x.weight": torch.ones(2)}, "holds x.weight, which no .* has"),
    ("eagle3", {}, {"layers.0.hidden_norm.weight": torch.ones(32)}, f"holds {NORM} in two spell"),
    ("pass_head", {"num_embeddings": 4}, {}, r"embeddings of .* must be \[4, 32\], got \[3, 32\]"),
    ("medusa", {"vocab_size": 67}, outputs(3, 32), "vocab_size = 67 rows, got 3"),
    ("blockwise", {}, {"hidden.bias": lambda x: x / 0}, "hidden.bias .* must be finite"),
    ("eagle3", {}, {"d2t": lambda x: 0 * x + 40, "t2d": None}, "d2t must .* 40 to 76, 37"),
    (SPECULATORS, {}, {"t2d": lambda x: x.roll(1)}, "t2d of .* must mark the tokens of d2t and"),
    # What config.json says of them.
    ("medusa", {"medusa_num_layers": None}, {}, "must hold medusa_num_layers"),
    ("peagle", drafting(1025), {}, r"speculative_tokens must be .* in \[1, 1024\], got 1025"),
    ("dflash", {"block_size": 1}, {}, r"block_size must be .* in \[2, 1025\], got 1$"),
    ("eagle3", {"num_hidden_layers": 2}, {}, "num_hidden_layers of a head must be 1, got 2"),
    ("eagle3", {"norm_before_residual": "false"}, {}, "norm_before_residual must.*, got 'false'"),
    ("eagle3", {"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, {}, "rope_p.*'foo'"),
    ("dflash", inside("rope_parameters", LONG), {}, "rope_parameters must turn the whole of a"),
    ("dflash", {"mask_token_id": 67}, {}, r"mask_token_id must be .* in \[0, 66\], got 67"),
    ("dflash", {"transformer_layer_config": lambda inner: inner | SLIDING}, {},
     "sliding_window must be an integer, got None"),
    # What no head here computes.
    ("peagle", {TYPE: "eagle3"}, {}, "be peagle, got 'eagle3', which drafter eagle3 reads"),
    ("peagle", {"norm_before_fc": True, "fc_norm": True}, {}, "false with fc_norm, got both"),
    ("dflash", inside("layer_types", ["chunked_attention"] * 2), {}, "'chunked_attention'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "tensors", "message"), DAMAGED)
def test_a_damaged_head_is_refused_by_name(name, fields, tensors, message, target, tmp_path):
    folder = damage(name, target, tmp_path, fields, tensors)
    with pytest.raises(ValueError, match=message):
        load(name, folder)


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
    folder, _ = write("eagle3", target, tmp_path)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load("eagle3", folder)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("eagle3", "pytorch_model.bin"), ("medusa", "medusa_lm_head.pt")],
)
def test_a_pickle_is_refused_with_the_way_to_convert_it(kind, name, target, tmp_path, monkeypatch):
    folder, file = write(kind, target, tmp_path)
    want = load(kind, folder).state_dict()
    torch.save(load_file(file), folder / name)
    file.unlink()
    with pytest.raises(ValueError, match=r"is a pickle, .* convert it") as refusal:
        load(kind, folder)
    command = str(refusal.value).split("where you trust it: ")[1]
    monkeypatch.chdir(folder)
    exec(command, {"torch": torch, "safetensors": safetensors})
    assert all(torch.equal(x, want[key]) for key, x in load(kind, folder).state_dict().items())


@pytest.mark.parametrize(
    ("kind", "published", "message"),
    [
        ("eagle", "eagle3", "draft_vocab_size: it belongs to a head of EAGLE-3, .* eagle3 reads"),
        ("eagle", "eagle3, speculators", "belongs to a head of the library speculators"),
        ("eagle3", "eagle", "must hold draft_vocab_size; heads of the first EAGLE, which drafter"),
    ],
)
def test_a_head_of_the_other_eagle_is_refused_by_name(kind, published, message, target, tmp_path):
    fields = {"draft_vocab_size": None} if "speculators" in published else {}
    folder = damage(published, target, tmp_path, fields, {})
    with pytest.raises(ValueError, match=message):
        load(kind, folder)
