"""Times texts that follow a JSON schema, with drafts and without, and free texts beside them.

    python -m bench.structured_text [--dtype D] [--runs N] [--tokens N]

SmolLM2-135M reads notes and fills in a form about each, greedily. Every note is answered in turns
by all ways, and the first answers are not counted. Texts with drafts must be those without.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from specdec_hf import generate
from specdec_hf.cli.weights import load_embedded
from specdec_hf.extras.grammar import Grammar, GrammarProcessor, GrammarTokenizer

TEXT = {"type": "string", "maxLength": 60}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "city": TEXT,
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "works": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
        "living": {"type": "boolean"},
    },
    "required": ["name", "city", "year", "works", "living"],
    "additionalProperties": False,
}
NOTES = (
    "Clara Weiss was born in Leipzig in 1907. She wrote the novels The Long Bridge and Salt.",
    "In 1962 the architect Jun Mori, of Osaka, built the Harbour Library and the Sky Pavilion.",
    "Painted in 1885, The Ferry and Evening in the Port are by Pierre Lenoir, who lived in Nantes.",
    "Ada Okafor lives in Lagos. Her first record, Red Rain, came out in 1998, and Tides followed.",
)
console = Console(highlight=False, width=120)


def asked(tokenizer: Any, note: str) -> Any:
    """The prompt as a chat: input_ids and attention_mask [1, T]."""
    line = f"{note}\n\nDescribe the person as JSON with the keys {', '.join(SCHEMA['required'])}."
    turn = [{"role": "user", "content": line}]
    return tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def main(
    dtype: Annotated[str, typer.Option(help="of the weights")] = "float32",
    runs: Annotated[int, typer.Option(help="timed answers to each note")] = 3,
    tokens: Annotated[int, typer.Option(help="most new tokens of an answer")] = 96,
) -> None:
    """Print tokens a second, and exit with 1 if drafts change a text."""
    model, tokenizer = load_embedded(dtype=getattr(torch, dtype))
    begin = time.perf_counter()
    reader = GrammarTokenizer(tokenizer, model.config.vocab_size, [tokenizer.eos_token_id])
    read = time.perf_counter() - begin
    begin = time.perf_counter()
    grammar = Grammar.json_schema(reader, SCHEMA)
    compiled = time.perf_counter() - begin
    ways: dict[tuple[str, str], dict[str, Any]] = {
        (text, drafts): {} if drafts == "default" else {"drafter": drafter}
        for text in ("JSON", "free")
        for drafts, drafter in (("none", None), ("copied", "prompt_lookup"), ("default", ""))
    }
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    made = dict.fromkeys(ways, 0)
    rounds = dict.fromkeys(ways, 0)
    texts: dict[tuple[str, str, str], list[int]] = {}
    for note in NOTES:
        inputs = asked(tokenizer, note)
        width = inputs["input_ids"].shape[1]
        for run in range(runs + 1):
            for way, options in ways.items():
                follows = [GrammarProcessor(grammar, width)] if way[0] == "JSON" else None
                begin = time.perf_counter()
                out = generate(
                    model, **inputs, **options, logits_processor=follows, do_sample=False,
                    max_new_tokens=tokens, return_dict_in_generate=True,
                )  # fmt: skip
                took = time.perf_counter() - begin
                texts[(*way, note)] = out.sequences[0, width:].tolist()
                if run:
                    seconds[way].append(took)
                    made[way] += out.stats.sequences[0].new_tokens
                    rounds[way] += out.stats.sequences[0].rounds
    table = Table("text", "drafts", "tokens/s", "over none", "tokens a round", "s, median")
    for way, took in seconds.items():
        plain = sum(seconds[way[0], "none"])
        table.add_row(
            *way,
            f"{made[way] / sum(took):.1f}",
            f"{plain / sum(took):.2f}",
            f"{made[way] / rounds[way]:.2f}",
            f"{statistics.median(took):.3f}",
        )
    console.print(table)
    console.print(f"tokenizer read in {read:.2f} s, schema compiled in {compiled * 1e3:.1f} ms")
    differing = 0
    for note in NOTES:
        text = texts["JSON", "none", note]
        console.print(json.loads(tokenizer.decode(text, skip_special_tokens=True)))
        differing += sum(texts["JSON", way, note] != text for way in ("copied", "default"))
    console.print(f"{differing} texts differ from those without drafts")
    raise typer.Exit(int(differing > 0))


if __name__ == "__main__":
    typer.run(main)
