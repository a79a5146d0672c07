"""Drafting with a model of another vocabulary: both are joined by the text.

The committed tokens of a sequence are carried to the draft model's vocabulary, the draft model
continues them, and its text is carried back. What comes back is deterministic: a token of the
target has no probability under the draft model. So the drafts are the draft model's most likely
tokens, which every rule verifies without loss, whatever the two tokenizers make of the text.

Source: universal assisted generation of Transformers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from specdec_hf.arguments import check_integer, shown
from specdec_hf.cache.forward import forward_window
from specdec_hf.drafters.context import DraftContext, History
from specdec_hf.drafters.drafter import Draft, Drafter
from specdec_hf.drafters.models.draft_model import DraftModel
from specdec_hf.drafters.models.retokenize import UNFINISHED, Translation, Vocabulary, plain_end
from specdec_hf.hf_arguments.language_model import check_language_model

LOOKBEHIND = 10  # as in Transformers


class TextDrafter(Drafter):
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

    Raises:
        TypeError: a model or tokenizer that is none, a number of tokens that is no integer.
        ValueError: a number of tokens below 1.
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
    ) -> None:
        check_language_model("model", model)
        for name, value in (
            ("assistant_tokenizer", assistant_tokenizer),
            ("tokenizer", tokenizer),
        ):
            if not isinstance(value, PreTrainedTokenizerBase):
                raise TypeError(f"{name} must be a tokenizer of Transformers, got {shown(value)}")
        ours = check_integer("assistant_lookbehind", assistant_lookbehind, 1)
        target = check_integer("target_lookbehind", target_lookbehind, 1)
        self.model = model
        self._ours = Vocabulary(assistant_tokenizer, ours)
        self._target = Vocabulary(tokenizer, target)

    def start(self, context: DraftContext) -> None:
        """Make an empty cache.

        Raises:
            ValueError: no cache fits the draft model.
        """
        self._draft = DraftModel(self.model, context, own_vocabulary=True)
        self.relative_cost = self._draft.relative_cost
        size = context.batch_size
        self._texts = [Translation(self._target, self._ours) for _ in range(size)]
        # The draft model's tokens that its cache holds.
        self._fed: list[list[int]] = [[] for _ in range(size)]

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        active, gamma = history.active.copy(), int(limits.max())
        for b in np.flatnonzero(active).tolist():
            self._texts[b].extend(history.tokens[b, : history.lengths[b]].tolist())
            active[b] = not self._texts[b].unfinished
        drafted = self._continue(active, gamma)
        if drafted is None:
            return None
        tokens = np.full((len(active), gamma), -1, dtype=np.int64)
        counts = np.zeros(len(active), dtype=np.int64)
        for b in np.flatnonzero(active).tolist():
            committed = history.tokens[b, : history.lengths[b]].tolist()
            found = self._carry_back(committed, self._texts[b].ids, drafted[b])[:gamma]
            tokens[b, : len(found)] = found
            counts[b] = len(found)
        return Draft(torch.from_numpy(tokens), counts=counts) if counts.any() else None

    def _continue(self, active: NDArray[np.bool_], gamma: int) -> list[list[int]] | None:
        """The draft model's most likely tokens after each text; None if nothing can be drafted."""
        draft = self._draft
        texts = [text.ids or [self._filler()] for text in self._texts]
        lengths = np.array([len(ids) for ids in texts])
        tokens = np.zeros((len(texts), int(lengths.max())), dtype=np.int64)
        for b, ids in enumerate(texts):
            tokens[b, : len(ids)] = ids
            same = _common_prefix(ids, self._fed[b])
            self._fed[b] = self._fed[b][: min(same, len(ids) - 1)]
        draft.truncate(np.array([len(ids) for ids in self._fed]))
        history = History(tokens, lengths, active)
        counts = draft.room(history, gamma)
        steps = int(counts.max())
        if steps < 1:
            return None
        drawn = [draft.catch_up(history).argmax(dim=-1)]
        for i in range(1, steps):
            logits = forward_window(
                draft.model, draft.cache, drawn[-1][:, None], lengths + i - 1, keep=1
            )
            drawn.append(logits[:, -1].argmax(dim=-1))
        read: list[list[int]] = torch.stack(drawn, dim=1).tolist()
        self._fed = [[*ids, *more[:-1]] for ids, more in zip(texts, read, strict=True)]
        return [more[:count] for more, count in zip(read, counts.tolist(), strict=True)]

    def _carry_back(self, committed: list[int], ids: list[int], drafted: list[int]) -> list[int]:
        """The target's tokens for what the draft model drafted after ``ids``."""
        run, name = next(self._ours.parts(drafted), ([], ""))
        text = self._ours.added_text(plain_end(ids, self._ours), run)
        whole = text.rstrip(UNFINISHED)
        end = plain_end(committed, self._target)
        found = self._target.added_tokens(end, whole) if whole else []
        if found is None:
            # The target's last token is committed, so what follows is encoded by itself.
            found = self._target.encode(whole)
        if name and whole == text:
            found += self._special(name)
        return found

    def _special(self, name: str) -> list[int]:
        """The target's token for a special one of the draft model; both end texts in their way."""
        theirs = self._target.tokenizer
        if name == self._ours.tokenizer.eos_token and theirs.eos_token_id is not None:
            return [theirs.eos_token_id]
        return [self._target.special[name]] if name in self._target.special else []

    def _filler(self) -> int:
        """A token for a text that holds none, because a model must be fed something."""
        tokenizer = self._ours.tokenizer
        known = (tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
        return next(id for id in known if id is not None)


def _common_prefix(ids: list[int], others: list[int]) -> int:
    """How many tokens two lists begin with in common."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ids), len(others)))
