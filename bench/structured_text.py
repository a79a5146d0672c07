"""Times texts of which much is known: JSON of a schema, and edits of code that is given.

    python -m bench.structured_text [--dtype D] [--runs N] [--tokens N]

SmolLM2-135M reads notes and fills in a form about each, or writes of it freely; and it repeats
programs with a name changed, where the program is also the prediction. It does so greedily. Every
prompt is answered in turns by all ways, and the first answers are not counted. Texts with drafts
must be those without.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
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
PROGRAMS = (
    """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def __len__(self):
        return len(self.items)
""",
    """def read_lines(path):
    with open(path) as file:
        return [line.strip() for line in file]


def count_words(path):
    counts = {}
    for line in read_lines(path):
        for word in line.split():
            counts[word] = counts.get(word, 0) + 1
    return counts
""",
)
NAMES = (("Stack", "Pile"), ("counts", "totals"))
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"drafter": None}, "copied": {"drafter": "prompt_lookup"}, "default": {},
}  # fmt: skip
console = Console(highlight=False, width=120)


@dataclass
class Prompt:
    """What is asked, its token ids, and what is known of the answer."""

    text: str  # "JSON", "free" or "edit"
    inputs: Any  # input_ids and attention_mask [1, T]
    options: dict[str, Any] = field(default_factory=dict)
    prediction: list[int] | None = None

    @property
    def ways(self) -> dict[str, dict[str, Any]]:
        """What drafts, and the arguments that say so."""
        if self.prediction is None:
            return DRAFTS
        known = {"prediction": self.prediction}
        return {**DRAFTS, "prediction": known, "prediction alone": {**known, "drafter": None}}


def prompts(tokenizer: Any, grammar: Grammar) -> Iterator[Prompt]:
    """All prompts, as chats."""

    def chat(line: str) -> Any:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": line}], add_generation_prompt=True, return_tensors="pt",
            return_dict=True,
        )  # fmt: skip

    for note in NOTES:
        keys = ", ".join(SCHEMA["properties"])  # type: ignore[arg-type]  # names
        inputs = chat(f"{note}\n\nDescribe the person as JSON with the keys {keys}.")
        follows = GrammarProcessor(grammar, inputs["input_ids"].shape[1])
        yield Prompt("JSON", inputs, {"logits_processor": [follows]})
        yield Prompt("free", inputs)
    for program, (old, new) in zip(PROGRAMS, NAMES, strict=True):
        block = f"```python\n{program}```"
        inputs = chat(
            f"Repeat this code, but rename {old} to {new}. Write the code only.\n\n{block}"
        )
        known = tokenizer(block, add_special_tokens=False)["input_ids"]
        yield Prompt("edit", inputs, prediction=known)


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
    seconds: dict[tuple[str, str], list[float]] = {}
    made, rounds = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    different, written = 0, []
    for prompt in prompts(tokenizer, grammar):
        width, texts = prompt.inputs["input_ids"].shape[1], {}
        for run in range(runs + 1):
            for drafts, options in prompt.ways.items():
                way = prompt.text, drafts
                begin = time.perf_counter()
                out = generate(
                    model, **prompt.inputs, **options, **prompt.options, do_sample=False,
                    max_new_tokens=tokens, return_dict_in_generate=True,
                )  # fmt: skip
                took = time.perf_counter() - begin
                texts[drafts] = out.sequences[0, width:].tolist()
                if run:
                    seconds.setdefault(way, []).append(took)
                    made[way] += out.stats.sequences[0].new_tokens
                    rounds[way] += out.stats.sequences[0].rounds
        different += sum(text != texts["none"] for text in texts.values())
        if prompt.text != "free":
            written.append(tokenizer.decode(texts["none"], skip_special_tokens=True))
    table = Table("text", "drafts", "tokens/s", "over none", "tokens a round", "s, median")
    for way, times in seconds.items():
        plain = sum(seconds[way[0], "none"])
        table.add_row(
            *way,
            f"{made[way] / sum(times):.1f}",
            f"{plain / sum(times):.2f}",
            f"{made[way] / rounds[way]:.2f}",
            f"{statistics.median(times):.3f}",
        )
    console.print(table)
    console.print(f"tokenizer read in {read:.2f} s, schema compiled in {compiled * 1e3:.1f} ms")
    for text in written:
        console.print(text, markup=False)
    console.print(f"{different} texts differ from those without drafts")
    raise typer.Exit(int(different > 0))


if __name__ == "__main__":
    typer.run(main)
