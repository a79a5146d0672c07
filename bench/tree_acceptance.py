"""Compares chains and trees of equally many drafted tokens by tokens per round, on SmolLM2-135M.

    python -m bench.tree_acceptance [--steps N] [--limit PROMPTS] [--samples N] [--tokens N]
                                    [--prompts FILE]

The draft model is the target with the weights of its layers rounded to a few values; it takes the
place of a smaller model that agrees with the target about as often. Sequoia's trees are built from
acceptance vectors measured on other prompts than those that are counted. Nothing here is timed.
The number after +- is the standard error of the mean over rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from specdec_hf import EagleTree, SpecStats, TreeSpec, generate
from specdec_hf.cli.prompts import SHIPPED_PROMPTS, read_prompts
from specdec_hf.cli.weights import load_embedded

NODES = (8, 16)
WIDE = (4, 2, 1, 1)  # the tree that acceptance is measured with
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled at T=1": {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 1},
}
console = Console(highlight=False, width=120)


def rounded(model: Any, steps: int) -> Any:
    """A copy of a model whose matrices hold integers in [-steps, steps] times a scale per row."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for module in draft.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                scale = module.weight.abs().amax(dim=1, keepdim=True) / steps
                module.weight.copy_((module.weight / scale).round() * scale)
    return draft


def encode(tokenizer: Any, questions: list[str]) -> dict[str, torch.Tensor]:
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in questions
    ]
    return dict(tokenizer(chats, return_tensors="pt", padding=True, padding_side="left"))


def layouts(
    nodes: int, acceptance: list[float], *, sampled: bool
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(name, drafted tokens, arguments of `generate`) of each layout; the chain comes first."""
    best = TreeSpec.sequoia(acceptance, nodes)
    sequoia = f"Sequoia's tree, {best.leaves} leaves, depth {best.depth}"
    two = TreeSpec.branching((2,) + (1,) * (nodes // 2 - 1))
    yield f"chain of {nodes}", nodes, {"num_assistant_tokens": nodes}
    for rule in ("auto", "traversal") if sampled else ("auto",):
        yield sequoia, best.size, {"tree": best, "rule": rule}
        yield "two chains", two.size, {"tree": two, "rule": rule}
    yield "EAGLE-2's tree", nodes, {"tree": EagleTree(4, 6, nodes)}


def standard_error(stats: SpecStats) -> float:
    """The standard error of the mean acceptance length, as if rounds were independent."""
    counts = stats.together.acceptance_histogram
    accepted = np.repeat(list(counts.keys()), list(counts.values()))
    return float(accepted.std(ddof=1) / np.sqrt(len(accepted)))


def main(
    steps: Annotated[
        int, typer.Option(help="Values of the draft's weights on each side of 0.")
    ] = 6,
    limit: Annotated[
        int, typer.Option(help="Prompts to count; as many others measure acceptance.")
    ] = 4,
    samples: Annotated[int, typer.Option(help="Texts for each prompt when sampling.")] = 4,
    tokens: Annotated[int, typer.Option(help="New tokens of each text.")] = 48,
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines with "turns" (Spec-Bench format).')
    ] = None,
) -> None:
    """Print mean acceptance lengths of chains and trees."""
    target, tokenizer = load_embedded()
    draft = rounded(target, steps)
    questions = [p.turns[0] for p in read_prompts(prompts or SHIPPED_PROMPTS)]
    counted, spare = questions[0 : 2 * limit : 2], questions[1 : 2 * limit : 2]

    def run(asked: list[str], **settings: Any) -> SpecStats:
        asked = asked * (samples if settings["do_sample"] else 1)
        output = generate(
            target, **encode(tokenizer, asked), drafter=draft, max_new_tokens=tokens, guard=False,
            return_dict_in_generate=True, **settings,
        )  # fmt: skip
        return output.stats  # type: ignore[no-any-return]

    about = f"{len(counted)} prompts, {tokens} tokens each"
    table = Table(
        "decoding", "drafted", "layout", "rule", "tokens per round", "relative to the chain",
        title=f"SmolLM2-135M, drafted by itself with weights of {2 * steps + 1} values; {about}",
    )  # fmt: skip
    for mode, settings in MODES.items():
        acceptance = run(spare, tree=WIDE, **settings).acceptance_by_trial
        console.print(f"{mode}: acceptance by trial {', '.join(f'{a:.2f}' for a in acceptance)}")
        for nodes in NODES:
            chain = 0.0
            sampled = settings["do_sample"]
            for name, size, layout in layouts(nodes, acceptance, sampled=sampled):
                stats = run(counted, **layout, **settings)
                length = stats.mean_acceptance_length
                chain = chain or length
                found = f"{length:.2f} +- {standard_error(stats):.2f}"
                console.print(f"{mode}, {name}: {found} tokens per round, {stats.rule}")
                table.add_row(mode, str(size), name, stats.rule, found, f"{length / chain:.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
