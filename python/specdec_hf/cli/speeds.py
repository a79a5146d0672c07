"""What each part of a speed is due to: forwards of this library, and drafts on top of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Speeds:
    """Tokens a second of the same answers, made in three ways.

    Speculation is what drafts add to this library's own plain decoding, and nothing else: the
    forwards of this library are faster than those of ``model.generate`` without any draft.

    Attributes:
        generate: ``model.generate``; None where it was not run.
        without_drafts: this library without drafts; None where it was not run.
        with_drafts: this library with the drafter that was asked for.
        drafted: drafted tokens of the answers.
        accepted: those of them that were accepted.
    """

    generate: float | None
    without_drafts: float | None
    with_drafts: float
    drafted: int
    accepted: int

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
        return _ratio(self.with_drafts, self.without_drafts) if self.accepted else None

    def __str__(self) -> str:
        parts = []
        if self.generate is not None:
            parts.append(f"model.generate {self.generate:.1f} tokens/s")
        if self.without_drafts is not None:
            parts.append(f"without drafts {self.without_drafts:.1f}{_times(self.library)}")
        if self.drafted:
            parts.append(f"with drafts {self.with_drafts:.1f}{_times(self.together)}")
        if not self.drafted:
            gain = "nothing was drafted"
        elif not self.accepted:
            gain = "no draft was accepted"
        elif self.speculation is None:
            gain = ""
        else:
            gain = f"speculation: {self.speculation:.2f} times as fast as without drafts"
        return "; ".join(filter(None, [", ".join(parts), gain]))

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


def _ratio(speed: float | None, of: float | None) -> float | None:
    return speed / of if speed and of else None


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.2f} times)"
