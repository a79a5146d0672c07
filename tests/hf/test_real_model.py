"""The loop on SmolLM2-135M-Instruct: the same identities on real logits, text and stop strings."""

import pytest
import torch
from hf.recorded_ops import compile_on_cpu
from specdec_hf import EagleTree, generate
from support import hf_models
from support.cli_models import reported, says

from bench.tree_acceptance import encode

COPY = (
    "Repeat this sentence twice: The harbour ferry between Lindholm and the old fish market "
    "was out of service for four days last week."
)
QUESTIONS = ["Why is the sky blue?", COPY, "Name three colours of the rainbow and one animal."]


@pytest.fixture(scope="session")
def smollm():
    return hf_models.smollm()


@pytest.mark.full  # in make test the demo compares its greedy text
@pytest.mark.parametrize(
    ("questions", "tree"),
    [([COPY], None), (QUESTIONS[1:], (3, 2)), (QUESTIONS[1:], EagleTree(3, 3, 6))],
    ids=["chains", "tree", "eagle"],
)
def test_greedy_equals_model_generate(smollm, questions, tree):
    model, tokenizer, small = smollm
    inputs = encode(tokenizer, questions)
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    got = generate(
        model, **inputs, max_new_tokens=16, do_sample=False, guard=False, tree=tree,
        drafter=small if tree else "prompt_lookup", return_dict_in_generate=True,
    )  # fmt: skip
    assert got.sequences.tolist() == plain.tolist()
    assert got.stats.accepted > 0
    assert "Lindholm" in tokenizer.decode(got.sequences[0, inputs["input_ids"].shape[1] :])


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


def test_demo_answers_a_shipped_prompt_on_packed_weights(tmp_path):
    report, result = reported(tmp_path, "demo", "--limit", 1, "--max-new-tokens", 8)
    assert says(result, "greedy outputs identical yes")
    stats = report["prompts"][0]["turns"][0]["stats"]
    assert stats["drafted"] > 0
    assert stats["forwards"] == "packed"
    assert (stats["packed"]["layers"], stats["packed"]["drafts"][0]["layers"]) == (211, 9)
    answers, example = result.stdout.split("how answer ")
    assert "«drafted and accepted»" in example
    assert not set("«×‹") & set(answers)


@pytest.mark.build
def test_layers_that_inductor_compiled_give_the_same_text(monkeypatch):
    """The one test of inductor, with a CPU in the place of a CUDA device."""
    compile_on_cpu(monkeypatch)
    model = hf_models.build("llama")
    fast = hf_models.decode(model, (9,), compile=True, drafter="suffix_automaton")
    assert torch.equal(fast.sequences, hf_models.decode(model, (9,)).sequences)
    made = fast.stats.compiled
    assert (made.eager, made.graphs, made.recompilations) == ("", 2, 0)
