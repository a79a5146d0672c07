"""The measurement of a draft model that learns, on a toy."""

import math

import pytest
from specdec_hf import DistilledDrafter
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here

from bench.online_distillation import run_stream

pytestmark = pytest.mark.build  # a tool of bench


def test_rates_are_those_before_and_after_the_stream():
    model = hf_models.tiny("llama")
    drafter = DistilledDrafter(hf_models.with_noise(model, 0.4), learning_rate=3e-3)
    questions = [hf_models.prompts((9,), seed=n) for n in range(9)]
    rows = run_stream(model, drafter, questions[2:], questions[:2], tokens=12, every=4)
    assert [row["questions"] for row in rows] == [0, 4, 7]
    assert rows[0]["positions"] == 0 < rows[1]["positions"] < rows[2]["positions"]
    assert math.isnan(rows[0]["stream"])
    assert 0 <= rows[0]["held_out"] < rows[2]["held_out"] <= 1
