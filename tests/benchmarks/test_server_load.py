"""The load test of the server, with a tiny model and 50 clients at once."""

import json

import pytest
from support.cli_models import folder  # noqa: F401

from bench import server_load
from bench.server_load import STATIC

pytestmark = pytest.mark.build

PROMPTS = [f"{word} {n} {word}" for n in range(25) for word in ("cat", "dog")]


def test_the_program_measures_a_server_in_a_process_of_its_own(
    folder,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
):
    report, questions = tmp_path / "load.json", tmp_path / "questions.jsonl"
    lines = [{"turns": [text]} for text in (*PROMPTS[:9], "long " * 100)]
    questions.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(server_load, "SETTINGS", ((STATIC, "none"),))
    given = {"spread": 0.0, "prompt_tokens": 99, "clients": 6, "json_file": report}
    server_load.main(questions, model=str(folder), **given)
    (row,) = json.loads(report.read_text())["settings"]
    assert (row["batches"], row["drafter"], row["failures"]) == (STATIC, "none", {})
    assert row["equal"] == row["answered"] == 6
    assert row["peak_mib"] >= row["loaded_mib"] > 0
    assert not any(text in report.read_text() for text in PROMPTS)
    assert "6 of 6" in capsys.readouterr().out
