"""The figures show the formulas, the measured points and the recorded rounds."""

import pytest
from matplotlib.colors import to_hex
from specdec_hf.lab.analysis import figures
from specdec_hf.lab.analysis.encoders import EncoderSeconds
from specdec_hf.loop.round_record import RoundRecord
from support.hf_models import one_thread  # noqa: F401  # autouse here

MEASURED = [figures.Measured("small", 0.6, 3, 0.05, 2.1, 1.7)]


def lines(figure):
    """Each line by its label."""
    return {line.get_label(): line for line in figure.axes[0].lines}


def edges_of(panel):
    """Left and right edge of each bar, one after the other, by colour."""
    edges = {}
    for bars in panel.collections:
        found = edges.setdefault(to_hex(bars.get_facecolor()[0]), [])
        for path in bars.get_paths():
            found += [path.vertices[:, 0].min(), path.vertices[:, 0].max()]
    return edges


def test_figure_2_follows_equation_1():
    drawn = lines(figures.draw_expected_tokens(MEASURED))
    assert set(drawn) == {*(f"γ = {g}" for g in (1, 3, 5, 7, 10)), "γ = ∞", "small, γ = 3"}
    x, y = drawn["γ = 3"].get_data()
    for alpha, tokens in zip(x[::40], y[::40], strict=True):
        assert tokens == pytest.approx((1 - alpha**4) / (1 - alpha))
    assert drawn["small, γ = 3"].get_data() == ([0.6], [2.1])


def test_figure_3_shows_the_best_gamma():
    drawn = lines(figures.draw_optimal_gamma(MEASURED))
    assert len(drawn) == 5
    x, y = drawn["c = 0.1"].get_data()
    for alpha, gamma in zip(x[::30], y[::30], strict=True):
        factors = [(1 - alpha ** (g + 1)) / (1 - alpha) / (g * 0.1 + 1) for g in range(65)]
        assert factors[gamma] == max(factors)


def test_figure_4_shows_speed_and_operations():
    drawn = lines(figures.draw_speed_and_operations())
    assert len(drawn) == 10
    alpha = drawn["speed, γ = 5"].get_xdata()[160]
    speed = drawn["speed, γ = 5"].get_ydata()[160]
    operations = drawn["operations, γ = 5"].get_ydata()[160]
    assert speed == pytest.approx((1 - alpha**6) / (1 - alpha))
    assert operations == pytest.approx(6 / speed)


def test_figure_5_is_a_timeline_of_the_rounds():
    fast = [
        RoundRecord(0.0, 0.2, 0.5, 0.1, 0.0, 0.0, [4], [4], [5]),
        RoundRecord(0.9, 0.4, 0.3, 0.05, 0.03, 0.02, [4], [1], [2]),
    ]
    plain = [RoundRecord(i * 0.5, 0.0, 0.4, 0.05, 0.0, 0.0, [0], [0], [1]) for i in range(4)]
    rows = [figures.Timeline("γ = 4", fast), figures.Timeline("plain", plain)]
    figure = figures.draw_timeline(rows)
    panel = figure.axes[0]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["γ = 4", "plain"]
    assert panel.get_xlim() == pytest.approx((0, 1.95))
    edges = edges_of(panel)
    steps = [x for i in range(4) for x in (0.05 * i, 0.05 * (i + 1))]
    steps += [x for i in range(4) for x in (0.9 + 0.1 * i, 1.0 + 0.1 * i)]
    assert edges[figures.DRAFT] == pytest.approx(steps)
    assert edges[figures.PROMPT] == pytest.approx([0.2, 0.7, 0.0, 0.4])
    assert edges[figures.VERIFY] == pytest.approx([1.3, 1.6, 0.5, 0.9, 1.0, 1.4, 1.5, 1.9])
    assert [t.get_text() for t in panel.texts] == ["+5", "+2", "+1", "+1", "+1", "+1"]
    cut = figures.draw_timeline(rows[1:], seconds=0.6)
    assert len(cut.axes[0].texts) == 1  # the second round goes on after the edge


def test_encoders_come_before_the_rounds_and_a_tree_is_one_block():
    rounds = [
        RoundRecord(0.75, 0.0, 0.5, 0.25, 0.0, 0.0, [0], [0], [1]),
        RoundRecord(1.5, 0.5, 0.25, 0.25, 0.0, 0.0, [9], [2], [3]),
    ]
    rows = [
        figures.Timeline("tree", rounds, EncoderSeconds(0.5, 0.25), trees=True),
        figures.Timeline("plain", rounds, EncoderSeconds(0.5)),
    ]
    figure = figures.draw_timeline(rows)
    edges = edges_of(figure.axes[0])
    assert edges[figures.ENCODER] == pytest.approx([0, 0.5, 0, 0.5])
    # It runs while the call begins, before its first round.
    assert edges[figures.DRAFT_ENCODER] == pytest.approx([0.5, 0.75])
    assert edges[figures.PROMPT] == pytest.approx([1.25, 1.75] * 2)
    assert edges[figures.DRAFT][:2] == pytest.approx([2.0, 2.5])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[-2:] == ["encoder of the target", "encoder of the drafter"]
    late = figures.Timeline("late", [RoundRecord(0.1, *[0.0] * 5, [0], [0], [1])],
                            EncoderSeconds(0.5, 0.25))  # fmt: skip
    assert late.offset == pytest.approx(0.65)


@pytest.mark.build  # the tools of figures
def test_equal_figures_become_equal_files(tmp_path):
    for name in ("a.svg", "b.svg"):
        figures.draw_optimal_gamma(MEASURED).savefig(tmp_path / name, metadata={"Date": None})
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
