"""The benchmarks of ops: byte counts, peers, sweeps and their files, the run of the sanitizer."""

from __future__ import annotations

import dataclasses
import json

import proofs
import pytest
import torch

import specdec_kernels as sk
from bench import configs, measure, results, sanitize, sweep, tree_configs
from bench.configs import Config
from bench.peers import PEERS
from bench.tree_configs import TreeConfig, Visits
from bench.workloads import WORKLOADS

pytestmark = pytest.mark.build

CHAIN = Config(batch=4, gamma=3, vocabulary=521)


def test_the_floor_of_a_chain_counts_each_visited_row_once():
    config = Config(batch=2, gamma=3, vocabulary=1000, dtype="bfloat16")
    row = 2 * 1000
    accepted = torch.tensor([[0, 3]])  # one sequence rejects its first draft, one accepts all
    floor, visited = configs.floor_bytes, configs.visited_bytes
    assert floor(config, accepted) == row * ((1 + 1) + (4 + 3))
    assert visited(config, accepted) == floor(config, accepted) + 2 * row
    saved = dataclasses.replace(config, start="sampled")
    assert floor(saved, accepted) == row * ((1 + 1) + 4)
    assert visited(saved, accepted) == floor(saved, accepted) + row
    probs = dataclasses.replace(config, start="probs")
    assert floor(probs, accepted) == 4 * 1000 * (2 + 1) + 4 * 2 * (1 + 3)
    assert floor(config, torch.cat([accepted, accepted])) == floor(config, accepted)


def test_the_floor_of_a_tree_counts_each_visited_row_once():
    config = TreeConfig(batch=2, nodes=8, vocabulary=1000, dtype="bfloat16")
    seen = Visits(*(torch.tensor([n]) for n in ([2, 0], [3, 1], [3, 1], [4, 2], [2, 2])))
    assert tree_configs.floor_bytes(config, seen) == 2000 * (4 + 4)
    assert tree_configs.visited_bytes(config, seen) == 2000 * (4 + 4 + 2 * 4)
    without = dataclasses.replace(config, rule="multi_draft_wor")
    assert tree_configs.visited_bytes(without, seen) == 2000 * (4 + 4 + 3 * 4)
    probs = dataclasses.replace(config, rule="target_only", start="probs")
    assert tree_configs.floor_bytes(probs, seen) == 2 * 4000 + 4 * 6


def read_back(done, tmp_path, pictures):
    """Write what a sweep found, read it and draw it."""
    path = done.write(tmp_path)
    assert results.read(path) == done
    json.loads(path.read_text())
    made = pytest.importorskip("bench.plot").plots(path, tmp_path / "plots")
    assert [p.name.removeprefix(path.stem) for p in made] == pictures
    return {(row.config["id"], row.provider): row for row in done.rows}


def test_a_sweep_reports_rows_and_absences(monkeypatch, tmp_path):
    peers = tuple(p for p in PEERS if p.name != "compiled")
    work = dataclasses.replace(WORKLOADS["verify_chain"], peers=peers)
    monkeypatch.setitem(WORKLOADS, "verify_chain", work)
    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e10)
    sizes = ((1, 521), (2, 521), (4, 521), (4, 1031), (4, 4099), (10**6, 10**6))
    *given, huge = (dataclasses.replace(CHAIN, batch=b, vocabulary=v) for b, v in sizes)
    done = sweep.sweep([*given, huge], "cpu", budget=60)
    rows = read_back(done, tmp_path, ["-batch.svg", "-vocabulary.svg"])
    for config in given:
        ours, peer = rows[config.id, "cpp"], rows[config.id, "eager"]
        assert ours.floor_us == pytest.approx(ours.floor_bytes / 1e10 * 1e6)
        assert ours.ratio_to_floor == pytest.approx(ours.us / ours.floor_us)
        assert (ours.launches, ours.graph_us, ours.kernel_us) == (1, None, None)
        assert peer.launches > 10
        assert peer.bytes_read > ours.bytes_read >= ours.floor_bytes == peer.floor_bytes
        assert (config.id, "transformers") in rows or config.batch > 1
    assert {"cuda", "triton", "flashinfer", "vllm-v2"} <= set(done.absent)
    assert all(done.absent.values())
    left_out = {(s["config"], s["provider"]): s["reason"] for s in done.skipped}
    assert left_out[given[1].id, "transformers"] == "takes one sequence"
    assert left_out[huge.id, "all"].startswith("needs ")


def test_the_program_for_the_sanitizer_calls_every_op():
    calls, left_out = sanitize.sanitize("cpu", budget=60)
    assert left_out == 0
    for op in sk.providers():
        if cases := proofs.cases(op):
            assert calls[op] >= max(1, len(cases) // sanitize.SHARE // 2), op
