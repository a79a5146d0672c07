"""Beam search of a draft model, whose beams the target then verifies."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec_hf.decode.beam_tree import BeamTree, TreeModel
from specdec_hf.drafting.context import History


class DraftedBeams(NamedTuple):
    """Nodes of a draft on the draft model's device, level by level.

    tokens: [B, gamma * u] int64.
    parents: [B, gamma * u] int64, numbers of nodes of the tree that they extend.
    """

    tokens: torch.Tensor
    parents: torch.Tensor


@torch.inference_mode()
def draft_beams(
    drafter: TreeModel,
    text: History,
    tree: BeamTree,
    scores: torch.Tensor,
    *,
    width: int,
    gamma: int,
    eos: frozenset[int],
) -> DraftedBeams:
    """Continue the target's beams with the draft model. It does not wait for the device.

    Args:
        drafter: the draft model.
        text: the shared text.
        tree: ends with the last tokens of the target's w beams.
        scores: [B, w] float32, of these beams.
        width: u, beams of the draft, at least w.
        gamma: steps, at least 1.
        eos: tokens that end a sequence, so that no beam goes on with them.

    Source: Leviathan et al., arXiv 2211.17192, appendix A.4.
    """
    device, first = drafter.model.device, tree.size
    drafter.catch_up(text)
    fed = drafter.fed
    tokens = torch.from_numpy(tree.tokens[:, fed:].copy()).to(device, non_blocking=True)
    parents = torch.from_numpy(tree.parents.copy()).to(device, non_blocking=True)
    logits = drafter.feed(text, tokens, parents)[:, -scores.shape[1] :]
    ends = torch.tensor(sorted(eos), dtype=torch.int64, device=device)
    totals, vocab_size = scores.to(device), logits.shape[2]
    width = min(width, logits.shape[1] * vocab_size)
    numbers = torch.arange(first - totals.shape[1], first, device=device).expand_as(totals)
    drawn: list[torch.Tensor] = []
    for step in range(gamma):
        if step:
            logits = drafter.feed(text, drawn[-1], parents)
        log_probs = logits.float().log_softmax(-1).index_fill(2, ends, -torch.inf)
        totals, index = (log_probs + totals[:, :, None]).flatten(1).topk(width)
        drawn.append(index % vocab_size)
        parents = torch.cat([parents, numbers.gather(1, index // vocab_size)], dim=1)
        numbers = torch.arange(width, device=device).expand_as(totals) + first + step * width
    return DraftedBeams(torch.cat(drawn, dim=1), parents[:, first:])
