"""Drafters that copy from where the last tokens of a sequence occurred before.

The ending of a sequence is its last n tokens. A match is an earlier place with the same n tokens.
"""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer, split_options
from specdec_hf.drafters.fingerprint import check_fingerprint
from specdec_hf.drafters.kept_texts import (
    KeptTexts,
    kept_with,
    note_earlier_calls,
    note_same_noise,
    read_bytes,
    within_text,
)
from specdec_hf.drafting.call import DrafterCall, reads_draft
from specdec_hf.drafting.checks import check_vocab_size, describe
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Draft, Drafter, State
from specdec_hf.drafting.registry import entry_for
from specdec_hf.runner.protocol import vocab_size_of

if TYPE_CHECKING:
    from specdec_host import Corpus, Proposal, SuffixAutomaton
    from typing_extensions import Self


class CopiedText:
    """The text of each sequence and, of an encoder-decoder, what its encoder read before it.

    Args:
        call: the call; None for sequences alone.
    """

    def __init__(self, call: DrafterCall | None = None) -> None:
        self._read: list[NDArray[np.int64]] | None = None
        if call is not None and call.encoder is not None:
            config = call.model.config.get_text_config(decoder=True)
            self._read = call.encoder.texts(config.vocab_size)

    def of(self, texts: History, b: int) -> NDArray[np.int64]:
        """[n] int64, the committed tokens of sequence ``b`` last."""
        committed = texts.tokens[b, : texts.lengths[b]]
        return committed if self._read is None else np.concatenate([self._read[b], committed])


class CopyingDrafter(Drafter):
    """Base class of drafters that copy what follows the longest match of a text's end.

    Args:
        corpus: a text that it copies from; None for none.
    """

    min_match: int
    max_match: int
    min_confidence: float

    def __init__(self, corpus: Corpus | None) -> None:
        self.corpus = corpus

    def copy_from(
        self, corpus: Corpus, text: NDArray[np.int64], gamma: int, count: int
    ) -> Proposal:
        """Up to ``count`` chains of what follows the end of a text in a corpus."""
        return corpus.propose(
            text[max(0, len(text) - self.max_match) :],
            gamma,
            count=count,
            min_match=self.min_match,
            max_match=self.max_match,
            min_confidence=self.min_confidence,
        )

    def check_config(self, config: Any) -> None:
        made_for = None if self.corpus is None else self.corpus.vocab_size
        if made_for is not None:
            check_vocab_size("corpus", made_for, config)

    def check_tokenizer(self, tokenizer: Any) -> list[str]:
        if self.corpus is None:
            return []
        note = check_fingerprint("corpus", self.corpus.fingerprint, tokenizer)
        return [] if note is None else [f"{describe(self)}: {note}"]


class CopyingState(State):
    """Drafts deterministic chains, one sequence after the other, on the host. Override `copy`.

    Raises:
        ValueError: a corpus for another vocabulary.
    """

    def __init__(self, drafter: CopyingDrafter, call: DrafterCall) -> None:
        drafter.check_config(call.model.config)
        self.drafter, self.call, self._text = drafter, call, CopiedText(call)

    @abstractmethod
    def copy(self, b: int, text: NDArray[np.int64], gamma: int, count: int) -> Proposal:
        """Up to ``count`` chains of up to ``gamma`` tokens for sequence ``b``.

        ``text`` is that of the sequence, or of `CopiedText`; it grows at its end.
        """

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        """Different chains of every sequence."""
        batch_size, count, gamma = len(limits), self.call.num_proposals, int(limits.max())
        tokens = np.full((batch_size, count, gamma), -1, dtype=np.int64)
        confidence = np.zeros((batch_size, gamma), dtype=np.float32)
        for b, most in _wanted(limits):
            proposal = self.copy(b, self._text.of(texts, b), most, count)
            tokens[b, :, :most], confidence[b, :most] = proposal.tokens, proposal.confidence[0]
        if (tokens < 0).all():
            return None
        return Draft(
            torch.from_numpy(tokens).flatten(1),
            confidence=confidence if count == 1 else None,
            num_proposals=count,
        )


def _wanted(limits: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The sequences that draft, and their own limits.

    Chains differ somewhere within the limit that they are copied for. Those of the largest limit of
    a batch may be the same within another one, in the place of other continuations.
    """
    return [(b, most) for b, most in enumerate(limits.tolist()) if most > 0]


class PromptLookupDrafter(Drafter, entry="prompt_lookup"):
    """Copies the tokens that followed the latest of the longest matches of a sequence's ending.

    It runs on the host, where the loop holds all tokens, and treats every sequence by itself. With
    an encoder-decoder it also looks at what the encoder read, which summaries and translations copy
    from, as if that preceded the decoder's text.

    Args:
        max_ngram: longest ending to look for.
        min_ngram: shortest ending that gives a draft.

    Raises:
        TypeError: a length that is not an integer.
        ValueError: not 1 <= min_ngram <= max_ngram.

    Source: prompt lookup decoding (Saxena, 2023).
    """

    rolls_back = True

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        self.max_ngram = check_integer("max_ngram", max_ngram)
        self.min_ngram = check_integer("min_ngram", min_ngram)
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram must be in [1, max_ngram = {max_ngram}], got {min_ngram}")

    def begin(self, call: DrafterCall) -> State:
        return _LookupState(self, call)


class _LookupState(State):
    def __init__(self, drafter: PromptLookupDrafter, call: DrafterCall) -> None:
        self.drafter, self.call, self._text = drafter, call, CopiedText(call)

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        """Different continuations of every sequence."""
        count, gamma = self.call.num_proposals, int(limits.max())
        tokens = np.full((len(limits), count, gamma), -1, dtype=np.int64)
        longest, shortest = self.drafter.max_ngram, self.drafter.min_ngram
        for b, most in _wanted(limits):
            text = self._text.of(texts, b)
            for k, found in enumerate(lookup_several(text, most, count, longest, shortest)):
                tokens[b, k, :most] = found
        if (tokens < 0).all():
            return None
        return Draft(torch.from_numpy(tokens).flatten(1), num_proposals=count)

    def take(self, b: int, other: Self, index: int) -> None:
        """Nothing is kept of a sequence."""


def lookup(
    tokens: NDArray[np.int64], gamma: int, max_ngram: int, min_ngram: int = 1
) -> NDArray[np.int64]:
    """The ``gamma`` tokens that followed the latest of the longest matches of the ending.

    Where the copy reaches the end of ``tokens`` it continues from its own beginning, as in LZ77:
    the text then repeats with that period. So all drafts have one length, which keeps the shapes of
    the batch.

    Args:
        tokens: [T] int64, the text.
        gamma: how many tokens to copy.
        max_ngram: longest ending to look for.
        min_ngram: fewest tokens of a match.

    Returns:
        [gamma] int64; [0] if no match has ``min_ngram`` tokens.

    Example:
        >>> import numpy as np
        >>> lookup(np.array([5, 6, 7, 5, 6]), gamma=4, max_ngram=2).tolist()
        [7, 5, 6, 7]
    """
    ends, sizes = _matches(tokens, max_ngram, min_ngram)
    if not len(ends):
        return tokens[:0]
    return _copied(tokens, ends[np.flatnonzero(sizes == sizes.max())[-1]], gamma)


def lookup_several(
    tokens: NDArray[np.int64], gamma: int, count: int, max_ngram: int, min_ngram: int = 1
) -> list[NDArray[np.int64]]:
    """Up to ``count`` different continuations as in `lookup`.

    Those of longer matches come first; among equally long matches, the latest.

    Args:
        tokens, gamma, max_ngram, min_ngram: as in `lookup`.
        count: most continuations.

    Returns:
        Arrays [gamma] int64, none where no match has ``min_ngram`` tokens.

    Example:
        >>> import numpy as np
        >>> tokens = np.array([5, 6, 7, 5, 6, 8, 5, 6])
        >>> [found.tolist() for found in lookup_several(tokens, 2, 3, max_ngram=2)]
        [[8, 5], [7, 5]]
    """
    ends, sizes = _matches(tokens, max_ngram, min_ngram)
    found: dict[tuple[int, ...], NDArray[np.int64]] = {}
    for end in ends[np.lexsort((-ends, -sizes))]:
        copied = _copied(tokens, end, gamma)
        found.setdefault(tuple(copied.tolist()), copied)
        if len(found) == count:
            break
    return list(found.values())


def _matches(
    tokens: NDArray[np.int64], max_ngram: int, min_ngram: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All matches of the ending: index of the last token of each, and its length."""
    length = len(tokens)
    # Candidates end where the last token occurred before. Each longer ending leaves fewer of them.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) if length > 1 else np.empty(0, np.int64)
    sizes = np.ones(len(ends), dtype=np.int64)
    longest = np.arange(len(ends))
    for size in range(1, min(max_ngram, length - 1)):
        longest = longest[ends[longest] >= size]
        longest = longest[tokens[ends[longest] - size] == tokens[length - 1 - size]]
        if not len(longest):
            break
        sizes[longest] = size + 1
    return ends[sizes >= min_ngram], sizes[sizes >= min_ngram]


def _copied(tokens: NDArray[np.int64], end: int, gamma: int) -> NDArray[np.int64]:
    start = int(end) + 1
    return tokens[start + np.arange(gamma) % (len(tokens) - start)]


class SuffixAutomatonDrafter(CopyingDrafter, entry="suffix_automaton"):
    """Copies what most often followed the longest end of a sequence that occurred before.

    `specdec_host.SuffixAutomaton` says which continuation is taken. Each sequence of the batch has
    an automaton of its own, which is given the new tokens of every round.

    Args:
        corpus: a text to copy from too: a `specdec_host.Corpus`, or its ids [n], int32 or int64.
            Several drafters may share a `Corpus`.
        min_match: fewest tokens of a match that gives a draft.
        max_match: most tokens of a match that are looked at.
        min_confidence: a chain ends before the product of its confidences falls below this.
        keep: bytes of the texts of its finished calls that it copies from too, or a `KeptTexts`
            that several drafters share. 0 keeps nothing. The longest match wins, and of equally
            long ones that in the sequence itself or in ``corpus``.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: not 1 <= min_match <= max_match <= 65536, a confidence outside of [0, 1], a
            negative ``keep``, or ids out of range.
        ImportError: `specdec_host` was not built.

    Source: SAM Decoding (arXiv 2411.10666). Texts of earlier calls: Lookahead (arXiv 2312.12728),
    which stores them in a trie.
    """

    kept_with_target = 0  # bytes of what a drafter with a name keeps

    def __init__(
        self,
        corpus: Corpus | NDArray[Any] | None = None,
        min_match: int = 1,
        max_match: int = 32,
        min_confidence: float = 0.03,
        *,
        keep: int | KeptTexts = 0,
    ) -> None:
        import specdec_host  # noqa: PLC0415  # only drafters that copy need the native module

        if isinstance(corpus, np.ndarray):
            corpus = specdec_host.Corpus(corpus)
        self.automaton = functools.partial(specdec_host.SuffixAutomaton, max_match, corpus)
        self.min_match, self.max_match = min_match, max_match
        self.min_confidence = min_confidence
        self.propose_from(self.automaton(), 1, 1)  # validates them
        self.keep: KeptTexts | None = None
        if isinstance(keep, KeptTexts):
            self.keep = keep
        elif check_integer("keep", keep, 0):
            self.keep = KeptTexts(keep)
        super().__init__(corpus)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Copies from the datastore in a file too, if there is one.

        What ``keep`` keeps belongs to the target, because a name makes a drafter for every call.
        """
        import specdec_host  # noqa: PLC0415

        path, options = split_options(text, entry_for(cls.name).options)
        corpus = specdec_host.Corpus.open(path) if path else None
        drafter = cls(corpus)
        drafter.kept_with_target = read_bytes(options["keep"]) if options else 0
        return drafter

    def for_target(self, model: Any) -> Drafter:
        if not self.kept_with_target:
            return self
        drafter = copy.copy(self)
        drafter.keep, drafter.kept_with_target = kept_with(model, self.kept_with_target), 0
        return drafter

    def begin(self, call: DrafterCall) -> State:
        """Begin a new call with empty automata.

        Raises:
            ValueError: a corpus for another vocabulary.
        """
        return _AutomatonState(self, call)

    def propose_from(self, text: SuffixAutomaton, gamma: int, count: int) -> Proposal:
        """What most often followed the end of a text in itself, or in the corpus."""
        return text.propose(
            gamma, count=count, min_match=self.min_match, min_confidence=self.min_confidence
        )


class _AutomatonState(CopyingState):
    drafter: SuffixAutomatonDrafter

    def __init__(self, drafter: SuffixAutomatonDrafter, call: DrafterCall) -> None:
        super().__init__(drafter, call)
        self._texts = [drafter.automaton() for _ in range(call.batch_size)]
        self._vocab_size, keep = vocab_size_of(call.model), drafter.keep
        self._sampled = {} if keep is None else call.sampled_seeds()
        self._earlier = () if keep is None else keep.corpora(self._vocab_size)
        self._barred = self._drawn_alike()
        if self._barred:
            note_same_noise(drafter, call)
        if self._earlier and len(self._barred) < call.batch_size:
            note_earlier_calls(drafter, call)

    def _drawn_alike(self) -> set[int]:
        """The sequences whose seed drew a text of an earlier call; they copy nothing from these."""
        if self.drafter.keep is None or not reads_draft(self.call.rule):
            return set()
        drawn_by = self.drafter.keep.seeds
        return {b for b, seed in self._sampled.items() if seed in drawn_by}

    def copy(self, b: int, text: NDArray[np.int64], gamma: int, count: int) -> Proposal:
        automaton = self._texts[b]
        automaton.append(text[len(automaton) :])
        found = self.drafter.propose_from(automaton, gamma, count)
        for corpus in () if b in self._barred else self._earlier:
            if found.match_length >= self.drafter.max_match:
                break
            earlier = self.drafter.copy_from(corpus, text, gamma, count)
            if earlier.match_length > found.match_length:
                found = within_text(earlier)
        return found

    @property
    def joins(self) -> bool:
        """Texts are kept when all sequences of a call have ended."""
        return type(self) is _AutomatonState and self.drafter.keep is None

    def take(self, b: int, other: Self, index: int) -> None:
        self._texts[b] = other._texts[index]

    def end(self, texts: History) -> None:
        if self.drafter.keep is not None:
            kept = [self._text.of(texts, b) for b in range(len(texts.lengths))]
            self.drafter.keep.add(kept, self._vocab_size, self._sampled.values())


class RestDrafter(CopyingDrafter, entry="rest"):
    """Copies what most often followed the longest end of a sequence in a datastore.

    The matches are found by binary search in the datastore's suffix array. Of their continuations
    the most frequent ones are drafted: one chain, or several that `TrieTree` merges into a tree.
    `SuffixAutomatonDrafter` looks into the sequence itself too.

    Args:
        corpus: the datastore: a `specdec_host.Corpus`, which `Corpus.open` maps from a file that
            ``python -m specdec_hf build rest`` wrote.
        min_match: fewest tokens of a match that gives a draft.
        max_match: most tokens of a match that are looked at.
        min_confidence: a chain ends before the product of its confidences falls below this.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: not 1 <= min_match <= max_match <= 65536, or a confidence outside of [0, 1].
        ImportError: `specdec_host` was not built.

    Source: REST (arXiv 2311.08252).
    """

    def __init__(
        self,
        corpus: Corpus,
        min_match: int = 2,
        max_match: int = 16,
        min_confidence: float = 0.03,
    ) -> None:
        import specdec_host  # noqa: PLC0415  # only drafters that copy need the native module

        if not isinstance(corpus, specdec_host.Corpus):
            raise TypeError(f"corpus must be a Corpus, got {type(corpus).__name__}")
        super().__init__(corpus)
        self.min_match, self.max_match = min_match, check_integer("max_match", max_match)
        self.min_confidence = min_confidence
        self.copy_from(corpus, np.empty(0, dtype=np.int64), 1, 1)  # validates them

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Reads the datastore in a file."""
        import specdec_host  # noqa: PLC0415

        return cls(specdec_host.Corpus.open(text))

    def begin(self, call: DrafterCall) -> State:
        """Begin a new call.

        Raises:
            ValueError: a datastore of another vocabulary.
        """
        return _DatastoreState(self, call)


class _DatastoreState(CopyingState):
    def copy(self, b: int, text: NDArray[np.int64], gamma: int, count: int) -> Proposal:
        assert self.drafter.corpus is not None
        return self.drafter.copy_from(self.drafter.corpus, text, gamma, count)

    def take(self, b: int, other: Self, index: int) -> None:
        """Nothing is kept of a sequence."""
