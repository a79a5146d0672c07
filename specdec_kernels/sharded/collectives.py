"""Collectives that give every rank the same bits, and that fail on every rank or on none.

Numbers are exchanged as int64: sums and maxima of integers do not depend on the order in which
ranks are combined, whatever algorithm the backend uses. Floats travel as their bits, or as
fixed-point numbers; see `distribution.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments.checks import require

Compute = Callable[[], Tensor]
T = TypeVar("T")


class Collectives:
    """The exchanges of one call.

    A rank whose own computation raises goes on with zeros, so that no other rank waits for it, and
    `raise_failures` raises on every rank. `attempt` does the same for one that fails between
    exchanges. One that fails after the last exchange raises alone, and no other waits for it. A
    rank that dies or never calls makes the collectives of the others raise, at the latest after the
    timeout of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, like: object) -> None:
        """like: what should be a tensor on the device of this rank.

        The first exchanges are on the CPU if the backend of the group can, so that a rank whose
        argument is on no device of the group takes part in them; `use_device` comes after them.
        """
        self.rank = dist.get_rank(group)
        require(self.rank >= 0, "group must contain this rank")
        config = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
        self._device_types = [pair.split(":")[0] for pair in config.split(",")]
        first = "cpu" if "cpu" in self._device_types else self._device_types[0]
        self.group, self.device = group, torch.device(first)
        if isinstance(like, Tensor) and like.device.type == first:
            self.device = like.device
        device = self.device
        self.size = dist.get_world_size(group)
        self._error: Exception | None = None
        self._failed = torch.zeros((), dtype=torch.bool, device=device)
        self._differs: list[tuple[Tensor, Tensor, str]] = []
        self._exchanged = self._to_skip = 0
        self._broken = False  # an exchange itself raised

    def require_device(self, device: torch.device) -> None:
        require(
            device.type in self._device_types,
            "target_shard must be on a device of the group's backend, "
            f"{' or '.join(self._device_types)}, got {device}",
        )

    def use_device(self, device: torch.device) -> None:
        """Moves the exchanges that follow to the device of the tensors."""
        self.device, self._failed = device, self._failed.to(device)

    def fail(self, error: Exception) -> None:
        """Marks this rank as failed; the first error counts."""
        self._error = self._error or error

    def attempt(self, run: Callable[[], T], again: Callable[[], T]) -> T:
        """What `run` returns. If it raises between exchanges, `again` makes all of its exchanges
        once more, with zeros: those that are done already return at once."""
        begin = self._exchanged
        try:
            return run()
        except Exception as error:
            if self._broken:
                raise
            self.fail(error)
        self._to_skip = self._exchanged - begin
        return again()

    def total(self, compute: Compute, *shape: int) -> Tensor:
        """The sum over ranks of what `compute` returns on each: int64 of this shape."""
        return self._reduce(compute, shape, dist.ReduceOp.SUM)

    def maximum(self, compute: Compute, *shape: int) -> Tensor:
        """The maximum over ranks of what `compute` returns on each: int64 of this shape."""
        return self._reduce(compute, shape, dist.ReduceOp.MAX)

    def gather(self, compute: Compute, *shape: int) -> Tensor:
        """[ranks, *shape] int64: what `compute` returns on each rank."""
        payload = self._payload(compute, shape)
        gathered = [torch.zeros_like(payload) for _ in range(self.size)]
        self._exchange(lambda: dist.all_gather(gathered, payload, group=self.group))
        rows = torch.stack(gathered)
        self._failed |= (rows[:, -1] != 0).any()
        return rows[:, :-1].view(self.size, *shape)

    def require_equal(self, gathered: Tensor, what: str) -> None:
        """Marks all ranks as failed unless the ranks, dimension 0 of [ranks, B], agree.

        No host waits for it.
        """
        self._differs.append(((gathered != gathered[:1]).any(), gathered, what))

    def raise_failures(self) -> None:
        """Raises on every rank if any failed before its last exchange.

        The host waits for the device here.
        """
        for differs, gathered, what in self._differs:
            if not bool(self._failed) and bool(differs):
                first = int((gathered != gathered[:1]).any(0).nonzero()[0, 0])
                raise RuntimeError(
                    f"{what} must be equal on all ranks, got {gathered[:, first].tolist()} on them "
                    f"for sequence {first}"
                )
        if not bool(self._failed):
            if self._error is not None:
                raise self._error
            return
        mine = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        reasons: list[str | None] = [None] * self.size
        dist.all_gather_object(reasons, mine, group=self.group)
        found = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
        raise RuntimeError(f"verify_chain_sharded failed on {'; '.join(found)}") from self._error

    def _reduce(
        self, compute: Compute, shape: tuple[int, ...], op: dist.ReduceOp.RedOpType
    ) -> Tensor:
        payload = self._payload(compute, shape)
        if not self._exchange(lambda: dist.all_reduce(payload, op=op, group=self.group)):
            payload.zero_()
        self._failed |= payload[-1] != 0
        return payload[:-1].view(shape)

    def _exchange(self, call: Callable[[], object]) -> bool:
        """Whether the call was made, because it had not been before `attempt` repeated it."""
        if self._to_skip:
            self._to_skip -= 1
            return False
        self._exchanged += 1
        self._broken = True
        call()
        self._broken = False
        return True

    def _payload(self, compute: Compute, shape: tuple[int, ...]) -> Tensor:
        """What `compute` returns, flat, followed by whether this rank failed."""
        payload = torch.zeros(torch.Size(shape).numel() + 1, dtype=torch.int64, device=self.device)
        if self._error is None:
            try:
                payload[:-1] = compute().reshape(-1)
            except Exception as error:
                self.fail(error)
        if self._error is not None:
            payload.zero_()[-1] = 1
        return payload
