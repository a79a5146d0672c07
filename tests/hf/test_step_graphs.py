"""Draft steps of an EAGLE-3 head that are replayed; recorded ops take the place of CUDA graphs."""

import pytest
import torch
from specdec_hf.heads.eagle3.drafter import Eagle3ChainDrafter, Eagle3Drafter
from specdec_hf.heads.pairs import step as compiled_step
from specdec_hf.heads.pairs.cache import HeadCache
from specdec_hf.runner.compiled import cuda_graphs
from specdec_hf.runner.compiled.compiled_call import CompileStats, WarmUpCall
from specdec_hf.runner.policy import BUCKETS
from support import hf_models
from support.heads import head_for
from support.hf_models import decode
from support.recorded_ops import record_ops


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Of the head alone: the target's forwards run eagerly, whose graphs other tests are about."""
    record_ops(monkeypatch)
    monkeypatch.setattr("specdec_hf.loop.begin.use_compiled", lambda *_, **__: CompileStats())


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", vocab_size=11)


@pytest.fixture
def head(target):
    return head_for(target).requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        (Eagle3Drafter, (9, 4)),
        pytest.param(Eagle3ChainDrafter, (9,), marks=pytest.mark.full),
    ],
)
def test_drafts_are_those_without_graphs(target, head, kind, lengths):
    eager, drafter = decode(target, lengths, drafter=kind(head)), kind(head)
    graphs = []
    for _ in range(2):
        out = decode(target, lengths, drafter=drafter, compile=True)
        assert torch.equal(out.sequences, eager.sequences)
        assert out.stats.accepted == eager.stats.accepted > 0
        (made,) = out.stats.compiled.drafts
        assert (made.eager, made.without_cuda_graphs) == ("", "")
        assert made.replayed > 0
        graphs.append(made.cuda_graphs)
    assert graphs[0] == graphs[1] <= len(BUCKETS)


def test_one_call_at_a_time_has_the_buffers(head):
    step = compiled_step._made_for(head)
    calls = [WarmUpCall() for _ in range(3)]
    caches = [HeadCache(head.config, size, head.fc.weight) for size in (1, 1, 2)]
    assert step.lend(caches[0], calls[0], calls[0]) is caches[0]
    assert "another cache has" in step.lend(caches[1], calls[1], calls[1])
    calls[0].held = False
    caches[0].buffers(0)[0].fill_(torch.nan)
    assert step.lend(caches[1], calls[1], calls[1]) is caches[0]
    assert not caches[0].buffers(0)[0].any()
    calls[1].held = False
    assert step.lend(caches[2], calls[2], calls[2]) is caches[2]


@pytest.mark.parametrize("moved", [True, False])
def test_weights_that_move_end_the_graphs(head, moved):
    step, call = compiled_step._made_for(head), WarmUpCall()
    step.check_replays(head, 1)
    made = len(step.cuda_graphs)
    if moved:
        head.norm.weight.data = head.norm.weight.data.clone()
    step.lend(HeadCache(head.config, 1, head.fc.weight, 24), call, call)
    assert len(step.cuda_graphs) == (0 if moved else made)
    assert made > 0


@pytest.mark.parametrize("left_out", ["embeddings", "mask"])
def test_the_self_check_finds_what_a_replay_leaves_out(target, head, monkeypatch, left_out):
    """Negative controls: an input keeps the value of the recording."""
    names = ("embeddings", "hidden", "places", "starts", "mask", "cosines", "sines")

    def stale(self, inputs):
        for name, own, given in zip(names, self._inputs, inputs, strict=True):
            if name != left_out:
                own.copy_(given)
        self._replay()
        return [x.clone() for x in self._outputs]

    step = compiled_step._made_for(head)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs.Recording, "__call__", stale)
        step.check_replays(head, 2)
    assert "its logits differ from the head's own" in step.cuda_graphs.reason
    assert step.cuda_graphs._cache is None, "buffers that are lent no more are not kept"
    drafter = Eagle3Drafter(head)
    out = decode(target, drafter=drafter, compile=True)
    assert torch.equal(out.sequences, decode(target, drafter=Eagle3Drafter(head)).sequences)
