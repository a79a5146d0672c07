"""The one read of a round gives what the verdict's tensors hold, on the host and packed."""

import pytest
import torch
from specdec_hf.loop.commit import read_verdict
from support.device_reads import spied_reads

from specdec_kernels import Verdict


class OnDevice(torch.Tensor):
    """A tensor on the host that calls itself one on a device, so that its read is packed."""

    device = torch.device("cuda")
    __torch_function__ = torch._C._disabled_torch_function_impl  # results are plain tensors


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("kind", [torch.Tensor, OnDevice])
def test_a_round_is_read_as_its_tensors_hold_it(kind, ids):
    verdict = Verdict(
        tokens=torch.tensor([[11, 12, 13, -1], [21, -1, -1, -1]], dtype=ids),
        num_accepted=torch.tensor([2, 0], dtype=torch.int32),
        status=torch.tensor([4, 8], dtype=torch.int32),
        logprobs=torch.tensor([[-0.5, -1e-30, -torch.inf, 0], [-3.25, 0, 0, 0]]),
        accept_probs=torch.zeros(2, 3),
    )
    extra = torch.tensor([[31, 32], [33, 34]]), torch.tensor([[41], [42]], dtype=torch.int32)
    with spied_reads() as (_, reads):
        read = read_verdict(
            Verdict(*(x.as_subclass(kind) for x in verdict)), *(x.as_subclass(kind) for x in extra)
        )
    assert (reads == ["cpu", "numpy"]) == (kind is OnDevice)
    for name in ("tokens", "num_accepted", "status", "logprobs"):
        assert getattr(read, name).tolist() == getattr(verdict, name).tolist()
    assert [x.tolist() for x in read.extra] == [x.tolist() for x in extra]
    assert {str(x.dtype) for x in (read.tokens, read.num_accepted, *read.extra)} == {"int64"}
