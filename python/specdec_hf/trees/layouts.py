"""Layouts of token trees: which nodes are drafted, before anyone knows their tokens.

A tree hangs below the pending token, its root, which is not a node. Nodes are numbered breadth
first; siblings are tried in the order of their numbers. No torch in here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from specdec_hf.trees.sequoia import best_parents

MAX_NODES = 1024


@dataclass(frozen=True)
class TreeSpec:
    """A tree of fixed shape.

    Args:
        parents: parent of each node, -1 for children of the root; breadth first, so parents never
            decrease.
        ranks: of each node among its siblings: 0 is the draft's first choice, 1 its second, and so
            on. None counts them. Drafters that sample read only their order.

    Raises:
        ValueError: not such a tree, with the argument, the rule and the value.

    Example:
        >>> TreeSpec.branching((2, 1))
        TreeSpec(parents=(-1, -1, 0, 1), ranks=(0, 0, 0, 0))
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...] = None  # type: ignore[assignment]  # always a tuple afterwards

    def __post_init__(self) -> None:
        parents = _integers("parents", self.parents)
        if not 1 <= len(parents) <= MAX_NODES:
            raise ValueError(f"parents must have 1 to {MAX_NODES} entries, got {len(parents)}")
        for n, parent in enumerate(parents):
            if not -1 <= parent < n:
                raise ValueError(f"parents[{n}] must be in [-1, {n}), got {parent}")
            if n and parent < parents[n - 1]:
                raise ValueError(
                    "parents must never decrease (nodes breadth first), "
                    f"got {parents[n - 1]} before {parent} at {n}"
                )
        object.__setattr__(self, "parents", parents)
        ranks = self._counted() if self.ranks is None else _integers("ranks", self.ranks)
        if len(ranks) != len(parents):
            raise ValueError(f"ranks must have {len(parents)} entries, got {len(ranks)}")
        for n, rank in enumerate(ranks):
            least = ranks[n - 1] + 1 if n and parents[n - 1] == parents[n] else 0
            if rank < least:
                raise ValueError(
                    f"ranks[{n}] must be at least {least} (they rise among siblings), got {rank}"
                )
        object.__setattr__(self, "ranks", ranks)

    def _counted(self) -> tuple[int, ...]:
        ranks: list[int] = []
        for n, parent in enumerate(self.parents):
            ranks.append(ranks[-1] + 1 if n and self.parents[n - 1] == parent else 0)
        return tuple(ranks)

    @property
    def size(self) -> int:
        """Number of nodes N."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root's children have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return self.depths[-1]

    @cached_property
    def leaves(self) -> int:
        """Number of nodes without children."""
        return self.size - len({parent for parent in self.parents if parent >= 0})

    def cut(self, depth: int) -> TreeSpec:
        """The tree down to a depth >= 1; its nodes keep their numbers."""
        if depth >= self.depth:
            return self
        size = sum(d <= depth for d in self.depths)
        return TreeSpec(self.parents[:size], self.ranks[:size])

    @classmethod
    def chain(cls, n: int) -> TreeSpec:
        """n tokens one after the other."""
        return cls.branching((1,) * _integer("n", n, 1))

    @classmethod
    def branching(cls, widths: Iterable[int]) -> TreeSpec:
        """Every node at depth d has ``widths[d]`` children; the root has depth 0."""
        return cls(_branching("branching", widths))

    @classmethod
    def medusa(
        cls,
        ranks: Iterable[int],
        size: int | None = None,
        accuracies: Sequence[Sequence[float]] | None = None,
    ) -> TreeSpec:
        """The product of the heads' likeliest tokens, or the best ``size`` nodes of it.

        Args:
            ranks: how many of its likeliest tokens each head offers.
            size: nodes to keep; needs ``accuracies``.
            accuracies: ``accuracies[h][r]``, how often the token of rank r of head h is right. A
                node counts the product along its path.

        Source: Cai et al. 2024 (Medusa), section 2.3.3.
        """
        full = cls.branching(ranks)
        if size is None:
            return full
        size = _integer("size", size, 1)
        if accuracies is None:
            raise ValueError(f"accuracies must be given when size is, got None with size={size}")
        rows = _listed("accuracies", accuracies)
        table = [_probabilities(f"accuracies[{h}]", row) for h, row in enumerate(rows)]
        worth: list[float] = []
        for parent, rank, depth in zip(full.parents, full.ranks, full.depths, strict=True):
            if depth > len(table) or rank >= len(table[depth - 1]):
                raise ValueError(
                    f"accuracies must cover rank {rank} of head {depth - 1}, which ranks offers"
                )
            worth.append(table[depth - 1][rank] * (worth[parent] if parent >= 0 else 1.0))
        # No node is worth more than its parent and ties go to the lower number: what is kept hangs
        # together.
        kept = sorted(sorted(range(full.size), key=lambda n: (-worth[n], n))[:size])
        number = {-1: -1, **{n: i for i, n in enumerate(kept)}}
        return cls(tuple(number[full.parents[n]] for n in kept), tuple(full.ranks[n] for n in kept))

    @classmethod
    def sequoia(
        cls,
        acceptance: Sequence[float],
        size: int,
        depth: int | None = None,
        branching: int | None = None,
    ) -> TreeSpec:
        """The tree of at most ``size`` nodes with the largest expected accepted length.

        Args:
            acceptance: ``acceptance[k]``, the probability that the (k+1)-th child is accepted given
                that those before it were not, the same at every node. As the loop measures it:
                ``out.stats.acceptance_by_rank``.
            size: nodes at most; fewer where more would add nothing.
            depth, branching: limits; None is none but the others.

        Source: Chen et al. 2024 (Sequoia), section 4.1: the dynamic programme.
        """
        listed = _probabilities("acceptance", acceptance)
        size = _integer("size", size, 1, MAX_NODES)
        deepest = size if depth is None else min(_integer("depth", depth, 1), size)
        widest = len(listed) if branching is None else _integer("branching", branching, 1)
        chances: list[float] = []
        missed = 1.0
        for p in listed[: min(widest, size)]:
            chances.append(missed * p)
            missed *= 1 - p
        if not max(chances) > 0:
            return cls((-1,))
        return cls(tuple(best_parents(chances, size, deepest)))

    def expected_length(self, acceptance: Sequence[float]) -> float:
        """Expected accepted nodes where siblings are accepted with these chances, as in `sequoia`.

        Ranks beyond the list count as never accepted.
        """
        listed = _probabilities("acceptance", acceptance)
        chances = [p * math.prod(1 - q for q in listed[:k]) for k, p in enumerate(listed)]
        worth: list[float] = []
        for parent, rank in zip(self.parents, self._counted(), strict=True):
            chance = chances[rank] if rank < len(chances) else 0.0
            worth.append(chance * (worth[parent] if parent >= 0 else 1.0))
        return math.fsum(worth)


@dataclass(frozen=True)
class EagleTree:
    """A tree that grows where the draft model is sure (EAGLE-2).

    Each level expands the ``width`` likeliest paths so far by their ``width`` likeliest tokens; of
    all candidates the ``size`` likeliest are verified.

    Raises:
        ValueError: a number out of range, by name.

    Source: arXiv 2406.16858, section 4.
    """

    width: int = 4
    depth: int = 5
    size: int = 16

    def __post_init__(self) -> None:
        _integer("width", self.width, 1, 64)
        _integer("depth", self.depth, 1, 64)
        _integer("size", self.size, 1, MAX_NODES)


@dataclass(frozen=True)
class TrieTree:
    """Several drafted sequences merged into a prefix tree (SpecInfer, REST).

    Args:
        sequences: continuations that prompt lookup proposes; other drafters propose one each.
        depth: tokens of each.
        size: nodes of the tree at most; what has no room is dropped from the end. None holds all.

    Raises:
        ValueError: a number out of range, by name.
    """

    sequences: int = 4
    depth: int = 5
    size: int | None = None

    def __post_init__(self) -> None:
        _integer("sequences", self.sequences, 1, MAX_NODES)
        _integer("depth", self.depth, 1, MAX_NODES)
        if self.size is not None:
            _integer("size", self.size, 1, MAX_NODES)


Layout = TreeSpec | EagleTree | TrieTree


def as_layout(tree: Any) -> Layout | None:
    """A layout from what `generate` accepts; None is none.

    Raises:
        ValueError: anything else.
    """
    if tree is None or isinstance(tree, TreeSpec | EagleTree | TrieTree):
        return tree
    if isinstance(tree, list | tuple):
        return TreeSpec(_branching("tree", tree))
    raise ValueError(
        f"tree must be a TreeSpec, EagleTree, TrieTree or a tuple of branchings, got {tree!r}"
    )


@dataclass(frozen=True)
class Forest:
    """Copies of one tree under one root, one for each of several draft models.

    ``spec`` is the whole; node n of it belongs to copy ``owners[n]`` and is node ``numbers[n]``
    there. Levels stay together, so cutting at a depth leaves all numbers as they are.
    """

    tree: TreeSpec
    copies: int
    spec: TreeSpec = field(init=False)
    owners: tuple[int, ...] = field(init=False)
    numbers: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        tree = self.tree
        order = sorted(
            (depth, copy, n) for n, depth in enumerate(tree.depths) for copy in range(self.copies)
        )
        at = {(copy, n): i for i, (_, copy, n) in enumerate(order)}
        parents = tuple(
            at[copy, tree.parents[n]] if tree.parents[n] >= 0 else -1 for _, copy, n in order
        )
        object.__setattr__(self, "spec", TreeSpec(parents))
        object.__setattr__(self, "owners", tuple(copy for _, copy, _ in order))
        object.__setattr__(self, "numbers", tuple(n for _, _, n in order))


def save_acceptance(path: str | Path, acceptance: Sequence[float]) -> None:
    """Write an acceptance vector as JSON, for `load_acceptance` and `TreeSpec.sequoia`."""
    listed = _probabilities("acceptance", acceptance)
    Path(path).write_text(json.dumps({"acceptance": listed}) + "\n", encoding="utf-8")


def load_acceptance(path: str | Path) -> list[float]:
    """Read what `save_acceptance` wrote.

    Raises:
        ValueError: unreadable, or no such content; the message says which file and why.
    """
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"cannot read acceptance file {path}: {reason}") from error
    if not isinstance(content, dict) or not isinstance(content.get("acceptance"), list):
        raise ValueError(f'{path}: needs "acceptance", a list of probabilities')
    try:
        return _probabilities("acceptance", content["acceptance"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _branching(name: str, widths: Any) -> tuple[int, ...]:
    """Parents of a tree whose nodes at depth d have ``widths[d]`` children."""
    widths = tuple(_integer(name, w, 1) for w in _listed(name, widths))
    if not widths:
        raise ValueError(f"{name} must have at least one entry, got none")
    if sum(math.prod(widths[: d + 1]) for d in range(len(widths))) > MAX_NODES:
        raise ValueError(f"{name} must have at most {MAX_NODES} nodes, got {widths}")
    parents: list[int] = []
    level = [-1]
    for width in widths:
        begin = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(begin, len(parents)))
    return tuple(parents)


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a sequence, got {values!r}")
    return list(values)


def _integers(name: str, values: Any) -> tuple[int, ...]:
    listed = _listed(name, values)
    for n, value in enumerate(listed):
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name}[{n}] must be an integer, got {value!r}")
    return tuple(int(value) for value in listed)


def _integer(name: str, value: Any, least: int, most: int = MAX_NODES) -> int:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= int(value) <= most:
        raise ValueError(f"{name} must be an integer in [{least}, {most}], got {value!r}")
    return int(value)


def _probabilities(name: str, values: Any) -> list[float]:
    listed = _listed(name, values)
    if not listed:
        raise ValueError(f"{name} must have at least one entry, got none")
    for k, value in enumerate(listed):
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not 0 <= float(value) <= 1:
            raise ValueError(f"{name}[{k}] must be in [0, 1], got {value!r}")
    return [float(value) for value in listed]
