"""Hugging Face's logits processors, asked about one sequence at a time or, where
`apply_penalties_` computes the same, about all rows of a round at once.

A processor must be a function of its arguments: it is asked about drafts that the text does not
take, and so in another order than by plain decoding. A user's processor is asked again in each
round for its answer of the round before, which finds one that keeps a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import shown
from specdec_hf.extras.grammar import GrammarProcessor, allowed, bits_of_drafts
from specdec_hf.extras.penalties import penalise
from specdec_hf.loop.endings import reason_to_end
from specdec_hf.loop.session import Answer, Session
from specdec_hf.rules import CUSTOM_RULE, is_lossy
from specdec_hf.runner.protocol import to_device
from specdec_kernels import Tree

# The processors of this module are functions of their arguments, but for those named below, which
# have a state or call a function of the user's.
STATELESS_MODULE = "transformers.generation.logits_process"
STATEFUL_CLASSES = (
    "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
)


class Processed(NamedTuple):
    """What processors make of the rows of a round.

    Attributes:
        logits: [B, N+1, V]. They are float32 where some processor has changed them.
        errors: by the index of the sequence, where the session isolates faults: what its processors
            raised. Its rows are not finite, or allow nothing.
        allowed: token_bitmask [B, N+1, ceil(V/32)] int32 for the verifier, where grammars have not
            been applied to the logits.
    """

    logits: torch.Tensor
    errors: dict[int, Exception]
    allowed: dict[str, torch.Tensor]


def process_logits(session: Session, logits: torch.Tensor, drafts: Tree) -> Processed:
    """Logits after the processors, each row with the path to it as prefix.

    Rows behind a draft that cannot be accepted, because it is absent, a processor forbids it or a
    greedy text takes another token, and behind one that ends its sequence are left as they are: the
    text takes nothing from them, and a processor must not be shown a prefix that plain decoding
    could not have made. Drafts that top_p, min_p or a larger top_k exclude are shown to them.

    Args:
        session: names the processors of each sequence.
        logits: [B, N+1, V], the row of the pending token, then those of the drafts.
        drafts: tokens and parents [B, N].

    Raises:
        ValueError: a processor that is no function of its arguments, by name.
    """
    active = np.flatnonzero(session.history.active).tolist()
    grammars, others = _split(session, active)
    # Who reads the rows that a text was taken from must find the mask in them.
    read = session.outputs is not None or session.rule == CUSTOM_RULE or session.options.ablate
    changed = bool(read) or any(others.values())
    processed = logits.to(torch.float32, copy=True) if changed else logits
    errors: dict[int, Exception] = {}
    done = penalise(session, processed, drafts, others)
    _process_one_by_one(session, logits, processed, drafts, sorted({*active} - done), errors)
    grammars = {b: one for b, one in grammars.items() if b in done}
    if not grammars:
        return Processed(processed, errors, {})
    bitmask = _bits(session, grammars, drafts, errors, processed.shape[-1])
    if read:
        for b, rows in enumerate(bitmask):
            for words, row in zip(rows, processed[b], strict=True):
                row[~allowed(words, len(row)).to(row.device)] = -torch.inf
        return Processed(processed, errors, {})
    allowed_bits = {"token_bitmask": torch.from_numpy(bitmask).to(session.device)}
    return Processed(processed, errors, allowed_bits)


def _split(
    session: Session, active: list[int]
) -> tuple[dict[int, GrammarProcessor], dict[int, tuple[Any, ...]]]:
    """By the index of the sequence: a grammar where that is its last processor, and the others."""
    grammars, others = {}, {}
    for b in active:
        listed = session.processors[b]
        last = listed[-1] if listed else None
        if type(last) is GrammarProcessor:
            grammars[b] = last
        others[b] = tuple(listed[:-1] if b in grammars else listed)
    return grammars, others


def _bits(
    session: Session,
    grammars: dict[int, GrammarProcessor],
    drafts: Tree,
    errors: dict[int, Exception],
    vocab: int,
) -> NDArray[np.int32]:
    """[B, N+1, ceil(V/32)]: the masks of the sequences that have a grammar, all bits of others."""
    tokens, parents = drafts.tokens.tolist(), drafts.parents.tolist()
    bits = np.full((len(tokens), len(tokens[0]) + 1, -(-vocab // 32)), -1, np.int32)
    for b, one in grammars.items():
        text = session.padded_ids(b)[one.prompt :].tolist()
        eos = session.sequences.calls[b][0].stopping.eos
        if (given := one.grammar.tokenizer.vocab_size) != vocab:
            raise ValueError(f"vocab_size of a GrammarTokenizer must be {vocab}, got {given}")
        try:
            bits_of_drafts(one, text, tokens[b], parents[b], eos, bits[b])
        except Exception as error:  # whatever the grammar raises
            if not session.isolates:
                raise
            errors.setdefault(b, error)
            bits[b] = 0
    return bits


def _process_one_by_one(
    session: Session,
    logits: torch.Tensor,
    processed: torch.Tensor,
    drafts: Tree,
    left: list[int],
    errors: dict[int, Exception],
) -> None:
    """Ask the processors of some sequences about their text and each draft that may follow it."""
    if not left:
        return
    processors: list[Any] = session.processors
    device, greedy = session.device, _greedy(session)
    tokens, parents = drafts.tokens.tolist(), drafts.parents.tolist()

    def process(b: int, row: int, prefix: NDArray[np.int64]) -> None:
        processed[b, row] = run_processors(processors[b], to_device(prefix, device), logits[b, row])

    for b in left:
        prefixes = {-1: session.padded_ids(b)}
        with _isolated(session, errors, b, processed[b, 0]):
            process(b, 0, prefixes[-1])
        for n, (token, parent) in enumerate(zip(tokens[b], parents[b], strict=True)):
            reached = parent in prefixes
            if not reached or not _may_follow(processed[b, parent + 1], token, greedy=greedy[b]):
                continue
            prefix = np.append(prefixes[parent], token)
            with _isolated(session, errors, b, processed[b, n + 1]):
                if not reason_to_end(*session.sequences.calls[b], prefix, device):
                    process(b, n + 1, prefix)
                    prefixes[n] = prefix
        out_of_order = session.drafter is not None or len(processors) > 1
        if out_of_order and b not in errors and stateful(processors[b]):
            root = to_device(prefixes[-1], device)
            answer = Answer(root, logits[b, 0], processed[b, 0])
            with _isolated(session, errors, b, processed[b]):
                check_answer(processors[b], session.answers, session.sequences.numbers[b], answer)


@contextmanager
def _isolated(
    session: Session, errors: dict[int, Exception], b: int, scores: torch.Tensor
) -> Iterator[None]:
    """Keep an error as that of sequence ``b``, whose scores are then not finite, if it may be."""
    try:
        yield
    except Exception as error:  # whatever a processor or a criterion raises
        if not session.isolates:
            raise
        errors.setdefault(b, error)
        scores.fill_(torch.nan)


def _may_follow(scores: torch.Tensor, token: int, *, greedy: bool) -> bool:
    if not 0 <= token < len(scores) or not scores[token] > -torch.inf:
        return False
    return not greedy or bool(scores[token] == scores.max())


def _greedy(session: Session) -> list[bool]:
    """[B], whether a sequence takes a likeliest token of each row and no other."""
    temperature, top_k = (
        torch.as_tensor(value, device="cpu").expand(len(session.sequences.numbers)).tolist()
        for value in (session.sampling.temperature, session.sampling.top_k)
    )
    lossless = not is_lossy(session.rule)
    return [lossless and (t == 0 or k == 1) for t, k in zip(temperature, top_k, strict=True)]


def run_processors(processors: Any, prefix: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """The row [V] float32 of a prefix [T] after processors; neither is changed."""
    answer: torch.Tensor = processors(prefix[None], row[None].to(torch.float32, copy=True))
    return answer[0]


def stateful(processors: Any) -> list[str]:
    """The names of processors that may have a state."""
    return [
        getattr(one, "__name__", type(one).__name__)
        for one in processors
        if type(one).__module__ != STATELESS_MODULE or type(one).__name__ in STATEFUL_CLASSES
    ]


def check_answer(processors: Any, answers: dict[int, Answer], key: int, answer: Answer) -> None:
    """Ask for an answer of an earlier round again, and keep this round's for the next one.

    Args:
        processors: those of one sequence.
        answers: of earlier rounds; changed in place.
        key: names the sequence there.
        answer: of this round, after which the processors were asked about its drafts.

    Raises:
        ValueError: they answer otherwise now. Nothing else would show that a text is another than
            without drafts.
    """
    names = stateful(processors)
    if not names:
        return
    rule = (
        f"logits_processor {' or '.join(names)} must be a function of input_ids and scores, since "
        "drafts, batches and beams ask it out of order (drafter=None asks it once a token for a "
        "sequence alone): asked again for the same input_ids, "
    )
    prefix, row, before = answers.get(key, answer)
    try:
        now = run_processors(processors, prefix, row)
    except Exception as error:
        raise ValueError(f"{rule}it raised {type(error).__name__}: {shown(str(error))}") from error
    unlike = (now != before) & ~(now.isnan() & before.isnan())
    if unlike.any():
        token = int(unlike.nonzero()[0])
        scores = f"{float(before[token]):g} and then {float(now[token]):g}"
        raise ValueError(f"{rule}it gave token {token} the scores {scores}")
    # Buffers of forwards are written to again.
    answers[key] = Answer(answer.prefix, answer.row.clone(), answer.processed.clone())


def process_ended(
    session: Session,
    logits: torch.Tensor,
    counts: NDArray[np.int64],
    padding: NDArray[np.int64] | None = None,
) -> torch.Tensor:
    """Logits [B, n, V] float32 after the processors, for sequences that go on with padding.

    Args:
        session: names the processors of each sequence.
        logits: [B, n, V], the rows of the last token and of the padding after it.
        counts: [B], how many rows of each sequence are wanted; 0 for one that is not behind.
        padding: [B], how much padding there is before the first row; None is none.
    """
    processors: list[Any] = session.processors
    processed = logits.to(torch.float32, copy=True)
    for b in np.flatnonzero(counts).tolist():
        ids, first = session.padded_ids(b), 0 if padding is None else int(padding[b])
        for n in range(int(counts[b])):
            padded = np.pad(ids, (0, first + n), constant_values=session.call.stopping.pad)
            prefix = to_device(padded, session.device)[None]
            processed[b, n] = processors[b](prefix, processed[b, n][None])[0]
    return processed
