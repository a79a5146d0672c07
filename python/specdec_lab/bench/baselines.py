"""Baselines of speculative sampling: the same drafts, verified in two simpler ways.

They run Transformers' own forwards over its own caches, for one prompt. `choose` alone differs.
Importing this module imports torch and transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from specdec_hf.cli.distributions import target_probs
from specdec_hf.runner.protocol import CACHE_NAME
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdec_kernels.analysis import rejection_acceptance


class Baseline(ABC):
    """A loop that drafts chains side by side, verifies them in one forward and keeps one of them.

    Args:
        model: target.
        drafter: draft model of the target's vocabulary.
        gamma: drafts of each chain per round.

    Attributes:
        chains: how many chains K are drafted side by side. They begin with the K likeliest tokens
            where there are several, and are drawn otherwise.
        samples: whether text may be sampled.
        rounds: forwards of the target in the last call.
    """

    chains = 1
    samples = True

    def __init__(self, model: PreTrainedModel, drafter: PreTrainedModel, gamma: int) -> None:
        self.model, self.drafter, self.gamma = model, drafter, gamma
        self.rounds = 0

    @abstractmethod
    def choose(self, p: Tensor, q: Tensor, drafts: Tensor) -> tuple[int, int, int]:
        """The chain that is kept, how many of its drafts, and the token that follows them.

        Args:
            p: [K, gamma + 1, V] float64, the target's distributions.
            q: [K, gamma, V] float64, those that the drafts were drawn from.
            drafts: [K, gamma] int64.
        """

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        do_sample: bool,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        **_: Any,
    ) -> Tensor:
        """[1, W] token ids of one prompt and its answer; random numbers are torch's own.

        Raises:
            ValueError: several prompts, or sampled text of which the longest chain would be biased.
        """
        if do_sample and not self.samples:
            raise ValueError("do_sample must be False: the longest of sampled chains is biased")
        if len(input_ids) != 1:
            raise ValueError(f"input_ids must be of one sequence, got {len(input_ids)}")
        sampling = {
            "temperature": float(temperature) if do_sample else 0.0,
            "top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p, "min_p": min_p or 0.0,
        }  # fmt: skip
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        text, end = input_ids.expand(self.chains, -1), input_ids.shape[1] + max_new_tokens
        caches = [DynamicCache(config=one.config) for one in (self.model, self.drafter)]
        self.rounds = 0
        while text.shape[1] < end:
            length = text.shape[1]
            drafts, q = self._draft(text, min(self.gamma, end - length - 1), caches[1], sampling)
            logits = _forward(self.model, caches[0], torch.cat([text, drafts], dim=1))
            p = _probs(logits[:, -drafts.shape[1] - 1 :], sampling)
            self.rounds += 1
            chain, count, token = self.choose(p, q, drafts)
            new = [*drafts[chain, :count].tolist(), token]
            stops = [i for i, one in enumerate(new) if one in ends]
            if stops:
                new, end = new[: stops[0] + 1], 0
            text = torch.cat([text, text.new_tensor(new).expand(self.chains, -1)], dim=1)
            for cache in caches:
                cache.batch_select_indices(torch.full((self.chains,), chain, device=text.device))
                if (extra := cache.get_seq_length() - length - count) > 0:
                    cache.crop(-extra)
        return text[:1]

    def _draft(
        self, text: Tensor, size: int, cache: DynamicCache, sampling: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Drafts [K, size] after the text [K, L], and the distributions [K, size, V]."""
        drafts, rows = text[:, :0], []
        for i in range(size):
            logits = _forward(self.drafter, cache, torch.cat([text, drafts], dim=1))[:, -1]
            rows.append(_probs(logits, sampling))
            if i == 0 and self.chains > 1:
                drawn = logits[0].topk(self.chains).indices[:, None]
            else:
                drawn = torch.multinomial(rows[-1], 1)
            drafts = torch.cat([drafts, drawn], dim=1)
        vocab_size = self.model.get_output_embeddings().weight.shape[0]
        none = torch.empty(len(text), 0, vocab_size, dtype=torch.float64, device=text.device)
        return drafts, torch.stack(rows, dim=1) if rows else none


class RejectionSampling(Baseline):
    """Accepts a draft x with probability p(x) / (M q(x)), where M is the largest p / q.

    After a rejection a token is drawn from P itself, so that the text is distributed as P. The
    acceptance rate is 1 / M, never above that of speculative sampling.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Appendix A.2, its variant without iteration.
    """

    def choose(self, p: Tensor, q: Tensor, drafts: Tensor) -> tuple[int, int, int]:
        accept = self.accept_probs(p, q, drafts)[0]
        rejected = torch.rand(len(accept), dtype=torch.float64, device=p.device) >= accept
        count = int(rejected.long().cumsum(0).eq(0).sum())
        return 0, count, int(torch.multinomial(p[0, count], 1))

    @staticmethod
    def accept_probs(p: Tensor, q: Tensor, drafts: Tensor) -> Tensor:
        """[K, gamma] float64, the probability that each draft is accepted."""
        size = drafts.shape[1]
        ids, p = drafts[:, :, None], p[:, :size]
        ratio = p.gather(-1, ids) / q.gather(-1, ids)
        return rejection_acceptance(p, q) * ratio[..., 0]


class BestOf(Baseline):
    """Verifies K greedy chains as a batch and keeps the one with most accepted drafts.

    The chains begin with the K likeliest tokens of the drafter. A tree would verify the same with
    fewer tokens and one cache.

    Source: the batched extension in appendix A of Stratos's notes on speculative decoding, which
    SpecInfer (arXiv 2305.09781) compares its trees with.
    """

    samples = False

    def __init__(
        self, model: PreTrainedModel, drafter: PreTrainedModel, gamma: int, chains: int
    ) -> None:
        super().__init__(model, drafter, gamma)
        self.chains = chains

    def choose(self, p: Tensor, q: Tensor, drafts: Tensor) -> tuple[int, int, int]:
        chosen = p.argmax(-1)
        agree = (chosen[:, :-1] == drafts).long().cumprod(1).sum(1)
        chain = int(agree.argmax())
        count = int(agree[chain])
        return chain, count, int(chosen[chain, count])


def _forward(model: PreTrainedModel, cache: DynamicCache, tokens: Tensor) -> Tensor:
    """Logits [K, n, V] of the tokens [K, L] that the cache lacks."""
    fed = tokens[:, cache.get_seq_length() :]
    logits: Tensor = model(input_ids=fed, **{CACHE_NAME: cache}).logits
    return logits


def _probs(logits: Tensor, sampling: dict[str, Any]) -> Tensor:
    return target_probs(logits.flatten(0, -2).float(), sampling).view(*logits.shape)
