"""NASD: drafts from counts of n-grams, to which the target adds its most likely next tokens.

The ending of a text is its last n tokens, as in copying.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.arguments import check_flag, check_integer
from specdec_hf.drafters.kept_texts import note_earlier_calls, note_same_noise
from specdec_hf.drafting.call import DrafterCall, reads_draft
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Draft, Drafter, Needs, Round, State
from specdec_hf.runner.protocol import vocab_size_of
from specdec_hf.trees import MAX_NODES

from specdec_papers.ngram_table import NgramCounts

_ADDING = threading.Lock()  # no copy of what is kept holds one


class KeptCounts:
    """Counts of finished calls, for later ones. A call sees what had been kept when it began.

    Args:
        empty: counts of no text, whose endings are as long as those to be kept.
        max_ngrams: how many n-grams are kept, those that were counted last.
    """

    def __init__(self, empty: NgramCounts, max_ngrams: int) -> None:
        self.max_ngrams = max_ngrams
        self._empty = empty
        # The vocabulary size, the counts, and the seeds that drew them. Readers take all at once.
        self._kept: tuple[int, NgramCounts, frozenset[int]] = (0, empty, frozenset())

    def of(self, vocab_size: int) -> tuple[NgramCounts, frozenset[int]]:
        """The counts of a vocabulary of this size, and the seeds of the sampled texts in them."""
        kept_for, counts, seeds = self._kept
        return (counts, seeds) if kept_for == vocab_size else (self._empty, frozenset())

    def add(self, vocab_size: int, texts: Iterable[NgramCounts], seeds: Iterable[int]) -> None:
        """Keep the counts of texts. Those of a vocabulary of another size are dropped."""
        with _ADDING:
            counts, known = self.of(vocab_size)
            self._kept = (
                vocab_size, counts.with_latest(texts, self.max_ngrams), known.union(seeds)
            )  # fmt: skip


class NasdDrafter(Drafter, entry="nasd"):
    """Drafts the most counted token after the longest known ending, again and again.

    Each sequence has counts of its own. Every committed token is counted after the endings of
    the text before it, those of the prompt included. The target's ``top_k`` most likely tokens are
    counted there too, so likely continuations that were not taken are known as well. A call
    begins without counts, unless those of earlier calls are kept.

    Args:
        max_ngram: longest ending to look for; the N-gram model of the source has N = max_ngram + 1.
        min_ngram: shortest ending that gives a draft.
        top_k: how many of the target's most likely tokens are counted; 0 counts the text alone.
        stop_if_unknown: whether a chain ends where no ending is known. The code of the source
            drafts on by default, with a token drawn uniformly.
        max_kept: how many n-grams of finished calls later calls know too, those that were counted
            last. The code of the source keeps all.
        seed: of the uniform draws, which depend on it and the token's position alone.

    Raises:
        TypeError: a number that is not an integer, or a flag that is none.
        ValueError: a number out of range, or not min_ngram <= max_ngram.

    Source: n-gram assisted speculative decoding of github.com/romsto/Speculative-Decoding; with
    ``top_k`` 0 or 1, arXiv 2404.08698.
    """

    def __init__(
        self,
        max_ngram: int = 4,
        min_ngram: int = 2,
        top_k: int = 3,
        *,
        stop_if_unknown: bool = True,
        max_kept: int = 0,
        seed: int = 0,
    ) -> None:
        self.max_ngram = check_integer("max_ngram", max_ngram, 1, MAX_NODES)
        self.min_ngram = check_integer("min_ngram", min_ngram, 1, MAX_NODES)
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram must be at most max_ngram={self.max_ngram}, got {self.min_ngram}"
            )
        self.needs = Needs(candidates=check_integer("top_k", top_k, 0, MAX_NODES))
        self.stop_if_unknown = check_flag("stop_if_unknown", stop_if_unknown)
        kept = check_integer("max_kept", max_kept, 0)
        self.kept = KeptCounts(self.no_counts(), kept) if kept else None
        self.seed = check_integer("seed", seed, 0)

    def no_counts(self, earlier: NgramCounts | None = None) -> NgramCounts:
        """The counts of a text that begins, beside those of earlier ones."""
        return NgramCounts(self.max_ngram, self.min_ngram, earlier)

    def begin(self, call: DrafterCall) -> State:
        """Begin without counts, or with those of earlier calls of a vocabulary of this size."""
        return _NasdState(self, call)


class _NasdState(State):
    def __init__(self, drafter: NasdDrafter, call: DrafterCall) -> None:
        self.drafter, self._num_proposals = drafter, call.num_proposals
        self._vocab_size = vocab_size_of(call.model)
        self._sampled = {} if drafter.kept is None else call.sampled_seeds()
        earlier = self._earlier_of_each(call)
        if drafter.kept is not None and None in earlier:
            note_same_noise(drafter, call)
        if any(earlier):
            note_earlier_calls(drafter, call)
        self._counts = [drafter.no_counts(one) for one in earlier]

    def _earlier_of_each(self, call: DrafterCall) -> list[NgramCounts | None]:
        """What each sequence knows of earlier calls: nothing where it meets their noise again."""
        if self.drafter.kept is None:
            return [None] * call.batch_size
        counts, seeds = self.drafter.kept.of(self._vocab_size)
        if not reads_draft(call.rule):
            seeds = frozenset()
        return [None if self._sampled.get(b) in seeds else counts for b in range(call.batch_size)]

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        """Chains that differ in their first token."""
        self._count(texts)
        count, gamma = self._num_proposals, int(limits.max())
        chains = np.full((len(texts.lengths), count, gamma), -1, dtype=np.int64)
        for b in np.flatnonzero(limits > 0).tolist():
            length, counts, most = int(texts.lengths[b]), self._counts[b], int(limits[b])
            ending = self._ending(texts.tokens[b], length)
            stops = self.drafter.stop_if_unknown
            guess = None if stops else functools.partial(self._guess, length)
            begins = [[token] for token in counts.ranking(ending)[:count]] or [[]]
            for k, begin in enumerate(begins):
                follow = counts.continuation([*ending, *begin], most - len(begin), guess)
                chains[b, k, : len(begin) + len(follow)] = [*begin, *follow]
        if (chains < 0).all():
            return None
        return Draft(torch.from_numpy(chains).flatten(1), num_proposals=count)

    def _guess(self, length: int, index: int) -> int:
        """A token drawn uniformly; the noise of the verification has no part in it."""
        noise = np.random.default_rng((self.drafter.seed, length + index))
        return int(noise.integers(self._vocab_size))

    def commit(self, texts: History, done: Round) -> None:
        """Count what was committed, and the target's most likely tokens in its places."""
        candidates = done.candidates
        if candidates is None:
            return
        self._count(texts)
        for b in np.flatnonzero(texts.active).tolist():
            text, begin = texts.tokens[b, : texts.lengths[b]], int(done.lengths[b])
            for at, row in enumerate(candidates.path(b, text[begin:].tolist()), begin):
                self._counts[b].add(self._ending(text, at), candidates.ids[b, row].tolist())

    def end(self, texts: History) -> None:
        if self.drafter.kept is not None:
            for counts, text, length in zip(self._counts, texts.tokens, texts.lengths, strict=True):
                counts.extend(text[:length])
            self.drafter.kept.add(self._vocab_size, self._counts, self._sampled.values())

    def _count(self, texts: History) -> None:
        """Count what was committed since the last time."""
        for b in np.flatnonzero(texts.active).tolist():
            self._counts[b].extend(texts.tokens[b, : texts.lengths[b]])

    def _ending(self, text: NDArray[np.int64], at: int) -> list[int]:
        """Up to ``max_ngram`` tokens of the text before index ``at``."""
        ending: list[int] = text[max(0, at - self.drafter.max_ngram) : at].tolist()
        return ending
