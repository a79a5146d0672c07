"""Tests the benchmarks themselves: the grid, the byte counts, the peers and the results files."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

import specdec_kernels as sk
from bench import eager, measure, results, sanitize, sweep
from bench.configs import (
    BASE,
    FACTORS,
    FILTERS,
    HEADLINE,
    STARTS,
    Config,
    build,
    floor_bytes,
    grid,
    visited_bytes,
)
from bench.peers import PEERS, Unsupported
from bench.peers.base import importable
from bench.workloads import WORKLOADS
from specdec_kernels import testing

pytestmark = pytest.mark.build

SMALL = Config(batch=4, gamma=3, vocabulary=521)
BY_NAME = {peer.name: peer for peer in PEERS}


def test_the_grid_covers_every_value_around_the_base_point():
    for device, base in BASE.items():
        configs = grid(device)
        assert len(configs) == len(set(configs)) == len({config.id for config in configs})
        assert tuple(configs[: len(HEADLINE[device])]) == HEADLINE[device]
        for name, values in FACTORS.items():
            around = [dataclasses.replace(base, **{name: value}) for value in values]
            assert set(around) <= set(configs), name
        assert len(grid(device, quick=True)) < len(configs)


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
    assert BY_NAME["flashinfer"].available("cpu")
    assert importable("no_such_module") == "no_such_module is not installed"


@pytest.mark.parametrize("per_sequence", [False, True], ids=["numbers", "tensors"])
def test_inputs_have_the_shapes_of_the_config(per_sequence):
    config = dataclasses.replace(SMALL, filters="t.8-k50-p.9", per_sequence=per_sequence)
    inputs = build(config)
    assert inputs.target.shape == (4, 4, 521)
    assert inputs.draft.shape == (4, 3, 521)
    assert all(turn.tokens.shape == (4, 3) for turn in inputs.turns)
    assert len({tuple(turn.seeds.tolist()) for turn in inputs.turns}) == len(inputs.turns)
    assert isinstance(inputs.top_p, torch.Tensor) == per_sequence
    probs = eager.filtered(inputs.target, inputs.temperature, inputs.top_k, inputs.top_p)
    expected = eager.filtered(inputs.target, 0.8, 50, 0.9)
    torch.testing.assert_close(probs, expected)


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


def test_top_k_candidates_have_the_distribution_of_the_sorted_rule():
    logits = testing.zipf_logits(6, 521, torch.Generator().manual_seed(0)).view(2, 3, 521)
    for temperature in (0.8, torch.tensor([0.8, 1.2])):
        want = eager.filtered(logits, temperature, 50, 0.9)
        got = eager.filtered_candidates(logits, temperature, 50, 0.9)
        torch.testing.assert_close(got, want)
    torch.manual_seed(0)
    drawn = torch.stack([eager.sample_candidates(logits[0], 0.8, 50, 0.9) for _ in range(50)])
    assert (eager.filtered(logits[0], 0.8, 50, 0.9).gather(-1, drawn.T) > 0).all()


def test_dispatched_ops_and_their_operands_are_counted():
    x = torch.ones(1000)
    assert measure.dispatched(lambda: x.exp() + 1) == (2, 4 * 4000)
    assert measure.dispatched(lambda: x.view(10, 100)[3]) == (0, 0)
    assert measure.dispatched(lambda: x.add_(1)) == (1, 2 * 4000)
    ours = BY_NAME["cpp"].build(build(SMALL))
    assert measure.dispatched(ours)[0] == 1


def _event(name, start, device="CUDA", annotation=False):
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
        time_range=SimpleNamespace(start=start),
    )


def test_a_profile_does_not_count_cache_flushes():
    xor = "void at::native::vectorized_elementwise_kernel<4, at::native::BitwiseXorFunctor<int>>"
    extremes = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<int, MinMaxOps<int>>>"
    flush = [(xor, 0), ("Memset (Device)", 1), (extremes, 2)]
    call = [("Memset (Device)", 3), ("chain_kernel", 4), ("reduce_kernel<MaxOps<float>>", 5)]
    events = [_event(name, at + 10 * i) for i in (1, 0) for name, at in flush + call]
    events += [_event("step", 0, annotation=True), _event("aten::sum", 4, device="CPU")]
    kept = measure._without_flushes(events, 2)
    assert [event.name for event in kept] == [name for name, _ in call] * 2
    with pytest.raises(RuntimeError, match="2 of 3 flushes"):
        measure._without_flushes(events, 3)
    with pytest.raises(RuntimeError, match="no work of the calls"):
        measure._without_flushes([_event(*pair) for pair in flush], 1)
    # Where flushes have other names, those of the calls tell.
    assert measure._of_calls(events, 2, "chain_kernel") == kept
    found = measure._of_calls(events, 3, "chain_kernel")
    assert [event.name for event in found] == ["chain_kernel"] * 2
    for unknown in ("", "tree_kernel"):
        with pytest.raises(RuntimeError, match="2 of 3 flushes"):
            measure._of_calls(events, 3, unknown)


def test_rounds_alternate_and_stop_at_the_budget():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    found = measure.rounds(calls, "cpu", budget=0, least=4)
    assert order == ["a", "b"] * 4
    assert [len(us) for us in found.values()] == [4, 4]
    assert len(measure.rounds(calls, "cpu", budget=60, most=7)["a"]) == 7
    assert measure.rounds({}, "cpu", budget=1) == {}
    spread = measure.Spread.of([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (spread.low, spread.median, spread.high) == (2.0, 3.0, 4.0)


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
    assert {"cuda", "triton", "flashinfer", "vllm-v2"} <= set(done.absent)
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


def test_a_peer_that_accepts_another_number_of_drafts_gets_a_note():
    ours = torch.tensor([[0, 1, 3, 2]] * 16)
    assert sweep._suspect(ours, ours) == ""
    assert sweep._suspect(torch.zeros_like(ours), ours).startswith("suspect: accepts 0.00 drafts")


def test_a_spent_budget_leaves_points_out_by_name(monkeypatch):
    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e10)
    done = sweep.sweep([SMALL], "cpu", budget=0, only=["cpp"])
    assert done.rows == []
    assert done.absent["eager"] == "not asked for"
    assert done.skipped == [
        {"config": SMALL.id, "provider": "all", "reason": "the budget of 0 s was spent"}
    ]


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
    assert "absent: flashinfer: not asked for" in done.output
    assert SMALL.id in done.output


def test_a_sweep_that_is_stopped_keeps_the_points_before(command, monkeypatch, tmp_path):
    def stopped(config, *rest, **options):
        if config != SMALL:
            raise KeyboardInterrupt
        return measured(config, *rest, **options)

    measured = sweep.measure_config
    monkeypatch.setattr(sweep, "measure_config", stopped)
    configs = [SMALL, dataclasses.replace(SMALL, batch=1)]
    replaced(monkeypatch, grid=lambda device, quick: configs)
    assert command("--only", "cpp", "--budget", "5").exit_code != 0
    (path,) = tmp_path.iterdir()
    assert [row.config["id"] for row in results.read(path).rows] == [SMALL.id]


@pytest.mark.parametrize(
    "words",
    [("--device", "tpu"), ("--only", "vllm-v3"), ("--device", "cuda"), ("--op", "sample")],
    ids=" ".join,
)
def test_the_command_refuses_unknown_options(command, words):
    if words == ("--device", "cuda") and torch.cuda.is_available():
        pytest.skip("torch sees a CUDA device, so that this command would start a sweep")
    assert command(*words).exit_code == 2


@pytest.mark.parametrize(
    "path", sorted((results.ROOT / "bench/results").glob("*.json")), ids=lambda p: p.stem
)
def test_results_written_with_older_field_names_can_be_read(path):
    run = results.read(path)
    assert all(row.config["id"] for row in run.rows)
    assert all(entry.keys() == {"config", "provider", "reason"} for entry in run.skipped)


def test_the_program_for_the_sanitizer_calls_every_op():
    calls = sanitize.main("cpu")
    for op in sk.providers():
        if cases := testing.cases(op):
            assert calls[op] >= max(1, len(cases) // sanitize.SHARE // 2), op
    for turn in range(len(sanitize.FORCED)):
        wide = [c.id for c in sanitize._chosen("verify_chain", turn) if c.vocabulary > 4096]
        assert any(c.endswith("scalar") for c in wide), wide
