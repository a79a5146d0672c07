"""NASD: drafts from counts of n-grams, to which the target adds its most likely next tokens.

The ending of a text is its last n tokens, as in copying.py.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_flag, check_integer
from specdec_hf.drafters.kept_texts import note_earlier_calls, note_same_noise
from specdec_hf.drafters.ngram_table import NgramCounts
from specdec_hf.drafting.context import Candidates, DraftContext, History, reads_draft
from specdec_hf.drafting.drafter import Draft, Drafter
from specdec_hf.runner.protocol import vocab_size_of
from specdec_hf.trees import MAX_NODES


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
        self.candidates = check_integer("top_k", top_k, 0, MAX_NODES)
        self.stop_if_unknown = check_flag("stop_if_unknown", stop_if_unknown)
        self.max_kept = check_integer("max_kept", max_kept, 0)
        self.seed = check_integer("seed", seed, 0)
        self._vocab_size = 0

    def start(self, context: DraftContext) -> None:
        """Begin without counts, or with those of earlier calls of a vocabulary of this size."""
        self._num_proposals = context.num_proposals
        vocab_size = vocab_size_of(context.model)
        if vocab_size != self._vocab_size:
            self._earlier = NgramCounts(self.max_ngram, self.min_ngram)
            self._earlier_seeds: set[int] = set()
        self._vocab_size = vocab_size
        self._sampled = context.sampled_seeds() if self.max_kept else {}
        earlier = [self._earlier_of(b, context) for b in range(context.batch_size)]
        if self.max_kept and None in earlier:
            note_same_noise(self, context)
        if any(earlier):
            note_earlier_calls(self, context)
        self._counts = [NgramCounts(self.max_ngram, self.min_ngram, one) for one in earlier]
        self._observed: tuple[NDArray[np.int64], Candidates] | None = None

    def _earlier_of(self, b: int, context: DraftContext) -> NgramCounts | None:
        """What sequence ``b`` knows of earlier calls: nothing where it meets their noise again."""
        drawn = self._sampled.get(b) in self._earlier_seeds and reads_draft(context.rule)
        return None if drawn or not self.max_kept else self._earlier

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        """Chains that differ in their first token."""
        self._count(history)
        count, gamma = self._num_proposals, int(limits.max())
        chains = np.full((len(history.lengths), count, gamma), -1, dtype=np.int64)
        for b in np.flatnonzero(limits > 0).tolist():
            length, counts, most = int(history.lengths[b]), self._counts[b], int(limits[b])
            ending = self._ending(history.tokens[b], length)
            guess = None if self.stop_if_unknown else functools.partial(self._guess, length)
            begins = [[token] for token in counts.ranking(ending)[:count]] or [[]]
            for k, begin in enumerate(begins):
                follow = counts.continuation([*ending, *begin], most - len(begin), guess)
                chains[b, k, : len(begin) + len(follow)] = [*begin, *follow]
        if (chains < 0).all():
            return None
        return Draft(torch.from_numpy(chains).flatten(1), num_proposals=count)

    def _guess(self, length: int, index: int) -> int:
        """A token drawn uniformly; the noise of the verification has no part in it."""
        noise = np.random.default_rng((self.seed, length + index))
        return int(noise.integers(self._vocab_size))

    def observe(self, history: History, candidates: Candidates) -> None:
        self._count(history)
        self._observed = history.lengths.copy(), candidates

    def finish(self, history: History) -> None:
        if self.max_kept:
            for counts, text, length in zip(
                self._counts, history.tokens, history.lengths, strict=True
            ):
                counts.extend(text[:length])
                self._earlier.take_over(counts, self.max_kept)
            self._earlier_seeds.update(self._sampled.values())

    def _count(self, history: History) -> None:
        """Count what was committed since the last time, and the target's tokens after that."""
        observed, self._observed = self._observed, None
        for b in np.flatnonzero(history.active).tolist():
            text = history.tokens[b, : history.lengths[b]]
            self._counts[b].extend(text)
            if observed is not None:
                begin, candidates = int(observed[0][b]), observed[1]
                for at, row in enumerate(candidates.path(b, text[begin:].tolist()), begin):
                    self._counts[b].add(self._ending(text, at), candidates.ids[b, row].tolist())

    def _ending(self, text: NDArray[np.int64], at: int) -> list[int]:
        """Up to ``max_ngram`` tokens of the text before index ``at``."""
        ending: list[int] = text[max(0, at - self.max_ngram) : at].tolist()
        return ending
