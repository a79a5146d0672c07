"""The rows of a round of beam search, and its book-keeping: which beams go on, which are best.

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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.extras.processors import check_answer, run_processors
from specdec_hf.loop.endings import reason_to_end
from specdec_hf.loop.session import Answer
from specdec_hf.request.call import Call
from specdec_hf.runner.protocol import to_device

from specdec_papers.beams.tree import DraftedBeams, Integers


@dataclass
class Rows:
    """The rows of one round: those of the beams, then those of the drafted nodes.

    Attributes:
        log_probs: [B, R, V] float32 on the target's device, after the logits processors.
        values, ids: [B, R, k] on the host, the best of each row and their tokens.
        tokens, parents: [B, M] on the host, of the drafted nodes.
    """

    log_probs: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor
    tokens: Integers
    parents: Integers

    def best(self, index: Integers) -> tuple[torch.Tensor, torch.Tensor]:
        """``values`` and ``ids`` of rows [B, w]."""
        chosen = torch.from_numpy(index)[:, :, None]
        return self.values.take_along_dim(chosen, dim=1), self.ids.take_along_dim(chosen, dim=1)

    def whole(self, index: Integers) -> torch.Tensor:
        """``log_probs`` of rows [B, w]."""
        chosen = to_device(index, self.log_probs.device)
        return self.log_probs.take_along_dim(chosen[:, :, None], dim=1)


def log_prob_rows(
    call: Call, beams: Beams, logits: torch.Tensor, first: int, drafted: DraftedBeams | None
) -> Rows:
    """Read a round from the device.

    Args:
        call: names the processors.
        beams: the running beams.
        logits: [B, R, V].
        first: number of the node of row 0, -1 for the root.
        drafted: the drafted nodes, which have the last rows.

    Raises:
        RuntimeError: a row that holds no distribution.
    """
    log_probs = logits.float().log_softmax(-1)
    empty = torch.zeros((len(logits), 0), dtype=torch.int64, device=logits.device)
    tokens = empty if drafted is None else drafted.tokens.to(logits.device)
    parents = empty if drafted is None else drafted.parents.to(logits.device)
    if any(call.processors):
        _process(call, beams, log_probs, tokens, (parents - first).tolist())
    k = min(beams.num_candidates + 1, log_probs.shape[2])
    values, ids = log_probs.topk(k, dim=-1)
    packed = [values.view(torch.int32).long().flatten(1), ids.flatten(1), tokens, parents]
    host = torch.cat(packed, dim=1).cpu()  # the only read of the round
    ends = np.cumsum([x.shape[1] for x in packed]).tolist()
    values = host[:, : ends[0]].int().view(torch.float32).view(*values.shape)
    for b in values.isnan().flatten(1).any(dim=1).nonzero().flatten().tolist():
        raise RuntimeError(f"logits of sequence {b} at position {beams.length} are not finite")
    return Rows(
        log_probs,
        values,
        host[:, ends[0] : ends[1]].view(*ids.shape),
        host[:, ends[1] : ends[2]].numpy(),
        host[:, ends[2] :].numpy(),
    )


def drafted_below(
    rows: Rows, first: int, above: Integers, tokens: Integers
) -> NDArray[np.int64] | None:
    """The drafted nodes that are the target's beams, None where one of them was not drafted.

    Args:
        rows: with the drafted nodes.
        first: number of the first drafted node.
        above: [B, w], the nodes that the beams continue.
        tokens: [B, w], the tokens that they continue them by.

    Returns:
        [B, w] numbers of nodes. Beams of one prompt may be one node.
    """
    found = np.empty_like(above)
    for b in range(len(above)):
        drafted = zip(rows.parents[b].tolist(), rows.tokens[b].tolist(), strict=True)
        numbers = {edge: first + n for n, edge in enumerate(drafted)}
        for j, edge in enumerate(zip(above[b].tolist(), tokens[b].tolist(), strict=True)):
            if edge not in numbers:
                return None
            found[b, j] = numbers[edge]
    return found


def _process(
    call: Call, beams: Beams, log_probs: torch.Tensor, tokens: torch.Tensor, above: list[list[int]]
) -> None:
    """Run the logits processors over log_probs [B, R, V], in place; see `process_logits`.

    ``above[b][n]`` is the row of the node that drafted node n extends.
    """
    processors: list[Any] = call.processors
    rows = log_probs.shape[1] - tokens.shape[1]
    running = beams.running[:, :rows, : beams.length].to(log_probs.device)
    for b, drawn in enumerate(tokens.tolist()):
        before = log_probs[b, 0].clone()
        prefixes = {row: running[b, row] for row in range(rows)}
        for row in range(log_probs.shape[1]):
            if row >= rows:
                n = row - rows
                parent = prefixes.get(above[b][n])
                if parent is None or log_probs[b, above[b][n], drawn[n]] == -torch.inf:
                    continue
                prefix = torch.cat([parent, tokens[b, n].view(1)])
                if reason_to_end(call, b, prefix.cpu().numpy(), prefix.device):
                    continue
                prefixes[row] = prefix
            log_probs[b, row] = run_processors(processors[b], prefixes[row], log_probs[b, row])
        answer = Answer(running[b, 0], before, log_probs[b, 0])
        check_answer(processors[b], beams.answers, b, answer)


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
        answers: of logits processors in an earlier round, by the number of the prompt.
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
        self.answers: dict[int, Answer] = {}

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
        ended = torch.isin(
            last, torch.tensor([*self.call.stopping.eos], dtype=torch.int64, device="cpu")
        )
        if candidates.shape[2] >= self.max_length:
            return torch.ones_like(ended)
        if self.call.stopping.criteria:
            for b, k in (~ended).nonzero().tolist():
                ids = candidates[b, k].numpy()
                ended[b, k] = bool(reason_to_end(self.call, b, ids, self.model.device))
        return ended


def _gather(x: torch.Tensor, beams: torch.Tensor) -> torch.Tensor:
    """Entries [B, K, n] of [B, w, n] for beams [B, K]."""
    return x.gather(1, beams[:, :, None].expand(-1, -1, x.shape[2]))
