"""The output of the loop after every round.

Kinds of tokens, in the words of vLLM's rejection sampler:

- accepted: drafted, and kept by the verification.
- recovered: drawn from the residual in place of the first rejected draft.
- bonus: drawn from the target after a fully accepted draft.
- plain: drawn from the target where nothing was drafted.

A rejected draft is no token of the text; `Step.rejected` names those that the recovered token
replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from specdec_hf.runner.protocol import Lengths
from specdec_kernels import SampledDraft

Kind = Literal["accepted", "recovered", "bonus", "plain"]


@dataclass(frozen=True)
class Step:
    """The tokens that one round appended to one sequence.

    Attributes:
        sequence: index of the sequence in the batch, or its number where sequences join one.
        tokens: the new token ids, in order, cut where plain decoding would have stopped.
        kinds: how each token came about: "accepted", "recovered", "bonus" or "plain".
        logprobs: log probability of each token under the filtered target.
        finished: why the sequence ended with this step, "" while it goes on.
        rejected: the drafts that the recovered token replaces: the first rejected one of a chain,
            of a tree the children of the last accepted node, each token once. Empty where the step
            has no recovered token.
        top_logprobs: for each token, token ids with the log probabilities that the model gives them
            before temperature and filters: of the token itself, then of the likeliest ones. Empty
            where nobody asks; see `SpeculativeDecoder.stream`.
        drafted: how many tokens the round drafted for the sequence; of a tree, its nodes.
        predicted: whether these are of the ``prediction`` of the call.
        error: why the sequence ended where ``finished`` is "error", else None. It is a fault of
            this sequence alone: the others of a batch that sequences join go on.
    """

    sequence: int
    tokens: list[int]
    kinds: list[Kind]
    logprobs: list[float]
    finished: str = ""
    rejected: list[int] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    drafted: int = 0
    predicted: bool = False
    error: Exception | None = None

    @property
    def from_draft(self) -> list[bool]:
        """Which of the tokens were drafted."""
        return [kind == "accepted" for kind in self.kinds]


def run_stream(
    stream: Generator[Step, None, Any], on_step: Callable[[Step], None]
) -> tuple[list[Step], Any]:
    """Run a stream to its end, with a call for each step; returns the steps and its output."""
    steps: list[Step] = []
    while True:
        try:
            steps.append(next(stream))
        except StopIteration as stop:
            return steps, stop.value
        on_step(steps[-1])


class Streamer(Protocol):
    """Hugging Face's streamer interface."""

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


def put_step(streamer: Streamer | None, step: Step) -> None:
    """Give a step to a streamer token by token, as plain ``generate`` would."""
    if streamer is not None:
        for token in step.tokens:
            streamer.put(torch.tensor([token], device="cpu"))


def step_kinds(kept: int, accepted: int, tried: int) -> list[Kind]:
    """Kinds of a round's tokens.

    Args:
        kept: tokens that were appended, at most ``accepted + 1``.
        accepted: drafts that the verification accepted.
        tried: drafts that the verification compared: ``accepted`` where it rejected none.
    """
    last: Kind = "plain" if tried == 0 else "bonus" if accepted == tried else "recovered"
    drafts: list[Kind] = ["accepted"] * accepted
    return [*drafts, last][:kept]


@dataclass(frozen=True, eq=False)
class TracedRound:
    """The rows, drafts and decisions of one round. Tensors are on the target's device.

    Attributes:
        rule: acceptance rule of the call.
        seeds: [B] int64.
        lengths: [B] committed tokens of each sequence before the round, the position of draft 0.
        logits: [B, gamma+1, V], of the target, after the logits processors and before the sampling
            parameters.
        draft_token_ids: [B, gamma]; -1 where a sequence drafted less.
        distribution: what the drafts were drawn from; None for deterministic drafts.
        accept_probs: [B, gamma], as in `Verdict`.
        steps: what the round appended to each active sequence.
        indices: for each of them, the index of its sequence in the tensors.
        parents: [B, N], as in `Tree`, where the round drafted trees, whose nodes take the place of
            the gamma drafts above; row n+1 of ``logits`` is then that after node n. None for
            chains, and for rounds without drafts.
        path: [B, depth] of trees, as in `TreeVerdict`.
        draft_rows: [B, N] of trees, the row of ``distribution`` that each node was drawn from; None
            means row n.
    """

    rule: str
    seeds: torch.Tensor
    lengths: Lengths
    logits: torch.Tensor
    draft_token_ids: torch.Tensor
    distribution: SampledDraft | None
    accept_probs: torch.Tensor
    steps: list[Step]
    indices: list[int]
    parents: torch.Tensor | None = None
    path: torch.Tensor | None = None
    draft_rows: torch.Tensor | None = None


Trace = Callable[[TracedRound], None]
