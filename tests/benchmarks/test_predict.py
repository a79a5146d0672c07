"""The predicted times of bench/predict.py against numbers worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from bench import predict
from bench.configs import HEADLINE, Config
from bench.sass import budgets

# A multiprocessor issues four instructions a nanosecond, memory gives a terabyte a second.
GPU = predict.Gpu(processors=132, clock=1e9, issued=1, bandwidth=1e12, trip=1e-6, launch=2e-6)
CHAIN = budgets.CHAIN
BF16 = Config(1, 1, 51200, "bfloat16", acceptance=0.5)  # 100 warp tiles


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    for work, count in (
        (budgets.FILL_BF16, 100),
        (budgets.FILL_F32, 100),
        (budgets.RESIDUAL_BF16, 200),
        (budgets.RESIDUAL_PROBS, 200),
    ):
        monkeypatch.setitem(predict.COUNTED, (CHAIN, work.name), count)


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
    check(
        predict.predict(config, GPU),
        "row-lazy",
        # Half of the time two rows of 204800 bytes, else one; on the 8 multiprocessors of a group.
        bytes_us=204800 * 1.5 / 1e6,
        issue_us=100 * (0.5 * 100 + 0.5 * 200) / (8 * 4) / 1e3,
        slowest_us=100 * 200 / (8 * 4) / 1e3,
        trips=4 + 13,
        us=0.625 + 17 + 2,
    )


def test_a_single_sequence_from_logits():
    check(
        predict.predict(BF16, GPU),
        "row-parallel",
        # Three rows, and two again after a rejection.
        bytes_us=102400 * 4 / 1e6,
        issue_us=100 * (3 * 100 + 0.5 * 200) / (132 * 4) / 1e3,
        slowest_us=100 * 200 / (8 * 4) / 1e3,
        trips=17 + 9,  # however many drafts are tested
        us=0.625 + 26 + 2,
    )


def test_a_batch_from_logits():
    config = Config(32, 1, 51200, "bfloat16", acceptance=0.5)
    longest = 1 - 0.5**32
    check(
        predict.predict(config, GPU),
        "row-lazy",
        bytes_us=32 * 102400 * (1.5 + 1 + 2 * 0.5) / 1e6,
        issue_us=32 * 100 * (2.5 * 100 + 0.5 * 200) / (132 * 4) / 1e3,
        slowest_us=100 * (2 * longest + 1) * 100 / (132 / 32 * 4) / 1e3,
        trips=2 + 9 * (longest + 1) + 9,
    )


def test_filters_read_target_rows_again():
    plain = predict.predict(Config(32, 1, 51200, "bfloat16", acceptance=0.5), GPU)
    config = Config(32, 1, 51200, "bfloat16", "t.8-k50-p.9", acceptance=0.5)
    filtered = predict.predict(config, GPU)
    again = 32 * 102400 * 1.5 * predict.FILTER_PASSES
    assert math.isclose(filtered.bytes_us - plain.bytes_us, again / 1e6)
    assert filtered.trips > plain.trips


@pytest.mark.parametrize(("batch", "size"), [(1, 8), (32, 8), (33, 8), (34, 7), (256, 1), (512, 1)])
def test_as_many_blocks_are_in_a_group_as_run_at_once(batch, size):
    config = Config(batch, 5, 151936, "bfloat16")
    assert predict.group_size(config, GPU, parallel=False) == size


@pytest.mark.parametrize(("batch", "size"), [(1, 8), (6, 7), (8, 5), (16, 8)])
def test_the_last_group_of_the_row_parallel_schedule_is_not_small(batch, size):
    config = Config(batch, 5, 151936, "bfloat16")
    assert predict.group_size(config, GPU, parallel=True) == size


def test_a_faster_loop_is_predicted_to_take_less(monkeypatch):
    monkeypatch.setitem(predict.COUNTED, (CHAIN, budgets.FILL_BF16.name), 400)
    before = predict.predict(HEADLINE["cuda"][0])
    monkeypatch.setitem(predict.COUNTED, (CHAIN, budgets.FILL_BF16.name), 50)
    after = predict.predict(HEADLINE["cuda"][0])
    assert after.us < before.us
    assert after.bytes_us == before.bytes_us


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


def test_nothing_predicted_is_called_measured():
    table = predict.table({})
    assert set(table.columns[-1].cells) == {"-"}
    assert [str(column.header) for column in table.columns[-2:]] == ["predicted us", "measured us"]
    assert "not measured" in str(table.title)
