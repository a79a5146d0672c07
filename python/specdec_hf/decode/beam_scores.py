"""The book-keeping of beam search: which beams go on, and which finished sequences are best.

Terms:

- beam: one of the w running sequences of a prompt, with the sum of its log probabilities.
- step: every prompt extends its w beams by one token.
- candidate: a beam extended by one token. The best K candidates of a step are looked at, so that w
  beams remain where some of them end.

The steps are those of Transformers' ``_beam_search``, done by the model's own methods, but on the
host and from the K + 1 best continuations of each beam: no candidate among the K + 1 best of all
beams is missing there. Where some of these have equal scores, as do those of beams that processors
leave without a continuation, the step is made from all continuations, because which of equal scores
``topk`` takes depends on all that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.decode.criteria import ends_text
from specdec_hf.hf_arguments.call import Call

NO_SCORE = -1.0e9  # of a beam or finished sequence that is not there yet


class Beams:
    """The running beams and the finished sequences of all B prompts of a call.

    Args:
        model: its methods update the beams.
        call: with ``beams``.
        max_new_tokens: steps at most.

    Attributes:
        running: [B, w, C] int64, the beams with the padding of their prompt; ``length`` columns are
            filled.
        running_scores: [B, w] float32.
        length: columns of the prompt, and one more after every step.
        done: whether no further step can change the output.
    """

    def __init__(self, model: Any, call: Call, max_new_tokens: int) -> None:
        assert call.beams is not None
        self.model, self.call, self.arguments = model, call, call.beams
        batch_size, self.prompt_length = call.input_ids.shape
        self.width = self.arguments.num_beams
        self.num_candidates = max(2, 1 + len(self.arguments.eos_token_ids)) * self.width
        self.length = self.prompt_length
        self.max_length = self.prompt_length + max_new_tokens
        shape = (batch_size, self.width)
        fill = self.arguments.fill
        self.running = torch.full((*shape, self.max_length), fill, device="cpu")
        self.running[:, :, : self.length] = torch.from_numpy(call.input_ids)[:, None]
        self.sequences = self.running.clone()
        # All beams of a prompt begin as one, and a step must not choose its continuations twice.
        self.running_scores = torch.zeros(shape, device="cpu")
        self.running_scores[:, 1:] = NO_SCORE
        self.scores = torch.full(shape, NO_SCORE, device="cpu")
        self.finished = torch.zeros(shape, dtype=torch.bool, device="cpu")
        self.improvable = torch.ones((batch_size, 1), dtype=torch.bool, device="cpu")
        # Which beam each token of a sequence continued, -1 after its end.
        self.running_indices = torch.full((*shape, max_new_tokens), -1, device="cpu").int()
        self.indices = self.running_indices.clone()
        self.done = False

    def step(
        self,
        values: torch.Tensor,
        ids: torch.Tensor,
        whole_rows: Callable[[], torch.Tensor],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Extend the beams by one token.

        Args:
            values: [B, w, k] float32 on the host, the best log probabilities after each beam.
            ids: [B, w, k], their tokens.
            whole_rows: gives all log probabilities after each beam, [B, w, V] on any device.

        Returns:
            [B, w], which beam each of the new beams continues, and [B, w], by which token.
        """
        a, model, at = self.arguments, self.model, self.length
        batch_size = len(values)
        top, index = self._best(values, self.num_candidates + 1)
        if (top[:, 1:] == top[:, :-1]).any():
            values = whole_rows()
            ids = torch.arange(values.shape[2], device="cpu").expand(values.shape)
            top, index = self._best(values, self.num_candidates)
        top, index = top[:, : self.num_candidates], index[:, : self.num_candidates]
        origins = index // values.shape[2]
        candidates = _gather(self.running, origins)
        candidates[:, :, at] = ids.flatten(1).gather(1, index)
        indices = _gather(self.running_indices, origins)
        firsts = torch.arange(batch_size, device="cpu")[:, None] * self.width
        indices[:, :, at - self.prompt_length] = (origins + firsts).int()
        stops = self._stops(candidates[:, :, : at + 1])
        self.running, self.running_scores, self.running_indices = (
            model._get_running_beams_for_next_iteration(
                topk_log_probs=top,
                topk_running_sequences=candidates,
                topk_running_beam_indices=indices,
                next_token_hits_stopping_criteria=stops,
                num_beams=self.width,
            )
        )
        self.sequences, self.scores, self.indices, self.finished = model._update_finished_beams(
            sequences=self.sequences,
            topk_running_sequences=candidates,
            beam_scores=self.scores,
            topk_log_probs=top,
            beam_indices=self.indices,
            topk_running_beam_indices=indices,
            is_early_stop_heuristic_unsatisfied=self.improvable,
            is_sent_finished=self.finished,
            next_token_hits_stopping_criteria=stops,
            top_num_beam_mask=torch.arange(top.shape[1], device="cpu") < self.width,
            num_beams=self.width,
            cur_len=at,
            decoder_prompt_len=self.prompt_length,
            length_penalty=a.length_penalty,
            early_stopping=a.early_stopping,
        )
        self.length += 1
        self.improvable = model._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=self.improvable,
            running_beam_scores=self.running_scores,
            beam_scores=self.scores,
            is_sent_finished=self.finished,
            cur_len=self.length,
            max_length=self.max_length,
            decoder_prompt_len=self.prompt_length,
            early_stopping=a.early_stopping,
            length_penalty=a.length_penalty,
        )
        self.done = not model._beam_search_has_unfinished_sequences(
            self.improvable, self.finished, stops, a.early_stopping
        )
        continued = self.running_indices[:, :, at - self.prompt_length] - firsts
        return continued.long().numpy(), self.running[:, :, at].numpy()

    def best(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The best sequences [B * n, W], their scores [B * n] and beam indices [B * n, W - T]."""
        count = self.arguments.num_return_sequences
        sequences, scores, indices = (
            x[:, :count].flatten(0, 1) for x in (self.sequences, self.scores, self.indices)
        )
        longest = int((indices >= 0).sum(dim=1).max())
        return sequences[:, : self.prompt_length + longest], scores, indices[:, :longest]

    def _best(self, values: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, K] on the host: the best candidates, and their indices in values [B, w * k]."""
        totals = (values + self.running_scores[:, :, None].to(values.device)).flatten(1)
        top, index = totals.topk(min(number, totals.shape[1]))
        return top.cpu(), index.cpu()

    def _stops(self, candidates: torch.Tensor) -> torch.Tensor:
        """[B, K], which candidates [B, K, n] end with their last token."""
        last = candidates[:, :, -1]
        ended = torch.isin(last, torch.tensor([*self.call.eos], dtype=torch.int64, device="cpu"))
        if candidates.shape[2] >= self.max_length:
            return torch.ones_like(ended)
        if self.call.criteria:
            for b, k in (~ended).nonzero().tolist():
                ids = candidates[b, k].numpy()
                ended[b, k] = ends_text(self.call.criteria, ids, self.model.device)
        return ended


def _gather(x: torch.Tensor, beams: torch.Tensor) -> torch.Tensor:
    """Entries [B, K, n] of [B, w, n] for beams [B, K]."""
    return x.gather(1, beams[:, :, None].expand(-1, -1, x.shape[2]))
