"""Tests the benchmarks themselves: the grid, the byte counts, the peers and the results files."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import proofs
import pytest
import torch
import typer
from typer.testing import CliRunner

import specdec_kernels as sk
from bench import measure, results, sanitize, sweep
from bench.configs import (
    FILTERS,
    STARTS,
    Config,
    build,
    floor_bytes,
    visited_bytes,
)
from bench.peers import PEERS, Unsupported
from bench.peers.base import importable
from bench.workloads import WORKLOADS

pytestmark = pytest.mark.build

SMALL = Config(batch=4, gamma=3, vocabulary=521)
BY_NAME = {peer.name: peer for peer in PEERS}


def test_floor_counts_each_visited_row_once():
    config = Config(batch=2, gamma=3, vocabulary=1000, dtype="bfloat16")
    row = 2 * 1000
    accepted = torch.tensor([[0, 3]])  # one sequence rejects its first draft, one accepts all
    assert floor_bytes(config, accepted) == row * ((1 + 1) + (4 + 3))
    assert visited_bytes(config, accepted) == floor_bytes(config, accepted) + 2 * row
    saved = dataclasses.replace(config, start="sampled")
    assert floor_bytes(saved, accepted) == row * ((1 + 1) + 4)
    assert visited_bytes(saved, accepted) == floor_bytes(saved, accepted) + row
    probs = dataclasses.replace(config, start="probs")
    assert floor_bytes(probs, accepted) == 4 * 1000 * (2 + 1) + 4 * 2 * (1 + 3)
    twice = torch.cat([accepted, accepted])
    assert floor_bytes(config, twice) == floor_bytes(config, accepted)


@pytest.mark.parametrize("op", WORKLOADS)
def test_every_peer_says_why_it_cannot_run(op):
    for peer in WORKLOADS[op].peers:
        for device in ("cpu", "cuda"):
            assert isinstance(peer.available(device), str)
        assert peer.available("cpu") == "" or peer.name not in ("cpp", "eager")
    assert BY_NAME["flashinfer_headers"].available("cpu")
    assert importable("no_such_module") == "no_such_module is not installed"


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("filters", FILTERS)
def test_every_provider_accepts_as_many_drafts(filters, start):
    """If an adapter passes wrong arguments, its peer accepts fewer or more drafts than others."""
    config = Config(batch=1, gamma=3, vocabulary=521, filters=filters, start=start)
    inputs = build(config)
    means = {}
    refusing = {"transformers": start == "probs"}
    refusing["eager-topk"] = start == "probs" or not FILTERS[filters][1]
    for name in ("cpp", "eager", "eager-topk", "transformers"):
        peer = BY_NAME[name]
        if refusing.get(name):
            with pytest.raises(Unsupported):
                peer.build(inputs)
            continue
        call = peer.build(inputs)
        torch.manual_seed(0)
        # Ours gives the same result for a turn every time; the others draw new uniforms.
        count = len(inputs.turns) * (1 if peer.ours else 12)
        drafts = torch.stack([peer.accepted(call()) for _ in range(count)])
        assert drafts.shape == (count, 1)
        means[name] = float(drafts.double().mean())
    # The standard errors are 1.2 / sqrt(32) for ours and 1.2 / sqrt(384) for the others.
    assert abs(means["cpp"] - means["eager"]) < 0.75
    for name in means.keys() - {"cpp", "eager"}:
        assert abs(means[name] - means["eager"]) < 0.3


@pytest.mark.parametrize("op", ["sample", "kv_append_", "cases"])
def test_calls_that_accept_nothing_are_timed(op, monkeypatch):
    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e10)
    config = WORKLOADS[op].grid("cpu")[-2]
    done = sweep.sweep([config], "cpu", op, budget=2)
    names = {"sample": {"cpp", "eager", "eager-topk"}, "kv_append_": {"cpp", "eager"}}
    assert {row.provider for row in done.rows} == names.get(op, {"cpp"})
    assert [row.notes for row in done.rows] == [[]] * len(done.rows)
    assert not done.skipped
    assert done.rows[0].mean_accepted == 0
    assert done.rows[0].floor_bytes == config.floor_bytes > 1


def replaced(monkeypatch, **fields):
    """Replace fields of the workload of verify_chain."""
    work = dataclasses.replace(WORKLOADS["verify_chain"], **fields)
    monkeypatch.setitem(WORKLOADS, "verify_chain", work)
    return work


@pytest.fixture
def run(monkeypatch):
    """A sweep of small configs, with a peer that fails and one that is not installed."""
    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e10)

    def broken(inputs):
        raise RuntimeError("no such kernel\nand more lines")

    peers = (
        *(peer for peer in PEERS if peer.name != "compiled"),
        sweep.Peer("broken", lambda device: "", broken),
    )
    replaced(monkeypatch, peers=peers)
    configs = [
        dataclasses.replace(SMALL, batch=b, vocabulary=v)
        for b, v in ((1, 521), (2, 521), (4, 521), (4, 1031), (4, 4099))
    ]
    huge = dataclasses.replace(SMALL, batch=10**6, vocabulary=10**6)
    done = sweep.sweep([*configs, huge], "cpu", budget=60)
    return configs, huge, done


def test_a_sweep_reports_rows_absences_and_failures(run, tmp_path):
    configs, huge, done = run
    rows = {(row.config["id"], row.provider): row for row in done.rows}
    for config in configs:
        ours, peer = rows[config.id, "cpp"], rows[config.id, "eager"]
        assert ours.us_low <= ours.us <= ours.us_high
        assert ours.times_faster["eager"] > 0
        assert ours.floor_us == pytest.approx(ours.floor_bytes / 1e10 * 1e6)
        assert ours.ratio_to_floor == pytest.approx(ours.us / ours.floor_us)
        assert (ours.launches, ours.graph_us, ours.kernel_us) == (1, None, None)
        assert peer.launches > 10
        assert peer.bytes_read > ours.bytes_read >= ours.floor_bytes
        assert peer.floor_bytes == ours.floor_bytes
        assert (config.id, "transformers") in rows or config.batch > 1
    assert {"cuda", "triton", "flashinfer_headers", "vllm-v2"} <= set(done.absent)
    assert all(done.absent.values())
    left_out = {(s["config"], s["provider"]): s["reason"] for s in done.skipped}
    assert left_out[configs[0].id, "broken"] == "failed: RuntimeError: no such kernel"
    assert left_out[configs[1].id, "transformers"] == "takes one sequence"
    assert left_out[huge.id, "all"].startswith("needs ")
    for key in ("device", "date", "commit", "torch", "triton", "python", "bandwidth", "providers"):
        assert key in done.machine

    path = done.write(tmp_path)
    assert results.read(path) == done
    json.loads(path.read_text())
    plot = pytest.importorskip("bench.plot")
    made = plot.plots(path, tmp_path / "plots")
    assert [p.name.removeprefix(path.stem) for p in made] == ["-batch.svg", "-vocabulary.svg"]
    assert all("byte floor" in p.read_text() or p.stat().st_size > 10_000 for p in made)


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`python -m bench.sweep` on one small config."""
    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e10)
    replaced(monkeypatch, grid=lambda device, quick: [SMALL])
    app = typer.Typer()
    app.command()(sweep.main)
    return lambda *words: CliRunner().invoke(app, ["--out", str(tmp_path), *words])


def test_the_command_writes_a_file_and_names_absent_peers(command, tmp_path):
    done = command("--only", "cpp", "--only", "eager", "--budget", "5")
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("cpu-*.json")
    assert {row.provider for row in results.read(path).rows} == {"cpp", "eager"}
    assert "absent: flashinfer_headers: not asked for" in done.output
    assert SMALL.id in done.output


def test_the_program_for_the_sanitizer_calls_every_op():
    calls, left_out = sanitize.sanitize("cpu", budget=60)
    assert left_out == 0
    for op in sk.providers():
        if cases := proofs.cases(op):
            assert calls[op] >= max(1, len(cases) // sanitize.SHARE // 2), op
    for turn in range(len(sanitize.FORCED)):
        wide = [c.id for c in sanitize._chosen("verify_chain", turn) if c.vocabulary > 4096]
        assert any(c.endswith("scalar") for c in wide), wide


def test_the_sanitizer_ends_within_its_budget_and_counts_what_it_left_out(monkeypatch):
    """As if each call took a second: the ops have taken turns when five are over."""
    clock = iter(range(10**6))
    monkeypatch.setattr(sanitize, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    calls, left_out = sanitize.sanitize("cpu", budget=5)
    assert sum(calls.values()) == 5
    assert set(calls.values()) == {0, 1}
    assert left_out > 100


def test_the_sanitizer_leaves_to_triton_what_triton_serves(monkeypatch, capsys):
    served = {"sample": {"cpu": "cpp"}, "build_trie": {"cpu": "triton"}}
    monkeypatch.setattr(sanitize.sk, "providers", lambda: served)
    calls, _ = sanitize.sanitize("cpu", budget=60)
    assert list(calls) == ["sample"]
    assert capsys.readouterr().out == "not called: build_trie\n"
