"""Outcomes of warm-ups: which calls they settle, and which failures are kept."""

import pytest
import torch
from specdec_hf.compiled.warm_up import MOST_GRAPHS, WarmUps


class Difference:
    """Counts warm-ups; each raises or returns the next outcome."""

    def __init__(self, *outcomes):
        self.outcomes, self.made = list(outcomes), 0

    def __call__(self):
        self.made += 1
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_a_warm_up_settles_calls_of_its_kind_that_compare_no_more_than_it_did():
    warm_ups, difference = WarmUps(), Difference(None, None, "differs", "differs")
    for kind, check, made in (
        (1, False, 1), (1, False, 1), (1, True, 2), (1, True, 2), (1, False, 2), (2, False, 3),
        (2, True, 3), (3, True, 4), (3, False, 4),
    ):  # fmt: skip
        assert warm_ups.run(kind, check, difference) == (None if kind == 1 else "differs")
        assert difference.made == made


def test_a_failure_is_kept_until_failures_are_forgotten():
    warm_ups, difference = WarmUps(), Difference(None, RuntimeError("no compiler"), None)
    assert warm_ups.run("good", True, difference) is None
    for _ in range(2):
        assert "RuntimeError: no compiler" in warm_ups.run("bad", True, difference)
    assert difference.made == 2
    warm_ups.forget_failures()
    assert warm_ups.run("good", True, difference) is None
    assert difference.made == 2
    assert warm_ups.run("bad", True, difference) is None


def test_a_lack_of_memory_says_nothing_about_the_graphs():
    warm_ups, difference = WarmUps(), Difference(MemoryError(), None)
    with pytest.raises(MemoryError):
        warm_ups.run(1, True, difference)
    assert warm_ups.seconds > 0
    assert warm_ups.run(1, True, difference) is None


def test_graphs_are_made_under_the_settings_of_a_warm_up():
    before = torch._dynamo.config.recompile_limit

    def difference():
        assert torch.is_inference_mode_enabled()
        return str(torch._dynamo.config.recompile_limit)

    assert WarmUps().run(1, True, difference) == str(MOST_GRAPHS) != str(before)
    assert torch._dynamo.config.recompile_limit == before
