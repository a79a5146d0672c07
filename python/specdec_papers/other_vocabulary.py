"""Drafting with a model of another vocabulary: both are joined by the text.

The committed tokens of a sequence are carried to the draft model's vocabulary, the draft model
continues them, and its text is carried back. What comes back is deterministic: a token of the
target has no probability under the draft model. So the drafts are the draft model's most likely
tokens, which every rule verifies without loss, whatever the two tokenizers make of the text.

Terms:

- window: the last tokens before a place in a text. Tokenizers treat the beginning of a text in
  their own way (some drop or add a space there), so text is decoded and encoded after a window.
- boundary: a place in a text where a token ends.
- special tokens stand for no text. One that both vocabularies have, under one name, is translated;
  another one is left out.

Source: universal assisted generation of Transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.arguments import check_integer, shown
from specdec_hf.drafters.model import DraftModel
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Draft, Drafter, State
from specdec_hf.request.inputs import check_language_model
from specdec_hf.runner.packed.blocks import DRAFT_WEIGHTS, checked_draft_weights
from transformers import PreTrainedTokenizerBase

LOOKBEHIND = 10  # as in Transformers


class OtherVocabularyDrafter(Drafter):
    """Any causal LM with a tokenizer of its own; it may be on another device or in another dtype.

    A round drafts as many tokens of the draft model as the loop asks for, and reads them from its
    device, because only the host knows tokenizers: one read more than other drafters make. A
    sequence that ends within a character drafts nothing in that round.

    Args:
        model: the draft model. Neither it nor its configs are changed.
        assistant_tokenizer: the draft model's tokenizer.
        tokenizer: the target's tokenizer.
        assistant_lookbehind, target_lookbehind: how many tokens before new text each tokenizer
            sees with it.
        draft_weights: see `DraftModel`.

    Raises:
        TypeError: a model or tokenizer that is none, a number of tokens that is no integer.
        ValueError: a number of tokens below 1.

    Attributes:
        ours, target: the vocabularies of the draft model and of the target.
    """

    name = "text"

    def __init__(
        self,
        model: Any,
        assistant_tokenizer: Any,
        tokenizer: Any,
        *,
        assistant_lookbehind: int = LOOKBEHIND,
        target_lookbehind: int = LOOKBEHIND,
        draft_weights: str = DRAFT_WEIGHTS[0],
    ) -> None:
        check_language_model("model", model)
        self.draft_weights = checked_draft_weights(draft_weights)
        for name, value in (
            ("assistant_tokenizer", assistant_tokenizer),
            ("tokenizer", tokenizer),
        ):
            if not isinstance(value, PreTrainedTokenizerBase):
                raise TypeError(f"{name} must be a tokenizer of Transformers, got {shown(value)}")
        ours = check_integer("assistant_lookbehind", assistant_lookbehind, 1)
        target = check_integer("target_lookbehind", target_lookbehind, 1)
        self.model, self.assistant_tokenizer = model, assistant_tokenizer
        self.ours = Vocabulary(assistant_tokenizer, ours)
        self.target = Vocabulary(tokenizer, target)

    def begin(self, call: DrafterCall) -> State:
        """Make an empty cache.

        Raises:
            ValueError: no cache fits the draft model.
        """
        return _TextState(self, call)

    def carry_back(self, committed: list[int], ids: list[int], drafted: list[int]) -> list[int]:
        """The target's tokens for what the draft model drafted after ``ids``."""
        run, name = next(self.ours.parts(drafted), ([], ""))
        text = self.ours.added_text(plain_end(ids, self.ours), run)
        whole = text.rstrip(UNFINISHED)
        end = plain_end(committed, self.target)
        found = self.target.added_tokens(end, whole) if whole else []
        if found is None:
            # The target's last token is committed, so what follows is encoded by itself.
            found = self.target.encode(whole)
        if name and whole == text:
            found += self._special(name)
        return found

    def _special(self, name: str) -> list[int]:
        """The target's token for a special one of the draft model; both end texts in their way."""
        theirs = self.target.tokenizer
        if name == self.ours.tokenizer.eos_token and theirs.eos_token_id is not None:
            return [theirs.eos_token_id]
        return [self.target.special[name]] if name in self.target.special else []

    def filler(self) -> int:
        """A token for a text that holds none, because a model must be fed something."""
        tokenizer = self.ours.tokenizer
        known = (tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
        return next(id for id in known if id is not None)


class _TextState(State):
    def __init__(self, drafter: OtherVocabularyDrafter, call: DrafterCall) -> None:
        self.drafter = drafter
        weights = drafter.draft_weights
        self._model = DraftModel(drafter.model, call, own_vocabulary=True, draft_weights=weights)
        self.cost = self._model.cost
        size = call.batch_size
        self._texts = [Translation(drafter.target, drafter.ours) for _ in range(size)]
        # The draft model's tokens that its cache holds.
        self._fed: list[list[int]] = [[] for _ in range(size)]

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        active, gamma = limits > 0, int(limits.max())
        for b in np.flatnonzero(active).tolist():
            self._texts[b].extend(texts.tokens[b, : texts.lengths[b]].tolist())
            active[b] = not self._texts[b].unfinished
        drafted = self._continue(active, limits)
        if drafted is None:
            return None
        tokens = np.full((len(active), gamma), -1, dtype=np.int64)
        counts = np.zeros(len(active), dtype=np.int64)
        for b in np.flatnonzero(active).tolist():
            committed = texts.tokens[b, : texts.lengths[b]].tolist()
            found = self.drafter.carry_back(committed, self._texts[b].ids, drafted[b])[: limits[b]]
            tokens[b, : len(found)] = found
            counts[b] = len(found)
        return Draft(torch.from_numpy(tokens), counts=counts) if counts.any() else None

    def _continue(
        self, active: NDArray[np.bool_], limits: NDArray[np.int64]
    ) -> list[list[int]] | None:
        """The draft model's most likely tokens after each text; None if nothing can be drafted.

        Each has as many as its own limit. The target's tokenizer may merge the first letters of
        more of them to other tokens.
        """
        model = self._model
        carried = [text.ids or [self.drafter.filler()] for text in self._texts]
        lengths = np.array([len(ids) for ids in carried])
        tokens = np.zeros((len(carried), int(lengths.max())), dtype=np.int64)
        for b, ids in enumerate(carried):
            tokens[b, : len(ids)] = ids
            same = _common_prefix(ids, self._fed[b])
            self._fed[b] = self._fed[b][: min(same, len(ids) - 1)]
        model.truncate(np.array([len(ids) for ids in self._fed]))
        texts = History(tokens, lengths, active)
        counts = model.room(texts, limits)
        steps = int(counts.max())
        if steps < 1:
            return None
        likely = [model.catch_up(texts).argmax(dim=-1)]
        for i in range(1, steps):
            logits = model.extend(likely[-1][:, None], lengths + i - 1)
            likely.append(logits.argmax(dim=-1))
        read: list[list[int]] = torch.stack(likely, dim=1).tolist()
        self._fed = [[*ids, *more[:-1]] for ids, more in zip(carried, read, strict=True)]
        return [more[:count] for more, count in zip(read, counts.tolist(), strict=True)]


def _common_prefix(ids: list[int], others: list[int]) -> int:
    """How many tokens two lists begin with in common."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ids), len(others)))


UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how tokenizers show bytes that are no whole character
MAX_UNFINISHED = 3  # bytes of a character without its last one


class Vocabulary:
    """A tokenizer of Transformers, as far as text is carried through it.

    Args:
        tokenizer: it is not changed.
        window: how many tokens before a place are decoded and encoded with what follows.

    Attributes:
        special: id of each special token.
        first: the tokens that begin every text, such as the token for its beginning.
    """

    def __init__(self, tokenizer: Any, window: int) -> None:
        self.tokenizer = tokenizer
        self.window = window
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special: dict[str, int] = dict(
            zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        )
        self.special |= {str(token): id for id, token in added.items() if token.special}
        self._names = {id: name for name, id in self.special.items()}
        begin = tokenizer.bos_token_id
        starts = begin is not None and tokenizer("a")["input_ids"][:1] == [begin]
        self.first = [begin] if starts else []

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, as at the beginning of a text."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def added_text(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text that tokens add to those before them; neither holds special tokens."""
        window = list(before[-self.window :])
        return self.text_of([*window, *ids])[len(self.text_of(window)) :]

    def added_tokens(self, before: Sequence[int], text: str) -> list[int] | None:
        """The tokens of a text after others; None where no token ends between the two."""
        window = list(before[-self.window :])
        prefix = self.text_of(window)
        if prefix.endswith(UNFINISHED):
            return None
        ids = self.encode(prefix + text)
        # The boundary is where it was, unless the tokenizer splits the window in another way.
        ends = sorted(range(len(ids) + 1), key=lambda k: abs(k - len(window)))
        return next((ids[k:] for k in ends if self.text_of(ids[:k]) == prefix), None)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with no others around them."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def parts(self, ids: Sequence[int]) -> Iterator[tuple[list[int], str]]:
        """Runs of tokens that hold text, each with the special token after it or ""."""
        run: list[int] = []
        for id in ids:
            if id in self._names:
                yield run, self._names[id]
                run = []
            else:
                run.append(id)
        if run:
            yield run, ""


def plain_end(ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """The last tokens within the window that hold text only and begin with a whole character."""
    tail = list(ids[-vocabulary.window :])
    *_, (run, name) = [([], ""), *vocabulary.parts(tail)]
    begin = 0
    while begin < len(run) and vocabulary.text_of(run[begin:]).startswith(UNFINISHED):
        begin += 1
    return [] if name else run[begin:]


class Translation:
    """The tokens of one sequence in another vocabulary, extended as the sequence grows.

    Args:
        source: the vocabulary of the sequence.
        goal: the vocabulary to carry it to.

    Attributes:
        ids: tokens of the other vocabulary; their text is that of the sequence.
        unfinished: whether the sequence ends within a character; ``ids`` then end before it.
    """

    def __init__(self, source: Vocabulary, goal: Vocabulary) -> None:
        self.source, self.goal = source, goal
        self.ids = list(goal.first)
        self.unfinished = False
        self._done = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Carry over what the sequence has gained.

        Args:
            tokens: the whole sequence, which begins with what was given before.
        """
        before = plain_end(tokens[: self._done], self.source)
        self.unfinished = False
        for run, name in self.source.parts(tokens[self._done :]):
            rest = 0 if name else self._unfinished_tokens(before, run)
            whole = run[: len(run) - rest]
            self._append(self.source.added_text(before, whole))
            self._done += len(whole) + bool(name)
            self.unfinished = rest > 0
            token = self.goal.special.get(name)
            if token is not None and self.ids != [token]:  # both begin with the same token
                self.ids.append(token)
            before = []

    def _unfinished_tokens(self, before: list[int], run: list[int]) -> int:
        """How many tokens at the end hold a part of a character only."""
        if not self.source.added_text(before, run).endswith(UNFINISHED):
            return 0
        for rest in range(1, min(len(run), MAX_UNFINISHED) + 1):
            if not self.source.added_text(before, run[:-rest]).endswith(UNFINISHED):
                return rest
        return 0  # these bytes are no part of a character

    def _append(self, text: str) -> None:
        """Add text. The last tokens are replaced where the text makes them longer."""
        end = plain_end(self.ids, self.goal)
        for back in range(len(end) + 1 if text else 0):
            kept, replaced = end[: len(end) - back], end[len(end) - back :]
            added = self.goal.added_tokens(kept, self.goal.added_text(kept, replaced) + text)
            if added is not None:
                self.ids[len(self.ids) - back :] = added
                return
