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
    """Figures with the results that they were drawn from; sweeps have one for each axis."""
    for svg in sorted(RESULTS.rglob("*.svg")):
        stem = svg.stem
        for axis in plot.AXES:
            stem = stem.removesuffix(f"-{axis}")
        path = svg.with_name(f"{stem}.json")
        tables = json.loads(path.read_text()).get("results", [])
        if all("speeds" in row for table in tables for row in table["rows"]):
            yield svg, path


@pytest.mark.parametrize(("svg", "path"), list(drawn()), ids=lambda path: path.stem)
def test_a_committed_figure_is_that_of_its_results(svg, path, tmp_path):
    made = {file.name: file for file in plot.plots(path, tmp_path)}
    assert words(made[svg.name].read_text()) == words(svg.read_text())
