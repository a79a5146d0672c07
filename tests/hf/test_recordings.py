"""Recordings of functions: the memory that they read, with recorded ops in the place of graphs."""

import contextlib

import pytest
import torch
from specdec_hf.runner.compiled import cuda_graphs
from support.recorded_ops import FreedMemory, OpRecorder
from torch.nn.functional import linear


@pytest.mark.parametrize("view", [False, True])
def test_the_stand_in_finds_reads_of_freed_memory(view):
    """Negative control: as a graph, it keeps the memory of its own results alone."""
    weight, x = torch.ones(3, 3), torch.ones(1, 3)
    outputs, replay = OpRecorder().record(lambda: [x @ (weight.t() if view else weight) + 1])
    x.fill_(2)
    replay()
    assert outputs[0].tolist() == [[7, 7, 7]]
    weight.data = torch.zeros(3, 3)
    with pytest.raises(FreedMemory, match=r"a tensor of shape \(3, 3\)"):
        replay()


@pytest.mark.parametrize("kept", [False, True])
def test_casts_that_autocast_frees_are_not_recorded(monkeypatch, kept):
    outcome = contextlib.nullcontext()
    if kept:  # negative control
        monkeypatch.setattr(cuda_graphs, "_no_kept_casts", contextlib.nullcontext)
        outcome = pytest.raises(FreedMemory)
    weight = torch.ones(3, 3, requires_grad=True)  # autocast keeps no casts of others
    made, outputs = cuda_graphs.Recordings(OpRecorder(), 1.0), []

    def run(value):
        given = {"x": torch.full((1, 3), value)}
        outputs.append(made.replay(lambda given: [linear(given["x"], weight)], given)[0])

    with torch.no_grad():
        run(1.0)
        with torch.autocast("cpu", torch.bfloat16):
            run(2.0)
            assert torch.is_autocast_cache_enabled()
        with torch.autocast("cpu", torch.bfloat16), outcome:
            run(3.0)
    assert [x[0, 0].item() for x in outputs] == [3, 6, 9][: 2 if kept else 3]
    assert len(made) == 2, "one with autocast and one without"
    assert made.reason == ""
