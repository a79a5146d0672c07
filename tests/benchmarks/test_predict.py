"""The predicted times of bench/predict.py against numbers worked out by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from bench import predict
from bench.configs import HEADLINE, Config
from bench.sass import budgets

pytestmark = pytest.mark.build

ROOT = Path(__file__).resolve().parents[2]

# A multiprocessor issues four instructions a nanosecond, memory gives a terabyte a second.
GPU = predict.Gpu(processors=132, clock=1e9, issued=1, bandwidth=1e12, trip=1e-6, launch=2e-6)
BF16 = Config(1, 1, 51200, "bfloat16", acceptance=0.5)  # 100 warp tiles


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    for kernel, work in predict.COUNTED:
        count = 200 if work.startswith("residual") else 100
        monkeypatch.setitem(predict.COUNTED, (kernel, work), count)


def check(found, schedule, **wanted):
    assert found.schedule == schedule
    for name, value in wanted.items():
        assert math.isclose(getattr(found, name), value, rel_tol=1e-9), name


def test_a_single_sequence_from_logits():
    assert predict.plan(BF16, GPU) == predict.Plan(budgets.LOGITS, True, 2, 8, 4, 66)
    check(
        predict.predict(BF16, GPU),
        "row-parallel",
        # Three rows, and two again after a rejection.
        bytes_us=102400 * 4 / 1e6,
        # On the 64 multiprocessors of eight groups.
        issue_us=100 * (3 * 100 + 0.5 * 200) / (64 * 4) / 1e3,
        # 64 warps sum the residual of 100 warp tiles in two rounds. 256 warp tiles are on their way
        # at once when a row is measured beside another.
        slowest_us=1,
        trips=1 + 1 + 4 + 1 + 1 + 3 + 2,  # however many drafts are tested
        us=1 + 13 + 2,
        overlapped_us=1 + 13 + 2,
    )


def test_the_documented_round_trips():
    """Those that docs/design/cuda.md adds up."""
    for config, trips in zip(HEADLINE["cuda"][2:4], (14, 8), strict=True):
        assert config.batch == 1
        assert predict.predict(config).trips == trips
        text = (ROOT / "docs/design/cuda.md").read_text()
        assert re.search(rf"^\| together, .*\| {trips} \|$", text, re.MULTILINE)


def test_a_batch_from_logits():
    config = Config(33, 4, 51200, "bfloat16", acceptance=0.5)
    planned = predict.plan(config, GPU)
    assert planned == predict.Plan(budgets.LOGITS, True, 5, 8, 1, 66)
    assert planned.waves(33) == 3
    # All rows of all sequences. A sixteenth rejects no draft, and reads no row again.
    rows, residuals = 9, 15 / 16
    check(
        predict.predict(config, GPU),
        "row-parallel",
        bytes_us=33 * 102400 * (rows + 2 * residuals) / 1e6,
        issue_us=33 * 100 * (rows * 100 + residuals * 200) / (132 * 4) / 1e3,
        # 32 warps have 64 of the 100 warp tiles of a row on their way: each of three waves and the
        # residual take a second round.
        slowest_us=3 + 1,
        trips=3 * (1 + 1 + 4) + 2 + 1 + 3 + 2,
        us=33 * 0.1024 * 10.875 + 26 + 2,
        overlapped_us=33 * 0.1024 * 10.875 + 2,
    )


@pytest.mark.parametrize(
    ("batch", "schedule", "size", "splits"),
    [
        # The last group of the row-parallel schedule is not small.
        *((1, "row-parallel", 8, 10), (8, "row-parallel", 8, 1), (12, "row-parallel", 7, 1)),
        *((22, "row-parallel", 4, 1), (23, "row-parallel", 8, 1), (33, "row-parallel", 8, 1)),
        # As many blocks are in a group as run at once.
        *((34, "row-lazy", 8, 1), (67, "row-lazy", 7, 1), (88, "row-lazy", 6, 1)),
        *((256, "row-lazy", 2, 1), (512, "row-lazy", 1, 1), (1000, "row-lazy", 1, 1)),
    ],
)
def test_a_plan_fills_the_device(batch, schedule, size, splits):
    planned = predict.plan(Config(batch, 5, 151936, "bfloat16"), GPU)
    assert (planned.schedule, planned.group, planned.splits) == (schedule, size, splits)
    if schedule == "row-parallel":  # with 22 sequences the groups of all rows run at once
        assert (planned.waves(batch) > 1) == (batch > 22)
