"""Generated text that shows how each token came about (Leviathan et al. 2023, Figure 1).

Accepted drafts, rejected drafts and recovered tokens have colours, or marks around them where
there is no colour. A rejected draft is printed before the recovered token that replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.text import Text

from specdec_hf.cli.terminal import Terminal, visible
from specdec_hf.detokenizer import INCOMPLETE, Detokenizer
from specdec_hf.loop.streaming import Kind, Step

Shown = Kind | Literal["rejected"]
STYLES: dict[Shown, str] = {
    "accepted": "green", "rejected": "red strike", "recovered": "blue", "bonus": "", "plain": ""
}  # fmt: skip
Marks = dict[Shown, tuple[str, str]]
MARKS: Marks = {"accepted": ("«", "»"), "rejected": ("×", "×"), "recovered": ("‹", "›")}
ASCII_MARKS: Marks = {"accepted": ("[", "]"), "rejected": ("~", "~"), "recovered": ("{", "}")}


def marks_of(terminal: Terminal) -> Marks:
    """The marks that a console needs: none where it shows colours."""
    if terminal.has_colour:
        return {}
    return MARKS if "utf" in terminal.encoding.lower() else ASCII_MARKS


def styled(piece: str, kind: Shown, marks: Marks) -> Text:
    """A piece of one kind. Marks leave the white space around it outside, and blanks unmarked."""
    piece = visible(piece)
    body = piece.strip()
    if kind not in marks or not body:
        return Text(piece, style="" if marks else STYLES[kind])
    before, after = marks[kind]
    begin = piece.index(body)
    return Text(f"{piece[:begin]}{before}{body}{after}{piece[begin + len(body) :]}")


def render(
    tokenizer: Any,
    steps: Iterable[Step],
    sequence: int = 0,
    marks: Marks | None = None,
    *,
    prompt: Sequence[int] = (),
) -> Text:
    """The text of one sequence and its rejected drafts.

    Accepted drafts are green, rejected ones red, recovered tokens blue, and others plain.

    Args:
        tokenizer: of the tokens.
        steps: of the call.
        sequence: which of its sequences.
        marks: in place of colours; see `marks_of`.
        prompt: token ids; the text is what follows theirs.
    """
    stream, runs = PieceStream(tokenizer, prompt, rejected=True), list[tuple[str, Shown]]()
    pieces = [piece for step in steps if step.sequence == sequence for piece in stream.feed(step)]
    for piece, kind in [*pieces, stream.rest()]:
        if runs and runs[-1][1] == kind != "rejected":  # rejected siblings are apart
            runs[-1] = (runs[-1][0] + piece, kind)
        else:
            runs.append((piece, kind))
    return Text().join(styled(piece, kind, marks or {}) for piece, kind in runs)


class PieceStream:
    """The text of a sequence that is still growing, piece by piece.

    Bytes of a character that is not complete are held back until it is, or until `rest`.

    Args:
        tokenizer: of the tokens.
        prompt: token ids; the text is what follows theirs.
        rejected: whether rejected drafts are pieces too; they are no part of the text.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int] = (), *, rejected: bool = False
    ) -> None:
        self.rejected = rejected
        self.kind: Kind = "plain"
        self._detokenizer, self._texts = Detokenizer(tokenizer, prompt), list[str]()

    @property
    def text(self) -> str:
        """The text of all steps, that which is held back included."""
        return "".join([*self._texts, self._detokenizer.rest()])

    def feed(self, step: Step) -> list[tuple[str, Shown]]:
        """The pieces that a step completes."""
        pieces: list[tuple[str, Shown]] = []
        for token, kind in zip(step.tokens, step.kinds, strict=True):
            if kind == "recovered" and self.rejected:
                pieces += [(self._instead(draft), "rejected") for draft in step.rejected]
            self.kind = kind
            self._texts.append(new := self._detokenizer.add(token))
            if pieces and pieces[-1][1] == kind:
                pieces[-1] = (pieces[-1][0] + new, kind)
            else:
                pieces.append((new, kind))
        return [piece for piece in pieces if piece[0]]

    def _instead(self, token: int) -> str:
        """What another token would add to the text; empty for a part of a character.

        Special tokens, such as an end of the text, are left out of texts and have their names here.
        """
        return self._detokenizer.name(token).strip(INCOMPLETE)

    def rest(self) -> tuple[str, Kind]:
        """The end of the text, which was held back while it could still change."""
        return self._detokenizer.rest(), self.kind


def legend(marks: Marks) -> Text:
    """One line that explains the colours, or the marks."""
    parts = [
        styled("drafted and accepted", "accepted", marks),
        styled("drafted and rejected", "rejected", marks),
        styled("recovered after a rejection", "recovered", marks),
    ]
    return Text("  ").join([*parts, Text("bonus or plain")])
