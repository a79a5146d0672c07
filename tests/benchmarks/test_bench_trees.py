"""Tests the benchmarks of trees and of compaction: trees, byte counts, peers and results files."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench import kv_configs, measure, results, sweep, tree_configs
from bench.kv_configs import KvConfig
from bench.peers import KV_PEERS, TREE_PEERS, Unsupported
from bench.tree_configs import RULES, TreeConfig, Visits

pytestmark = pytest.mark.build

SMALL = TreeConfig(batch=4, nodes=8, vocabulary=521)
BY_NAME = {peer.name: peer for peer in TREE_PEERS}


def test_floor_counts_each_visited_row_once():
    config = TreeConfig(batch=2, nodes=8, vocabulary=1000, dtype="bfloat16")
    seen = Visits(*(torch.tensor([n]) for n in ([2, 0], [3, 1], [3, 1], [4, 2], [2, 2])))
    assert tree_configs.floor_bytes(config, seen) == 2000 * (4 + 4)
    assert tree_configs.visited_bytes(config, seen) == 2000 * (4 + 4 + 2 * 4)
    without = dataclasses.replace(config, rule="multi_draft_wor")
    assert tree_configs.visited_bytes(without, seen) == 2000 * (4 + 4 + 3 * 4)
    probs = dataclasses.replace(config, rule="target_only", start="probs")
    assert tree_configs.floor_bytes(probs, seen) == 2 * 4000 + 4 * 6


@pytest.mark.parametrize("rule", [*RULES, *tree_configs.OTHERS])
def test_visits_are_those_of_the_rule(rule):
    inputs = tree_configs.build(dataclasses.replace(SMALL, rule=rule))
    seen = tree_configs.visits(inputs)
    assert seen.accepted.shape == (tree_configs.TURNS, 4)
    top_down = rule != "traversal"
    assert (seen.targets >= seen.accepted + 1).all()
    assert not top_down or seen.targets.equal((seen.accepted + 1).long())
    assert (seen.drafts <= seen.tested).all()
    assert (seen.drafts > 0).all() == (rule in tree_configs.DRAWN)
    if rule in tree_configs.DRAWN:
        assert (seen.rejected <= seen.tested).all()
        assert seen.rejected.any()


@pytest.mark.parametrize("rule", ["greedy", "target_only", "multi_draft", "multi_draft_wor"])
def test_eager_rules_accept_as_many_nodes(rule):
    inputs = tree_configs.build(dataclasses.replace(SMALL, rule=rule, batch=8))
    ours = torch.stack([tree_configs.call(inputs, t).num_accepted for t in inputs.turns]).double()
    for name in ("eager", "eager-path"):
        if (rule, name) == ("greedy", "eager-path"):
            with pytest.raises(Unsupported):
                BY_NAME[name].build(inputs)
            continue
        call = BY_NAME[name].build(inputs)
        torch.manual_seed(0)
        if rule == "greedy":
            for turn in inputs.turns[:4]:
                verdict = tree_configs.call(inputs, turn)
                path, accepted, y = call()
                assert path.equal(verdict.path)
                assert y.equal(verdict.tokens.gather(1, accepted[:, None])[:, 0])
            continue
        calls = [BY_NAME[name].accepted(call()) for _ in range(len(inputs.turns) * 4)]
        theirs = torch.stack(calls).double()
        assert abs(float(theirs.mean() - ours.mean())) < 0.35


def test_a_sweep_of_trees_writes_a_file_and_a_picture(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e10)
    configs = [dataclasses.replace(SMALL, nodes=n) for n in (4, 8, 16)]
    probs = dataclasses.replace(SMALL, rule="target_only", start="probs")
    done = sweep.sweep([*configs, probs], "cpu", "verify_tree", budget=120)
    rows = {(row.config["id"], row.provider): row for row in done.rows}
    for config in configs:
        ours, peer = rows[config.id, "cpp"], rows[config.id, "eager"]
        assert ours.times_faster.keys() == {"eager", "eager-path"}
        assert ours.launches == 1
        assert peer.bytes_read > ours.bytes_read >= ours.floor_bytes == peer.floor_bytes
        assert not ours.notes
    assert (probs.id, "eager") in rows
    assert {"cuda", "triton", "sglang"} <= set(done.absent)
    path = done.write(tmp_path)
    assert path.name.startswith("cpu-verify_tree-")
    assert results.read(path) == done
    plot = pytest.importorskip("bench.plot")
    made = plot.plots(path, tmp_path / "plots")
    assert [p.name.removeprefix(path.stem) for p in made] == ["-nodes.svg"]


def test_the_eager_compaction_and_ours_move_the_same_tokens():
    config = KvConfig(batch=3, layers=2, heads=2, head_dim=16, slots=40)
    moved = []
    for peer in KV_PEERS:
        inputs = kv_configs.build(config)
        assert (inputs.path[:, : config.accepted] > torch.arange(config.accepted)).all()
        for i, cache in enumerate(inputs.caches):
            cache.copy_(torch.arange(cache.numel()).view_as(cache) % 199 + i)
        if peer.name in ("cpp", "eager"):
            assert peer.accepted(peer.build(inputs)()).tolist() == [4, 4, 4]
            moved.append(inputs.caches)
    assert all(a.equal(b) for a, b in zip(*moved, strict=True))
