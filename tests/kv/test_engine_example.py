"""examples/engine_paged.py gives the texts of plain decoding, and loses no block."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/engine_paged.py"
PROMPTS = [[7, 3, 7], [1], [*range(10, 23)], [5, 6, 5, 6, 5]]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1], PROMPTS[::-1]])
def test_texts_equal_those_of_plain_decoding(example, prompts):
    texts, engine, accepted = example["generate"](prompts, 30)
    assert texts == [example["plain"](prompt, 30) for prompt in prompts]
    assert sorted(engine.free) == [*range(example["BLOCKS"])]
    assert bool((engine.tables == -1).all())
    drafts = [n for each in accepted for n in each]
    assert len(prompts) == 1 or (max(drafts) > 0 and len(accepted) < 30)
    assert 0 in drafts


def test_rejected_tokens_that_stay_change_the_text(example, monkeypatch):
    """Negative control: without the rollback the comparison fails."""
    monkeypatch.setattr(example["Engine"], "truncate", lambda *_: None)
    texts, engine, _ = example["generate"](PROMPTS[2:], 12)
    assert texts != [example["plain"](prompt, 12) for prompt in PROMPTS[2:]]
    assert len(engine.free) < example["BLOCKS"]
