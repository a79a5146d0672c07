"""Drafts that a call brings itself: its prediction of the text, and what a grammar forces.

They take the place of the drafter's in a round where a sequence has some. They follow from the
texts alone, so neither a clock nor an earlier round changes them, and a sequence may join a batch
with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import shown
from specdec_hf.drafting.drafter import Draft
from specdec_hf.extras.grammar import GrammarLimitError, GrammarProcessor
from specdec_hf.loop.drafted import DraftedRound
from specdec_hf.loop.session import Session

MAX_KNOWN = 31  # tokens of a round; the tree of drafter "auto" has as many
MAX_MATCH = MAX_KNOWN  # tokens of an ending that are compared
MIN_MATCH = 2
MATCH_BEHIND_EDIT = 4


def check_prediction(
    given: Any, batch_size: int, num_return_sequences: int, vocab_size: int, max_tokens: int | None
) -> list[NDArray[np.int64] | None]:
    """``prediction`` of `generate` for each sequence.

    Args:
        given: token ids of the text behind one prompt: a tensor [n], or integers; for a batch a
            list of such texts, or of None.
        batch_size: number of sequences.
        num_return_sequences: how many that follow one another continue one prompt.
        vocab_size: all ids are below it.
        max_tokens: of a text, the context length of the model; None where there is no limit.

    Raises:
        TypeError: no sequence of integers.
        ValueError: too many of them, one outside the vocabulary, or another number of texts.
    """
    prompts = batch_size // num_return_sequences
    if isinstance(given, torch.Tensor | np.ndarray):
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(f"prediction must be token ids, or a list of them, got {shown(given)}")
    single = not any(isinstance(one, Sequence | torch.Tensor | np.ndarray) for one in given)
    texts = [given] if single and any(one is not None for one in given) else list(given)
    checked = [None if one is None else _checked(one, vocab_size, max_tokens) for one in texts]
    if len(checked) != prompts:
        raise ValueError(
            f"prediction must have a text for each of {prompts} prompts, got {len(checked)}"
        )
    return [one for one in checked for _ in range(num_return_sequences)]


def _checked(text: Any, vocab_size: int, max_tokens: int | None) -> NDArray[np.int64]:
    try:
        ids = np.asarray(text.tolist() if isinstance(text, torch.Tensor) else text)
    except ValueError:  # lists of several lengths
        ids = np.empty((1, 1))
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"prediction must be token ids, got {shown(text)}")
    if max_tokens is not None and len(ids) > max_tokens:
        raise ValueError(
            f"prediction must have at most {max_tokens} tokens, the model's context, got {len(ids)}"
        )
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise ValueError(f"prediction must hold token ids in [0, {vocab_size}), got {wrong[0]}")
    return ids.astype(np.int64)


def continuation(
    text: NDArray[np.int64], prediction: NDArray[np.int64], max_tokens: int
) -> NDArray[np.int64]:
    """The tokens that follow in a prediction at the place that a text has come to.

    They are those behind the longest match of the text's ending; of equally long ones, behind the
    one whose place in the prediction is the nearest to that in the text. Where the last token is
    not the predicted one, the prediction goes on behind the token that it replaces. After a match
    of n tokens at most 2n are drafted, so that an edit costs few rejected drafts.

    Args:
        text: [n] int64, the new tokens; at least one.
        prediction: [m] int64.
        max_tokens: of the draft.

    Returns:
        [up to ``max_tokens``] int64, empty where the prediction does not say what follows.

    Example:
        >>> import numpy as np
        >>> predicted = np.array([5, 6, 7, 8, 9, 10])
        >>> continuation(np.array([5, 6]), predicted, 8).tolist()
        [7, 8, 9, 10]
        >>> continuation(np.array([5, 6, 7, 8, 4]), predicted, 8).tolist()
        [10]
    """
    end, size = _longest_match(text, prediction)
    if size < min(MIN_MATCH, len(text)):
        end, size = _longest_match(text[:-1], prediction)
        if size < MATCH_BEHIND_EDIT:
            return prediction[:0]
        end, size = end + 1, MATCH_BEHIND_EDIT
    elif size == len(text):  # it began as predicted
        size = max(size, MATCH_BEHIND_EDIT)
    return prediction[end + 1 : end + 1 + min(max_tokens, 2 * size)]


def _longest_match(text: NDArray[np.int64], prediction: NDArray[np.int64]) -> tuple[int, int]:
    """The index in a prediction of the last token of the match of a text's ending, and its size."""
    if not len(text):
        return -1, 0
    ends = np.flatnonzero(prediction == text[-1])
    size = 1 if len(ends) else 0
    while size and size < min(len(text), MAX_MATCH):
        longer = ends[ends >= size]
        longer = longer[prediction[longer - size] == text[-1 - size]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    if not size:
        return -1, 0
    return int(ends[np.abs(ends - (len(text) - 1)).argmin()]), size


def propose_known(session: Session, drafted: DraftedRound, max_depths: NDArray[np.int64]) -> bool:
    """Draft what the calls of the sequences bring; whether there is something.

    Args:
        session: between two rounds.
        drafted: its round, which holds the drafts then.
        max_depths: [B], how many tokens each sequence may draft.
    """
    drafter = session.drafter
    verifies = session.plan.request.drafts or session.runner.has_slots
    if not verifies or (drafter is not None and drafter.needs.target_forward):
        return False
    chains: dict[int, Sequence[int]] = {}
    for b in np.flatnonzero(max_depths > 0).tolist():
        limit = min(int(max_depths[b]), MAX_KNOWN)
        call, index = session.sequences.calls[b]
        begin, end = session.sequences.prompt_lengths[b], session.history.lengths[b]
        prediction = call.assistant.predictions[index] if call.assistant.predictions else None
        if prediction is not None:
            text = session.history.tokens[b, begin:end]
            chains[b] = continuation(text, prediction, limit).tolist()
            drafted.predicted[b] = bool(chains[b])
        if not chains.get(b) and call.processors[index] and drafter is not None:
            chains[b] = _forced(session, b, call.processors[index][-1])[:limit]
    width = max(map(len, chains.values()), default=0)
    if not width:
        return False
    tokens = np.full((len(max_depths), width), -1)
    for b, chain in chains.items():
        tokens[b, : len(chain)] = chain
    made = Draft(torch.from_numpy(tokens))
    if session.drafts_trees:
        above = torch.arange(-1, width - 1, device=session.device)
        made.parents, made.depth = above.expand(tokens.shape), width
    drafted.hold(made, made.tokens, known=True)
    return True


def _forced(session: Session, b: int, processor: Any) -> Sequence[int]:
    """The tokens that the grammar of a sequence forces, where they are several."""
    if type(processor) is not GrammarProcessor:
        return ()
    try:
        forced = processor.forced(session.padded_ids(b)[processor.prompt :].tolist())
    except (GrammarLimitError, RuntimeError):  # the masks of the round will say so
        return ()
    return forced if len(forced) > 1 else ()
