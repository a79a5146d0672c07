"""A prefix tree of several drafts: of several drafters, or several of one.

`ChainSource` is one drafter among them: how it is asked and informed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.composed import ComposedDrafter, candidates_for, round_for, values_of
from specdec_hf.drafters.node_budget import NodeBudget, Nodes
from specdec_hf.drafting.call import MAX_DRAFTS_PER_ROUND, Asks, DrafterCall, Drawn, reads_draft
from specdec_hf.drafting.checks import (
    OUTSIDE,
    begin_state,
    cut_chains,
    describe,
    propose_checked,
)
from specdec_hf.drafting.context import Candidates, History
from specdec_hf.drafting.drafter import (
    RULES_OF_DETERMINISTIC_TREES,
    Cost,
    Draft,
    Drafter,
    Round,
    State,
)
from specdec_hf.runner.protocol import to_device
from specdec_hf.trees import TrieTree
from specdec_kernels import build_trie

if TYPE_CHECKING:
    from typing_extensions import Self


class TrieDrafter(ComposedDrafter):
    """Merges the drafts of several drafters into one tree.

    Chains share the nodes of their common prefix, which is then verified once. Only rules that read
    the draft distribution keep the chains apart: they try a token that was drawn twice two times
    (SpecInfer). They are offered where no drafter drafts several chains or trees of its own, and
    rule "auto" is one of them where all drafters draw their drafts from a distribution.

    A tree of limited size takes the nodes that are most likely to be committed: by a head's own
    probabilities, and by the acceptance measured so far for drafters that give none; see
    `NodeBudget`. With schedule "optimal" it takes as many of them as are worth their time, where
    the rule does not read the draft distribution. Drafts on a device are not cut so: they would
    have to be read first.

    Args:
        drafters: those with `Drafter.several` draft several chains, each other drafter one. The
            leaves of a tree end one chain each.
        layout: number of chains and tokens.

    Attributes:
        ranks: for each chain its number among those of its drafter.
    """

    def __init__(self, drafters: Sequence[Drafter], layout: TrieTree) -> None:
        self.drafters = list(drafters)
        self.layout = layout
        self.name = ", ".join(drafter.name for drafter in drafters)
        self.depth = layout.depth
        counts = [most_chains(part, layout.sequences) for part in drafters]
        self.ranks = [rank for count in counts for rank in range(count)]
        all_nodes = len(self.ranks) * layout.depth
        self.size = all_nodes if layout.size is None else min(layout.size, all_nodes)
        self.needs = candidates_for(self.drafters)
        self.rules, drawn = RULES_OF_DETERMINISTIC_TREES, ("multi_draft", "traversal")
        if all(drafter.draws and not drafter.size for drafter in drafters):
            self.rules = (*drawn, *self.rules)
        elif not any(drafter.several or drafter.size for drafter in drafters):
            self.rules = (*self.rules, *drawn)

    def begin(self, call: DrafterCall) -> State:
        """Begin a call with every drafter."""
        return TrieState(self, call)


class TrieState(State):
    """What the drafters of a `TrieDrafter` know of a call, and what is measured of their chains."""

    def __init__(self, drafter: TrieDrafter, call: DrafterCall) -> None:
        self.drafter, self.call, self.layout = drafter, call, drafter.layout
        self.budget = NodeBudget(drafter.ranks, call.batch_size)
        self.sources = [
            ChainSource(part, call, drafter.layout.sequences, k * MAX_DRAFTS_PER_ROUND)
            for k, part in enumerate(drafter.drafters)
        ]
        self.cost = Cost.sum([source.state.cost for source in self.sources])
        # Told before any draft: in a round the drafts of one sequence may all be on the host, and
        # those of another one of its batch not.
        self._on_host = call.device.type == "cpu" or not any(
            source.state.cost.relative > 0 or (source.drafter.draws and reads_draft(call.rule))
            for source in self.sources
        )

    def read(self, texts: History, size: int) -> int:
        return max([source.state.read(texts, size) for source in self.sources])

    @property
    def joins(self) -> bool:
        return type(self) is TrieState and all(source.state.joins for source in self.sources)

    def take(self, b: int, other: Self, index: int) -> None:
        self.budget.take(b, other.budget, index)
        for mine, its in zip(self.sources, other.sources, strict=True):
            mine.call.take(b, its.call, index)  # the loop tells the whole call alone
            mine.state.take(b, its.state, index)

    def end(self, texts: History) -> None:
        for source in self.sources:
            source.state.end(texts)

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        call, most = self.call, self.drafter.size
        drafts = [source.propose(texts, limits) for source in self.sources]
        drafted = [draft.tokens for draft in drafts if draft is not None]
        if not drafted:
            return None
        depth, target = int(limits.max()), call.device
        on_host = self._on_host and all(tokens.device.type == "cpu" for tokens in drafted)
        sized = on_host and self.layout.size is not None
        if sized and not reads_draft(call.rule):
            return self._best(drafts, texts, depth)
        device = torch.device("cpu") if on_host else target
        chains = torch.full((len(limits), len(self.drafter.ranks), depth), -1, device=device)
        for draft, chain_range in zip(drafts, self._chain_ranges(), strict=True):
            if draft is not None:
                own = _chains_of(draft)[:, :, :depth]
                first, (_, count, size) = chain_range.start, own.shape
                chains[:, first : first + count, :size] = own.to(device)
        if sized:
            chains = torch.from_numpy(self.budget.cut(chains.numpy(), most))
        trie = build_trie(chains, size=most, merge=not reads_draft(call.rule))
        # The number of nodes is known where the trie is on the host. On a device it would take one
        # more read, so the tree keeps its largest size there.
        size = int(trie.num_nodes.max()) if on_host else most
        if size == 0:
            return None
        proposed = Draft(
            trie.tokens[:, :size].to(target, non_blocking=True),
            trie.parents[:, :size].to(target, non_blocking=True),
            depth=depth,
            carried=chains.flatten(1).to(target, non_blocking=True),
        )
        drawn = [None if draft is None else draft.drawn for draft in drafts]
        parts = [part for part in drawn if part is not None]
        if reads_draft(call.rule) and parts:
            for source, draft in zip(self.sources, drafts, strict=True):
                if draft is not None and draft.drawn is None:
                    raise ValueError(
                        f"{type(source.drafter).__name__}.propose must return a distribution under "
                        f"rule {call.rule!r} if another drafter of the TrieTree does, got None"
                    )
            proposed.drawn = Drawn.join(parts, target)
            rows = _draft_rows(trie.nodes, most, drawn)
            proposed.draft_rows = rows[:, :size].to(target, non_blocking=True)
        return proposed

    def _best(self, drafts: list[Draft | None], texts: History, depth: int) -> Draft | None:
        """A tree of the most valuable nodes of drafts on the host."""
        batch_size, ranks = len(texts.lengths), self.drafter.ranks
        trees = [Nodes() for _ in range(batch_size)]
        chains = np.full((batch_size, len(ranks), depth), -1)
        paths: list[tuple[int, int, list[int]]] = []  # of each chain: its sequence, number, nodes
        for draft, chain_range in zip(drafts, self._chain_ranges(), strict=True):
            if draft is None:
                continue
            if draft.parents is not None and draft.scores is not None:
                columns = draft.tokens, draft.parents, draft.scores.exp()
                for tree, *rows in zip(trees, *(x.tolist() for x in columns), strict=True):
                    tree.add_tree(*rows)
                continue
            own = _chains_of(draft)[:, :, :depth]
            worth = self.budget.worth(own.shape[2]).tolist()
            for b, of_sequence in enumerate(own.tolist()):
                for k, chain in enumerate(of_sequence, chain_range.start):
                    path = trees[b].add_chain(chain, worth[b][k], first=ranks[k] == 0)
                    paths.append((b, k, path))
        asks, least = self.call.asks.nodes, self.layout.min_probability
        nodes = None if asks is None else lambda worth: asks(depth, worth[texts.active])
        kept = self.budget.choose(trees, self.drafter.size, least, nodes)
        if (size := max(map(len, kept))) == 0:
            return None
        made = np.full((2, batch_size, size), -1)
        places = [{node: place for place, node in enumerate(numbers)} for numbers in kept]
        for b, (tree, numbers) in enumerate(zip(trees, kept, strict=True)):
            made[0, b, : len(numbers)] = [tree.tokens[node] for node in numbers]
            above = [tree.parents[node] for node in numbers]
            made[1, b, : len(numbers)] = [places[b].get(node, -1) for node in above]
        for b, k, path in paths:
            for d, node in enumerate(path):
                if node in places[b]:
                    chains[b, k, d] = trees[b].tokens[node]
        tokens, parents = torch.from_numpy(made).to(self.call.device)
        carried = torch.from_numpy(chains.reshape(batch_size, -1)).to(self.call.device)
        return Draft(tokens, parents, depth=depth, carried=carried)

    def _chain_ranges(self) -> list[slice]:
        """For each drafter, the range of its chains among those of all."""
        ends = np.cumsum([0, *(source.count for source in self.sources)]).tolist()
        return [slice(first, last) for first, last in pairwise(ends)]

    def commit(self, texts: History, done: Round) -> None:
        ranks = self.drafter.ranks
        chains = np.full((len(done.lengths), len(ranks), 1), -1)
        if done.carried.size:
            chains = done.carried.reshape(*chains.shape[:2], -1)
            self.budget.observe(chains, agreement(chains, done.tokens))
        for source, chain_range in zip(self.sources, self._chain_ranges(), strict=True):
            source.commit(texts, done, chains[:, chain_range])


def _draft_rows(nodes: torch.Tensor, size: int, drawn: Sequence[Drawn | None]) -> torch.Tensor:
    """[B, size] int32, the row of each node's draft distribution in their concatenation.

    Args:
        nodes: [B, K, L], the node of each token of a trie whose chains share no nodes.
        size: number of its nodes.
        drawn: the rows of each chain, None for one that drafted nothing.
    """
    rows = np.zeros(tuple(nodes.shape[1:]), dtype=np.int32)
    first = 0
    for k, one in enumerate(drawn):
        if one is not None:
            count = one.logits.shape[1]
            rows[k] = first + np.minimum(np.arange(rows.shape[1]), count - 1)
            first += count
    flat = nodes.flatten(1).long()
    values = to_device(rows.flatten(), nodes.device).expand_as(flat)
    out = torch.zeros((len(flat), size + 1), dtype=torch.int32, device=nodes.device)
    return out.scatter(1, torch.where(flat < 0, size, flat), values)[:, :size]


@dataclass(frozen=True, eq=False)
class MostLikelyCall(DrafterCall):
    """A call whose drafts are the most likely tokens, although its texts are sampled.

    Attributes:
        whole: the call with the temperature of its texts.
    """

    whole: DrafterCall = field(kw_only=True)

    def take(self, b: int, other: DrafterCall, index: int) -> None:
        """Nothing here is of one sequence but for what the whole call has, and is told."""
        self._placed.clear()

    def sampled_seeds(self) -> dict[int, int]:
        return self.whole.sampled_seeds()


def most_chains(drafter: Drafter, num_proposals: int) -> int:
    """How many chains a drafter of a `TrieDrafter` gives at most: a tree's leaves end one each."""
    return drafter.size or (num_proposals if drafter.several else 1)


class ChainSource:
    """One drafter of a `TrieDrafter` in a call.

    It drafts chains, or a tree on the host. The paths to leaves of a tree without scores become
    chains.

    Args:
        drafter: it drafts ``num_proposals`` chains if it has `Drafter.several`, else one.
        call: that of the whole tree.
        num_proposals: most chains of a sequence in one round.
        first_draft_index: chains of one round must not share their noise.

    Attributes:
        call: its own.
        count: most chains of it.

    Raises:
        ValueError: a call that it cannot draft for.
    """

    def __init__(
        self, drafter: Drafter, call: DrafterCall, num_proposals: int, first_draft_index: int
    ) -> None:
        self.drafter, self.count = drafter, most_chains(drafter, num_proposals)
        # The schedule counts the nodes of the merged tree, and answers no part.
        self.call = dataclasses.replace(
            call,
            num_proposals=num_proposals if drafter.several else 1,
            first_draft_index=first_draft_index,
            asks=Asks(),
        )
        if call.rule == "target_only":
            # This rule accepts whichever child equals the target's own draw, so the most likely
            # tokens are the best drafts and nothing need be drawn.
            sampling = dataclasses.replace(call.sampling, temperature=0.0)
            self.call = MostLikelyCall(**{**values_of(self.call), "sampling": sampling}, whole=call)
        self.state = begin_state(drafter, self.call)
        self._tree: Draft | None = None  # of the round that was not committed yet

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        """Ask the drafter."""
        draft = propose_checked(self.drafter, self.state, texts, limits, self.call)
        self._tree = None if draft is None or draft.parents is None else draft
        if draft is None or draft.parents is None:
            return draft
        name = type(self.drafter).__name__
        if draft.drawn is not None:
            raise ValueError(f"{name}.propose must return no distribution with TrieTree, got one")
        if draft.tokens.device.type != "cpu" or draft.parents.device.type != "cpu":
            raise ValueError(
                f"{name}.propose must return tokens and parents on the host with TrieTree, "
                f"got {draft.tokens.device} and {draft.parents.device}"
            )
        return draft

    def commit(self, texts: History, done: Round, chains: NDArray[np.int64]) -> None:
        """Tell the drafter how much of its first chain, or which path of its tree, was committed.

        Args:
            texts: the committed tokens after the round.
            done: the round of the merged tree.
            chains: [B, K, L], its chains as they were verified.
        """
        if not self.drafter.size and (chains < -1).any():  # the tree ends there as it does at -1
            self.call.note(f"{describe(self.drafter)} {OUTSIDE}")
        tree, self._tree = self._tree, None
        if type(self.state).commit is State.commit:  # which learns nothing
            return
        lengths = done.lengths.copy()
        candidates = round_for(self.drafter, done).candidates
        if tree is not None:
            own = _round_of_tree(tree, lengths, done.active, done.tokens)
            if candidates is not None:
                candidates = _renumber(candidates, tree)
        else:
            chain = chains[:, 0, :0] if self.drafter.size else chains[:, 0]
            accepted = agreement(chain[:, None], done.tokens)[:, 0]
            own = Round.of_chain(lengths, done.active, accepted, chain)
        self.state.commit(texts, dataclasses.replace(own, candidates=candidates))


def agreement(chains: NDArray[np.int64], committed: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B, K], how many tokens of each chain [B, K, L] begin the committed path [B, D]."""
    depth = min(chains.shape[2], committed.shape[1])
    path = committed[:, None, :depth]
    equal = (chains[:, :, :depth] == path) & (path >= 0)
    lengths: NDArray[np.int64] = np.minimum.accumulate(equal, axis=2).sum(axis=2)
    return lengths


def _paths(tokens: list[int], parents: list[int]) -> dict[int, tuple[int, ...]]:
    """The tokens from the root, which is -1, to each present node of one tree."""
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token >= 0 and parent in paths:
            paths[n] = (*paths[parent], token)
    return paths


def _chains_of(draft: Draft) -> torch.Tensor:
    """[B, K, L], a draft as chains, -1 behind the end of each; of a tree its paths to leaves."""
    if draft.parents is None:
        count = draft.num_proposals
        tokens = draft.tokens if count > 1 else cut_chains(draft)
        return tokens.reshape(len(tokens), count, tokens.shape[1] // count)
    rows = zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)
    leaves = [_leaf_paths(*of_sequence) for of_sequence in rows]
    depth = max((len(path) for paths in leaves for path in paths), default=0)
    chains = np.full((len(leaves), max(map(len, leaves)), depth), -1)
    for b, paths in enumerate(leaves):
        for k, path in enumerate(paths):
            chains[b, k, : len(path)] = path
    return torch.from_numpy(chains)


def _leaf_paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The tokens from the root to each leaf of one tree, leaves in the order of their numbers."""
    paths = _paths(tokens, parents)
    inner = {parents[n] for n in paths if n >= 0}
    return [path for n, path in paths.items() if n >= 0 and n not in inner]


def _round_of_tree(
    draft: Draft,
    lengths: NDArray[np.int64],
    active: NDArray[np.bool_],
    committed: NDArray[np.int64],
) -> Round:
    """The committed path in the numbers of a drafter's own tree."""
    assert draft.parents is not None
    path = np.full_like(committed, -1)
    tokens, parents = draft.tokens.numpy(), draft.parents.numpy()
    for b in range(len(committed)):
        node = -1
        for depth, token in enumerate(committed[b].tolist()):
            children = np.flatnonzero((parents[b] == node) & (tokens[b] == token))
            if token < 0 or not len(children):
                break
            path[b, depth] = node = int(children[0])
    carried = path[:, :0] if draft.carried is None else draft.carried.numpy()
    kept = path >= 0
    accepted = np.where(kept, committed, -1)
    return Round(lengths, active, kept.sum(axis=1), path, accepted, carried)


def _renumber(candidates: Candidates, draft: Draft) -> Candidates:
    """Candidates of a merged tree, with node n of one drafter's own tree in row n + 1.

    The row of a node that the merged tree lacks is absent. Rows of other tokens follow.
    """
    assert draft.parents is not None
    batch_size, rows = candidates.tokens.shape
    nodes = draft.tokens.shape[1]
    order = np.full((batch_size, nodes + rows), -1)  # the merged tree's row that each row shows
    places = np.tile(np.arange(rows) + nodes, (batch_size, 1))  # the reverse
    for b in range(batch_size):
        merged = _paths(candidates.tokens[b, 1:].tolist(), (candidates.parents[b, 1:] - 1).tolist())
        row_of = {path: n + 1 for n, path in merged.items()}
        for n, path in _paths(draft.tokens[b].tolist(), draft.parents[b].tolist()).items():
            if (row := row_of.get(path)) is not None:
                order[b, n + 1], places[b, row] = row, n + 1
    order[:, nodes + 1 :] = np.where(places[:, 1:] > nodes, np.arange(1, rows), -1)
    taken = np.maximum(order, 0)
    tokens = np.take_along_axis(candidates.tokens, taken, axis=1)
    above = np.take_along_axis(candidates.parents, taken, axis=1)
    parents = np.take_along_axis(places, np.maximum(above, 0), axis=1)
    return Candidates(
        np.where(order < 0, -1, tokens),
        np.where((order < 0) | (above < 0), -1, parents),
        np.take_along_axis(candidates.ids, taken[:, :, None], axis=1),
    )
