"""Tests the benchmarks of trees and of compaction: trees, byte counts, peers and results files."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from support.providers import SIGNIFICANCE, chi_square

from bench import eager_tree, kv_configs, measure, results, sweep, tree_configs
from bench.kv_configs import KvConfig
from bench.peers import KV_PEERS, TREE_PEERS, Unsupported, sglang_tree
from bench.tree_configs import RULES, Shape, TreeConfig, Visits, grid, tree
from specdec_kernels.arguments.rules import TREE_RULES

pytestmark = pytest.mark.build

SMALL = TreeConfig(batch=4, nodes=8, vocabulary=521)
BY_NAME = {peer.name: peer for peer in TREE_PEERS}


def test_the_grid_has_every_rule_batch_and_size():
    configs = grid("cuda", quick=True)
    assert len(configs) == len(set(configs)) == len({config.id for config in configs})
    for dtype in ("bfloat16", "float32"):
        found = {(p.rule, p.batch, p.nodes) for p in grid("cuda") if p.dtype == dtype}
        assert found >= {(r, b, n) for r in RULES for b in (1, 8, 64) for n in (8, 16, 64)}
    assert {p.filters for p in configs} == set(tree_configs.FILTERS)
    every = {*RULES, *tree_configs.OTHERS}
    assert {p.rule for p in grid("cpu")} == {p.rule for p in configs} == every
    assert every == set(TREE_RULES)
    assert {p.vocabulary for p in configs} == {128256}


@pytest.mark.parametrize("n", [1, 8, 16, 64])
def test_trees_are_in_topological_order_and_smaller_trees_are_prefixes(n):
    parents = tree(n)
    assert len(parents) == n
    assert all(-1 <= parent < i for i, parent in enumerate(parents))
    assert parents == tree(64)[:n]
    shape = Shape.of(parents)
    assert shape.depth <= tree_configs.DEPTH
    assert sorted(shape.children[shape.children >= 0].tolist()) == list(range(n))
    for place, family in enumerate(shape.children.tolist()):
        assert all(parents[i] == place - 1 for i in family if i >= 0)


def test_siblings_without_replacement_differ():
    inputs = tree_configs.build(dataclasses.replace(SMALL, rule="multi_draft_wor", nodes=16))
    for family in inputs.shape.children.tolist():
        nodes = [n for n in family if n >= 0]
        for turn in inputs.turns:
            tokens = turn.tokens[:, nodes]
            assert all(len(set(row)) == len(nodes) for row in tokens.tolist())


def test_the_last_child_is_not_among_the_top_tokens():
    inputs = tree_configs.build(dataclasses.replace(SMALL, rule="top_k_plus_one", nodes=16))
    for place, family in enumerate(inputs.shape.children.tolist()):
        *top, last = [n for n in family if n >= 0] or [None]
        if last is None:
            continue
        row = inputs.draft_rows[0, last]
        best = inputs.draft[:, row].topk(len(top)).indices
        found = set()
        for turn in inputs.turns:
            assert turn.tokens[:, top].equal(best), place
            assert not (turn.tokens[:, last, None] == best).any()
            found |= set(turn.tokens[:, last].tolist())
        assert len(found) > 1


def test_nodes_are_drawn_from_the_row_of_their_parent():
    inputs = tree_configs.build(dataclasses.replace(SMALL, rule="target_only"))
    drawn = tree_configs.build(SMALL)
    assert inputs.draft is None
    inside = sorted(set(inputs.shape.parents))
    for n, parent in enumerate(drawn.shape.parents):
        assert inside[drawn.draft_rows[0, n]] == parent
        rank = inputs.shape.children[parent + 1].tolist().index(n)
        best = drawn.draft[:, drawn.draft_rows[0, n]].topk(rank + 1).indices[:, rank]
        assert inputs.turns[0].tokens[:, n].equal(best)


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


def walk(outputs, tokens, tree, answer):
    """Verify one sequence after another over SGLang's arrays: answer(b, node) is the next token."""
    predicts, path, accepted = outputs
    for b, links in enumerate(zip(*tree, strict=True)):
        index, child, sibling = (x.tolist() for x in links)
        place, n, path[b, 0] = 0, 0, index[0]
        while True:
            y = answer(b, place)
            predicts[index[place]] = y
            at = child[place] if n + 1 < path.shape[1] else -1
            while at != -1 and int(tokens[b, at]) != y:
                at = sibling[at]
            if at == -1:
                break
            place, n = at, n + 1
            path[b, n] = index[at]
        accepted[b] = n


@pytest.fixture
def kernels(monkeypatch):
    """A stand-in for sgl_kernel, with its signatures."""

    def verify_tree_greedy(predicts, path, accepted, tokens, index, child, sibling, best):
        assert predicts.dtype == path.dtype == accepted.dtype == torch.int32
        assert tokens.dtype == best.dtype == torch.int64
        assert tokens.shape == best.shape == index.shape
        outputs, tree = (predicts, path, accepted), (index, child, sibling)
        walk(outputs, tokens, tree, lambda b, place: int(best[b, place]))

    def target_only(predicts, path, accepted, tokens, index, child, sibling, uniforms, last, p, q):
        assert uniforms.dtype == last.dtype == p.dtype == q.dtype == torch.float32
        assert p.shape == q.shape == (*tokens.shape, p.shape[-1])
        assert uniforms.shape == tokens.shape
        torch.testing.assert_close(p.sum(-1), torch.ones(p.shape[:2]))
        outputs, tree = (predicts, path, accepted), (index, child, sibling)
        walk(outputs, tokens, tree, lambda b, place: int(p[b, place].multinomial(1)))

    names = {"tree_speculative_sampling_target_only": target_only}
    module = SimpleNamespace(verify_tree_greedy=verify_tree_greedy, **names)
    monkeypatch.setitem(sys.modules, "sgl_kernel", module)


@pytest.mark.parametrize("nodes", [8, 64])
def test_sglang_greedy_kernel_gets_the_same_trees(kernels, nodes):
    inputs = tree_configs.build(dataclasses.replace(SMALL, rule="greedy", nodes=nodes))
    call = sglang_tree.build(inputs)
    for turn in inputs.turns[:8]:
        assert call().equal(tree_configs.call(inputs, turn).num_accepted)
    with pytest.raises(Unsupported, match="no rule traversal"):
        sglang_tree.build(tree_configs.build(dataclasses.replace(SMALL, rule="traversal")))


@pytest.mark.parametrize("start", ["logits", "probs"])
def test_sglang_sampling_kernel_gets_the_same_trees(kernels, start):
    inputs = tree_configs.build(dataclasses.replace(SMALL, rule="target_only", start=start))
    call = sglang_tree.build(inputs)
    torch.manual_seed(0)
    theirs = torch.stack([call() for _ in range(200)]).double()
    ours = torch.stack([tree_configs.call(inputs, t).num_accepted for t in inputs.turns]).double()
    # The standard deviation is about 1.4, so that the standard errors are 0.05 and 0.12.
    assert abs(float(theirs.mean() - ours.mean())) < 0.5


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


@pytest.mark.parametrize("rule", ["target_only", "multi_draft", "multi_draft_wor"])
def test_eager_rules_emit_the_target_distribution(rule):
    """Tests the first two emitted tokens over many sequences with trees of one shape."""
    b, v = 20000, 4
    g = torch.Generator().manual_seed(0)
    shape = Shape.of((-1, -1, 0, 0))
    p, q = (torch.softmax(2 * torch.randn(5, v, generator=g), -1) for _ in range(2))
    torch.manual_seed(1)
    first = q[0].expand(b, v).multinomial(2, replacement=rule != "multi_draft_wor")
    again = q[1].expand(b, v).multinomial(2, replacement=rule != "multi_draft_wor")
    tokens = torch.cat([first, again], 1)
    rest = (tokens, shape.children, shape.depth)
    if rule == "target_only":
        path, accepted, y = eager_tree.target_only(lambda at: p[at], *rest)
    else:
        path, accepted, y = eager_tree.multi_draft(
            lambda at: p[at], lambda at: q[at], *rest, replacement=rule == "multi_draft"
        )
    emitted = torch.where(accepted > 0, tokens.gather(1, path[:, :1].clamp(min=0))[:, 0], y)
    assert chi_square(emitted, p[0].double()) > SIGNIFICANCE
    below = path[:, 0] == 0
    second = torch.where(accepted > 1, tokens.gather(1, path[:, 1:].clamp(min=0))[:, 0], y)
    assert chi_square(second[below], p[1].double()) > SIGNIFICANCE
    assert 0 < float(accepted.double().mean()) < 2


def test_a_draw_by_the_cdf_never_gives_a_token_without_weight():
    torch.manual_seed(0)
    weights = torch.tensor([[0.0, 3.0, 0.0, 1.0, 0.0]]).expand(4000, 5)
    assert chi_square(eager_tree.draw(weights), torch.tensor([0, 0.75, 0, 0.25, 0])) > SIGNIFICANCE


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


def test_compaction_is_compared_with_a_copy_of_the_moved_bytes(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e10)
    config = KvConfig(batch=3, layers=2, heads=2, head_dim=16, slots=40)
    done = sweep.sweep([config], "cpu", "kv_compact_", budget=5)
    rows = {row.provider: row for row in done.rows}
    assert rows.keys() == {"cpp", "copy", "eager"}
    assert all(row.floor_bytes == 2 * 4 * 3 * 4 * 2 * 16 * 2 for row in done.rows)
    assert rows["cpp"].times_faster["copy"] > 0
    assert done.write(tmp_path).name.startswith("cpu-kv_compact-")


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
