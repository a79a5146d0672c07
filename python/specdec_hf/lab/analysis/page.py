"""Figure 1 of Leviathan et al. 2023 as one HTML page that needs nothing beside itself.

Each token shows how it came about when it is pointed at or has the keyboard's focus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from specdec_hf.cli.terminal import visible
from specdec_hf.lab.analysis.explain import Explained
from specdec_hf.lab.analysis.page_style import SCRIPT, STYLE

MEANINGS = {
    "accepted": "drafted and accepted",
    "rejected": "drafted and rejected",
    "recovered": "recovered after a rejection",
    "bonus": "bonus after a fully accepted draft",
    "plain": "plain, nothing was drafted",
}


@dataclass(frozen=True)
class Answer:
    """One answer of the page.

    Attributes:
        title: heading.
        prompt: the user's text.
        rounds: explained tokens of each round.
    """

    title: str
    prompt: str
    rounds: Sequence[Sequence[Explained]]


def render_page(title: str, header: dict[str, str], answers: Sequence[Answer]) -> str:
    """The page, as HTML text.

    Args:
        title: of the page.
        header: names and values to print above the answers, such as the model's name.
        answers: at least one.
    """
    table = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in header.items()
    )
    legend = "".join(
        f'<li><span class="token {kind}">token</span> {escape(meaning)}</li>'
        for kind, meaning in MEANINGS.items()
    )
    body = "".join(_answer(number, answer) for number, answer in enumerate(answers, start=1))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1><dl>{table}</dl>"
        f'<ul class="legend">{legend}</ul>'
        "<p>Each line is one round: one forward of the target. Point at a token to see how it came "
        "about, or reach it with Tab and go on with the arrow keys; Escape hides the details.</p>"
        f"</header>\n<main>\n{body}</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _answer(number: int, answer: Answer) -> str:
    rounds = "".join(
        f"<li>{''.join(_token(f'{number}-{r}-{i}', token) for i, token in enumerate(said))}</li>\n"
        for r, said in enumerate(answer.rounds, start=1)
    )
    return (
        f"<section><h2>{escape(visible(answer.title))}</h2>\n"
        f'<p class="prompt">{escape(visible(answer.prompt))}</p>\n'
        f'<ol class="rounds">\n{rounds}</ol></section>\n'
    )


def _token(name: str, token: Explained) -> str:
    text = escape(visible(token.text).replace("\n", "↵").replace("\t", "⇥")) or "∅"
    rows = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
        for label, value in details_of(token).items()
    )
    return (
        f'<span class="token {token.kind}" tabindex="0" role="note" data-kind="{token.kind}" '
        f'aria-describedby="details-{name}">{text}<span class="details" role="tooltip" '
        f'id="details-{name}"><strong>{escape(MEANINGS[token.kind])}</strong>'
        f"<dl>{rows}</dl></span></span>"
    )


def details_of(token: Explained) -> dict[str, str]:
    """What the page says about a token, by name."""
    details = {"token": f"{visible(token.text)!r}, id {token.token}"}
    if token.drafter:
        details["drafted by"] = token.drafter
    details["P, target"] = number(token.p)
    if token.q is not None:
        details["Q, drafter"] = number(token.q)
    if token.accept_prob is not None:
        details["acceptance probability"] = number(token.accept_prob)
    if token.uniform is not None:
        details["uniform" if token.drafter else "uniform of the draw"] = number(token.uniform)
    if token.accept_prob is not None and token.uniform is not None:
        sign = "<" if token.kind == "accepted" else "≥"
        details["decision"] = (
            f"{number(token.uniform)} {sign} {number(token.accept_prob)}, {token.kind}"
        )
    if token.residual is not None:
        details["probability under the residual"] = number(token.residual)
    if token.unread:
        details["drafts after it"] = f"{token.unread}, not looked at"
    return details


def number(value: float) -> str:
    """A probability with four digits, small ones as a power of ten."""
    return f"{value:.4f}" if value == 0 or value >= 1e-3 else f"{value:.2e}"
