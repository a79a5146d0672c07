"""Draws docs/pictures/round.svg, one round of rule `token`, from docs/pictures/round.json.

python docs/site/draw_round.py                      # draws it again
python docs/site/draw_round.py TRACE.json ROUND     # takes a round of another trace

A trace is what `python -m specdec_hf generate --trace --json TRACE.json` writes; round.json has the
whole command.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).parents[1] / "pictures"
LABELS, COLUMN, BAR = 184, 148, 124  # pixels: the labels' width, a column's, and a bar's
COLOURS = {"accepted": "#2e7d32", "rejected": "#c62828", "recovered": "#1565c0"}
P, Q = "#1565c0", "#ef6c00"
HEIGHT = 372


def extract(trace: dict[str, Any], number: int) -> dict[str, Any]:
    """The round of a trace that is drawn, with the text before it."""
    turn = trace["prompts"][0]["turns"][0]
    before = [
        token["text"]
        for one in turn["rounds"][: number - 1]
        for token in one
        if token["kind"] != "rejected"
    ]
    return {
        "model": trace["summary"]["model"],
        "prompt": turn["prompt"],
        "text": "".join(before[-4:]).strip(),
        "tokens": turn["rounds"][number - 1],
    }


def text(
    x: float, y: float, words: str, *, size: int = 13, fill: str = "#222", more: str = ""
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" {more}>{escape(words)}</text>'
    )


def rectangle(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{fill}" {more}/>'
    )


def box(x: float, y: float, word: str, colour: str, *, dashed: bool = False) -> list[str]:
    """A token."""
    border = f'stroke="{colour}" stroke-width="2" rx="6"' + (
        ' stroke-dasharray="5 4"' if dashed else ""
    )
    return [
        rectangle(x, y, BAR, 32, "#fff", border),
        text(x + BAR / 2, y + 21, word.strip(), size=15, fill=colour, more='text-anchor="middle"'),
    ]


def draft(x: float, token: dict[str, Any]) -> list[str]:
    """The column of a drafted token: its box, Q and P, and the comparison that decides."""
    colour, u, ratio = COLOURS[token["kind"]], token["uniform"], token["accept_prob"]
    parts = box(x, 52, token["text"], "#555", dashed=True)
    for row, (name, value, fill) in enumerate((("Q", token["q"], Q), ("P", token["p"], P))):
        y = 112 + 30 * row
        parts += [
            rectangle(x, y, BAR * value, 12, fill),
            text(x, y + 25, f"{name} = {value:.3f}", size=12),
        ]
    sign = "<" if u < ratio else "≥"
    return [
        *parts,
        rectangle(x, 206, BAR, 14, "#e0e0e0"),
        rectangle(x, 206, BAR * ratio, 14, colour, 'opacity="0.55"'),
        rectangle(x + BAR * u - 1.5, 200, 3, 26, "#222"),
        text(x, 243, f"u = {u:.3f} {sign} {ratio:.3f}", size=12),
        text(x, 261, token["kind"], size=13, fill=colour, more='font-weight="bold"'),
    ]


def draw(drawn: dict[str, Any]) -> str:
    """The picture, as SVG text."""
    drafts = [token for token in drawn["tokens"] if "drafter" in token]
    following = drawn["tokens"][-1]
    emitted = [token for token in drawn["tokens"] if token["kind"] != "rejected"]
    steps = (
        (72, "1  The drafter proposes", "tokens that it draws from Q"),
        (124, "2  One forward", "of the target gives P of all"),
        (214, "3  Verification", "accepts while u < P / Q"),
        (302, "4  The round emits", "what was accepted, and a"),
    )
    parts = [
        text(LABELS, 32, f"… {drawn['text']}", size=15, more='font-style="italic"'),
        text(0, 32, "Text so far"),
    ]
    for y, what, how in steps:
        parts += [
            text(0, y, what, more='font-weight="bold"'),
            text(0, y + 18, how, size=12, fill="#555"),
        ]
    parts.append(text(0, 338, f"{following['kind']} token", size=12, fill="#555"))
    for column, token in enumerate(drafts):
        parts += draft(LABELS + COLUMN * column, token)
    for column, token in enumerate(emitted):
        parts += box(LABELS + COLUMN * column, 286, token["text"], COLOURS[token["kind"]])
    parts.append(text(LABELS + COLUMN * (len(emitted) - 1), 340, "from max(P − Q, 0)", size=12))
    width = LABELS + COLUMN * len(drafts)
    lines = "\n".join(parts)
    title = f"One round of speculative decoding after the text: {drawn['text']}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 0 {width + 12} {HEIGHT}" '
        f'width="{width + 12}" height="{HEIGHT}" '
        f'font-family="sans-serif" role="img">\n<title>{escape(title)}</title>\n'
        f"{rectangle(-12, 0, width + 12, HEIGHT, '#fff')}\n{lines}\n</svg>\n"
    )


def main() -> None:
    """Draw the picture."""
    data = PICTURES / "round.json"
    if len(sys.argv) == 3:
        of = json.loads(data.read_text()) if data.exists() else {}
        of |= extract(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
        data.write_text(json.dumps(of, indent=1, ensure_ascii=False) + "\n")
    (PICTURES / "round.svg").write_text(draw(json.loads(data.read_text())))


if __name__ == "__main__":
    main()
