"""The trees that drafters draft for a prompt, round by round, in the terminal and as a page.

A picture of a round shows which nodes were accepted, rejected, or not looked at, and the mask by
which the nodes attend to one another in the one forward that verifies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from specdec_hf.cli import interrupt
from specdec_hf.cli.checks import Settings
from specdec_hf.cli.decisions import number, print_tree
from specdec_hf.cli.explain import Explained, ExplainedTree, Node
from specdec_hf.cli.load import Loaded
from specdec_hf.cli.prompts import Prompt
from specdec_hf.cli.run import begin_chat, encode, generation_arguments, make_explainer
from specdec_hf.cli.terminal import console, visible
from specdec_hf.cli.trace import marks_of
from specdec_hf.decoder import SpeculativeDecoder
from specdec_hf.loop.streaming import run_stream

from specdec_lab.analysis.page import MEANINGS, document

FILE = "trees.html"
SHOWN_ROUNDS = 3  # in the terminal, of each drafter
KINDS = {
    "accepted": "drafted and accepted",
    "rejected": "drafted and rejected",
    "drafted": "drafted, not looked at",
    "recovered": MEANINGS["recovered"],
    "bonus": MEANINGS["bonus"],
}
# In pixels: a column for each depth, a line for each leaf, a box within them, a cell of the mask.
COLUMN, LINE, BOX, HIGH, CELL = 150, 30, 126, 22, 14
LONGEST = 14  # characters of a token in its box


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
    prompt: Prompt,
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
            if interrupt.State.seen:
                raise
            failed[name] = str(error) or type(error).__name__
            continue
        pictures.append(Picture(name, prompt.turns[0], explainer.trees))
    return pictures


def print_trees(pictures: Sequence[Picture]) -> None:
    """Print the trees of the first rounds of each drafter."""
    for picture in pictures:
        title = f"Trees of the first rounds, {picture.drafter}"
        console.rule(visible(title), align="left", style="dim")
        for tree in picture.trees[:SHOWN_ROUNDS]:
            print_tree(tree, marks_of(console))
        if not picture.trees:
            console.print("nothing was drafted", style="dim")


def write_trees(
    folder: Path, loaded: Loaded, settings: Settings, pictures: Sequence[Picture]
) -> None:
    """Write the page of all rounds, and say so."""
    folder.mkdir(exist_ok=True)
    page = folder / FILE
    header = {
        "model": loaded.title,
        "dtype": loaded.dtype,
        "temperature": f"{settings.sampling['temperature']:g}",
        "seed": str(settings.seed),
    }
    if settings.tree is not None:
        header["children at each depth"] = ",".join(map(str, settings.tree))
    page.write_text(render_trees(header, pictures), encoding="utf-8")
    console.print(visible(f"wrote {page}"), style="dim")


def render_trees(header: dict[str, str], pictures: Sequence[Picture]) -> str:
    """The page, as HTML text.

    Args:
        header: names and values to print above the trees, such as the model's name.
        pictures: of all drafters.
    """
    note = (
        "Each picture is one round: the tree whose nodes one forward of the target verifies, and "
        "the mask of that forward, a row for each node. Point at a node for its probabilities."
    )
    body = "".join(map(_picture, pictures))
    title = "Drafted trees"
    return document(title, header, KINDS, note, f"{body}</main>", STYLE)


def _picture(picture: Picture) -> str:
    rounds = "".join(map(_round, picture.trees)) or "<p>nothing was drafted</p>"
    return (
        f"<section><h2>{escape(visible(picture.drafter))}</h2>\n"
        f'<p class="prompt">{escape(visible(picture.prompt))}</p>\n{rounds}</section>\n'
    )


def _round(tree: ExplainedTree) -> str:
    accepted = sum(node.kind == "accepted" for node in tree.nodes)
    caption = (
        f"round {tree.round}, position {tree.position}: {len(tree.nodes)} nodes, "
        f"{accepted} accepted"
    )
    return (
        f"<figure><figcaption>{caption}</figcaption>\n{_tree(tree, caption)}\n"
        f"{_mask(tree)}</figure>\n"
    )


def _tree(tree: ExplainedTree, caption: str) -> str:
    """The tree as SVG, from the root on the left to the leaves on the right."""
    following = tree.following
    parents = [node.parent for node in tree.nodes]
    if following is not None:
        parents.append(tree.last)
    places = place_nodes(parents)
    lines, boxes = [], [_box(places[0], "root", tree.root, "the last committed token")]
    for n, parent in enumerate(parents):
        (x, y), (far_x, far_y) = places[parent + 1], places[n + 1]
        lines.append(
            f'<path d="M{x + BOX} {y + HIGH // 2} C{x + COLUMN - 8} {y + HIGH // 2} '
            f'{far_x - 16} {far_y + HIGH // 2} {far_x} {far_y + HIGH // 2}"/>'
        )
        if n < len(tree.nodes):
            node = tree.nodes[n]
            boxes.append(_box(places[n + 1], node.kind, node.text, f"{n + 1}: {_says(node)}"))
        else:
            assert following is not None
            boxes.append(_box(places[n + 1], following.kind, following.text, _says(following)))
    width = max(x for x, _ in places) + COLUMN
    height = max(y for _, y in places) + LINE
    return (
        f'<svg class="tree" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(caption)}">{"".join(lines)}{"".join(boxes)}</svg>'
    )


def place_nodes(parents: Sequence[int]) -> list[tuple[int, int]]:
    """Where the root and each node are drawn, in pixels: leaves below one another.

    Args:
        parents: of each node, -1 for the root, which comes first in the result.
    """
    children: dict[int, list[int]] = {}
    for n, parent in enumerate(parents):
        children.setdefault(parent, []).append(n)
    places, leaves = {}, 0

    def place(node: int, depth: int) -> float:
        nonlocal leaves
        below = [place(child, depth + 1) for child in children.get(node, ())]
        if not below:
            leaves += 1
        line = (below[0] + below[-1]) / 2 if below else leaves - 1
        places[node] = (depth * COLUMN, round(line * LINE) + (LINE - HIGH) // 2)
        return line

    place(-1, 0)
    return [places[n] for n in range(-1, len(parents))]


def _box(place: tuple[int, int], kind: str, text: str, says: str) -> str:
    x, y = place
    shown = visible(text).replace("\n", "↵").replace("\t", "⇥") or "∅"
    if len(shown) > LONGEST:
        shown = f"{shown[: LONGEST - 1]}…"
    return (
        f'<g class="node {kind}"><title>{escape(visible(repr(text)))}: {escape(says)}</title>'
        f'<rect x="{x}" y="{y}" width="{BOX}" height="{HIGH}" rx="4"/>'
        f'<text x="{x + 8}" y="{y + 15}" xml:space="preserve">{escape(shown)}</text></g>'
    )


def _says(token: Node | Explained) -> str:
    kind = KINDS[token.kind]
    values: dict[str, Any] = {"P": token.p, "Q": token.q, "acceptance": token.accept_prob}
    known = [f"{name} {number(value)}" for name, value in values.items() if value is not None]
    return ", ".join([kind, *known])


def _mask(tree: ExplainedTree) -> str:
    """A cell for each pair of a node and one that it attends to, as SVG."""
    cells = "".join(
        f'<rect x="{x * CELL}" y="{y * CELL}" width="{CELL - 1}" height="{CELL - 1}"/>'
        for y, row in enumerate(tree.mask)
        for x, attends in enumerate(row)
        if attends
    )
    size = len(tree.mask) * CELL
    return (
        f'<svg class="mask" width="{size}" height="{size}" role="img" '
        f'aria-label="mask of {len(tree.mask)} rows, the root first">{cells}</svg>'
    )


STYLE = """
figure { margin: 0 0 1.5rem; padding: .75rem 0 0; border-top: 1px solid var(--line);
  overflow-x: auto; }
figcaption { color: var(--faint); font-size: .9rem; margin-bottom: .5rem; }
.tree path { fill: none; stroke: var(--line); stroke-width: 1.5; }
.node rect { fill: var(--card); stroke: var(--line); }
.node text { fill: currentColor; font: 12px ui-monospace, Menlo, Consolas, monospace; }
.node { background: none; }
.node.accepted rect { fill: var(--accepted-ground); stroke: var(--accepted); stroke-width: 2; }
.node.rejected rect { fill: var(--rejected-ground); stroke: var(--rejected); }
.node.recovered rect { fill: var(--recovered-ground); stroke: var(--recovered); }
.node.bonus rect { fill: var(--bonus-ground); stroke: var(--bonus); }
.node.drafted { color: var(--faint); }
.node.drafted rect { stroke-dasharray: 3 3; }
.mask { display: block; margin-top: .75rem; background: var(--card); }
.mask rect { fill: var(--faint); }
"""
