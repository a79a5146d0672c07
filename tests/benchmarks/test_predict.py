"""The predicted times of bench/predict.py against numbers worked out by hand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
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


def test_the_mean_number_of_accepted_drafts():
    assert predict.mean_accepted(0.5, 2) == 0.5 + 0.25
    assert predict.mean_accepted(0.5, 2, batch=2) == 0.75 + 0.4375  # 1 - .5^2, 1 - .75^2
    assert round(predict.mean_accepted(0.8, 5) + 1, 2) == 3.69


def test_a_single_sequence_from_probabilities():
    config = Config(1, 1, 51200, acceptance=0.5, start="probs")
    # 13 blocks read the row at once: two groups of 8.
    assert predict.plan(config, GPU) == predict.Plan(budgets.PROBS, True, 1, 8, 2, 66)
    check(
        predict.predict(config, GPU),
        "row-parallel",
        # Half of the time two rows of 204800 bytes, else one; on 16 multiprocessors.
        bytes_us=204800 * 1.5 / 1e6,
        issue_us=100 * 200 / (16 * 4) / 1e3,
        # Each group reads half of the row. No warp has a second warp tile.
        slowest_us=50 * 200 / (8 * 4) / 1e3,
        trips=1 + 1 + 3 + 2 + (4 - 1),
        us=0.3125 + 10 + 2,
    )


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
    for config, trips in zip(HEADLINE["cuda"][2:4], (14, 10), strict=True):
        assert config.batch == 1
        assert predict.predict(config).trips == trips
        text = (ROOT / "docs/design/cuda.md").read_text()
        assert re.search(rf"^\| together, .*\| {trips} \|$", text, re.MULTILINE)


def test_rows_after_a_rejection_are_read_if_they_run_with_it():
    config = Config(64, 3, 51200, "bfloat16", acceptance=0.5)
    # Waves of 64 groups. The first rows of all sequences: a target and a draft row each. Then 32 go
    # on, with two rows each; then 8, with the bonus token's row alone.
    assert predict.rows_in_waves(config, 64) == (2 + 0.5 * 4 + 0.125 * 1, 3)
    # Two rows of 32 sequences; 8 go on, with two rows each, one of them the bonus token's.
    assert predict.rows_in_waves(replace(config, batch=32), 64) == (4 + 0.25 * 3, 2)
    # All rows at once.
    assert predict.rows_in_waves(replace(config, batch=16), 64) == (7, 1)
    everything = predict.rows_in_waves(replace(config, acceptance=1.0), 64)
    assert everything == (7, 4)
    assert predict.rows_in_waves(replace(config, acceptance=0.0), 64) == (2, 1)


def test_a_batch_from_logits():
    config = Config(66, 2, 51200, "bfloat16", acceptance=0.5)
    planned = predict.plan(config, GPU)
    assert planned == predict.Plan(budgets.LOGITS, True, 3, 8, 1, 66)
    assert planned.waves(66)
    # The first rows of all; then half of the sequences have both other rows read, one of them that
    # of the bonus token. A quarter rejects no draft, and reads no row again.
    rows, residuals = 2 + 0.5 * 3, 0.75
    check(
        predict.predict(config, GPU),
        "row-parallel",
        bytes_us=66 * 102400 * (rows + 2 * residuals) / 1e6,
        issue_us=66 * 100 * (rows * 100 + residuals * 200) / (132 * 4) / 1e3,
        # 32 warps have 64 of the 100 warp tiles of a row on their way: each of two waves and the
        # residual take a second round.
        slowest_us=1 + 1 + 1,
        trips=2 * (1 + 1 + 1 + 2 + 4) + 2 + 1 + 1 + 3 + 2,
        us=33.792 + 27 + 2,
        overlapped_us=33.792 + 2,
    )


def test_a_large_batch_from_logits():
    config = Config(132, 1, 51200, "bfloat16", acceptance=0.5)
    longest = 1 - 0.5**132
    check(
        predict.predict(config, GPU),
        "row-lazy",
        bytes_us=132 * 102400 * (1.5 + 1 + 2 * 0.5) / 1e6,
        issue_us=132 * 100 * (2.5 * 100 + 0.5 * 200) / (132 * 4) / 1e3,
        # 4 blocks have 32 warp tiles of each row on their way: three more rounds for each row and
        # its draft's, which take less than this.
        slowest_us=100 * (2 * longest + 1) * 100 / 4 / 1e3,
        trips=1 + (1 + 1 + 2) * (longest + 1) + 3 + 2,
    )


def test_filters_read_target_rows_again():
    config = Config(132, 1, 51200, "bfloat16", "t.8-k50-p.9", acceptance=0.5)
    filtered = predict.predict(config, GPU)
    assert predict.plan(config, GPU).kernel == budgets.GENERAL
    plain = predict.predict(replace(config, filters="off"), GPU)
    again = 132 * 102400 * 1.5 * predict.FILTER_PASSES
    assert math.isclose(filtered.bytes_us - plain.bytes_us, again / 1e6)
    assert filtered.trips > plain.trips


@pytest.mark.parametrize(("filters", "batches"), [("off", 66), ("t.8-k50-p.9", 8)])
def test_the_schedule_depends_on_the_kernel(filters, batches):
    configs = [Config(b, 5, 151936, "bfloat16", filters) for b in range(1, 200)]
    assert [c.batch for c in configs if predict.plan(c, GPU).parallel] == [*range(1, batches + 1)]
    probs = [replace(c, start="probs", dtype="float32") for c in configs]
    assert [c.batch for c in probs if predict.plan(c, GPU).parallel] == [*range(1, 9)]


@pytest.mark.parametrize(
    ("batch", "schedule", "size", "splits"),
    [
        # The last group of the row-parallel schedule is not small.
        *((1, "row-parallel", 8, 10), (8, "row-parallel", 8, 1), (12, "row-parallel", 7, 1)),
        *((22, "row-parallel", 4, 1), (23, "row-parallel", 8, 1)),
        # As many blocks are in a group as run at once.
        *((67, "row-lazy", 7, 1), (88, "row-lazy", 6, 1), (256, "row-lazy", 2, 1)),
        *((512, "row-lazy", 1, 1), (1000, "row-lazy", 1, 1)),
    ],
)
def test_a_plan_fills_the_device(batch, schedule, size, splits):
    planned = predict.plan(Config(batch, 5, 151936, "bfloat16"), GPU)
    assert (planned.schedule, planned.group, planned.splits) == (schedule, size, splits)
    if schedule == "row-parallel":  # with 22 sequences the groups of all rows run at once
        assert planned.waves(batch) == (batch > 22)


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_measured_times_stand_beside_predicted_ones(tmp_path, form):
    config = HEADLINE["cuda"][0]
    row = {"config": {"id": config.id}, "provider": "cuda", "us": 70.0, "kernel_us": 61.5}
    other = {**row, "provider": "triton", "kernel_us": 1.0}
    path = tmp_path / f"results.{form}"
    if form == "json":
        path.write_text(json.dumps({"rows": [row, other]}))
    else:
        path.write_text("\n".join(map(json.dumps, [{"machine": {}}, {"row": row}, {"row": other}])))
    measured = list(predict.table(predict.measured(path)).columns[-1].cells)
    assert measured == ["61.5", "-", "-", "-", "-", "-"]
