"""The whole loop of speculative decoding over the ops, for causal models with full attention.

    python examples/minimal_loop.py "Repeat this twice: the cat sat on the mat." "Count to nine."
    python examples/minimal_loop.py --model FOLDER --draft-model FOLDER --temperature 0.8 "Why?"

Every round drafts, lets the target read the drafts in one forward, verifies, and rolls the caches
back. Without a draft model the drafts are copied from the text (prompt lookup).
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicLayer

import specdec_kernels as ops


class Slots(DynamicLayer):
    """Keys and values of one layer, [B, H, S, D]: token t of a sequence is in slot t."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.keys, self.values = (
                x.new_zeros(*x.shape[:2], self.reader.slots, x.shape[3]) for x in (key, value)
            )
            self.is_initialized = True
        ops.kv_append_([self.keys, self.values], [key, value], self.reader.lengths)
        return self.keys, self.values


class Reader:
    """A model with a cache in which every sequence has its own length."""

    def __init__(self, model: Any, batch: int, slots: int) -> None:
        self.model, self.slots = model, slots
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=model.device)
        self.cache = Cache(layers=[Slots(self) for _ in range(model.config.num_hidden_layers)])
        names = inspect.signature(model.forward).parameters
        self.name = "cache" if "cache" in names else "past_key_values"  # Transformers < 5.24

    def read(self, tokens: Tensor) -> Tensor:
        """The logits [B, n, V] behind each of the next tokens [B, n] of every sequence."""
        n = tokens.shape[1]
        chain = torch.arange(-1, n - 2, device=tokens.device).expand(len(tokens), n - 1)
        seen, positions = ops.tree_attention(chain, self.lengths, slots=self.slots)
        logits = self.model(
            tokens, attention_mask=seen[:, None], position_ids=positions, **{self.name: self.cache}
        ).logits  # fmt: skip
        self.lengths += n
        return logits

    def roll_back(self, lengths: Tensor) -> None:
        """Keep so many tokens [B] of each sequence; later ones will be overwritten."""
        ops.kv_truncate_([], self.lengths, lengths)


def draft(
    reader: Reader, texts: Tensor, lengths: Tensor, seeds: Tensor, gamma: int, temperature: float
) -> tuple[Tensor, ops.SampledDraft]:
    """Drafts [B, gamma] of a draft model, with the distributions that they were drawn from."""
    # The cache may lack the last two tokens: the last draft, and the token that followed it.
    reader.roll_back(lengths - 2)
    tokens = texts.gather(1, torch.stack([lengths - 2, lengths - 1], dim=1))
    positions = ops.draft_positions(lengths, gamma, rule="block")
    rows, drawn = [], []
    for i in range(gamma):
        rows.append(reader.read(tokens)[:, -1])
        where = {"seeds": seeds, "positions": positions[:, i]}
        drawn.append(ops.sample(rows[i], temperature=temperature, **where))
        tokens = drawn[i].tokens[:, None]
    drafts, sums, thresholds = (
        torch.stack([getattr(one, name) for one in drawn], dim=1)
        for name in ("tokens", "logsumexp", "threshold")
    )
    return drafts, ops.SampledDraft(torch.stack(rows, dim=1), sums, thresholds, temperature)


@torch.inference_mode()
def generate(
    model: Any, prompts: list[list[int]], new_tokens: int, *, draft_model: Any = None,
    gamma: int = 5, temperature: float = 0.0, seed: int = 0,
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    """The texts of prompts of at least two tokens, and how many rounds each of them took."""
    device, batch = model.device, len(prompts)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max())
    texts = torch.zeros(batch, longest + new_tokens + gamma + 1, dtype=torch.int64, device=device)
    for text, prompt in zip(texts, prompts, strict=True):
        text[: len(prompt)] = torch.tensor(prompt)
    ends = model.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.int64, device=device).flatten()
    seeds = torch.arange(seed, seed + batch, device=device)
    left = torch.full_like(lengths, new_tokens)
    rounds = torch.zeros_like(lengths)
    readers = [Reader(one, *texts.shape) for one in (model, draft_model) if one is not None]
    for reader in readers:  # the prompts but for their last tokens, which the first round reads
        reader.read(texts[:, : longest - 1])
        reader.roll_back(lengths - 1)

    while (left > 0).any():
        rounds += left > 0
        # 1. Draft.
        if draft_model is None:
            drafts, q = ops.ngram_propose(texts, lengths, gamma=gamma).tokens, None
        else:
            drafts, q = draft(readers[1], texts, lengths, seeds, gamma, temperature)
        # 2. One forward of the target reads the last token and the drafts; -1 is no draft.
        last = texts.gather(1, lengths[:, None] - 1)
        logits = readers[0].read(torch.cat([last, drafts.clamp(min=0)], dim=1))
        # 3. Verify: the accepted drafts and one token more.
        verdict = ops.verify_chain(
            logits, drafts, q, rule="block", temperature=temperature, seeds=seeds,
            positions=lengths, eos_token_ids=ends, max_new_tokens=left,
        )  # fmt: skip
        if (verdict.status & (ops.Status.TARGET_INVALID | ops.Status.BAD_PARAMETER)).any():
            raise ValueError("the target's logits or an argument give no distribution")
        # 4. Append what was emitted. Where tokens are -1, the next round writes over the zeros.
        columns = lengths[:, None] + torch.arange(gamma + 1, device=device)
        texts.scatter_(1, columns, verdict.tokens.clamp(min=0))
        emitted = (verdict.tokens >= 0).sum(dim=1)
        lengths += emitted
        left -= emitted
        left[torch.isin(verdict.tokens, ends).any(dim=1)] = 0
        # 5. Roll back: the cache lacks the last token, which the next round reads.
        readers[0].roll_back(lengths - 1)
    found = [text[:n].tolist() for text, n in zip(texts, lengths.tolist(), strict=True)]
    return found, rounds.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", help="of a folder or the hub; SmolLM2-135M-Instruct without")
    parser.add_argument("--draft-model", help="of the same vocabulary")
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    if given.model is None:
        from specdec_hf.cli.weights import load_embedded  # noqa: PLC0415  # only for this model

        model, tokenizer = load_embedded()
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model)
        tokenizer = AutoTokenizer.from_pretrained(given.model)
    draft_model = given.draft_model and AutoModelForCausalLM.from_pretrained(given.draft_model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in given.prompts
    ]
    texts, rounds = generate(
        model, prompts, 64, draft_model=draft_model, temperature=given.temperature
    )
    for prompt, text, count in zip(prompts, texts, rounds, strict=True):
        answer = text[len(prompt) :]
        print(tokenizer.decode(answer, skip_special_tokens=True))
        print(f"{len(answer)} tokens in {count} rounds: {len(answer) / count:.2f} a round\n")


if __name__ == "__main__":
    main()
