"""What each part of a speed is due to: forwards of this library, and drafts on top of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GENERATE, WITHOUT, WITH = "model.generate", "without drafts", "with drafts"
Sums = tuple[float, float]  # tokens and seconds of one answer or several


@dataclass(frozen=True)
class Speeds:
    """Tokens a second of the same answers, made in three ways.

    Speculation is what drafts add to this library's own plain decoding, and nothing else: the
    forwards of this library are faster than those of ``model.generate`` without any draft.

    Attributes:
        generate: ``model.generate``; None where it was not run.
        without_drafts: this library without drafts; None where it was not run.
        with_drafts: this library with the drafter that was asked for. Where that was none, it is
            the speed without drafts.
        drafted: drafted tokens of the answers.
        accepted: those of them that were accepted.

    >>> print(Speeds(10.0, 24.0, 30.0, drafted=50, accepted=20))
    model.generate 10.0 tokens/s, without drafts 24.0 (2.40 times), with drafts 30.0 (3.00 times); \
speculation: 1.25 times as fast as without drafts
    """

    generate: float | None
    without_drafts: float | None
    with_drafts: float
    drafted: int
    accepted: int

    @classmethod
    def of_sums(
        cls,
        generate: Sequence[Sums | None],
        without_drafts: Sequence[Sums | None],
        with_drafts: Sequence[Sums | None],
        *,
        drafted: int,
        accepted: int,
    ) -> Speeds:
        """The speeds of all answers together; one that was not made, None, leaves its way out."""
        return cls(
            _speed(generate), _speed(without_drafts), _speed(with_drafts) or 0.0, drafted, accepted
        )

    @property
    def library(self) -> float | None:
        """Speed without drafts over that of ``model.generate``."""
        return _ratio(self.without_drafts, self.generate)

    @property
    def together(self) -> float | None:
        """Speed with drafts over that of ``model.generate``."""
        return _ratio(self.with_drafts, self.generate)

    @property
    def speculation(self) -> float | None:
        """Speed with drafts over that without; None where no draft was accepted."""
        return self._over_plain if self.accepted else None

    @property
    def _over_plain(self) -> float | None:
        return _ratio(self.with_drafts, self.without_drafts)

    @property
    def rows(self) -> list[tuple[str, float, float | None]]:
        """What was measured: its name, tokens a second, and how often that of `GENERATE`.

        Where nothing was drafted, nothing is said to have had drafts.
        """
        measured = [(GENERATE, self.generate, None), (WITHOUT, self.without_drafts, self.library)]
        if self.drafted or self.with_drafts != self.without_drafts:
            name = WITH if self.drafted else "with the drafter"
            measured.append((name, self.with_drafts, self.together))
        return [(name, speed, ratio) for name, speed, ratio in measured if speed is not None]

    def __str__(self) -> str:
        parts: list[str] = []
        for name, speed, ratio in self.rows:
            unit = "" if parts else " tokens/s"
            parts.append(f"{name} {speed:.1f}{unit}{_times(ratio)}")
        if not self.drafted:
            gain = "nothing was drafted"
        elif not self.accepted:
            gain = f"none of {self.drafted} drafts was accepted"
        elif self.speculation is None:
            gain = ""
        else:
            gain = f"speculation: {self.speculation:.2f} times as fast as without drafts"
        return "; ".join(filter(None, [", ".join(parts), gain]))

    def conclusion(self) -> str:
        """One sentence with each factor by its cause; empty where nothing was compared.

        >>> Speeds(10.0, 24.0, 30.0, drafted=50, accepted=20).conclusion()
        '3.00 times as fast as model.generate: 2.40 times without drafts, 1.25 times by speculation'
        >>> Speeds(10.0, 24.0, 12.0, drafted=50, accepted=0).conclusion()
        '1.20 times as fast as model.generate: 2.40 times without drafts, 0.50 times by drafts of \
which none was accepted'
        """
        if self.together is None:
            return ""
        line = f"{self.together:.2f} times as fast as {GENERATE}"
        if not self.drafted or self.library is None or self._over_plain is None:
            return line
        cause = "by speculation" if self.accepted else "by drafts of which none was accepted"
        return f"{line}: {self.library:.2f} times {WITHOUT}, {self._over_plain:.2f} times {cause}"

    def to_dict(self) -> dict[str, dict[str, float | None]]:
        """Plain values for JSON: ``tokens_per_second`` and ``ratios``."""
        return {
            "tokens_per_second": {
                "model.generate": self.generate,
                "without_drafts": self.without_drafts,
                "with_drafts": self.with_drafts,
            },
            "ratios": {
                "library": self.library,
                "speculation": self.speculation,
                "together": self.together,
            },
        }


def _speed(answers: Sequence[Sums | None]) -> float | None:
    made = [one for one in answers if one is not None]
    seconds = sum(one[1] for one in made)
    return sum(one[0] for one in made) / seconds if seconds and len(made) == len(answers) else None


def _ratio(speed: float | None, of: float | None) -> float | None:
    return speed / of if speed and of else None


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.2f} times)"
