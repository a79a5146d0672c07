"""Compares texts with drafts with the texts that this library makes without, token for token.

    python -m bench.equal_texts --questions FILE [--dtype D] [--limit N] [--tokens N]

SmolLM2-135M answers prompts alone and in ragged batches of four, greedily and sampled by rule
`match`, with the default drafter, copies, a draft model (itself with rounded weights) and a tree,
without the benefit guard, so that all of them draft.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from specdec_hf import TreeSpec, generate
from specdec_hf.cli.prompts import read_prompts
from specdec_hf.cli.weights import load_embedded
from specdec_lab.bench.configs import first_of_each_category

from bench.tree_acceptance import encode, rounded

RULES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "match": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "rule": "match"},
}
SIZES = (1, 4)  # prompts together
console = Console(highlight=False, width=120)


def drafters(target: Any) -> dict[str, dict[str, Any]]:
    """Arguments of a call by what drafts."""
    draft = rounded(target, 13)
    return {
        "auto": {"drafter": "auto"},
        "prompt_lookup": {"drafter": "prompt_lookup"},
        "draft model": {"drafter": draft},
        "tree of the draft model": {"drafter": draft, "tree": TreeSpec.branching((2, 2, 1))},
    }


def main(
    questions: Annotated[Path, typer.Option(help="prompts as JSON lines (Spec-Bench)")],
    dtype: Annotated[list[str] | None, typer.Option(help="by default both")] = None,
    limit: Annotated[int, typer.Option(help="prompts of each category")] = 2,
    tokens: Annotated[int, typer.Option(help="new tokens of an answer")] = 32,
) -> None:
    """Count equal texts by drafter and rule, and exit with 1 if one differs."""
    asked = [one.turns[0] for one in first_of_each_category(read_prompts(questions), limit)]
    differing = 0
    for name in dtype or ["float32", "bfloat16"]:
        begin = time.perf_counter()
        target, tokenizer = load_embedded(dtype=getattr(torch, name))
        calls = drafters(target)
        equal: Counter[tuple[str, int, str]] = Counter()
        rounds, new = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        for size in SIZES:
            batches = [range(i, min(i + size, len(asked))) for i in range(0, len(asked), size)]
            for rule, sampling in RULES.items():
                for batch in batches:
                    inputs = encode(tokenizer, [asked[i] for i in batch])
                    options = {
                        **inputs, **sampling, "max_new_tokens": tokens, "seed": list(batch),
                        "return_dict_in_generate": True,
                    }  # fmt: skip
                    plain = generate(target, **options, drafter=None)
                    for drafter, own in calls.items():
                        out = generate(target, **options, **own, guard=False)
                        for a, b in zip(out.sequences, plain.sequences, strict=True):
                            same = torch.equal(a, b)
                            equal[drafter, size, rule] += same
                            differing += not same
                        together = out.stats.together
                        rounds[drafter, size] += together.rounds
                        new[drafter, size] += together.new_tokens
        table = Table("drafter", "prompts together", *RULES, "tokens a round", title=name)
        for size in SIZES:
            for drafter in calls:
                same_texts = (f"{equal[drafter, size, rule]} of {len(asked)}" for rule in RULES)
                length = new[drafter, size] / rounds[drafter, size]
                table.add_row(drafter, str(size), *same_texts, f"{length:.2f}")
        console.print(table)
        console.print(f"{time.perf_counter() - begin:.0f} s", end="\n\n")
    raise typer.Exit(1 if differing else 0)


if __name__ == "__main__":
    typer.run(main)
