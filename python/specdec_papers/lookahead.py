"""Lookahead decoding: Jacobi windows fill a pool of n-grams within the forwards that verify them.

Terms:

- window: N - 1 levels of W columns, guesses of the tokens ahead. The token at level l and column j
  is a guess for the place j + l after the pending token, which itself is column 0 of level 0.
- Level 0 is a chain, and every other token follows the one above it in its column. The window is so
  a tree below the pending token, and its tokens are drafts as good as any.
- Jacobi step: the target's most likely token after each token of the last level becomes the next
  level. A column and its new token are an n-gram; then level 0 is dropped.
- pool: n-grams by their first token. Those that begin with the pending token are drafted too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from specdec_hf.arguments import check_flag, check_integer
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Draft, Drafter, Needs, Round, State
from specdec_hf.trees import MAX_NODES

from specdec_papers.host_tree import ROOT, HostTree, as_draft

if TYPE_CHECKING:
    from typing_extensions import Self


class NgramPool:
    """The n-grams that were added last, a few for each first token.

    Args:
        capacity: most n-grams with one first token; the one that was added longest ago is dropped.

    Example:
        >>> pool = NgramPool(capacity=2)
        >>> for ngram in [(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7), (8, 9, 9)]:
        ...     pool.add(ngram)
        >>> pool.after(1)
        [(6, 7), (2, 3)]
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ngrams: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram, or mark that it was seen again."""
        first, *rest = ngram
        known = self._ngrams.setdefault(first, {})
        known.pop(tuple(rest), None)
        known[tuple(rest)] = None
        if len(known) > self._capacity:
            del known[next(iter(known))]

    def after(self, first: int) -> list[tuple[int, ...]]:
        """What follows ``first`` in its n-grams, the latest first."""
        return list(self._ngrams.get(first, {}))[::-1]


class Window:
    """The Jacobi window of one sequence.

    Attributes:
        levels: N - 1 lists of W tokens. Only `step` writes the pending token to its place; before,
            that place holds a token which has no meaning.
    """

    def __init__(self, text: Sequence[int], columns: int, depth: int) -> None:
        """The first guess for each place ahead is a token of the text, evenly spaced in it."""
        places = columns + depth - 1
        guesses = [text[i * len(text) // places] for i in range(places)]
        self.levels = [guesses[level : level + columns] for level in range(depth)]

    def place(self, tree: HostTree) -> list[int] | None:
        """Hang the window into a tree.

        Returns:
            The node of each column in the last level; None where the tree is too shallow for all.
        """
        tops = [ROOT, *tree.path(self.levels[0][1:])]
        ends = [
            [top, *tree.path([level[j] for level in self.levels[1:]], top)]
            for j, top in enumerate(tops)
        ]
        complete = len(ends) == len(self.levels[0]) and all(
            len(column) == len(self.levels) for column in ends
        )
        return [column[-1] for column in ends] if complete else None

    def step(self, pending: int, new: Sequence[int]) -> list[tuple[int, ...]]:
        """Take the tokens after the last level as the next level.

        Returns:
            The n-grams of all columns, the one of the pending token last.
        """
        self.levels[0][0] = pending
        self.levels.append(list(new))
        ngrams = list(zip(*self.levels, strict=True))
        del self.levels[0]
        return ngrams[::-1]


class LookaheadDrafter(Drafter, entry="lookahead"):
    """Drafts the window and the pool's n-grams after the pending token, as one tree.

    Each sequence has a window and a pool of its own, and a call begins with new ones. N-grams of
    the text join the pool, those of the prompt included. A sequence whose end is nearer than the
    window is deep keeps its window for the rest. So does a round of a `TrieTree` without room for
    the whole window.

    Args:
        window: columns W.
        ngram: tokens N of an n-gram.
        guesses: most n-grams G that are kept and drafted after one token; 0 drafts the window.
        text_ngrams: whether n-grams of the text join the pool.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: a number out of range, or not 1 to 1,024 nodes.

    Source: Fu et al. 2024, arXiv 2402.02057.
    """

    needs = Needs(candidates=1)

    def __init__(
        self, window: int = 3, ngram: int = 3, guesses: int = 3, *, text_ngrams: bool = True
    ) -> None:
        self.window = check_integer("window", window, 1, MAX_NODES)
        self.ngram = check_integer("ngram", ngram, 2, MAX_NODES)
        self.guesses = check_integer("guesses", guesses, 0, MAX_NODES)
        self.text_ngrams = check_flag("text_ngrams", text_ngrams)
        self.size = (self.window + self.guesses) * (self.ngram - 1) - 1
        self.depth = max(self.window + self.ngram - 3, self.ngram - 1 if self.guesses else 1)
        if not 1 <= self.size <= MAX_NODES:
            raise ValueError(
                f"(window + guesses) * (ngram - 1) must be in [2, {MAX_NODES + 1}], "
                f"got {self.size + 1}"
            )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Three numbers W,N,G."""
        if not text:
            return cls()
        numbers = text.split(",")
        if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
            raise ValueError(f"lookahead must be given three integers W,N,G, got {text!r}")
        return cls(*map(int, numbers))

    def begin(self, call: DrafterCall) -> State:
        """Begin with empty pools; windows begin with the first round."""
        return LookaheadState(self, call)


class LookaheadState(State):
    """The windows and the pools of a call.

    Attributes:
        windows: of each sequence, from its first draft on.
        ends: of each sequence, the nodes of its window's last level in the round's draft; None
            where the draft does not hold the whole window.
        pools: of each sequence.
    """

    def __init__(self, drafter: LookaheadDrafter, call: DrafterCall) -> None:
        self.drafter = drafter
        self.pools = [NgramPool(drafter.guesses) for _ in range(call.batch_size)]
        self.windows: list[Window | None] = [None] * call.batch_size
        self.ends: list[list[int] | None] = [None] * call.batch_size
        self._read = np.zeros(call.batch_size, dtype=np.int64)

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        drafter, size = self.drafter, self.drafter.ngram
        trees = [HostTree(int(limit)) for limit in limits]
        for b in np.flatnonzero(limits > 0).tolist():
            text = texts.tokens[b, : texts.lengths[b]].tolist()
            if drafter.text_ngrams:
                for end in range(max(int(self._read[b]), size - 1), len(text)):
                    self.pools[b].add(text[end + 1 - size : end + 1])
                self._read[b] = len(text)
            window = self.windows[b] or Window(text, drafter.window, size - 1)
            self.windows[b] = window
            self.ends[b] = window.place(trees[b])
            for follow in self.pools[b].after(text[-1]):
                trees[b].path(follow)
        return as_draft(trees)

    def commit(self, texts: History, done: Round) -> None:
        candidates = done.candidates
        if candidates is None:
            return
        for b in np.flatnonzero(done.active).tolist():
            window, ends = self.windows[b], self.ends[b]
            if window is None or ends is None:  # no drafts, or not all of the window
                continue
            self.ends[b] = None
            rows = np.array(ends) + 1  # row 0 is the pending token's, which is no node
            if (candidates.tokens[b, rows] < 0).any():  # a merged tree had no room for all of it
                continue
            new = candidates.ids[b, rows, 0].tolist()
            for ngram in window.step(int(candidates.tokens[b, 0]), new):
                self.pools[b].add(ngram)
