"""Figure 1 of Leviathan et al. 2023 as one HTML page that needs nothing beside itself.

Each token shows how it came about when it is pointed at or has the keyboard's focus. The tables of
the command follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from specdec_hf.cli.decisions import number
from specdec_hf.cli.explain import Explained
from specdec_hf.cli.terminal import visible

from specdec_lab.analysis.tables import ShownTable

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


def render_page(
    title: str,
    header: dict[str, str],
    answers: Sequence[Answer],
    tables: Sequence[ShownTable] = (),
) -> str:
    """The page, as HTML text.

    Args:
        title: of the page.
        header: names and values to print above the answers, such as the model's name.
        answers: at least one.
        tables: to show after the answers.
    """
    body = "".join(_answer(number, answer) for number, answer in enumerate(answers, start=1))
    body += "".join(map(_table, tables))
    note = (
        "Each line is one round: one forward of the target. Point at a token to see how it came "
        "about, or reach it with Tab and go on with the arrow keys; Escape hides the details."
    )
    return document(title, header, MEANINGS, note, f"{body}</main>\n<script>{SCRIPT}</script>")


def document(
    title: str,
    header: dict[str, str],
    meanings: dict[str, str],
    note: str,
    body: str,
    style: str = "",
) -> str:
    """A page that needs nothing beside itself, as HTML text.

    Args:
        title: of the page.
        header: names and values to print above the body.
        meanings: of the kinds of tokens, for the legend.
        note: a sentence that explains the body.
        body: HTML of the element ``main`` and of what follows, with the end tag of ``main``.
        style: more rules of style.
    """
    table = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in header.items()
    )
    legend = "".join(
        f'<li><span class="token {kind}">token</span> {escape(meaning)}</li>'
        for kind, meaning in meanings.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1><dl>{table}</dl>"
        f'<ul class="legend">{legend}</ul>'
        f"<p>{escape(note)}</p></header>\n<main>\n{body}\n</body>\n</html>\n"
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


def _table(shown: ShownTable) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in shown.names)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(visible(text))}</td>' for text in row)}</tr>\n"
        for row in shown.rows
    )
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>\n" * bool(rows)
    note = f'<p class="note">{escape(visible(shown.note))}</p>\n' if shown.note else ""
    return f"<section><h2>{escape(visible(shown.title))}</h2>\n{table}{note}</section>\n"


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


STYLE = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --text: #1c2024; --faint: #5b6470; --line: #d5dae0; --card: #f6f8fa;
  --accepted: #0f6b33; --accepted-ground: #ddf4e4;
  --rejected: #b3261e; --rejected-ground: #fde7e6;
  --recovered: #0a4fb3; --recovered-ground: #dfeafd;
  --bonus: #6b4a00; --bonus-ground: #fbf0d3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171a; --text: #e7eaee; --faint: #a4adb8; --line: #3a424c; --card: #20252b;
    --accepted: #7ee2a0; --accepted-ground: #143322;
    --rejected: #ff9a92; --rejected-ground: #431a18;
    --recovered: #9cc2ff; --recovered-ground: #16294a;
    --bonus: #f2cf7a; --bonus-ground: #3a2e10;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 17rem; max-width: 62rem; background: var(--ground);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .75rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
header p { color: var(--faint); }
dl, dd { margin: 0; }
header dl { display: flex; flex-wrap: wrap; gap: .25rem 2rem; }
header dt { color: var(--faint); font-size: .85rem; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .35rem 1.5rem; padding: 0;
  margin: 1rem 0; }
.legend .token { cursor: default; }
.prompt { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card);
  border-left: 3px solid var(--line); padding: .6rem .9rem; margin: 0 0 1rem; }
.rounds { font: .95rem/1.9 ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace;
  padding-left: 3.2rem; margin: 0; }
.rounds li { padding-left: .5rem; border-bottom: 1px solid var(--line); }
.rounds li::marker { color: var(--faint); font-size: .8rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
main section { overflow-x: auto; }
th, td { padding: .2rem .9rem .2rem 0; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 1px solid var(--line); color: var(--faint); font-weight: normal; }
.note { color: var(--faint); font-size: .9rem; margin: .4rem 0 0; }
.token { white-space: pre-wrap; overflow-wrap: anywhere; padding: .1rem 0; cursor: help;
  border-radius: .15rem; margin-right: 1px; }
.accepted { color: var(--accepted); background: var(--accepted-ground); }
.rejected { color: var(--rejected); background: var(--rejected-ground);
  text-decoration: line-through; }
.recovered { color: var(--recovered); background: var(--recovered-ground);
  text-decoration: underline double; text-underline-offset: .2em; }
.bonus { color: var(--bonus); background: var(--bonus-ground); text-decoration: underline dotted;
  text-underline-offset: .2em; }
.rounds .token:hover, .token:focus { outline: 2px solid currentColor; outline-offset: 1px; }
.details { display: none; position: fixed; z-index: 1; right: 1rem; bottom: 1rem; width: 25rem;
  max-width: calc(100vw - 2rem); padding: .75rem 1rem; background: var(--card);
  color: var(--text); border: 1px solid var(--line); border-radius: .5rem;
  box-shadow: 0 4px 18px rgb(0 0 0 / .28); font: .9rem/1.5 system-ui, sans-serif;
  text-decoration: none; white-space: normal; }
.details strong { display: block; margin-bottom: .35rem; }
.details div { display: flex; justify-content: space-between; gap: 1rem; }
.details dt { color: var(--faint); }
.details dd { font-variant-numeric: tabular-nums; text-align: right; overflow-wrap: anywhere; }
.token:hover > .details, .token:focus > .details { display: block; }
.rounds:hover .token:focus:not(:hover) > .details { display: none; }
.hidden .details { display: none !important; }
"""

SCRIPT = """
const tokens = [...document.querySelectorAll('.rounds .token')];
const show = () => document.body.classList.remove('hidden');
document.addEventListener('keydown', event => {
  if (event.key === 'Escape') document.body.classList.add('hidden');
  const move = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  const here = tokens.indexOf(document.activeElement);
  if (move && here >= 0 && tokens[here + move]) {
    tokens[here + move].focus();
    event.preventDefault();
  }
});
document.addEventListener('focusin', show);
document.addEventListener('mouseover', event => {
  if (event.target.closest('.rounds .token')) show();
});
"""
