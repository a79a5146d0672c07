"""Layouts of draft trees: which nodes are drafted, before their tokens are known.

Nodes are numbered breadth first, and the verification tries siblings in the order of their numbers.
This module does without torch, because the command line checks ``--tree`` before it loads torch.

Terms: the root is the pending token, which is not a node. A node is a drafted token; its parent is
the token before it, its path the nodes from the root down to it, its depth the length of the path.
Siblings are the children of one parent. A trial is the comparison of one child with the target.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer, check_integers, check_number, check_sequence, shown

MAX_NODES = 1024


def check_probabilities(name: str, values: Any) -> list[float]:
    """The values as probabilities, at least one of them."""
    listed = check_sequence(name, values)
    if not listed:
        raise ValueError(f"{name} must have at least one entry, got none")
    return [check_number(f"{name}[{k}]", value, 0, 1) for k, value in enumerate(listed)]


@dataclass(frozen=True)
class TreeSpec:
    """A tree of fixed shape.

    Args:
        parents: parent of each node, -1 for children of the root; breadth first, so parents never
            decrease.
        ranks: which of the draft's most likely tokens each node holds: 0 for the most likely, 1 for
            the second, and so on. None numbers the siblings 0, 1, ... Drafters that sample tokens
            use only the number of siblings.

    Raises:
        TypeError: parents or ranks that are not sequences of integers.
        ValueError: parents or ranks that are no such tree.

    Example:
        >>> TreeSpec.branching((2, 1))
        TreeSpec(parents=(-1, -1, 0, 1), ranks=(0, 1, 0, 0))
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...] = None  # type: ignore[assignment]  # always a tuple afterwards

    def __post_init__(self) -> None:
        parents = check_integers("parents", self.parents)
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
        ranks = (
            self._sibling_numbers() if self.ranks is None else check_integers("ranks", self.ranks)
        )
        if len(ranks) != len(parents):
            raise ValueError(f"ranks must have {len(parents)} entries, got {len(ranks)}")
        for n, rank in enumerate(ranks):
            minimum = ranks[n - 1] + 1 if n and parents[n - 1] == parents[n] else 0
            if rank < minimum:
                raise ValueError(
                    f"ranks[{n}] must be at least {minimum} (they rise among siblings), got {rank}"
                )
        object.__setattr__(self, "ranks", ranks)

    def _sibling_numbers(self) -> tuple[int, ...]:
        numbers: list[int] = []
        for n, parent in enumerate(self.parents):
            numbers.append(numbers[-1] + 1 if n and self.parents[n - 1] == parent else 0)
        return tuple(numbers)

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
        """A tree of ``n`` nodes without branches."""
        return cls.branching((1,) * check_integer("n", n, 1, MAX_NODES))

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
        """All combinations of the heads' most likely tokens, or the best ``size`` nodes of them.

        Args:
            ranks: how many of its most likely tokens each head offers.
            size: nodes to keep; needs ``accuracies``.
            accuracies: ``accuracies[h][r]``, how often the token of rank r of head h is right. The
                value of a node is the product along its path.

        Source: Cai et al. 2024 (Medusa), section 2.3.3.
        """
        full = cls.branching(ranks)
        if size is None:
            return full
        size = check_integer("size", size, 1, MAX_NODES)
        if accuracies is None:
            raise ValueError(f"accuracies must be given when size is, got None with size={size}")
        heads = check_sequence("accuracies", accuracies)
        table = [check_probabilities(f"accuracies[{h}]", head) for h, head in enumerate(heads)]
        values: list[float] = []
        for parent, rank, depth in zip(full.parents, full.ranks, full.depths, strict=True):
            if depth > len(table) or rank >= len(table[depth - 1]):
                raise ValueError(
                    f"accuracies must cover rank {rank} of head {depth - 1}, which ranks offers"
                )
            values.append(table[depth - 1][rank] * (values[parent] if parent >= 0 else 1.0))
        # No value exceeds that of the parent, and of equal values the lower number is kept, so the
        # nodes that are kept form a tree.
        kept = sorted(sorted(range(full.size), key=lambda n: (-values[n], n))[:size])
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
            acceptance: ``acceptance[k]``, the probability that trial k (the (k+1)-th child) accepts
                given that the trials before it did not. It is taken to be the same at every node.
                The loop measures it: ``out.stats.acceptance_by_trial``.
            size: most nodes; the tree has fewer where more would add nothing.
            depth, branching: most levels, and most children of a node; None sets no limit.

        Source: Chen et al. 2024 (Sequoia), section 4.1.
        """
        listed = check_probabilities("acceptance", acceptance)
        size = check_integer("size", size, 1, MAX_NODES)
        deepest = size if depth is None else min(check_integer("depth", depth, 1, MAX_NODES), size)
        widest = len(listed)
        if branching is not None:
            widest = check_integer("branching", branching, 1, MAX_NODES)
        accept_probs: list[float] = []
        all_rejected = 1.0
        for p in listed[: min(widest, size)]:
            accept_probs.append(all_rejected * p)
            all_rejected *= 1 - p
        if not max(accept_probs) > 0:
            return cls((-1,))
        return cls(tuple(best_parents(accept_probs, size, deepest)))


@dataclass(frozen=True)
class EagleTree:
    """A tree that grows along the most likely paths of the draft model (EAGLE-2).

    Each level expands the ``width`` most likely paths so far by their ``width`` most likely tokens.
    The ``size`` most likely of all candidates are verified.

    Args:
        width: paths that a level expands, and children of each.
        depth: most levels.
        size: most nodes.
        min_probability: a CPU grows no further level below a sequence where the paths that it would
            expand have less probability than this together, by the draft model: each level is one
            more forward of it. Devices are not asked, because the host would have to wait.

    Raises:
        TypeError: a size that is not an integer, or a probability that is no number, by name.
        ValueError: a number out of range, by name.

    Source: arXiv 2406.16858, section 4; ``min_probability`` is of this library.
    """

    width: int = 4
    depth: int = 5
    size: int = 16
    min_probability: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", check_integer("width", self.width, 1, 64))
        object.__setattr__(self, "depth", check_integer("depth", self.depth, 1, 64))
        object.__setattr__(self, "size", check_integer("size", self.size, 1, MAX_NODES))
        object.__setattr__(
            self, "min_probability", check_number("min_probability", self.min_probability, 0, 1)
        )


@dataclass(frozen=True)
class TrieTree:
    """Several drafts merged into a prefix tree (SpecInfer, REST).

    Args:
        sequences: chains that a copying drafter drafts, such as prompt lookup; others draft one
            each.
        depth: tokens of each chain.
        size: most nodes of the tree. They go to the nodes that are most likely to be committed, by
            a head's own probabilities, or by the measured acceptance of the chain for drafters that
            give none. None keeps all nodes.
        min_probability: with ``size``, nodes that are less likely to be committed are left out, but
            for the first of a drafter that gives no probabilities.

    Raises:
        TypeError: a size that is not an integer, or a probability that is no number, by name.
        ValueError: a number out of range, by name.
    """

    sequences: int = 4
    depth: int = 5
    size: int | None = None
    min_probability: float = 0.0

    def __post_init__(self) -> None:
        for name in ("sequences", "depth", "size"):
            value = getattr(self, name)
            if name != "size" or value is not None:
                object.__setattr__(self, name, check_integer(name, value, 1, MAX_NODES))
        object.__setattr__(
            self, "min_probability", check_number("min_probability", self.min_probability, 0, 1)
        )


Layout = TreeSpec | EagleTree | TrieTree


def as_layout(tree: Any) -> Layout | None:
    """The layout that the argument ``tree`` of `generate` names; None stays None.

    Raises:
        TypeError: anything else.
        ValueError: numbers of children that are no tree.
    """
    if tree is None or isinstance(tree, TreeSpec | EagleTree | TrieTree):
        return tree
    if isinstance(tree, list | tuple):
        return TreeSpec(_branching("tree", tree))
    raise TypeError(
        f"tree must be a TreeSpec, EagleTree, TrieTree or a tuple of branchings, got {shown(tree)}"
    )


@dataclass(frozen=True)
class Forest:
    """Copies of one tree under one root, one for each of several draft models.

    Attributes:
        spec: the whole. It is breadth first too, so a cut at a depth keeps all numbers.
        owners: the copy that each node of ``spec`` belongs to.
        numbers: the number of each node of ``spec`` in its copy.
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


def _branching(name: str, widths: Any) -> tuple[int, ...]:
    """Parents of a tree whose nodes at depth d have ``widths[d]`` children."""
    widths = tuple(check_integer(name, w, 1, MAX_NODES) for w in check_sequence(name, widths))
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


def best_parents(accept_probs: list[float], size: int, depth: int) -> list[int]:
    """Parents of at most ``size`` nodes, breadth first, at most ``depth`` deep.

    Args:
        accept_probs: probability of the first, second, ... child to be the accepted one. At least
            one of them is not 0.
    """
    splits = _best_splits(accept_probs, size, depth)
    parents: list[int] = []
    level = [(-1, size)]
    for levels in range(len(splits), 0, -1):
        below: list[tuple[int, int]] = []
        for node, budget in level:
            remaining = budget
            for split in splits[levels]:
                share = int(split[remaining])
                if share == 0:
                    break
                below.append((len(parents), share - 1))
                parents.append(node)
                remaining -= share
        level = below
    return parents


def _best_splits(
    accept_probs: list[float], size: int, depth: int
) -> dict[int, list[NDArray[np.int64]]]:
    """How to divide a budget of nodes among the children of one node.

    Returns:
        ``splits[d][k][n]``: the size of child k's subtree, itself included, where d levels are
        allowed below the parent and n nodes are to be divided among child k and those after it.
    """
    values = np.zeros(size + 1)  # expected length of the best n nodes below a node, a level deeper
    splits: dict[int, list[NDArray[np.int64]]] = {}
    for d in range(1, depth + 1):
        after = np.zeros(size + 1)  # expected length of n nodes for the children after this one
        picked: list[NDArray[np.int64]] = []
        for accept_prob in reversed(accept_probs):
            best, share = np.zeros(size + 1), np.zeros(size + 1, dtype=np.int64)
            child = accept_prob * (1 + values[:size])  # of subtrees of 1 to size nodes
            for n in range(1, size + 1):
                total = child[:n] + after[n - 1 :: -1][:n]
                m = int(total.argmax())
                if total[m] > 0:
                    best[n], share[n] = total[m], m + 1
            after = best
            picked.insert(0, share)
        splits[d] = picked
        if np.array_equal(after, values):
            break  # more levels do not help so few nodes
        values = after
    return splits


def save_acceptance(path: str | Path, acceptance: Sequence[float]) -> None:
    """Write an acceptance vector as JSON, for `load_acceptance` and `TreeSpec.sequoia`."""
    listed = check_probabilities("acceptance", acceptance)
    Path(path).write_text(json.dumps({"acceptance": listed}) + "\n", encoding="utf-8")


def load_acceptance(path: str | Path) -> list[float]:
    """Read an acceptance vector that `save_acceptance` wrote.

    Raises:
        ValueError: the file cannot be read or holds something else; the message says why.
    """
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"cannot read acceptance file {path}: {reason}") from error
    if not isinstance(content, dict) or not isinstance(content.get("acceptance"), list):
        raise ValueError(f'{path}: needs "acceptance", a list of probabilities')
    try:
        return check_probabilities("acceptance", content["acceptance"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
