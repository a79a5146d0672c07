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
    speeds = None if without is None else ratios
    categories = {each: {**ratios, "together": 9.87} for each in categories}
    return {
        "name": name, "ratio": mine / generate, "interval": None, "speeds": speeds,
        "categories": categories, "answers": [],
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
    made = plot.plots(path, tmp_path)
    assert [file.name for file in made] == ["both-1.svg", "both-2.svg"]
    first, second = (words(file.read_text()) for file in made)
    assert {"2.60 = 2.00 × 1.30", "9.87 = 2.00 × 1.30", "all prompts", "qa", "auto"} <= {*first}
    assert {"1.25", "2.10", "peer", "idle", "9.87 = 2.00 × 1.30"} <= {*second}
    assert not {"model.generate", "without drafts, specdec", "peer"} & {*first}
    rejected = "drafts of which none was accepted"
    assert (rejected in first, rejected in second) == (False, True)
    assert not any("costs more than it gives" in word for word in (*first, *second))


def test_segments_end_at_the_factors():
    """Rejected drafts cost time, which is no speed of this library without drafts."""
    panel = plot.plt.subplots()[1]
    bars = [
        plot.Bar("gain", 3.0, 2.0, 1.5),
        plot.Bar("loss", 1.8, 2.0, 0.9),
        plot.Bar("idle", 1.6, 2.0),
        plot.Bar("peer", 1.2),
    ]
    plot._draw_bars(panel, bars, "", len(bars))
    found = [(box.get_x(), pytest.approx(box.get_x() + box.get_width())) for box in panel.patches]
    library = (1, 2.0)
    assert found == [library, (2.0, 3.0), library, (2.0, 1.8), library, (2.0, 1.6), (1, 1.2)]
    solid = [plot.mpl.colors.to_hex(box.get_facecolor()) for box in panel.patches if box.get_fill()]
    speculation = plot.GAIN["color"]
    assert solid == [plot.LIBRARY, speculation, *[plot.LIBRARY] * 2, plot.OTHER]
    hatched = [
        plot.mpl.colors.to_hex(box.get_edgecolor()) for box in panel.patches if box.get_hatch()
    ]
    assert hatched == [plot.LOSS["edgecolor"], plot.OTHER]
    assert [bar.drafts for bar in bars] == ["gain", "loss", "idle", None]


def test_the_legend_of_a_single_panel_is_not_cut(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plot, "_save", lambda figure, path: figures.append(figure))
    loss = row_of("auto", 10, 20, 18, ["qa"])
    loss["categories"]["qa"]["speculation"] = 1.1
    plot.draw_speeds(
        {"title": "", "rows": [row_of("model.generate", 10, None, 10), loss]}, tmp_path
    )
    (figure,) = figures
    figure.canvas.draw()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 3
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1


def test_answers_without_turns_of_three_are_refused_by_file(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"results": [{"title": "", "rows": [{"name": "auto"}]}]}))
    with pytest.raises(SystemExit, match=r"old\.json has no answers without drafts in turns"):
        plot.plots(path, tmp_path)


def test_forwards_are_drawn_for_each_dtype(tmp_path):
    content = json.loads((RESULTS / "cpu-forward-smollm2-20261126T1832.json").read_text())
    path = tmp_path / "forward.json"
    path.write_text(json.dumps(content))
    (made,) = plot.plots(path, tmp_path)
    text = words(made.read_text())
    assert text.count("floor") == len(content["runs"]) == 2
    assert "smollm2, bfloat16, 2 threads" in text
