"""The figures of answers and of forwards are drawn from the results that lie beside them."""

import json
import re

import pytest
from support.sources import ROOT

plot = pytest.importorskip("bench.plot")
RESULTS = ROOT / "bench/results"

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not beside the tests"),
]


def words(svg):
    """The words of a figure, whose numbers are values of bars or of ticks."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def drawn():
    """Results that have a figure of these kinds."""
    for path in sorted(RESULTS.rglob("*.json")):
        content = json.loads(path.read_text())
        if path.with_suffix(".svg").exists() and ("results" in content or "runs" in content):
            yield path


@pytest.mark.parametrize("path", list(drawn()), ids=lambda path: path.stem)
def test_a_committed_figure_is_that_of_its_results(path, tmp_path):
    (made,) = plot.plots(path, tmp_path)
    assert made.name == path.with_suffix(".svg").name
    assert words(made.read_text()) == words(path.with_suffix(".svg").read_text())


def test_the_bars_of_a_table_are_its_ratios(tmp_path):
    content = json.loads((RESULTS / "spec_bench/cpu-default-float32-20261126.json").read_text())
    (table,) = content["results"]
    _, plain, ours = table["rows"]
    ours["ratio"], ours["categories"]["qa"] = 1.234, 5.678
    path = tmp_path / "both.json"
    path.write_text(json.dumps({"results": [table, {**table, "rows": [ours, plain]}]}))
    made = plot.plots(path, tmp_path)
    assert [file.name for file in made] == ["both-1.svg", "both-2.svg"]
    first = words(made[0].read_text())
    assert {"1.23", "5.68", "auto, optimal, by category", f"{plain['ratio']:.2f}"} <= {*first}
    assert "plain, Transformers" not in first  # the ratios are over it


def test_forwards_are_drawn_for_each_dtype(tmp_path):
    content = json.loads((RESULTS / "cpu-forward-smollm2-20261126T1832.json").read_text())
    path = tmp_path / "forward.json"
    path.write_text(json.dumps(content))
    (made,) = plot.plots(path, tmp_path)
    text = words(made.read_text())
    assert text.count("floor") == len(content["runs"]) == 2
    assert "smollm2, bfloat16, 2 threads" in text
