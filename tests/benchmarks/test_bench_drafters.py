"""The benchmarks of drafters, on toys.

A replay of greedy texts counts what the loop counts with a head; the measurements of a draft model
that learns and of drafts over a sparse cache.
"""

import pytest
import torch
from specdec_hf import generate
from specdec_hf.heads.eagle3.drafter import Eagle3ChainDrafter
from specdec_lab.analysis.replay import write_text
from specdec_papers.distilled import DistilledDrafter
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from transformers import DynamicCache

from bench import online_distillation, sparse_cache
from bench.head_acceptance import GAMMAS, count, read

pytestmark = pytest.mark.build

PROMPT = 9


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", vocab_size=40)


@pytest.fixture(scope="module")
def text(target):
    inputs = hf_models.prompts((PROMPT,), vocab_size=40)
    return write_text(target, inputs, {"max_new_tokens": 40, "do_sample": False}, 0)


def test_the_rounds_are_those_of_a_call(target, text):
    """And the places are those of the answer, with the one after its last token."""
    head = hf_models.learnt(target, text.tokens.tolist(), steps=2, rate=0.003)
    counts = count(head, target, text, read(target, text))
    for gamma in GAMMAS:
        out = generate(
            target, torch.from_numpy(text.tokens[None, :PROMPT]),
            drafter=Eagle3ChainDrafter(head, draft_weights="float"),
            num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", guard=False,
            max_new_tokens=len(text.tokens) - PROMPT, do_sample=False, return_dict_in_generate=True,
        )  # fmt: skip
        assert out.sequences[0].tolist() == text.tokens.tolist()
        stats = out.stats
        assert 0 < stats.accepted < stats.drafted
        assert counts.rounds[gamma] == stats.rounds - 1  # the first reads the prompt
        assert counts.tokens[gamma] == stats.accepted + stats.rounds - 1
    assert counts.places.tolist() == [len(text.tokens) - PROMPT + 1] * 5
    assert all(0 <= share <= 1 for share in counts.greedy + counts.drawn)


def test_rates_are_those_before_and_after_the_stream():
    model = hf_models.tiny("llama")
    drafter = DistilledDrafter(hf_models.with_noise(model, 0.4), learning_rate=3e-3)
    questions = [hf_models.prompts((9,), seed=n) for n in range(9)]
    rows = online_distillation.run_stream(
        model, drafter, questions[2:], questions[:2], tokens=12, every=4
    )
    assert [row["questions"] for row in rows] == [0, 4, 7]
    assert 0 <= rows[0]["held_out"] < rows[2]["held_out"] <= 1


SMALL = "sparse_cache:budget=12,chunk=2,sinks=1,recent=3"


def test_calls_go_on_from_copies_of_one_cache():
    """So that all have the tokens of plain decoding; random keys and values are the control."""
    model, ids = hf_models.tiny("llama"), hf_models.prompts((40,))["input_ids"]
    past = DynamicCache()
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=past, use_cache=True)
    names = ("none", SMALL, f"{SMALL}+prompt_lookup", "sparse_cache:budget=99")
    texts = [sparse_cache.Text(ids, past), sparse_cache.random_text(model, 30, 3)]
    made = sparse_cache.measure(model, texts, names, 3, 12, 1)
    assert past.get_seq_length() == 39
    rows = {row["drafter"]: row for row in sparse_cache.report(made, 3, "a toy")}
    assert [row["accepted"] for row in rows.values()][::3] == [0, 1]
    assert 0 < rows[SMALL]["accepted"] < 1
    assert rows["none"]["tokens_per_round"] == 1 < rows[SMALL]["tokens_per_round"]
    assert rows[SMALL]["tokens_per_round"] < rows["sparse_cache:budget=99"]["tokens_per_round"] <= 4
