"""The predicted times of bench/predict.py against numbers worked out by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

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
    # With the code in a cache and in memory; stall counts alone are not asked for.
    cycles = (1000, 2000), (4000, 8000), (5000, 9500), (3000, 7000), (4500, 9000)
    routes = [(budgets.LOGITS, route) for route in budgets.LOGITS_ROUTES]
    costs = *zip(routes, cycles, strict=True), ((budgets.PROBS, budgets.PROBS_ROUTE), (7000, 11000))
    for (kernel, route), count in costs:
        counted = budgets.RouteBudget(kernel, route, 0, *count)
        monkeypatch.setitem(predict.COSTS, (kernel, route.name), counted)


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
        serial_us=4,  # eight blocks measure three rows in one turn
        code_us=4,
        us=1 + 13 + 4 + 4 + 2,
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
        # Three waves of groups up to their tickets; then nine rows are measured in two turns.
        serial_us=3 + (4 - 1) + (5 - 4),
        code_us=9.5 - 5,  # the groups of later waves find the code up to the ticket
        us=33 * 0.1024 * 10.875 + 26 + 7 + 4.5 + 2,
    )


@pytest.mark.parametrize(
    ("config", "schedule", "serial_us", "code_us"),
    [
        # The slowest of 67 sequences accepts 2.9 of 4 drafts and tests the next one.
        (
            Config(67, 4, 51200, "bfloat16", acceptance=0.5),
            "row-lazy",
            3 + 1.5 * predict.mean_accepted(0.5, 4, 67),
            4 + 0.5 * predict.mean_accepted(0.5, 4, 67),
        ),
        (Config(1, 4, 51200, start="probs"), "row-lazy", 7, 4),
        # The general kernel does at least what the one for logits does.
        (Config(1, 4, 51200, "bfloat16", "t.8-p.9"), "row-parallel", 5, 4.5),
    ],
    ids=["row-lazy", "probabilities", "filters"],
)
def test_what_one_warp_does_alone(config, schedule, serial_us, code_us):
    check(predict.predict(config, GPU), schedule, serial_us=serial_us, code_us=code_us)


def test_a_prediction_names_its_device():
    """H200 by default; an H100 differs in its memory."""
    assert predict.predict(BF16).gpu == "H200"
    h100 = predict.predict(BF16, predict.GPUS["H100"])
    assert (h100.gpu, h100.trips_us) == ("H100", predict.predict(BF16).trips_us)
    assert h100.bytes_us > predict.predict(BF16).bytes_us
    assert predict.gpu_called("NVIDIA H100 80GB HBM3").name == "H100"
    assert predict.gpu_called("NVIDIA H200").name == "H200"
    assert predict.gpu_called("NVIDIA GH200 480GB") is None


@pytest.mark.parametrize("file", ["cuda-goals-20261126.jsonl", "cuda-20261126T013609.json"])
def test_measured_times_are_printed_beside_predicted_ones(file, capsys, monkeypatch):
    """Each with the device and the commit that it is of."""
    monkeypatch.setenv("SPECDEC_COMMIT", "c0ffee")
    predict.main(ROOT / "bench/results" / file)
    out = capsys.readouterr().out
    title = " ".join(out[: out.index("┏")].split())
    assert title == (
        "verify_chain: predicted for one H200 at commit c0ffee, not measured; "
        "measured on NVIDIA H200 at commit 9bf373e"
    )
    row = next(line for line in out.splitlines() if "B256-g5-V128256-f32-t.8-a0.8-probs" in line)
    predicted, measured, ratio = (float(text) for text in row.split("│")[-4:-1])
    assert measured > 70
    assert ratio == pytest.approx(measured / predicted, abs=0.1)


def test_an_unknown_device_is_refused_by_name():
    app = typer.Typer()
    app.command()(predict.main)
    done = CliRunner().invoke(app, ["--gpu", "B200"])
    assert done.exit_code == 2
    assert "must be one of H200, H100, got B200" in done.output


@pytest.mark.parametrize(
    ("batch", "schedule", "group"),
    [(33, "row-parallel", 8), (34, "row-lazy", 8), (67, "row-lazy", 7), (512, "row-lazy", 1)],
)
def test_the_schedule_and_the_groups_follow_from_the_batch(batch, schedule, group):
    planned = predict.plan(Config(batch, 5, 151936, "bfloat16"), GPU)
    assert (planned.schedule, planned.group) == (schedule, group)
