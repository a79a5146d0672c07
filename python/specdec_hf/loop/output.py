"""The output of a call whose sequences have all ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils.generic import ModelOutput

from specdec_hf.loop.session import Session
from specdec_hf.request.call import Call
from specdec_hf.runner.protocol import CACHE_NAME, context_length, to_device


@dataclass
class SpecOutput(ModelOutput):
    """The output of `generate` with ``return_dict_in_generate=True``.

    Attributes:
        sequences: [B, W] int64: the input with its padding, new tokens, then ``pad_token_id``.
        attention_mask: [B, W] int64, 1 where ``sequences`` holds a token; pass it on to continue.
            With ``inputs_embeds`` alone it also has their columns, which ``sequences`` lacks.
        logprobs: [B, W - T] float32, of new tokens under the filtered target; 0 when greedy and
            in the padding.
        past_key_values: ``DynamicCache`` of W - 1 columns, as plain ``generate`` leaves it, or the
            ``EncoderDecoderCache`` of an encoder-decoder. None where the sequences of a batch ran
            one by one. It has the name ``cache``, too, where Transformers calls it so.
        encoder_outputs: those of an encoder-decoder; pass them on to continue without running its
            encoder again. ``sequences`` are then the next ``decoder_input_ids``, and
            ``attention_mask`` the next ``decoder_attention_mask``.
        stats: a `SpecStats`, counts and times.
        scores: with ``output_scores``, for each new token [B, V] float32: logits after processors,
            temperature and filters. As in plain ``generate``, a sequence that has ended goes on
            with padding; it has NaN beyond the model's context.
        logits: with ``output_logits``, the same before processors.
        sequences_scores: with ``num_beams`` and ``output_scores``, [B] float32.
        beam_indices: with ``num_beams``, [B, W - T] int32, as in plain ``generate``.
        hidden_states: with ``output_hidden_states``, for each new token and layer [B, 1, H]; for
            the first token [B, T, H] of the whole prompt, 0 in its padding.
    """

    sequences: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    if CACHE_NAME == "cache":
        cache: Any = None  # then past_key_values is a property of every output
    else:
        past_key_values: Any = None
    encoder_outputs: Any = None
    stats: Any = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    sequences_scores: torch.Tensor | None = None
    beam_indices: torch.Tensor | None = None
    hidden_states: tuple[tuple[torch.Tensor, ...], ...] | None = None


def finish(session: Session) -> SpecOutput:
    """The output of a session whose sequences have all ended."""
    batch_size, columns = session.call.input_ids.shape
    new_tokens = session.new_tokens
    longest = int(new_tokens.max())
    mask = np.concatenate([session.call.mask, np.arange(longest) < new_tokens[:, None]], axis=1)
    past: Any = None
    outputs: dict[str, Any] = {}
    if session.call.output.return_dict:
        if (new_tokens < longest).any() and session.runner.rolls_back:
            _follow_ended(session, longest - new_tokens)
        if session.outputs is not None:
            outputs = session.outputs.tensors(
                longest, _fed_columns(session.call), session.call.sampling
            )
        from specdec_hf.extras.handover import export_cache  # noqa: PLC0415  # asked for

        past = export_cache(session.runner, mask[:, :-1])
    end(session)
    sequences = np.full((batch_size, columns + longest), session.call.stopping.pad, dtype=np.int64)
    logprobs = np.zeros((batch_size, longest), dtype=np.float32)
    for b, values in enumerate(session.sequences.logprobs):
        ids = session.padded_ids(b)
        sequences[b, : len(ids)] = ids
        logprobs[b, : len(values)] = values
    device = session.device
    return SpecOutput(
        sequences=to_device(sequences, device),
        attention_mask=to_device(mask.astype(np.int64), device),
        logprobs=torch.from_numpy(logprobs),
        **{CACHE_NAME: past},
        encoder_outputs=None if session.call.encoded is None else session.call.encoded.outputs,
        stats=session.stats,
        **outputs,
    )


def end(session: Session) -> None:
    """Let the drafter and the schedule learn that all sequences have ended."""
    if session.state is not None:
        session.state.end(session.history.read_only())
    session.stats.total_seconds = session.options.clock() - session.plan.started
    session.length_policy.finish()


@torch.inference_mode()
def _follow_ended(session: Session, behind: NDArray[np.int64]) -> None:
    """Feed sequences that ended early what plain generation feeds them while others go on.

    That is their last token, which the cache of every sequence lacks, and then padding. Padding is
    fed for the outputs of each token only, and does not stay in the cache.

    Args:
        session: its cache holds all tokens of these sequences afterwards.
        behind: [B], how many tokens the longest sequence has more.
    """
    size = int(behind.max()) if session.outputs is not None else 1
    context = context_length(session.model)
    if context is not None and not session.runner.has_slots:
        size = min(size, context - int(session.history.lengths.max()) + 1)
    tokens = np.full((len(behind), size), session.call.stopping.pad, dtype=np.int64)
    tokens[:, :1] = session.history.last(1)
    fed = to_device(tokens, session.device)
    logits = session.runner.forward(fed, session.history.lengths - 1, size)
    session.runner.truncate(session.history.lengths)
    if session.outputs is not None:
        counts = np.minimum(behind, size)
        rows = np.broadcast_to(np.arange(size), tokens.shape)
        from specdec_hf.extras.processors import process_ended  # noqa: PLC0415  # rarely asked for

        processed = process_ended(session, logits, counts)
        session.outputs.record(logits, processed, session.runner.tap.pop(), rows, counts)


def _fed_columns(call: Call) -> NDArray[np.bool_]:
    """[B, P], the columns of the mask that the caller's cache does not hold."""
    return call.mask if call.past is None else call.mask[:, call.past.get_seq_length() :]
