"""The trees that drafters draft for a prompt, round by round, in the terminal and as a page.

A picture of a round shows which nodes were accepted, rejected, or not looked at, and the mask by
which the nodes attend to one another in the one forward that verifies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec_hf.cli import interrupt
from specdec_hf.cli.checks import Settings
from specdec_hf.cli.decisions import print_tree
from specdec_hf.cli.explain import ExplainedTree
from specdec_hf.cli.load import Loaded
from specdec_hf.cli.prompts import Question
from specdec_hf.cli.run import begin_chat, encode, generation_arguments, make_explainer
from specdec_hf.cli.terminal import Terminal, console, visible
from specdec_hf.decoder import SpeculativeDecoder
from specdec_hf.loop.streaming import run_stream

from specdec_lab.analysis.page import page

FILE = "trees.html"
SHOWN_ROUNDS = 3  # in the terminal, of each drafter


@dataclass(frozen=True)
class Picture:
    """The trees of one answer.

    Attributes:
        drafter: its name.
        prompt: the user's text.
        trees: of the rounds that drafted.
    """

    drafter: str
    prompt: str
    trees: Sequence[ExplainedTree]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"drafter": self.drafter, "trees": [tree.to_dict() for tree in self.trees]}


def draft_trees(
    loaded: Loaded,
    prompt: Question,
    settings: Settings,
    drafters: Mapping[str, Any],
    failed: dict[str, str],
) -> list[Picture]:
    """Answer a prompt with each drafter, which drafts the trees of ``settings.tree``.

    Args:
        loaded: the target and its tokenizer.
        prompt: whose first turn is answered.
        settings: with a seed and sampling parameters.
        drafters: the argument ``drafter`` of `generate` of each, by name.
        failed: takes the message of a drafter that fails, and then has no picture.
    """
    chat = [*begin_chat(settings), {"role": "user", "content": prompt.turns[0]}]
    inputs = encode(loaded.tokenizer, chat, loaded.model.device, template=settings.chat_template)
    pictures = []
    for name, drafter in drafters.items():
        explainer = make_explainer(loaded, inputs, replace(settings, drafter=[name]))
        decoder = SpeculativeDecoder(
            drafter,
            tree=settings.tree,
            guard=False,
            seed=settings.seed,
            trace=explainer,
            tokenizer=loaded.tokenizer,
        )
        stream = decoder.stream(loaded.model, **inputs, **generation_arguments(settings))
        try:
            run_stream(stream, lambda step: None)
        except Exception as error:  # the pictures of the others are still drawn
            if interrupt.InterruptState.seen:
                raise
            failed[name] = str(error) or type(error).__name__
            continue
        pictures.append(Picture(name, prompt.turns[0], explainer.trees))
    return pictures


def print_trees(
    pictures: Sequence[Picture], terminal: Terminal = console, shown: int | None = SHOWN_ROUNDS
) -> None:
    """Print the trees of the first rounds of each drafter, of all where ``shown`` is None."""
    for picture in pictures:
        title = f"Trees of {'all' if shown is None else 'the first'} rounds, {picture.drafter}"
        terminal.rule(visible(title), align="left", style="dim")
        for tree in picture.trees[:shown]:
            print_tree(tree, terminal)
        if not picture.trees:
            terminal.print("nothing was drafted", style="dim")


def write_trees(
    folder: Path, loaded: Loaded, settings: Settings, pictures: Sequence[Picture]
) -> None:
    """Write the page of all rounds, and say so."""
    folder.mkdir(exist_ok=True)
    header = {
        "model": loaded.title,
        "dtype": loaded.dtype,
        "temperature": f"{settings.sampling['temperature']:g}",
        "seed": str(settings.seed),
        "prompt": pictures[0].prompt,
    }
    if settings.tree is not None:
        header["children at each depth"] = ",".join(map(str, settings.tree))
    with page(folder / FILE, header) as terminal:
        print_trees(pictures, terminal, shown=None)
    console.print(visible(f"wrote {folder / FILE}"), style="dim")
