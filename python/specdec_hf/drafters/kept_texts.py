"""Texts of earlier calls, which later calls copy from."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer
from specdec_hf.drafting.checks import describe
from specdec_hf.rules import text_depends_on_drafts

if TYPE_CHECKING:
    from specdec_host import Corpus, Proposal

    from specdec_hf.drafting.call import DrafterCall
    from specdec_hf.drafting.drafter import Drafter

TOKEN_BYTES = 8  # of a token and of its place in the suffix array
PARTS = 8  # a suffix array is sorted again until it holds this share of the limit
END = 2**31 - 1  # follows every text; no vocabulary has this id
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class KeptTexts:
    """The newest texts of earlier calls, prompts included, within a memory limit.

    Several drafters may share it, also in several threads. A call sees what had been kept when it
    began. The oldest texts are dropped first, up to an eighth of the limit at once.

    Args:
        max_bytes: of memory. A token takes 8 bytes.

    Attributes:
        seeds: of all sampled texts that were ever kept, without a limit. A sequence with one of
            them meets the noise that drew a text again, so that drafts copied from it would bias
            its own. Which texts are dropped depends on their lengths, and so on that noise.

    Raises:
        TypeError: no integer.
        ValueError: below 8 bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = check_integer("max_bytes", max_bytes, TOKEN_BYTES)
        self.seeds: set[int] = set()
        self._adding = threading.Lock()
        # The vocabulary size and the texts, the oldest first. Readers take the pair as it is.
        self._kept: tuple[int, tuple[Corpus, ...]] = (0, ())

    @property
    def nbytes(self) -> int:
        """The memory that the texts take."""
        return TOKEN_BYTES * sum(len(corpus.tokens) for corpus in self._kept[1])

    def corpora(self, vocab_size: int) -> tuple[Corpus, ...]:
        """The texts of a vocabulary of this size, the newest first."""
        kept_for, corpora = self._kept
        return corpora[::-1] if kept_for == vocab_size else ()

    def add(
        self, texts: Iterable[NDArray[np.int64]], vocab_size: int, seeds: Iterable[int] = ()
    ) -> None:
        """Keep texts. Those of a vocabulary of another size are dropped.

        ``seeds`` are of those texts that were sampled.

        Like the levels of a log-structured merge tree, an array takes in the one before it unless
        that is longer, so that a token is sorted a logarithmic number of times.
        """
        import specdec_host  # noqa: PLC0415  # only drafters that copy need the native module

        most = self.max_bytes // TOKEN_BYTES
        added = np.concatenate([np.append(text, END) for text in texts])
        joined = added[-most:].astype(np.int32)
        with self._adding:
            self.seeds.update(seeds)  # before a reader can see the texts
            kept_for, corpora = self._kept
            kept = list(corpora) if kept_for == vocab_size else []
            while kept and len(last := kept[-1].tokens) <= len(joined):
                if len(last) + len(joined) > most // PARTS:
                    break
                joined = np.concatenate([last, joined])
                kept.pop()
            kept.append(specdec_host.Corpus(joined))
            while sum(len(corpus.tokens) for corpus in kept) > most:
                del kept[0]
            self._kept = vocab_size, tuple(kept)


# The texts that drafters with a name keep, by the target and the limit.
_of_target: weakref.WeakKeyDictionary[Any, dict[int, KeptTexts]] = weakref.WeakKeyDictionary()


def kept_with(target: Any, max_bytes: int) -> KeptTexts:
    """What all drafters that are named with this limit keep of calls with a target."""
    return _of_target.setdefault(target, {}).setdefault(max_bytes, KeptTexts(max_bytes))


def note_same_noise(drafter: Drafter, call: DrafterCall) -> None:
    """Say that sequences with seeds of earlier calls draft nothing of what these have drawn."""
    call.note(
        f"{describe(drafter)} drafts nothing from earlier calls where one of them had the same "
        f"seed: rule {call.rule} would be biased, because its noise comes again"
    )


def note_earlier_calls(drafter: Drafter, call: DrafterCall) -> None:
    """Say that a text depends on earlier calls, where it depends on what is drafted at all."""
    if text_depends_on_drafts(call.rule):
        call.note(
            f"{describe(drafter)} drafts from earlier calls: under rule {call.rule!r} the text "
            "depends on them, and the same seeds need not give it again"
        )


def within_text(proposal: Proposal) -> Proposal:
    """A proposal without what follows the end of a text."""
    ended = np.cumsum(proposal.tokens == END, axis=1) > 0
    return proposal._replace(
        tokens=np.where(ended, -1, proposal.tokens),
        confidence=np.where(ended, np.float32(0), proposal.confidence),
    )


def read_bytes(text: str) -> int:
    """A number of bytes such as ``64MiB``.

    Raises:
        ValueError: not such a text.

    >>> read_bytes("64MiB")
    67108864
    """
    found = re.fullmatch(rf"(\d{{1,15}})({'|'.join(_UNITS)})", text)
    if found is None:
        raise ValueError(f"keep must be a number of bytes such as 64MiB, got {text!r}")
    return int(found[1]) * _UNITS[found[2]]
