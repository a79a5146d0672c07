"""The acceptance rate of a drafter on text of the target (Leviathan et al. 2023, Corollary 3.6).

The target writes a text by itself. The drafter then drafts one token at every position of it, as if
each were the beginning of a round, so that the mean of `sum(min(P, Q))` is over the positions of
the target's text and not only over those at which rounds happen to begin. A drafter of trees drafts
a tree there, and what is measured is whether one of the root's children is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from specdec_hf.cli.distributions import draft_probs, target_probs
from specdec_hf.decoder import SpeculativeDecoder
from specdec_hf.drafting.call import DrafterCall, Drawn, Forwards
from specdec_hf.drafting.checks import begin_state, propose_checked
from specdec_hf.drafting.context import Candidates, CommittedStates, History
from specdec_hf.drafting.drafter import Draft, Drafter, Round, drafts_trees
from specdec_hf.extras.encoded import Encoded
from specdec_hf.extras.encoder import EncoderSource
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.loop.streaming import TracedRound, run_stream
from specdec_hf.request.entry import prepare_call
from specdec_hf.runner.choose import choose_cache
from specdec_hf.runner.protocol import CacheRequest, HiddenStates, is_encoder_decoder, to_device
from torch import Tensor

from specdec_lab.analysis.encoders import EncoderSeconds, timed_encoders

REPLAY_RULE, TREE_RULE = "token", "target_only"


def rule_for(drafter: Drafter) -> str:
    """The rule whose acceptance is measured: `TREE_RULE` accepts most of deterministic trees."""
    return TREE_RULE if drafts_trees(drafter) else REPLAY_RULE


@dataclass
class Text:
    """A text that the target wrote by itself.

    Attributes:
        tokens: [L] int64, prompt and answer. The prompt of an encoder-decoder is the decoder's.
        begin: tokens of the prompt.
        logits: one row [V] float32 for each token of the answer, after the logits processors.
        stats: of the call that wrote it.
        encoded, encoder: what the encoder of an encoder-decoder said and read, else None.
        encoders: how long the encoder took.
    """

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    begin: int
    logits: list[Tensor]
    stats: SpecStats
    encoded: Encoded | None = None
    encoder: EncoderSource | None = None
    encoders: EncoderSeconds = field(default_factory=EncoderSeconds)


@dataclass
class Position:
    """What a drafter does at one position of a text.

    Attributes:
        index: of the position in the text.
        p: [V] float64, the target's distribution.
        q: [V] float64, that of the drafter of a chain; None where it drafts nothing, or a tree.
        logits: [V] float32, the row that P was made of.
        draft: the draft of one token, or a tree; None where there is none.
        children: the tokens that a tree has below its root, each once, in the order in which they
            are tried; empty for a chain.
    """

    index: int
    p: Tensor
    q: Tensor | None
    logits: Tensor
    draft: Draft | None = field(repr=False)
    children: list[int] = field(default_factory=list)


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
    with timed_encoders(model) as encoders:
        steps, output = run_stream(
            decoder.stream(model, **inputs, **settings), lambda step: on_tokens(len(step.tokens))
        )
    prompt, encoded, encoder = inputs["input_ids"][0].tolist(), None, None
    if is_encoder_decoder(model):
        arguments: dict[str, Any] = {**inputs, **settings}
        call = prepare_call(model, **arguments)
        prompt, encoded, encoder = call.prompt_ids[0].tolist(), call.encoded, call.encoder
    answer = [token for step in steps for token in step.tokens]
    tokens = np.array([*prompt, *answer])
    return Text(tokens, len(prompt), rows, output.stats, encoded, encoder, encoders)


@torch.inference_mode()
def replay(
    drafter: Drafter,
    model: Any,
    text: Text,
    sampling: dict[str, Any],
    seed: int = 0,
    compile: bool | None = None,
) -> Iterator[Position]:
    """Let a drafter draft one token, or a tree, at every position of a text.

    Args:
        drafter: begins a call here, and learns from what the text and the target say, as in rounds
            whose drafts were all rejected.
        model: target.
        text: by `write_text`.
        sampling: the parameters that the text was written with.
        seed: of the drafts that are drawn, which have no influence on Q.
        compile: how the drafter's models run, as in `generate`.
    """
    length, depth = len(text.tokens), drafter.depth if drafts_trees(drafter) else 1
    runner = choose_cache(model, CacheRequest(1, encoded=text.encoded)).make(length)
    states: list[CommittedStates] = []
    call = DrafterCall.of(
        model, rule_for(drafter), sampling,
        seeds=torch.tensor([seed], device=model.device), max_length=length,
        max_draft=max(16, depth), forwards=Forwards(compile=compile), runner=runner,
        encoder=text.encoder, kept_states=states,
    )  # fmt: skip
    state = begin_state(drafter, call)
    hidden: HiddenStates = {}
    if states:  # those of all positions by one forward
        read = to_device(text.tokens[None, :-1], model.device)
        runner.forward(read, np.zeros(1, dtype=np.int64), 1)
        hidden = runner.tap.pop()
    for i, logits in enumerate(text.logits):
        index = text.begin + i
        history = _history(text, index)
        draft = propose_checked(drafter, state, history, np.array([depth]), call)
        p = target_probs(logits[None], sampling)[0]
        children = [token for token in _children(draft) if token < len(p)]
        yield Position(
            index, p, _q(draft, sampling["temperature"], len(p)), logits, draft, children
        )
        count, none = drafter.needs.candidates, np.zeros((1, 0), dtype=np.int64)
        done = Round.of_chain(np.array([index]), np.array([True]), np.array([0]), none)
        if count:
            done = replace(done, candidates=_candidates(count, history, logits, draft))
        state.commit(_history(text, index + 1), done)
        begin = index - 1 if i else 0  # the first round reads the prompt
        for kept in states:
            new = {layer: x[:, begin:index] for layer, x in hidden.items()}
            kept.record(new, np.array([index]), np.array([[0]]), 1)


def _history(text: Text, index: int) -> History:
    known = np.where(np.arange(len(text.tokens)) < index, text.tokens, 0)
    return History(known[None], np.array([index]), np.array([True]))


def _q(draft: Draft | None, temperature: float, vocab_size: int) -> Tensor | None:
    if draft is None or draft.parents is not None:
        return None
    drawn = None
    if draft.drawn is not None:
        drawn = Drawn.join([draft.drawn], torch.device("cpu")).at(temperature)
    return draft_probs(draft.tokens.cpu(), drawn, vocab_size)[0, 0]


def _children(draft: Draft | None) -> list[int]:
    """The tokens below the root of a tree, each once, in their order."""
    if draft is None or draft.parents is None:
        return []
    tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
    children = (t for t, above in zip(tokens, parents, strict=True) if above < 0 <= t)
    return list(dict.fromkeys(children))


def _candidates(count: int, history: History, logits: Tensor, draft: Draft | None) -> Candidates:
    """The target's next tokens after the pending token alone: what follows a draft is unknown.

    The nodes of a tree have rows, as absent ones.
    """
    nodes = 0 if draft is None or draft.parents is None else draft.tokens.shape[1]
    ids = logits.topk(min(count, len(logits))).indices.numpy()
    tokens = np.concatenate([history.last(1), np.full((1, nodes), -1)], axis=1)
    rows = np.broadcast_to(ids, (*tokens.shape, len(ids)))
    return Candidates(tokens, np.full_like(tokens, -1), rows)
