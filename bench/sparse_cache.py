"""Times drafting over a sparse cache at long contexts, beside decoding without drafts.

    python -m bench.sparse_cache --prompts FILE [--context N] [--drafter NAME]...
    python -m bench.sparse_cache --model random [--context N] [--batch-size B] [--drafter NAME]...

The first form continues texts with SmolLM2-135M-Instruct: prompts of one category, joined until
they fill the context. The second takes a Llama of 1 B random weights in bfloat16 and random keys
and values, so that times are those of a real model, and acceptance has no meaning. Its break-even
acceptance is the rate from which on drafts pay (Theorem 3.8 of Leviathan et al. 2023, with the
measured times).

A text is read once; every call goes on from a copy of its cache. Calls of all drafters take turns.
Times are those of the rounds after the first one, of which drafters read the text in the first.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from specdec_hf import generate, pack_
from specdec_hf.cli.prompts import read_prompts
from specdec_hf.cli.run import encode
from specdec_hf.cli.weights import load_embedded
from specdec_hf.loop.statistics import SpecStats
from specdec_papers.vertical_cascade import VerticalCascade
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from specdec_kernels.analysis import walltime_factor

DRAFTERS = ("sparse_cache:budget=512", "sparse_cache:budget=512+prompt_lookup")
console = Console(highlight=False, width=140)


@dataclass
class Text:
    """Texts [B, N] and the cache of their first N - 1 tokens."""

    ids: torch.Tensor
    past: DynamicCache


@dataclass
class Rounds:
    """What the rounds of all calls of one drafter took and gave; seconds of each round."""

    draft: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    drafted: list[list[int]] = field(default_factory=list)  # of each sequence
    accepted: list[list[int]] = field(default_factory=list)
    emitted: list[list[int]] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)

    def add(self, stats: SpecStats) -> None:
        """Count the rounds of a call, but for the first one."""
        for record in stats.round_log[1:]:
            self.draft.append(record.draft)
            self.rest.append(record.target + record.after_target)
            self.drafted.append(record.drafted)
            self.accepted.append(record.accepted)
            self.emitted.append(record.emitted)
        self.notes |= set(stats.remarks)

    @property
    def tokens_per_round(self) -> float:
        going_on = sum(count > 0 for one in self.emitted for count in one)
        return sum(map(sum, self.emitted)) / going_on

    @property
    def tokens_per_second(self) -> float:
        return sum(map(sum, self.emitted)) / (sum(self.draft) + sum(self.rest))


def random_model() -> Any:
    """A Llama of 1 B weights in bfloat16."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # so that no copy in float32 is made
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def random_text(model: Any, context: int, batch_size: int) -> Text:
    """Random tokens with random keys and values."""
    config = model.config
    past = DynamicCache()
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, batch_size, heads, context - 1, size, dtype=model.dtype)
        past.update(keys, values, layer)
    return Text(torch.randint(0, config.vocab_size, (batch_size, context)), past)


@torch.inference_mode()
def texts_of(model: Any, tokenizer: Any, file: Path, category: str, context: int) -> Iterator[Text]:
    """Prompts of a category, joined to texts of at most ``context`` tokens, with caches."""
    turns = [one.turns[0] for one in read_prompts(str(file)) if one.category == category]

    def encoded(parts: list[str]) -> torch.Tensor:
        chat = [{"role": "user", "content": "\n\n".join(parts)}]
        ids: torch.Tensor = encode(tokenizer, chat, model.device)["input_ids"]
        return ids

    parts: list[str] = []
    for turn in turns:
        if encoded([*parts, turn]).shape[1] <= context:
            parts.append(turn)
            continue
        ids, past = encoded(parts), DynamicCache()
        model(ids[:, :-1], past_key_values=past, use_cache=True, logits_to_keep=1)
        yield Text(ids, past)
        parts = [turn]


def drafter_of(name: str) -> Any:
    """None for "none"; A+B is a vertical cascade, in which B drafts for A."""
    first, plus, second = name.partition("+")
    if plus:
        return VerticalCascade(first, second)
    return None if name == "none" else name


def measure(
    model: Any,
    texts: Sequence[Text],
    names: Sequence[str],
    gamma: int,
    tokens: int,
    turns: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Rounds]:
    """Continue each text with each drafter in turns, greedily and without the benefit guard."""
    made = {name: Rounds() for name in names}
    for turn in range(turns + 1):
        for number, text in enumerate(texts):
            for name in names:
                if turn == 0 and number > 0:
                    continue  # the first turn packs, and is not counted
                drafter = drafter_of(name)
                chains = {} if drafter in (None, "auto") else {"num_assistant_tokens": gamma}
                out = generate(
                    model, text.ids, attention_mask=torch.ones_like(text.ids),
                    past_key_values=copy.deepcopy(text.past), drafter=drafter, guard=False,
                    max_new_tokens=tokens if turn else 4, do_sample=False,
                    return_dict_in_generate=True, clock=clock, **chains,
                )  # fmt: skip
                if turn:
                    made[name].add(out.stats)
    return made


def break_even(plain: float, draft: float, verify: float, gamma: int) -> float | None:
    """The acceptance rate from which on drafts pay; None where not even 1 is enough.

    Args:
        plain, draft, verify: seconds of a step without drafts, of a draft step, and of a round
            without its drafts.
        gamma: drafts of a round.
    """

    def pays(rate: float) -> bool:
        return walltime_factor(rate, gamma, draft / plain, verify / plain) >= 1

    rates = [n / 1000 for n in range(1001)]
    return next(filter(pays, rates), None)


def report(made: dict[str, Rounds], gamma: int, title: str) -> list[dict[str, Any]]:
    """Print a table, and return its rows."""
    table = Table("drafter", "draft step, ms", "rest of a round, ms", title=title)
    for column in ("accepted", "tokens a round", "tokens/s", "of plain", "break-even"):
        table.add_column(column, justify="right")
    plain, rows = made["none"], []
    for name, one in made.items():
        drafting = [t / max(n) for t, n in zip(one.draft, one.drafted, strict=True) if max(n)]
        draft, rest = median(drafting) if drafting else 0.0, median(one.rest)
        even = break_even(median(plain.rest), draft, rest, gamma) if drafting else 0.0
        row = {
            "drafter": name, "draft": 1e3 * draft, "rest": 1e3 * rest,
            "accepted": sum(map(sum, one.accepted)) / max(sum(map(sum, one.drafted)), 1),
            "tokens_per_round": one.tokens_per_round, "tokens_per_second": one.tokens_per_second,
            "of_plain": one.tokens_per_second / plain.tokens_per_second, "break_even": even,
            "rounds": len(one.rest), "notes": sorted(one.notes),
        }  # fmt: skip
        rows.append(row)
        table.add_row(
            name, f"{row['draft']:.1f}", f"{row['rest']:.1f}", f"{row['accepted']:.3f}",
            f"{row['tokens_per_round']:.2f}", f"{row['tokens_per_second']:.2f}",
            f"{row['of_plain']:.2f}", "never" if even is None else f"{even:.2f}",
        )  # fmt: skip
    console.print(table)
    for note in sorted({note for one in made.values() for note in one.notes}):
        console.print(f"- {note}")
    return rows


def main(
    prompts: Annotated[Path | None, typer.Option(help='JSON lines with "turns".')] = None,
    model: Annotated[str, typer.Option(help="smollm2 or random.")] = "smollm2",
    category: Annotated[str, typer.Option(help="Of the prompts.")] = "summarization",
    context: Annotated[int, typer.Option(help="Tokens of a text.")] = 8000,
    texts: Annotated[int, typer.Option(help="How many texts.")] = 2,
    drafter: Annotated[list[str] | None, typer.Option(help="A name, or A+B; repeatable.")] = None,
    gamma: Annotated[int, typer.Option(help="Drafts of a round.")] = 4,
    tokens: Annotated[int, typer.Option(help="New tokens of a call.")] = 48,
    turns: Annotated[int, typer.Option(help="Calls of each drafter on each text.")] = 2,
    dtype: Annotated[str, typer.Option(help="Of SmolLM2.")] = "float32",
    batch_size: Annotated[int, typer.Option(help="Texts of the random model.")] = 1,
    processor_time: Annotated[
        bool,
        typer.Option(
            "--processor-time", help="Seconds of the processor, where other processes share it."
        ),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Print a row for each drafter."""
    if model == "random":
        target = random_model()
        pack_(target)  # without a second copy of its weights
        read = [random_text(target, context, batch_size)]
    elif model == "smollm2" and prompts is not None:
        target, tokenizer = load_embedded()
        target = target.to(getattr(torch, dtype))
        found = texts_of(target, tokenizer, prompts, category, context)
        read = [text for _, text in zip(range(texts), found, strict=False)]
    else:
        raise typer.BadParameter("--model must be random, or smollm2 with --prompts")
    names = list(dict.fromkeys(["none", *(drafter or DRAFTERS)]))
    sizes = ", ".join("x".join(map(str, text.ids.shape)) for text in read)
    title = f"{model}, {str(target.dtype)[6:]}, texts of {sizes} tokens, {gamma} drafts"
    clock = time.process_time if processor_time else time.perf_counter
    rows = report(measure(target, read, names, gamma, tokens, turns, clock), gamma, title)
    console.print(f"load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads")
    if json_file is not None:
        json_file.write_text(json.dumps({"title": title, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
