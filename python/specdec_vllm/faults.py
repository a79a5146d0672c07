"""Which requests of a step the ops emitted nothing for, said to the users of vLLM."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from specdec_kernels import Status
from specdec_vllm.messages import log

# Of the steps of a device: what tells that a copy is complete, and the copy on the host.
_unread: deque[tuple[torch.Event, Tensor]] = deque()


def name(faults: Tensor, token: str, step: str = "") -> None:
    """Warn of the requests that got `token`.

    Args:
        faults: [B] int32 on the host, the status of each of these requests, 0 for the others.
        token: which one that is.
        step: of which step, if not of this.
    """
    found = [f"{i} ({_names(int(faults[i]))})" for i in faults.nonzero()[:, 0].tolist()]
    if found:
        log.warning(
            "specdec_vllm: requests that get %s, by index in the batch%s: %s",
            token, step, ", ".join(found),
        )  # fmt: skip


def name_later(faults: Tensor, token: str) -> None:
    """`name` those of a device in the first later step that finds them on the host.

    So the host never waits for the device.
    """
    _unread.append(copy_of(faults))
    while _unread and _unread[0][0].query():
        name(_unread.popleft()[1], token, " of an earlier step")


def copy_of(faults: Tensor) -> tuple[torch.Event, Tensor]:
    """A copy on the host that the device has yet to write, and what tells that it has."""
    copy = torch.empty(faults.shape, dtype=faults.dtype, pin_memory=True)
    copy.copy_(faults, non_blocking=True)
    written = torch.Event(faults.device)
    written.record()
    return written, copy


def _names(status: int) -> str:
    return "|".join(fault.name or "" for fault in Status if status & fault)
