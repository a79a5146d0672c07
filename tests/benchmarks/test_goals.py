"""What bench/gpu.sh runs before the tests: goals, plans, stages, and FlashInfer's kernel."""

from __future__ import annotations

import pytest

from bench import goals, measure, plans
from bench.configs import Config

pytestmark = pytest.mark.build

TINY = [Config(batch=b, gamma=2, vocabulary=521) for b in (1, 3)]
# The public function of FlashInfer's header, with the types of its arguments.


def test_each_config_is_in_the_file_before_the_next_begins_and_a_failure_is_recorded(
    monkeypatch, tmp_path
):
    path, seen, real = tmp_path / "cpu-goals.jsonl", [], goals.sweep.measure_config

    def measured(config, *rest, **others):
        seen.append(len(path.read_text().splitlines()))
        if config.batch == 1:
            raise RuntimeError("an illegal memory access")
        return real(config, *rest, **others)

    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(goals.sweep, "measure_config", measured)
    monkeypatch.setitem(goals.HEADLINE, "cpu", TINY)
    with pytest.raises(goals.typer.Exit):
        goals.main("cpu", ["cpp"], tmp_path, 0.01, 60)
    assert seen == [1, 2]
    failed, row = path.read_text().splitlines()[1:]
    assert TINY[0].id in failed
    assert "RuntimeError: an illegal memory access" in failed
    assert TINY[1].id in row


def test_every_kernel_that_plans_its_launches_is_called():
    """The device is asked about each of them by its own call."""
    for call in plans.calls(3, "cpu").values():
        assert call().status.tolist() == [0] * 3
