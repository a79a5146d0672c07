"""Compares drafters that copy by tokens per round on greedy texts of SmolLM2-135M.

    python -m bench.drafter_acceptance [--prompts FILE] [--limit PROMPTS] [--longest N] [--tokens N]
                                        [--json FILE]

Greedy text does not depend on the drafter, so it is generated once and replayed: each drafter is
asked at every length that its rounds reach, and the drafts that agree with the text are accepted.
Nothing here is timed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from specdec_hf import (
    Draft,
    DraftContext,
    Drafter,
    History,
    PromptLookupDrafter,
    SuffixAutomatonDrafter,
    TrieTree,
    generate,
)
from specdec_hf.cli.prompts import SHIPPED_PROMPTS, Prompt, read_prompts
from specdec_hf.cli.weights import load_embedded
from specdec_hf.drafters.merge import TrieDrafter

GAMMA = 7
BATCH = 6  # texts that are generated together
console = Console(highlight=False, width=120)


@dataclass
class Text:
    """A prompt and its greedy continuation."""

    category: str
    tokens: list[int]
    prompt_length: int


@dataclass
class Counts:
    """The outcome of replayed rounds."""

    rounds: int = 0
    accepted: int = 0
    drafted: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.rounds + other.rounds,
            self.accepted + other.accepted,
            self.drafted + other.drafted,
        )

    @property
    def tokens_per_round(self) -> float:
        return 1 + self.accepted / self.rounds


def drafters(gamma: int = GAMMA) -> dict[str, Drafter]:
    """The drafters that are compared, prompt lookup first."""

    def tree(chains: int, *given: Drafter) -> Drafter:
        return TrieDrafter(given, TrieTree(chains, gamma))

    return {
        "prompt lookup": PromptLookupDrafter(),
        "prompt lookup, tree of 4": tree(4, PromptLookupDrafter()),
        "suffix automaton": SuffixAutomatonDrafter(),
        "suffix automaton, tree of 4": tree(4, SuffixAutomatonDrafter()),
        "both, tree of 2 and 2": tree(2, SuffixAutomatonDrafter(), PromptLookupDrafter()),
        "both, tree of 4 and 4": tree(4, SuffixAutomatonDrafter(), PromptLookupDrafter()),
    }


def replay(drafter: Drafter, text: Text, model: Any, gamma: int = GAMMA) -> Counts:
    """Count the rounds that the loop would make, and what they would accept."""
    tokens, counts = np.array([text.tokens]), Counts()
    drafter.start(
        DraftContext(
            model=model, rule="greedy", temperature=0.0, top_k=0, top_p=1.0, min_p=0.0,
            seeds=torch.zeros(1, dtype=torch.int64), batch_size=1, max_length=tokens.shape[1],
            max_draft=gamma,
        )
    )  # fmt: skip
    length = text.prompt_length
    while length < tokens.shape[1]:
        history = History(tokens[:, :length].copy(), np.array([length]), np.array([True]))
        wanted = min(gamma, tokens.shape[1] - length - 1)
        if length == text.prompt_length:
            wanted = 0  # the round that reads the prompt
        accepted, drafted = _agreeing(drafter, history, wanted, tokens[0, length:])
        counts.rounds += 1
        counts.accepted += accepted
        counts.drafted += drafted
        length += accepted + 1
    return counts


def _agreeing(
    drafter: Drafter, history: History, wanted: int, rest: NDArray[np.int64]
) -> tuple[int, int]:
    """How many drafts agree with the text from the root down, and how many there are."""
    if wanted == 0:
        return 0, 0
    draft: Draft | None = drafter.propose(history, np.array([wanted]))
    if draft is None:
        return 0, 0
    nodes = draft.tokens[0].tolist()
    parents = range(-1, len(nodes) - 1) if draft.parents is None else draft.parents[0].tolist()
    at, depth = -1, 0
    for n, (token, parent) in enumerate(zip(nodes, parents, strict=True)):
        if parent == at and depth < len(rest) and token == rest[depth]:
            at, depth = n, depth + 1
    return depth, sum(token >= 0 for token in nodes)


def choose(prompts: Sequence[Prompt], limit: int, fits: Callable[[Prompt], bool]) -> list[Prompt]:
    """The first ``limit`` prompts of each category that fit."""
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        if seen[prompt.category] < limit and fits(prompt):
            seen[prompt.category] += 1
            chosen.append(prompt)
    return chosen


def chat_of(tokenizer: Any, prompt: Prompt) -> str:
    """The first turn as the model reads it."""
    turn = [{"role": "user", "content": prompt.turns[0]}]
    return str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))


def greedy_texts(model: Any, tokenizer: Any, prompts: list[Prompt], tokens: int) -> Iterator[Text]:
    """The model's answers to the first turns, generated together without drafts."""
    chats = [chat_of(tokenizer, prompt) for prompt in prompts]
    inputs = tokenizer(chats, return_tensors="pt", padding=True, padding_side="left")
    out = generate(model, **inputs, drafter=None, max_new_tokens=tokens, do_sample=False)
    width = inputs["input_ids"].shape[1]
    for prompt, row, mask in zip(prompts, out, inputs["attention_mask"], strict=True):
        answer = row[width:].tolist()
        if tokenizer.eos_token_id in answer:
            answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
        asked = row[:width][mask.bool()].tolist()
        yield Text(prompt.category, asked + answer, len(asked))


def main(
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines with "turns" (Spec-Bench format).')
    ] = None,
    limit: Annotated[int, typer.Option(help="Prompts of each category.")] = 3,
    longest: Annotated[int, typer.Option(help="Leave out prompts of more tokens.")] = 500,
    tokens: Annotated[int, typer.Option(help="New tokens of each text.")] = 80,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the counts of each category here.")
    ] = None,
) -> None:
    """Print tokens per round of each drafter."""
    model, tokenizer = load_embedded()
    sizes = {
        prompt.turns[0]: len(tokenizer(chat_of(tokenizer, prompt))["input_ids"])
        for prompt in read_prompts(prompts or SHIPPED_PROMPTS)
    }
    chosen = choose(
        read_prompts(prompts or SHIPPED_PROMPTS), limit, lambda p: sizes[p.turns[0]] <= longest
    )
    chosen.sort(key=lambda prompt: sizes[prompt.turns[0]])
    totals: dict[str, dict[str, Counts]] = {}
    for begin in range(0, len(chosen), BATCH):
        for text in greedy_texts(model, tokenizer, chosen[begin : begin + BATCH], tokens):
            for name, drafter in drafters().items():
                by_category = totals.setdefault(name, {})
                before = by_category.get(text.category, Counts())
                by_category[text.category] = before + replay(drafter, text, model)
        console.print(f"{min(begin + BATCH, len(chosen))} of {len(chosen)} prompts")
    table = Table(
        "drafter", "drafted a round", "tokens a round", "of prompt lookup",
        title=f"{len(chosen)} prompts, {tokens} tokens each, at most {GAMMA} drafts deep",
    )  # fmt: skip
    first = 0.0
    for name, by_category in totals.items():
        parts = by_category.values()
        both = sum(parts, Counts())
        first = first or both.tokens_per_round
        table.add_row(
            name, f"{both.drafted / both.rounds:.1f}", f"{both.tokens_per_round:.3f}",
            f"{both.tokens_per_round / first:.3f}",
        )  # fmt: skip
    console.print(table)
    if json_file is not None:
        plain = {
            name: {category: vars(counts) for category, counts in by_category.items()}
            for name, by_category in totals.items()
        }
        json_file.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    typer.run(main)
