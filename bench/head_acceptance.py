"""Compares EAGLE-3 heads by acceptance on greedy answers of SmolLM2-135M to users' prompts.

    python -m bench.head_acceptance --head FOLDER [--head FOLDER ...] [--prompts FILE] [--limit N]
                                    [--tokens N] [--dtype DTYPE] [--json FILE]

Greedy text does not depend on the drafter, so that it is generated once. One forward of the target
over each text gives what a head reads in a call, and the training's `unroll` gives its drafts at
every place: so the rounds of a chain are counted that a call would make. Nothing here is timed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from specdec_hf.cli.prompts import SHIPPED_PROMPTS, read_prompts
from specdec_hf.cli.run import encode
from specdec_hf.cli.weights import load_embedded
from specdec_hf.heads.eagle3.files import load_head
from specdec_hf.heads.eagle3.head import Eagle3Head
from specdec_hf.heads.shipped import shipped_heads
from specdec_lab.analysis.replay import Text, write_text
from specdec_lab.bench.configs import first_of_each_category
from specdec_lab.training.unrolled import TrainingBatch, acceptance_of, unroll

STEPS = 5  # drafts of the longest chain
GAMMAS = (1, 3, 5)
console = Console(highlight=False, width=120)


@dataclass
class HeadCounts:
    """What was counted of one head.

    Attributes:
        equal, shared, places: [STEPS] each: greedy drafts that are the target's choice after
            accepted ones, at every place of the answers; the acceptance probability of a draft
            drawn at temperature 1; and the number of places.
        rounds, tokens: by length of the chain: rounds after the one that reads the prompt, and the
            tokens that they commit.
    """

    equal: torch.Tensor = field(default_factory=lambda: torch.zeros(STEPS))
    shared: torch.Tensor = field(default_factory=lambda: torch.zeros(STEPS))
    places: torch.Tensor = field(default_factory=lambda: torch.zeros(STEPS))
    rounds: dict[int, int] = field(default_factory=lambda: dict.fromkeys(GAMMAS, 0))
    tokens: dict[int, int] = field(default_factory=lambda: dict.fromkeys(GAMMAS, 0))

    def add(self, other: HeadCounts) -> None:
        self.equal += other.equal
        self.shared += other.shared
        self.places += other.places
        for gamma in GAMMAS:
            self.rounds[gamma] += other.rounds[gamma]
            self.tokens[gamma] += other.tokens[gamma]

    @property
    def greedy(self) -> list[float]:
        return (self.equal / self.places.clamp(min=1)).tolist()

    @property
    def drawn(self) -> list[float]:
        return (self.shared / self.places.clamp(min=1)).tolist()

    def tokens_per_round(self, gamma: int) -> float:
        return self.tokens[gamma] / max(self.rounds[gamma], 1)


@torch.no_grad()
def read(model: Any, text: Text) -> Any:
    """What the target's decoder gives for a text, with all hidden states."""
    ids = torch.from_numpy(text.tokens)[None]
    return model.get_decoder()(ids, output_hidden_states=True, use_cache=False)


@torch.no_grad()
def count(head: Eagle3Head, model: Any, text: Text, out: Any) -> HeadCounts:
    """Acceptance of a head on one text, whose answer is the model's greedy one.

    Args:
        head: float32; it takes the target's output matrix.
        model: the target.
        text: prompt and answer.
        out: that `read` gave.
    """
    ids = torch.from_numpy(text.tokens)[None]
    layers = head.config.for_layers(len(out.hidden_states) - 1).layers
    head.borrow(model)
    batch = TrainingBatch(
        ids, model.get_input_embeddings()(ids).float(),
        torch.cat([out.hidden_states[n] for n in layers], dim=-1).float(),
        out.last_hidden_state.float(), torch.tensor([ids.shape[1]]), torch.tensor([text.begin]),
    )  # fmt: skip
    # The draft after the last token has no target: the text ends there.
    found = [
        head.tokens[logits[0, :-1].argmax(dim=-1)] == ids[0, step + 1 :]
        for step, logits in enumerate(unroll(head, batch, STEPS), start=1)
    ]
    output = model.get_output_embeddings().weight.float()
    counts = HeadCounts(*acceptance_of(head, batch, STEPS, output))
    size = ids.shape[1]
    for gamma in GAMMAS:
        length = text.begin + 1  # the round that reads the prompt drafts nothing
        while length < size:
            drafts = min(gamma, size - length - 1)
            accepted = 0
            while accepted < drafts and found[accepted][length - 2]:
                accepted += 1
            counts.rounds[gamma] += 1
            counts.tokens[gamma] += accepted + 1
            length += accepted + 1
    return counts


def texts_of(
    model: Any, tokenizer: Any, prompts: Path, limit: int | None, tokens: int
) -> Iterator[tuple[str, Text]]:
    """The first prompts of each category with the model's greedy answers, after their category."""
    chosen = first_of_each_category(read_prompts(prompts), limit)
    settings = {"do_sample": False, "max_new_tokens": tokens}
    for number, prompt in enumerate(chosen, start=1):
        inputs = encode(tokenizer, [{"role": "user", "content": prompt.turns[0]}], model.device)
        yield prompt.category, write_text(model, inputs, settings, 0)
        console.print(f"{number} of {len(chosen)} prompts")


def main(
    head: Annotated[
        list[Path] | None, typer.Option(help="Folder of a head; the shipped one where none is.")
    ] = None,
    prompts: Annotated[
        Path, typer.Option(help='JSON lines with "turns" and "category" (Spec-Bench format).')
    ] = SHIPPED_PROMPTS,
    limit: Annotated[int | None, typer.Option(help="Prompts of each category.")] = None,
    tokens: Annotated[int, typer.Option(help="New tokens of each text.")] = 96,
    dtype: Annotated[str, typer.Option(help="Of the target.")] = "bfloat16",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures of each category here.")
    ] = None,
) -> None:
    """Print acceptance by draft step and tokens a round of each head."""
    model, tokenizer = load_embedded(dtype=getattr(torch, dtype))
    heads = {str(folder): load_head(folder) for folder in head or shipped_heads()}
    found: dict[str, dict[str, HeadCounts]] = {name: defaultdict(HeadCounts) for name in heads}
    for category, text in texts_of(model, tokenizer, prompts, limit, tokens):
        out = read(model, text)
        for name, one in heads.items():
            counts = count(one, model, text, out)
            found[name][category].add(counts)
            found[name]["all"].add(counts)
    for name, by_category in found.items():
        table = Table(
            "prompts", "places", *(f"draft {k}" for k in range(1, STEPS + 1)), "drawn",
            *(f"chain of {gamma}" for gamma in GAMMAS), title=name,
        )  # fmt: skip
        for category, counts in sorted(by_category.items(), key=lambda item: item[0] == "all"):
            table.add_row(
                category, f"{int(counts.places[0])}", *(f"{a:.3f}" for a in counts.greedy),
                f"{counts.drawn[0]:.3f}",
                *(f"{counts.tokens_per_round(gamma):.3f}" for gamma in GAMMAS),
            )  # fmt: skip
        console.print(table)
    if json_file is not None:
        plain = {
            name: {
                category: {
                    "greedy": counts.greedy, "drawn": counts.drawn,
                    "places": counts.places.tolist(),
                    "tokens_per_round": {g: counts.tokens_per_round(g) for g in GAMMAS},
                }
                for category, counts in by_category.items()
            }
            for name, by_category in found.items()
        }  # fmt: skip
        json_file.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    typer.run(main)
