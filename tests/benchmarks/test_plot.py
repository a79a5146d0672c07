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


def row_of(name, generate, without, mine, categories=()):
    """A row of a table as `bench` writes it; None is what was not measured."""
    ratios = {
        "library": without and without / generate,
        "speculation": without and mine / without,
        "together": mine / generate,
    }
    return {
        "name": name, "ratio": mine / generate, "interval": None, "answers": [],
        "speeds": None if without is None else ratios,
        "categories": {each: {**ratios, "together": 9.87} for each in categories},
    }  # fmt: skip


def test_a_bar_is_made_of_the_library_and_of_speculation(tmp_path):
    """On an axis where their factors add up; the legend names what the bars have."""
    peer, ours = row_of("peer", 10, None, 12.5), row_of("auto", 10, 20, 26, ["qa"])
    idle = row_of("idle", 10, 20, 21)
    idle["speeds"]["speculation"] = None
    rows = [row_of("model.generate", 10, None, 10), row_of("without drafts, specdec", 10, None, 20)]
    tables = [{"title": "both", "rows": [*rows, *more]} for more in ([ours], [peer, idle, ours])]
    path = tmp_path / "both.json"
    path.write_text(json.dumps({"results": tables}))
    first, second = (words(file.read_text()) for file in plot.plots(path, tmp_path))
    assert {"2.60 = 2.00 × 1.30", "9.87 = 2.00 × 1.30", "all prompts", "qa", "auto"} <= {*first}
    assert {"1.25", "2.10", "peer", "idle", "9.87 = 2.00 × 1.30"} <= {*second}
    assert not {"model.generate", "without drafts, specdec", "peer"} & {*first}
    rejected = "drafts of which none was accepted"
    assert (rejected in first, rejected in second) == (False, True)


def test_answers_without_turns_of_three_are_refused_by_file(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"results": [{"title": "", "rows": [{"name": "auto"}]}]}))
    with pytest.raises(SystemExit, match=r"old\.json has no answers without drafts in turns"):
        plot.plots(path, tmp_path)
