"""The acceptance rate of a drafter on text of the target (Leviathan et al. 2023, Corollary 3.6).

The target writes a text by itself. The drafter then drafts one token at every position of it, as if
each were the beginning of a round, so that the mean of `sum(min(P, Q))` is over the positions of
the target's text and not only over those at which rounds happen to begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_hf.api import SpeculativeDecoder
from specdec_hf.cli.distributions import draft_probs, target_probs
from specdec_hf.drafting.checks import ask
from specdec_hf.drafting.context import Candidates, CommittedStates, DraftContext, History
from specdec_hf.drafting.drafter import Draft, Drafter, DraftOutcome
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.loop.streaming import TracedRound, run_stream
from specdec_hf.runner.choose import choose_runner
from specdec_hf.runner.protocol import HiddenStates
from specdec_kernels import SampledDraft
from specdec_kernels.analysis import LENIENCES, acceptance_rate, clustered_mean

REPLAY_RULE = "token"


@dataclass
class Text:
    """A text that the target wrote by itself.

    Attributes:
        tokens: [L] int64, prompt and answer.
        begin: tokens of the prompt.
        logits: one row [V] float32 for each token of the answer, after the logits processors.
        stats: of the call that wrote it.
    """

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    begin: int
    logits: list[Tensor]
    stats: SpecStats


@dataclass
class Position:
    """What a drafter does at one position of a text.

    Attributes:
        index: of the position in the text.
        p: [V] float64, the target's distribution.
        q: [V] float64, that of the drafter; None where it drafts nothing.
        logits: [V] float32, the row that P was made of.
        draft: the draft of one token; None where there is none.
    """

    index: int
    p: Tensor
    q: Tensor | None
    logits: Tensor
    draft: Draft | None = field(repr=False)


def write_text(
    model: Any,
    inputs: dict[str, Tensor],
    settings: dict[str, Any],
    seed: int | None,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Text:
    """Let the target answer one prompt without drafts.

    Args:
        model: target.
        inputs: ``input_ids`` and ``attention_mask`` of one sequence.
        settings: generation arguments.
        seed: of the sampling.
        on_tokens: called with the number of new tokens as they come.
    """
    rows: list[Tensor] = []

    def keep(traced: TracedRound) -> None:
        rows.append(traced.logits[0, 0].float().cpu())

    decoder = SpeculativeDecoder(None, seed=seed, trace=keep)
    steps, output = run_stream(
        decoder.stream(model, **inputs, **settings), lambda step: on_tokens(len(step.tokens))
    )
    prompt = inputs["input_ids"][0].tolist()
    answer = [token for step in steps for token in step.tokens]
    return Text(np.array([*prompt, *answer]), len(prompt), rows, output.stats)


@torch.inference_mode()
def replay(
    drafter: Drafter, model: Any, text: Text, sampling: dict[str, Any], seed: int = 0
) -> Iterator[Position]:
    """Let a drafter draft one token at every position of a text.

    Args:
        drafter: begins a call here, and learns from what the text and the target say, as in rounds
            of one draft each.
        model: target.
        text: by `write_text`.
        sampling: the parameters that the text was written with.
        seed: of the drafts that are drawn, which have no influence on Q.
    """
    length = len(text.tokens)
    runner, _ = choose_runner(model, 1, length)
    states: list[CommittedStates] = []
    context = DraftContext(
        model, REPLAY_RULE, **sampling, seeds=torch.tensor([seed], device=model.device),
        batch_size=1, max_length=length, max_draft=16, runner=runner, kept_states=states,
    )  # fmt: skip
    drafter.start(context)
    hidden: HiddenStates = {}
    if states:  # those of all positions by one forward
        read = torch.from_numpy(text.tokens[None, :-1]).to(model.device)
        runner.forward(read, np.zeros(1, dtype=np.int64), 1)
        hidden = runner.tap.take()
    for i, logits in enumerate(text.logits):
        index = text.begin + i
        history = _history(text, index)
        draft = ask(drafter, history, np.array([1]), context)
        p = target_probs(logits[None], sampling)[0]
        yield Position(index, p, _q(draft, len(p)), logits, draft)
        if drafter.candidates:
            drafter.observe(history, _candidates(drafter.candidates, history, logits))
        none = np.zeros((1, 0), dtype=np.int64)
        drafter.commit(DraftOutcome.of_chain(np.array([index]), np.array([0]), none))
        begin = index - 1 if i else 0  # the first round reads the prompt
        for kept in states:
            new = {layer: x[:, begin:index] for layer, x in hidden.items()}
            kept.record(new, np.array([index]), np.array([[0]]), 1)


def _history(text: Text, index: int) -> History:
    known = np.where(np.arange(len(text.tokens)) < index, text.tokens, 0)
    return History(known[None], np.array([index]), np.array([True]))


def _q(draft: Draft | None, vocab_size: int) -> Tensor | None:
    if draft is None:
        return None
    d = draft.distribution
    if d is not None:
        d = SampledDraft(d.logits.cpu(), d.logsumexp.cpu(), d.threshold.cpu(), d.temperature)
    return draft_probs(draft.tokens.cpu(), d, vocab_size)[0, 0]


def _candidates(count: int, history: History, logits: Tensor) -> Candidates:
    """The target's next tokens after the pending token alone: what follows a draft is unknown."""
    ids = logits.topk(min(count, len(logits))).indices.numpy()
    return Candidates(history.last(1), np.array([[-1]]), ids[None, None])


@dataclass
class MeasuredAcceptance:
    """The acceptance probabilities of one drafter, gathered position by position.

    Attributes:
        lenience: the values l whose acceptance `sum(min(P / l, Q))` is gathered; the first is 1,
            the lossless rule.
        texts: one list for each text, of [len(lenience)] float64 for each position with a draft.
        positions: all positions, those without a draft included.
    """

    lenience: Sequence[float] = LENIENCES
    texts: list[list[Tensor]] = field(default_factory=list)
    positions: int = 0

    def begin_text(self) -> None:
        """The positions that follow belong to a new text."""
        self.texts.append([])

    def add(self, position: Position) -> None:
        """Gather one position of the current text."""
        self.positions += 1
        if position.q is not None:
            p, q = position.p, position.q
            rates = [acceptance_rate(p, q, "lenient", lenience=l) for l in self.lenience]
            self.texts[-1].append(torch.stack(rates))

    @property
    def drafted(self) -> int:
        """Positions at which the drafter drafted a token."""
        return sum(map(len, self.texts))

    @property
    def alpha(self) -> float:
        """Corollary 3.6 over the positions with a draft; NaN where nothing was drafted."""
        return self.estimates()[0][0]

    def estimates(self) -> list[tuple[float, float]]:
        """Alpha and its standard error, clustered by text, for each lenience."""
        means = []
        for column in range(len(self.lenience)):
            texts = [torch.stack(rates)[:, column] for rates in self.texts if rates]
            mean, error = clustered_mean(texts)
            means.append((float(mean), float(error)))
        return means

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what cannot be estimated."""
        rows = [
            {"lenience": l, "alpha": _known(mean), "standard_error": _known(error)}
            for l, (mean, error) in zip(self.lenience, self.estimates(), strict=True)
        ]
        return {
            "alpha": rows[0]["alpha"],
            "standard_error": rows[0]["standard_error"],
            "positions": self.positions,
            "drafted": self.drafted,
            "texts": len(self.texts),
            "lenience": rows,
        }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
