"""The loop on a device: forwards that are replayed as CUDA graphs, and what a round reads.

test_cuda.py and bench/gpu.sh run this file in a process of its own, as on_device.py.
tests/hf/test_cuda_graphs.py has the same calls, and more, with a stand-in for the device.
"""

from __future__ import annotations

import pytest
import torch

from specdec_kernels.versions import SUPPORTED

pytest.importorskip("transformers", minversion=SUPPORTED["transformers"].oldest)
pytest.importorskip("triton")

from specdec_hf import generate
from specdec_hf.heads.eagle3.drafter import Eagle3Drafter
from support.hf_models import build, head_for, prompts, with_noise


@pytest.fixture(scope="module")
def llama():
    return build("llama", layers=3).to("cuda")


def decode(model, lengths=(9,), **settings):
    inputs = {name: x.to("cuda") for name, x in prompts(lengths).items()}
    settings = {"max_new_tokens": 32, "do_sample": False, "guard": False, **settings}
    return generate(model, **inputs, return_dict_in_generate=True, **settings)


@pytest.mark.parametrize("lengths", [(9,), (12, 4, 7)], ids=["single", "ragged"])
@pytest.mark.parametrize("tree", [None, (2, 1, 1)], ids=["chain", "tree"])
def test_the_text_on_the_device_is_that_without_graphs(llama, lengths, tree):
    settings = {"drafter": with_noise(llama, 0.05), "tree": tree}
    eager = decode(llama, lengths, **settings)
    for _ in range(2):
        out = decode(llama, lengths, compile=True, **settings)
        made = out.stats.compiled
        assert torch.equal(out.sequences, eager.sequences)
        assert (made.eager, made.without_cuda_graphs, made.recompilations) == ("", "", 0)
        assert made.replayed == out.stats.rounds
        assert (made.verified > 0) == (tree is None)
        assert made.drafts[0].replayed > 0


@pytest.mark.parametrize("tree", [None, (2, 1, 1)], ids=["chain", "tree"])
def test_log_probabilities_are_read_with_their_tokens(llama, tree):
    out = decode(
        llama, (12, 4, 7), drafter=with_noise(llama, 0.05), tree=tree, do_sample=True, top_k=20,
        seed=5, output_scores=True,
    )  # fmt: skip
    assert 0 < out.stats.accepted < out.stats.drafted
    tokens = out.sequences[:, 12:]
    want = torch.stack(out.scores, dim=1).log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
    torch.testing.assert_close(out.logprobs, want.cpu(), rtol=1e-3, atol=1e-3)


def test_a_head_drafts_as_without_graphs():
    model = build("llama", layers=4).to("cuda")
    head = head_for(build("llama", layers=4)).requires_grad_(False)
    eager, drafter = decode(model, drafter=Eagle3Drafter(head)), Eagle3Drafter(head)
    for _ in range(2):
        out = decode(model, drafter=drafter, compile=True)
        (made,) = out.stats.compiled.drafts
        assert torch.equal(out.sequences, eager.sequences)
        assert out.stats.accepted == eager.stats.accepted
        assert (made.eager, made.without_cuda_graphs, made.recompilations) == ("", "", 0)
        assert made.replayed > 0


def test_plain_rounds_are_replayed_in_16_bits():
    model = build("llama").to("cuda", torch.bfloat16)
    out = decode(model, drafter=None, compile=True)
    assert out.stats.compiled.without_cuda_graphs == ""
    assert out.stats.compiled.replayed == out.stats.rounds


def test_a_forward_that_reads_the_device_is_not_recorded(llama, monkeypatch):
    model = build("llama").to("cuda")
    eager, owner = decode(model, drafter=None), type(model.model.rotary_emb)
    forward = owner.forward

    def reading(self, x, position_ids):
        int(position_ids.max())
        return forward(self, x, position_ids)

    monkeypatch.setattr(owner, "forward", reading)
    out = decode(model, drafter=None, compile=True)
    assert torch.equal(out.sequences, eager.sequences)
    assert out.stats.compiled.without_cuda_graphs
    assert out.stats.compiled.replayed == 0
    # The device still computes and draws, and other models are still recorded.
    torch.randn(2, device="cuda")
    monkeypatch.undo()
    assert decode(build("llama").to("cuda"), drafter=None, compile=True).stats.compiled.replayed > 0


def test_another_stream_runs_without_graphs(llama):
    decode(llama, drafter=None, compile=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        out = decode(llama, drafter=None, compile=True)
    assert "another CUDA stream" in out.stats.compiled.without_cuda_graphs
