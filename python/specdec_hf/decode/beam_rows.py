"""The target's log probabilities after every beam and drafted node of a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.decode.beam_draft import DraftedBeams
from specdec_hf.decode.beam_scores import Beams
from specdec_hf.decode.beam_tree import Integers
from specdec_hf.hf_arguments.call import Call


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
        chosen = torch.from_numpy(index).to(self.log_probs.device, non_blocking=True)
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
        prefixes = {row: running[b, row][None] for row in range(rows)}
        for row in range(log_probs.shape[1]):
            if row >= rows:
                n = row - rows
                parent = prefixes.get(above[b][n])
                if parent is None or log_probs[b, above[b][n], drawn[n]] == -torch.inf:
                    continue
                prefixes[row] = torch.cat([parent, tokens[b, n].view(1, 1)], dim=1)
            log_probs[b, row] = processors[b](prefixes[row], log_probs[b, row][None])[0]
