"""Answers that the draft model writes itself in training, and that the target scores.

A model that is trained on the target's texts alone never reads tokens that the target would not
have written, but drafts after its own.

Source: DistillSpec, arXiv 2310.08461, section 4.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from specdec_hf.runner.protocol import CACHE_NAME
from transformers import DynamicCache

from specdec_kernels import sample
from specdec_lab.training.draft_model import DraftLlama
from specdec_lab.training.unrolled import TrainingBatch


def is_on_policy(step: int, share: float) -> bool:
    """Whether the batch of a step, from 1, is one of the share that the draft model writes.

    >>> [step for step in range(1, 11) if is_on_policy(step, 0.3)]
    [4, 7, 10]
    """
    before, after = (int(n * share + 1e-9) for n in (step - 1, step))
    return after > before


class OnPolicy:
    """Has the draft model write the answers of a share of the batches anew.

    Args:
        head: the draft model, as it is at each step.
        model: the target.
        ends: tokens that end a text.
        share: of the batches.
        seed: of the random numbers.
    """

    def __init__(
        self, head: DraftLlama, model: Any, ends: Collection[int], share: float, seed: int
    ) -> None:
        self.head, self.model, self.share, self.seed = head, model, share, seed
        self.ends = torch.tensor(sorted(ends), dtype=torch.int64, device=model.device)

    @torch.no_grad()
    def __call__(self, step: int, batch: TrainingBatch) -> TrainingBatch:
        """The batch of a step: the same, or its texts with other answers and the target's states.

        An answer is at most as long as the one in its place. Texts without an answer are written
        anew from their middle.
        """
        if not is_on_policy(step, self.share):
            return batch
        has_answer = (batch.answers > 0) & (batch.answers < batch.lengths)
        prompts = torch.where(has_answer, batch.answers, batch.lengths // 2).clamp(min=1)
        numbers = torch.arange(len(prompts), device=prompts.device) + step * len(prompts)
        # Those of the target's texts are not negative.
        seeds = -1 - (self.seed << 32) - numbers
        tokens, lengths = write_answers(
            self.head.llama, batch.tokens, prompts, batch.lengths, self.ends, seeds
        )
        final = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        # A draft model reads neither embeddings nor features of the target.
        return replace(
            batch, tokens=tokens, final=final.to(batch.final.dtype), lengths=lengths,
            answers=prompts, embeddings=batch.embeddings[:, : tokens.shape[1], :0],
            features=batch.features[:, : tokens.shape[1]],
        )  # fmt: skip


@torch.no_grad()
def write_answers(
    model: Any,
    tokens: torch.Tensor,
    prompts: torch.Tensor,
    lengths: torch.Tensor,
    ends: torch.Tensor,
    seeds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Go on with the first tokens of texts by draws at temperature 1.

    All texts are read from their first token on, so that none is padded: one whose prompt is longer
    reads its own tokens while others write.

    Args:
        model: causal LM.
        tokens: [B, T] int64, the texts, padded on the right.
        prompts: [B] int64, how many tokens of each stay, at least 1.
        lengths: [B] int64, most tokens of each.
        ends: int64, tokens that end a text.
        seeds: [B] int64, of the random numbers of each text, which depend on nothing else.

    Returns:
        The texts [B, T'], padded with what was there, and their lengths [B].
    """
    tokens, lengths = tokens.clone(), lengths.clone()
    cache, fed = DynamicCache(config=model.config), 0
    place = int(prompts.min())
    while place < int(lengths.max()):
        logits = model(
            input_ids=tokens[:, fed:place], use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache}
        ).logits[:, -1]
        fed = place
        positions = torch.full_like(seeds, place)
        # Rows that are not finite draw -1; the loss of the step is then not finite, and says so.
        drawn = sample(logits, seeds=seeds, positions=positions).tokens.clamp(min=0)
        writes = (prompts <= place) & (place < lengths)
        tokens[:, place] = torch.where(writes, drawn, tokens[:, place])
        ended = writes & torch.isin(drawn, ends)
        lengths = lengths.masked_fill(ended, place + 1)
        place += 1
    return tokens[:, : int(lengths.max())], lengths
