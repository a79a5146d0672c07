"""The option ``--trace``: what each round drafted, compared and decided, as tables and trees.

A round of chains is some lines of a table. A round of trees is a tree, and beside it the mask by
which its nodes attend to one another.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.columns import Columns
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from specdec_hf.cli.explain import Explained, ExplainedTree, Explainer, Node
from specdec_hf.cli.terminal import Terminal, console, visible
from specdec_hf.cli.trace import STYLES, Marks, Shown, marks_of, styled

WIDEST_MASK = 48  # rows and columns of a mask that is drawn
COLUMNS = ("round", "position", "token", "Q", "P", "P/Q", "accept", "uniform", "verdict")
ATTENDS, HIDDEN = "■·"
ASCII_ATTENDS, ASCII_HIDDEN = "#."


def print_decisions(explainer: Explainer) -> None:
    """Print every round of an answer."""
    trees = {tree.round: tree for tree in explainer.trees}
    chains: list[tuple[int, Sequence[Explained]]] = []
    mask: list[list[bool]] = []
    for number, said in enumerate(explainer.rounds, start=1):
        if number not in trees:
            chains.append((number, said))
            continue
        print_chains(chains)
        chains = []
        # The mask of a fixed shape is the same in every round.
        print_tree(trees[number], mask=trees[number].mask != mask)
        mask = trees[number].mask
    print_chains(chains)


def print_tree(tree: ExplainedTree, terminal: Terminal = console, *, mask: bool = True) -> None:
    """Print the tree of a round, and its mask beside it."""
    parts: list[RenderableType] = [draw_tree(tree, marks_of(terminal))]
    if mask:
        parts.append(draw_mask(tree, terminal))
    terminal.print(Columns(parts, padding=(0, 4)))


def print_chains(
    rounds: Sequence[tuple[int, Sequence[Explained]]], terminal: Terminal = console
) -> None:
    """Print the decisions of rounds, which come with their numbers."""
    if rounds:
        terminal.print(decision_table(rounds, marks_of(terminal)))


def decision_table(
    rounds: Sequence[tuple[int, Sequence[Explained]]], marks: Marks
) -> RenderableType:
    """A line for each token of the rounds, which come with their numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        words = name in ("token", "verdict")  # where a narrow terminal breaks lines
        table.add_column(name, justify="left" if words else "right", no_wrap=not words)
    for number, said in rounds:
        for i, token in enumerate(said):
            verdict = token.kind + (f", {token.unread} unread" if token.unread else "")
            drafted = bool(token.drafter)
            table.add_row(
                str(number) if i == 0 else "",
                "" if token.position is None else str(token.position),
                _token(token.text, token.kind, marks),
                number_or_blank(token.q if drafted else None),
                number_or_blank(token.p),
                ratio(token.p, token.q) if drafted else "",
                number_or_blank(token.accept_prob),
                number_or_blank(token.uniform),
                Text(verdict, style="" if marks else STYLES[token.kind].removesuffix(" strike")),
            )
    return table


def draw_tree(tree: ExplainedTree, marks: Marks) -> Tree:
    """The drafted tree of a round, each node with its verdict."""
    accepted = sum(node.kind == "accepted" for node in tree.nodes)
    title = Text(f"round {tree.round}, position {tree.position}: ", style="dim")
    title.append(f"{len(tree.nodes)} nodes, {accepted} accepted; root ")
    drawn = Tree(title.append_text(_token(tree.root, "plain", marks)), guide_style="dim")
    branches = {-1: drawn}
    for n, node in enumerate(tree.nodes):
        branches[n] = branches[node.parent].add(_node_line(n, node, marks))
    if tree.following is not None:
        line = _token(tree.following.text, tree.following.kind, marks)
        line.append(f"  {tree.following.kind}, P {number(tree.following.p)}")
        branches[tree.last].add(line)
    return drawn


def _node_line(n: int, node: Node, marks: Marks) -> Text:
    kind: Shown = "plain" if node.kind == "drafted" else node.kind
    line = Text(f"{n + 1} ", style="dim").append_text(_token(node.text, kind, marks))
    q = "" if node.q is None else f", Q {number(node.q)}"
    said = "not looked at" if node.kind == "drafted" else node.kind
    accept = "" if node.accept_prob is None else f", accept {number(node.accept_prob)}"
    return line.append(f"  {said}, P {number(node.p)}{q}{accept}", style="dim")


def draw_mask(tree: ExplainedTree, terminal: Terminal) -> Text:
    """A row for the root and each node, and a column for each that it may attend to."""
    size = len(tree.nodes) + 1
    if size > WIDEST_MASK:
        return Text(f"mask of {size} rows, which is too wide to draw", style="dim")
    utf = "utf" in terminal.encoding.lower()
    attends, hidden = (ATTENDS, HIDDEN) if utf else (ASCII_ATTENDS, ASCII_HIDDEN)
    lines = [
        f"{n:3} " + " ".join(attends if seen else hidden for seen in row)
        for n, row in enumerate(tree.mask)
    ]
    return Text("\n".join(["mask, 0 is the root", *lines]), no_wrap=True)


def _token(text: str, kind: Shown, marks: Marks) -> Text:
    """A token in one line; a blank one in quotes."""
    shown = visible(text).replace("\n", "↵").replace("\t", "⇥") or "∅"
    return styled(repr(shown) if shown.isspace() else shown, kind, marks)


def number(value: float) -> str:
    """A probability with four digits, small ones as a power of ten."""
    return f"{value:.4f}" if value == 0 or value >= 1e-3 else f"{value:.2e}"


def number_or_blank(value: float | None) -> str:
    """A probability, or nothing where there is none."""
    return "" if value is None else number(value)


def ratio(p: float, q: float | None) -> str:
    """P/Q, which rule token compares with the uniform; "inf" for a draft that Q cannot draw."""
    if q is None:
        return ""
    return number(p / q) if q else "inf"
