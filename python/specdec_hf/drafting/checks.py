"""Checks of the drafts that drafters return.

A fault of the program, such as tokens of a wrong type, raises and names the drafter. A fault that
can come and go with the text leaves a note in the statistics, and the drafts count as absent: text
is never lost to a bad draft.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer, check_integers
from specdec_hf.drafting.call import DrafterCall, Drawn
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Draft, Drafter, State
from specdec_hf.drafting.sampling import depths_of, mask_below_limits
from specdec_hf.runner.protocol import to_device, vocab_size_of

IGNORED = "those drafts count as absent"
OUTSIDE = f"drafted ids outside the vocabulary; {IGNORED}"


def describe(drafter: Any) -> str:
    """A drafter in a note of the statistics."""
    return f"drafter {drafter.name} ({type(drafter).__name__})"


def begin_state(drafter: Drafter, call: DrafterCall) -> State:
    """The state of a drafter in a call.

    Raises:
        TypeError: `Drafter.begin` returned something else.
        ValueError: a call that the drafter cannot draft for.
    """
    state = drafter.begin(call)
    if not isinstance(state, State):
        raise TypeError(
            f"{type(drafter).__name__}.begin must return a State, got {type(state).__name__}"
        )
    return state


def propose_checked(
    drafter: Drafter, state: State, texts: History, limits: NDArray[np.int64], call: DrafterCall
) -> Draft | None:
    """The proposal of a drafter's state in one round, checked and cut to the limits.

    Returns:
        A draft without a token beyond the limit of its sequence, None where nothing is drafted. Its
        counts are known where it is a chain, and its rows are on the target's device. A chain of a
        drafter of trees becomes a tree.

    Raises:
        TypeError: not a draft, or one that holds something of a wrong type, such as a distribution
            that was not drawn with `DrafterCall.draw`.
        ValueError: tokens of a wrong shape, or a tensor on a wrong device.
    """
    limits = np.minimum(limits, drafter.depth) if drafter.size else limits
    proposed: Any = state.propose(texts, limits.copy())
    if proposed is None:
        return None
    proposed = proposed if isinstance(proposed, Draft) else Draft(proposed)
    if proposed.parents is not None:
        draft = _read_tree(drafter, proposed, texts, call)
    elif proposed.num_proposals != 1:
        draft = _read_proposals(drafter, proposed, texts, int(limits.max()), call)
    else:
        draft = read_chain(drafter, proposed, texts, int(limits.max()), call)
    if draft is None:
        return None
    draft = _within(draft, limits)
    return _as_tree(draft) if drafter.size and draft.parents is None else draft


def _within(draft: Draft, limits: NDArray[np.int64]) -> Draft:
    """A checked draft without what lies beyond the limits of its sequences."""
    if draft.counts is not None:
        return replace(draft, counts=np.minimum(draft.counts, limits))
    size = draft.tokens.shape[1]
    depth = draft.depth or size // draft.num_proposals
    if (limits >= depth).all():
        return draft
    device = draft.tokens.device
    chains = torch.arange(size, device=device)[None] % depth + 1
    depths = chains if draft.parents is None else depths_of(draft.parents, depth).to(device)
    tokens = mask_below_limits(draft.tokens, depths, limits)
    return replace(draft, tokens=tokens)


def check_vocab_size(name: str, vocab_size: int, config: Any) -> None:
    """Raises ValueError for stored ids of a vocabulary of another size than the model's."""
    expected = vocab_size_of(config)
    if vocab_size != expected:
        raise ValueError(
            f"{name} must have the model's vocabulary of {expected} tokens, got {vocab_size}"
        )


def read_chain(
    drafter: Drafter, draft: Draft, texts: History, gamma: int, call: DrafterCall
) -> Draft | None:
    """Check a drafted chain, so that the loop meets valid counts only; None for no drafts.

    Args:
        drafter: named in messages and notes.
        draft: its tokens are a tensor or array [B, up to gamma], or a list of one list for each
            sequence; lists may differ in length.
        texts: that it was given.
        gamma: the largest of the limits that it was given.
        call: names the target, and takes remarks for the statistics.

    Raises:
        TypeError: something of a wrong type.
        ValueError: tokens of a wrong shape, or a tensor on a wrong device.
    """
    model, note = call.model, call.note
    name, batch_size = f"{type(drafter).__name__}.propose", len(texts.lengths)
    tokens = _read_tokens(name, draft.tokens, batch_size, gamma)
    size = tokens.shape[1]
    counts = np.full(batch_size, size)
    if draft.counts is not None:
        given = _read_counts(name, draft.counts)
        if given.shape != (batch_size,):
            note(f"{describe(drafter)} gave counts that are not [B]; {IGNORED}")
            return None
        counts = given.clip(0, size)
        if (counts != given).any():
            note(f"{describe(drafter)} gave counts outside [0, gamma], which are clipped")
    drawn, fits = _read_drawn(name, draft.drawn, batch_size, size, call.device)
    if not fits:
        note(f"{describe(drafter)} gave a distribution that is not [B, gamma, V]; {IGNORED}")
        return None
    if tokens.device.type == "cpu":
        # On a device the verification finds these ends, and reports them in its status.
        ids, drafted = tokens.numpy(), np.arange(size) < counts[:, None]
        outside = (ids < -1) | (ids >= vocab_size_of(model))
        if (outside & drafted)[texts.active].any():
            note(f"{describe(drafter)} {OUTSIDE}")
        ended = ((ids == -1) | outside).cumsum(axis=1) > 0
        counts = np.minimum(counts, (~ended).sum(axis=1))
    confidence = _read_confidence(name, draft.confidence, (batch_size, size))
    _check_carried(name, draft.carried, batch_size, call)
    for field in ("draft_rows", "scores"):
        if getattr(draft, field) is not None:
            raise ValueError(f"{name} must return {field} with parents only, got a chain with it")
    if not counts.any():
        return None
    return Draft(
        tokens, drawn=drawn, counts=counts, confidence=confidence, carried=draft.carried
    )  # fmt: skip


def _read_proposals(
    drafter: Drafter, draft: Draft, texts: History, gamma: int, call: DrafterCall
) -> Draft | None:
    """Check K chains of each sequence, without a distribution."""
    name, batch_size = f"{type(drafter).__name__}.propose", len(texts.lengths)
    count = check_integer(f"num_proposals of {name}", draft.num_proposals, 1)
    _check_tensor(name, "tokens", draft.tokens, call)
    shape = list(draft.tokens.shape)
    if (
        count > call.num_proposals
        or len(shape) != 2
        or shape[0] != batch_size
        or shape[1] % count
        or shape[1] > count * gamma
    ):
        raise ValueError(
            f"{name} must return up to {call.num_proposals} proposals of up to {gamma} tokens "
            f"for each of {batch_size} sequences, got tokens {shape} with num_proposals={count}"
        )
    if draft.drawn is not None:
        raise ValueError(f"{name} must return several proposals without a distribution, got one")
    if shape[1] == 0:
        return None
    return Draft(draft.tokens.to(torch.int64), num_proposals=count)


def _as_tree(draft: Draft) -> Draft:
    """A checked chain as a tree with one path."""
    tokens = cut_chains(draft)
    size = tokens.shape[1]
    parents = torch.arange(-1, size - 1, device=tokens.device).expand(len(tokens), -1)
    return replace(draft, tokens=tokens, parents=parents, depth=size, counts=None, confidence=None)


def cut_chains(draft: Draft, counts: NDArray[np.int64] | None = None) -> torch.Tensor:
    """The tokens [B, N] of a checked chain, -1 after the end of each, ``counts[b]`` at most."""
    assert draft.counts is not None
    tokens: torch.Tensor = draft.tokens
    size = tokens.shape[1]
    counts = draft.counts if counts is None else np.minimum(draft.counts, counts)
    if (counts >= size).all():
        return tokens
    bounds = to_device(counts, tokens.device)
    return tokens.masked_fill(torch.arange(size, device=tokens.device) >= bounds[:, None], -1)


def _read_tree(drafter: Drafter, draft: Draft, texts: History, call: DrafterCall) -> Draft | None:
    """Check a drafted tree; None for no drafts. The op finds ids and parents out of range."""
    name, batch_size = f"{type(drafter).__name__}.propose", len(texts.lengths)
    if not drafter.size:
        raise ValueError(
            f"{name} must return a chain, without parents: a drafter of trees sets size and depth"
        )
    _check_tensor(name, "tokens", draft.tokens, call)
    if draft.tokens.ndim != 2 or len(draft.tokens) != batch_size:
        got = list(draft.tokens.shape)
        raise ValueError(f"{name} must return tokens [{batch_size}, N], got {got}")
    shape = (batch_size, size) = tuple(draft.tokens.shape)
    if size > drafter.size:
        raise ValueError(f"{name} must return at most size={drafter.size} nodes, got {size}")
    for field in ("parents", "draft_rows", "scores"):
        value = getattr(draft, field)
        if value is None:
            continue
        _check_tensor(name, field, value, call, integers=field != "scores")
        if value.shape != shape:
            raise ValueError(f"{name} must return {field} {list(shape)}, got {list(value.shape)}")
    _check_carried(name, draft.carried, batch_size, call)
    depth = min(size, drafter.depth)
    if draft.depth is not None:
        depth = min(size, check_integer(f"depth of {name}", draft.depth, 0))
    rows = size if draft.draft_rows is None else None
    device = call.device
    drawn, fits = _read_drawn(name, draft.drawn, batch_size, rows, device)
    if not fits:
        call.note(f"{describe(drafter)} gave a distribution that is not [B, M, V]; {IGNORED}")
        return None
    if size == 0:
        return None
    draft_rows, parents = draft.draft_rows, draft.parents
    assert parents is not None
    return replace(
        draft,
        tokens=draft.tokens.to(torch.int64),
        parents=parents.to(torch.int64),
        drawn=drawn,
        depth=depth,
        draft_rows=None if draft_rows is None else draft_rows.to(device, torch.int32),
    )


def _check_carried(name: str, carried: Any, batch_size: int, call: DrafterCall) -> None:
    if carried is None:
        return
    _check_tensor(name, "carried", carried, call)
    if carried.ndim != 2 or len(carried) != batch_size:
        raise ValueError(f"{name} must return carried [{batch_size}, E], got {list(carried.shape)}")


def _check_tensor(
    name: str, field: str, value: Any, call: DrafterCall, *, integers: bool = True
) -> None:
    """Raises unless it is a tensor of integers, or floats, on the host or the target's device."""
    kind = "integers" if integers else "floats"
    fits = _holds_integers(value) if integers else isinstance(value, torch.Tensor)
    if not fits or (not integers and not value.is_floating_point()):
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"{name} must return {field} as a tensor of {kind}, got {got}")
    if value.device.type != "cpu" and value.device != call.device:
        raise ValueError(
            f"{name} must return {field} on the host or on the target's device "
            f"{call.device}, got {value.device}"
        )


def _read_tokens(name: str, returned: Any, batch_size: int, gamma: int) -> torch.Tensor:
    """Drafted tokens [B, up to gamma] int64, -1 after the ends of short lists."""
    tokens: Any = returned
    requirement = f"{name} must return tokens [{batch_size}, 0..{gamma}]"
    if isinstance(returned, list | tuple):
        if len(returned) != batch_size:
            raise ValueError(f"{requirement}, got {len(returned)} lists")
        rows = [_read_row(f"{name} tokens[{b}]", row) for b, row in enumerate(returned)]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    elif isinstance(returned, np.ndarray) and returned.dtype.kind in "iu":
        tokens = torch.from_numpy(returned.astype(np.int64))
    elif not isinstance(returned, np.ndarray | torch.Tensor):
        raise TypeError(
            f"{name} must return None, a Draft, or its tokens as a tensor, array or list, "
            f"got {type(returned).__name__}"
        )
    if not _holds_integers(tokens):
        raise TypeError(f"{name} must return tokens of an integer type, got {tokens.dtype}")
    if tokens.device.type == "meta":
        raise ValueError(f"{name} must return tokens on a device that stores them, got meta")
    shape = list(tokens.shape)
    if len(shape) != 2 or shape[0] != batch_size or shape[1] > gamma:
        raise ValueError(f"{requirement}, got {shape}")
    return tokens.to(torch.int64)


def _read_row(name: str, row: Any) -> torch.Tensor:
    if isinstance(row, torch.Tensor) and row.ndim == 1 and _holds_integers(row):
        return row.to(torch.int64)
    # An id of more than 64 bits is out of range like any other beyond the vocabulary.
    ids = [min(max(token, -2), 2**62) for token in check_integers(name, row)]
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


def _holds_integers(tokens: Any) -> TypeGuard[torch.Tensor]:
    if not isinstance(tokens, torch.Tensor):
        return False
    return not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)


def _read_counts(name: str, values: Any) -> NDArray[np.int64]:
    """Counts as an array of any shape."""
    on_device = isinstance(values, torch.Tensor) and values.device.type != "cpu"
    counts = None if on_device else np.asarray(values)
    if counts is None or (counts.dtype.kind not in "iu" and counts.size):
        kind = f"a tensor on {values.device}" if counts is None else f"{counts.dtype}"
        raise TypeError(f"{name} must return counts as integers on the host, got {kind}")
    return counts.astype(np.int64)


def _read_confidence(
    name: str, confidence: Any, shape: tuple[int, int]
) -> NDArray[np.float32] | None:
    """Confidences within [0, 1], NaN as 0."""
    if confidence is None:
        return None
    if not isinstance(confidence, np.ndarray) or confidence.dtype.kind != "f":
        got = confidence.dtype if isinstance(confidence, np.ndarray) else type(confidence).__name__
        raise TypeError(f"{name} must return confidence as an array of floats, got {got}")
    if confidence.shape != shape:
        raise ValueError(
            f"{name} must return confidence {list(shape)}, got {list(confidence.shape)}"
        )
    return np.nan_to_num(confidence.astype(np.float32), nan=0.0).clip(0, 1)


def _read_drawn(
    name: str, drawn: Any, batch_size: int, rows: int | None, device: torch.device
) -> tuple[Drawn | None, bool]:
    """The draft's rows on the target's device, and whether they have the draft's shape.

    Args:
        name: of what returned them.
        drawn: `Draft.drawn`.
        batch_size: number of sequences B.
        rows: how many each sequence must have; None for any number.
        device: the target's.
    """
    if drawn is None:
        return None, True
    if not isinstance(drawn, Drawn):
        raise TypeError(
            f"{name} must return drawn as None or what call.draw returned, "
            f"got {type(drawn).__name__}"
        )
    shape: Any = getattr(drawn.logits, "shape", ())
    for field in ("logits", "tokens", "logsumexp", "threshold"):
        value = getattr(drawn, field)
        wanted = shape if field == "logits" else shape[:2]
        stored = isinstance(value, torch.Tensor) and value.device.type != "meta"
        if not stored or len(shape) != 3 or value.shape != wanted:
            got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"{name} must return drawn as call.draw returned it, with {field} "
                f"{'[B, M, V]' if field == 'logits' else '[B, M]'} in memory, got {got}"
            )
    fits = shape[0] == batch_size and rows in (None, shape[1])
    return Drawn.join([drawn], device), fits
