"""What a draft model learns on a stream of questions of one topic: its acceptance rate on others.

    python -m bench.online_distillation --prompts FILE [--category NAME] [--layers N] [--held-out N]
                                         [--tokens N] [--learning-rate X] [--every N] [--json FILE]

The target is SmolLM2-135M-Instruct, and the draft model its first layers, which were not trained to
draft. It answers the questions greedily, one call each, and learns between calls. On the held-out
questions, of which it learns nothing, the acceptance rate is the share of positions of the target's
own answers at which its most likely token is the target's. Nothing here is timed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from specdec_hf import generate
from specdec_hf.cli.prompts import read_prompts
from specdec_hf.cli.run import encode
from specdec_hf.cli.weights import load_embedded
from specdec_lab.analysis.acceptance import MeasuredAcceptance
from specdec_lab.analysis.replay import Text, replay, write_text
from specdec_papers.distilled import DistilledDrafter
from specdec_papers.layers import with_fewer_layers

GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LONGEST = 500  # tokens of a question
console = Console(highlight=False, width=100)


def acceptance(drafter: DistilledDrafter, model: Any, texts: Sequence[Text]) -> float:
    """Corollary 3.6 of Leviathan et al. 2023 at temperature 0 over the answers of some texts."""
    measured = MeasuredAcceptance()
    for text in texts:
        measured.begin_text()
        for position in replay(drafter, model, text, GREEDY):
            measured.add(position)
    return measured.alpha


def run_stream(
    model: Any,
    drafter: DistilledDrafter,
    stream: Sequence[dict[str, torch.Tensor]],
    held_out: Sequence[dict[str, torch.Tensor]],
    tokens: int,
    every: int,
) -> list[dict[str, float]]:
    """Answer a stream of questions; the rates before the first and after every few of them."""
    settings = {"do_sample": False, "max_new_tokens": tokens}
    texts = [write_text(model, inputs, settings, 0) for inputs in held_out]
    rows: list[dict[str, float]] = []
    accepted = drafted = 0
    for number in range(len(stream) + 1):
        if number % every == 0 or number == len(stream):
            rows.append(
                {
                    "questions": number, "positions": drafter.num_learnt,
                    "held_out": acceptance(drafter, model, texts),
                    "stream": accepted / drafted if drafted else float("nan"),
                }
            )  # fmt: skip
            shown = ", ".join(f"{name} {value:.4g}" for name, value in rows[-1].items())
            console.print(shown)
            accepted = drafted = 0
        if number < len(stream):
            out = generate(
                model, **stream[number], **settings, drafter=drafter, num_assistant_tokens=4,
                guard=False, return_dict_in_generate=True,
            )  # fmt: skip
            accepted += out.stats.accepted
            drafted += out.stats.drafted
    return rows


def main(
    prompts: Annotated[Path, typer.Option(help='JSON lines with "turns" and "category".')],
    category: Annotated[str, typer.Option(help="The topic.")] = "math_reasoning",
    layers: Annotated[int, typer.Option(help="Layers of the draft model.")] = 10,
    held_out: Annotated[
        int, typer.Option("--held-out", help="Questions that it learns nothing of.")
    ] = 8,
    tokens: Annotated[int, typer.Option(help="New tokens of each answer.")] = 64,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Of the drafter.")] = 1e-4,
    every: Annotated[int, typer.Option("--every", help="Questions between two measurements.")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rates here.")] = None,
) -> None:
    """Print acceptance rates along the stream."""
    model, tokenizer = load_embedded()
    chosen = [one for one in read_prompts(str(prompts)) if one.category == category]
    chats = ([{"role": "user", "content": one.turns[0]}] for one in chosen)
    questions = [encode(tokenizer, chat, model.device) for chat in chats]
    questions = [one for one in questions if one["input_ids"].shape[1] <= LONGEST]
    if len(questions) <= held_out:
        raise typer.BadParameter(
            f"--prompts must hold more than {held_out} of {category}, got {len(questions)}"
        )
    drafter = DistilledDrafter(with_fewer_layers(model, layers), learning_rate)
    rows = run_stream(model, drafter, questions[held_out:], questions[:held_out], tokens, every)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
