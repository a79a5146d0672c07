"""What records the work of a function on a CUDA device as a CUDA graph, and replays it.

A CUDA graph launches the kernels of a whole forward in one call. It reads and writes the memory
that it was recorded with, and holds every Python number as it was then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

Run = Callable[[], list[torch.Tensor]]


class Recorder(Protocol):
    """Records what functions do on a device."""

    def record(self, run: Run) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """The outputs of a function, and what computes them again, in place, from its inputs.

        Raises:
            Exception: the function reads from the device, or does what cannot be recorded.
        """
        ...

    def here(self) -> bool:
        """Whether work goes where recordings are replayed, behind the work before."""
        ...


class CudaRecorder:
    """Records CUDA graphs, which share memory for what is neither input nor output.

    Args:
        device: a CUDA device.
    """

    # PyTorch can record one graph of a process at a time.
    _recording = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        self._stream = torch.cuda.current_stream(device)

    def here(self) -> bool:
        return torch.cuda.current_stream(self._device) == self._stream

    def record(self, run: Run) -> tuple[list[torch.Tensor], Callable[[], None]]:
        with self._recording, torch.cuda.device(self._device):
            # Libraries set up what they need for a stream in its first calls.
            self._side.wait_stream(self._stream)
            with torch.cuda.stream(self._side):
                run()
            self._stream.wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may go on to allocate memory.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
                ):
                    outputs = run()
            except BaseException:
                self._restore()
                raise
        return outputs, graph.replay

    def _restore(self) -> None:
        """Undo what a failed recording leaves: the side stream, and a generator that records."""
        torch.cuda.set_stream(self._stream)
        generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())


def recorder_for(device: torch.device) -> Recorder | None:
    """What records on a device, or None where launches are not worth recording."""
    return CudaRecorder(device) if device.type == "cuda" else None
