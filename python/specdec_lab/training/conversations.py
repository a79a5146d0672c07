"""Texts of the target itself: it writes a user's turn, begins with words of one, or is given one.

It answers the turn.

Every row of the batch holds one conversation, of its own length. A row whose conversation has ended
takes the next one, so none is idle, and keeps the keys and values of the tokens that begin all
conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from specdec_hf.runner.choose import choose_cache
from specdec_hf.runner.packed.model import pack_for_call
from specdec_hf.runner.protocol import CacheRequest

from specdec_kernels import sample

PLACEHOLDER = "\N{INVERTED QUESTION MARK}TURN\N{INVERTED QUESTION MARK}"  # no template changes it
# Sampling parameters (temperature, top-p) of the user's turns, and of the answers in turn: drafts
# are to be good in greedy texts and in sampled ones.
TURN = (1.0, 0.95)
ANSWERS = ((0.0, 1.0), (0.7, 0.9))
HELD_OUT = 20  # one of so many conversations, given texts or tokens is held out


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation of one user's turn and one answer is written in tokens.

    Attributes:
        before: tokens up to the first one of the user's turn.
        between: tokens from the end of that turn to the first one of the answer.
        ends: tokens that end a turn.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    ends: frozenset[int]

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> ChatFormat:
        """The format of a model's chat template; without one a conversation is one text.

        Raises:
            ValueError: a template that changes the user's words, or a tokenizer that has neither a
                template nor a token to begin with.
        """
        ends = end_tokens(model, tokenizer)
        if not tokenizer.chat_template:
            first = tokenizer.bos_token_id
            first = tokenizer.eos_token_id if first is None else first
            if first is None:
                raise ValueError(
                    "the tokenizer must have a chat template, or a token to begin with"
                )
            return cls((first,), (), ends)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": PLACEHOLDER}], tokenize=False, add_generation_prompt=True
        )
        before, turn, between = text.partition(PLACEHOLDER)
        if not turn:
            raise ValueError("the chat template must write the user's words as they are")
        encoded = [
            tuple(tokenizer(part, add_special_tokens=False)["input_ids"])
            for part in (before, between)
        ]
        if not encoded[0] or not encoded[1]:
            raise ValueError(
                "the chat template must write tokens before and after the user's words"
            )
        return cls(encoded[0], encoded[1], ends | {encoded[1][0]})


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text."""
    given = model.generation_config.eos_token_id
    ends = set(given) if isinstance(given, list) else {given}
    return frozenset((ends | {tokenizer.eos_token_id}) - {None})


@dataclass
class TrainingText:
    """One text.

    Attributes:
        number: names it among all; its random numbers depend on nothing else but the seed.
        tokens: all its tokens.
        answer: where the answer begins; the number of tokens where there is none.
        held_out: whether it is left out of training, to measure on; None goes by its number.
    """

    number: int
    tokens: list[int]
    answer: int
    held_out: bool | None = None


@dataclass
class _Row:
    """A conversation that is being written: `tokens` beyond those fed are to be fed next."""

    number: int
    tokens: list[int]
    answer: int | None = None
    sampling: tuple[float, float] = TURN  # temperature and top-p of the next token

    def begin_answer(self, chat: ChatFormat) -> None:
        self.tokens.extend(chat.between)
        self.answer = len(self.tokens)
        self.sampling = answer_sampling(self.number)

    def append(self, token: int, chat: ChatFormat, turn_length: int, length: int) -> bool:
        """Add a token that was drawn; whether the conversation has ended."""
        self.tokens.append(token)
        ended = token in chat.ends
        if self.answer is not None or not chat.between:
            return ended or len(self.tokens) >= length
        if ended or len(self.tokens) - len(chat.before) >= turn_length:
            self.tokens.pop()
            self.begin_answer(chat)
        return False

    def conversation(self) -> TrainingText:
        answer = len(self.tokens) if self.answer is None else self.answer
        return TrainingText(self.number, self.tokens, answer)


@torch.inference_mode()
def converse(
    model: Any,
    chat: ChatFormat,
    *,
    numbers: Iterator[int],
    batch_size: int,
    length: int,
    turn_length: int,
    seed: int,
    prompts: Sequence[Sequence[int]] = (),
    opening: Callable[[int], Sequence[int]] = lambda number: (),
    stop: Callable[[int], bool] = lambda tokens: False,
) -> Iterator[TrainingText]:
    """Conversations of the target, as they end.

    Args:
        model: causal LM; on the CPU it runs on packed weights.
        chat: its format.
        numbers: of the conversations to write, in the order of beginning them.
        batch_size: how many are written at once.
        length: most tokens of one.
        turn_length: most tokens of a user's turn that the model writes.
        seed: of all random numbers.
        prompts: users' turns, where conversation n has turn n of them; without, the model writes
            them.
        opening: the first tokens of the user's turn of a conversation that the model writes.
        stop: given the number of tokens of all conversations, those that are not complete included,
            says whether to stop; these then end where they are.

    Raises:
        ValueError: a model that cannot run a ragged batch, or whose logits are no numbers.
    """
    head = list(chat.before)
    packed_model, _ = pack_for_call(model)
    runner = choose_cache(model, CacheRequest(batch_size, "spec"), packed_model).make(length + 1)
    device = model.device
    begin = torch.tensor([head], device=device).expand(batch_size, -1)
    if len(head) > 1:
        runner.forward(begin[:, :-1], np.zeros(batch_size, dtype=np.int64), 1)
    written = 0

    def next_row() -> _Row:
        number = next(numbers, -1)
        tokens = [*head, *(opening(number) if number >= 0 and not prompts else ())]
        row = _Row(number, tokens, None if chat.between else len(tokens))
        if number >= 0 and prompts:
            tokens.extend(prompts[number])
            row.begin_answer(chat)
        return row

    rows = [next_row() for _ in range(batch_size)]
    lengths = np.full(batch_size, len(head) - 1, dtype=np.int64)
    while any(row.number >= 0 for row in rows):
        fed = torch.tensor([[row.tokens[n]] for row, n in zip(rows, lengths, strict=True)])
        logits = runner.forward(fed.to(device), lengths, 1)[:, -1]
        lengths = lengths + 1
        drawn = _draw(logits, rows, lengths, seed)
        for b, row in enumerate(rows):
            if row.number < 0:
                lengths[b] = len(head) - 1
                continue
            if len(row.tokens) > lengths[b]:
                continue  # a token of the format or of a prompt is next
            if drawn[b] < 0:
                raise ValueError(
                    f"{type(model).__name__} gives logits that are no numbers after "
                    f"{len(row.tokens)} tokens of text {row.number}, so no token can be drawn"
                )
            if row.append(drawn[b], chat, turn_length, length):
                yield row.conversation()
                written += len(row.tokens)
                rows[b] = next_row()
                lengths[b] = len(head) - 1
        if stop(written + int(lengths.sum())):
            going = (row for row in rows if row.number >= 0 and row.answer is not None)
            yield from (row.conversation() for row in going)
            return
        runner.truncate(lengths)


def _draw(logits: torch.Tensor, rows: list[_Row], lengths: Any, seed: int) -> list[int]:
    """The next token of each row, by noise that depends on its number and length alone."""
    device = logits.device
    sampling = [row.sampling for row in rows]
    parameters = torch.tensor(sampling, dtype=torch.float32, device=device)
    tokens: list[int] = sample(
        logits,
        temperature=parameters[:, 0],
        top_p=parameters[:, 1],
        seeds=torch.tensor([(seed << 32) + max(row.number, 0) for row in rows], device=device),
        positions=torch.from_numpy(lengths.copy()).to(device),
    ).tokens.tolist()
    return tokens


def answer_sampling(number: int) -> tuple[float, float]:
    """Temperature and top-p of an answer: in turn, also among the conversations held out."""
    return ANSWERS[(number + number // HELD_OUT) % len(ANSWERS)]
