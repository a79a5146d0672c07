"""The measurement of drafts over a sparse cache, on a toy."""

import pytest
import torch
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from transformers import DynamicCache

from bench.sparse_cache import Text, break_even, measure, random_text, report

pytestmark = pytest.mark.build  # a tool of bench
SMALL = "sparse_cache:budget=12,chunk=2,sinks=1,recent=3"


def test_calls_go_on_from_copies_of_one_cache():
    """So that all have the tokens of plain decoding; random keys and values are the control."""
    model, ids = hf_models.tiny("llama"), hf_models.prompts((40,))["input_ids"]
    past = DynamicCache()
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=past, use_cache=True)
    names = ("none", SMALL, f"{SMALL}+prompt_lookup", "sparse_cache:budget=99")
    texts = [Text(ids, past), random_text(model, 30, 3)]
    made = measure(model, texts, names, 3, 12, 1)
    assert past.get_seq_length() == 39
    rows = {row["drafter"]: row for row in report(made, 3, "a toy")}
    assert [row["accepted"] for row in rows.values()][::3] == [0, 1]
    assert 0 < rows[SMALL]["accepted"] < 1
    assert rows["none"]["tokens_per_round"] == 1 < rows[SMALL]["tokens_per_round"]
    assert rows[SMALL]["tokens_per_round"] < rows["sparse_cache:budget=99"]["tokens_per_round"] <= 4
    assert any("sparse_cache holds" in note for note in rows[SMALL]["notes"])
    assert rows["none"]["of_plain"] == 1


def test_drafts_pay_from_the_break_even_acceptance_on():
    assert break_even(1.0, 0.25, 1.0, 4) == pytest.approx(0.519, abs=0.001)  # 2 tokens a round
    assert break_even(1.0, 0.0, 1.0, 4) == 0.0
    assert break_even(1.0, 1.0, 1.1, 4) is None
