"""P-EAGLE and DFlash: what a pass over mask tokens computes, and what its drafts depend on."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdec_hf import DFlashDrafter, PEagleDrafter, generate
from specdec_hf.heads.dflash import load_dflash, save_dflash
from specdec_hf.heads.peagle import load_peagle, save_peagle
from support import block_heads, hf_models
from support.block_heads import DRAFTS, LAYERS, Reference
from support.heads import rounds_of

SAMPLED = {"do_sample": True, "seed": [5, 6, 7], "gamma": 2 * DRAFTS}
SLIDING = {"types": ("sliding", "full"), "window": 3}
DRAFTERS = {"dflash": DFlashDrafter, "peagle": PEagleDrafter}
FILES = {"dflash": (load_dflash, save_dflash), "peagle": (load_peagle, save_peagle)}
# The kind of head and fields of config.json.
CASES = {
    "dflash": ("dflash", {}),
    "dflash, windows": ("dflash", SLIDING),
    "dflash, windows both ways": ("dflash", SLIDING | {"sliding_window_non_causal": True}),
    "dflash, from the anchor": (
        "dflash", {"sample_from_anchor": True, "block_size": DRAFTS, "draft": 67},
    ),
    "peagle": ("peagle", {"draft": 67}),
    "peagle, one Llama layer": ("peagle", {"types": ("full",), "model_type": "llama"}),
    "peagle, windows": ("peagle", SLIDING | {"norm_before_residual": True}),
    "peagle, features normalised": ("peagle", {"norm_before_fc": True}),
    "peagle, each layer's normalised": ("peagle", {"fc_norm": True, "model_type": "llama"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return hf_models.tiny("llama")


def made(name, target, folder):
    kind, fields = CASES[name]
    return kind, getattr(block_heads, kind)(target, folder, **fields)


def differences(reference, rounds):
    """How far the logits of each draft of a sequence are from the reference's."""
    found = []
    for texts, draft in rounds:
        rows = draft.distribution.logits
        for b, count in enumerate(draft.counts):
            if count:
                got, want = rows[b, :count].double(), reference.logits(texts[b])[:count]
                other = torch.ones(rows.shape[-1], dtype=torch.bool)
                other[reference.tokens] = False
                assert got[:, other].eq(-torch.inf).all()
                found.append(float((got[:, reference.tokens] - want).abs().max()))
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_pass_computes_what_the_layout_means(name, target, tmp_path):
    """Of every round of a ragged batch, against a reference that goes place by place."""
    kind, folder = made(name, target, tmp_path)
    _, rounds = rounds_of(target, DRAFTERS[kind](folder), (9, 4, 12), **SAMPLED)
    found = differences(Reference(target, folder), rounds)
    assert len(found) > 12
    assert max(int(draft.counts.max()) for _, draft in rounds) == DRAFTS
    assert max(found) < 1e-4


def inside(name, value):
    return {"transformer_layer_config": lambda inner: inner | {name: value}}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dflash", {LAYERS["dflash"]: [0, 1]}),
        ("dflash", {"mask_token_id": 5}),
        ("dflash, windows", {"sliding_window_non_causal": True}),
        ("dflash, windows", inside("sliding_window", 4)),
        ("dflash, windows", inside("layer_types", ["full_attention", "sliding_attention"])),
        ("dflash, from the anchor", {"sample_from_anchor": False}),
        ("peagle", {LAYERS["peagle"]: [0, 1]}),
        ("peagle", {"mask_token_id": 5}),
        ("peagle", inside("rope_parameters", {"rope_type": "default", "rope_theta": 70.0})),
        ("peagle, windows", {"norm_before_residual": False}),
        ("peagle, windows", inside("sliding_window", 2)),
    ],
)
def test_a_wrong_reading_of_a_field_is_found(name, fields, target, tmp_path):
    """Negative control of the test above."""
    kind, folder = made(name, target, tmp_path)
    reference, path = Reference(target, folder), folder / "config.json"
    config = json.loads(path.read_text())
    for field, value in fields.items():
        config[field] = value(config[field]) if callable(value) else value
    path.write_text(json.dumps(config))
    _, rounds = rounds_of(target, DRAFTERS[kind](folder), (9, 4, 12), **SAMPLED)
    assert max(differences(reference, rounds[:3])) > 1e-2


def test_embeddings_in_a_file_of_dflash_are_not_its_own(target, tmp_path):
    """Nor is the output matrix of the whole vocabulary: the library overwrites both."""
    folder, seen = block_heads.dflash(target, tmp_path, draft=67), []
    file = folder / "model.safetensors"
    rows = {name: torch.ones(67, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
    for tensors in (load_file(file), load_file(file) | rows):
        save_file(tensors, file)
        _, rounds = rounds_of(target, DFlashDrafter(folder), (9,), **SAMPLED | {"seed": 5})
        seen.append([draft.distribution.logits for _, draft in rounds])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


@pytest.mark.parametrize("kind", FILES)
def test_a_block_may_reach_beyond_the_context(kind, target, tmp_path):
    """Its places do; the tokens that are drafted do not."""
    folder, inputs = getattr(block_heads, kind)(target, tmp_path), hf_models.prompts((250, 3))
    settings = {"max_new_tokens": 6, "do_sample": False}
    plain = generate(target, **inputs, **settings, drafter=None)
    out, rounds = rounds_of(target, DRAFTERS[kind](folder), (250, 3), **settings, gamma=DRAFTS)
    assert out.sequences.tolist() == plain.tolist()
    for texts, draft in rounds:
        ends = [len(text) + count for text, count in zip(texts, draft.counts, strict=True)]
        assert max(ends) <= 256


@pytest.mark.parametrize("name", CASES)
def test_a_head_is_written_back_as_it_was(name, target, tmp_path):
    (tmp_path / "given").mkdir()
    kind, folder = made(name, target, tmp_path / "given")
    load, save = FILES[kind]
    head, given = load(folder), load_file(folder / "model.safetensors")
    save(head, tmp_path / "made", torch.float32)
    made_again = load_file(tmp_path / "made" / "model.safetensors")
    torch.testing.assert_close(made_again, given, rtol=0, atol=0)
    assert load(tmp_path / "made").config.to_dict() == head.config.to_dict()
    fields = [
        json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "made")
    ]
    assert fields[0].keys() == fields[1].keys()
    inner = [one.pop("transformer_layer_config") for one in fields]
    drafting = [one.pop("speculators_config")["proposal_methods"][0] for one in fields]
    assert fields[0] | {"verifier": None} == fields[1] | {"verifier": None}
    assert inner[0].items() <= {**inner[1], "sliding_window": inner[0]["sliding_window"]}.items()
    assert drafting[0].items() <= drafting[1].items()


@pytest.mark.parametrize("kind", FILES)
def test_a_target_is_named_and_gives_the_rows_that_a_head_has_not(kind, target, tmp_path):
    """So that other readers of the layout find all weights in the file."""
    load, save = FILES[kind]
    head = load(getattr(block_heads, kind)(target, tmp_path / "given"))
    head.own_lm_head = False
    save(head, tmp_path / "made", torch.float32, target)
    written = load_file(tmp_path / "made" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(written, target.get_output_embeddings().weight[head.tokens])


@pytest.mark.parametrize("kind", FILES)
def test_a_target_without_the_layers_of_a_head_is_refused(kind, target, tmp_path):
    """Also where the layer is its last, whose state is kept after the norm alone."""
    folder = getattr(block_heads, kind)(target, tmp_path, **{LAYERS[kind]: [0, 2]})
    with pytest.raises(ValueError, match=r"states after 2 layers, and must read .* model's 2"):
        generate(target, **hf_models.prompts((4,)), drafter=f"{kind}:{folder}", max_new_tokens=4)
