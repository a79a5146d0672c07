"""A peer of ``bench`` that runs in a process and, where asked, in a Python of its own.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from specdec_hf.cli.load import Loaded
from specdec_hf.options import DEFAULT_NUM_ASSISTANT_TOKENS

PYTHON = "SPECDEC_PEER_PYTHON"
WORKER = Path(__file__).with_name("peer_worker.py")
INSTALL = {
    "llama.cpp": 'CMAKE_ARGS="-DGGML_NATIVE=OFF" pip install llama-cpp-python',
    "openvino": "pip install openvino-genai",
}


class LeftOutError(Exception):
    """A peer cannot take part; the message says why."""


class PeerProcess:
    """`generate` of a peer that runs in a process of its own, by `peer_worker`.

    The Python is that of ``$SPECDEC_PEER_PYTHON``, or the one that runs here.

    Args:
        kind: one of the peers of `peer_worker`.
        path: of the weights that it reads.
        loaded: the target, whose ends of sequence end its texts, too.

    Attributes:
        name: what generates, with its version.
        later_tokens, later_seconds: of the last answer, after its first tokens.

    Raises:
        LeftOutError: the peer is not installed, or cannot read the weights.
    """

    def __init__(self, kind: str, path: Path, loaded: Loaded) -> None:
        if loaded.model.device.type != "cpu":
            raise LeftOutError(f"it runs on the CPU, and the target is on {loaded.model.device}")
        ends = loaded.model.generation_config.eos_token_id
        self._ends: list[int] = ends if isinstance(ends, list) else [ends] * (ends is not None)
        self.later_tokens, self.later_seconds = 0, 0.0
        python = os.environ.get(PYTHON) or sys.executable
        command = [python, str(WORKER), kind, str(path), str(torch.get_num_threads())]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, bufsize=1
            )
        except OSError as error:
            raise LeftOutError(f"${PYTHON} cannot be run: {error}") from error
        weakref.finalize(self, _end, self._process)
        try:
            self.name: str = self._read()
        except RuntimeError as error:
            install = INSTALL[kind.partition(",")[0]]
            raise LeftOutError(f"{error}; `{install}` installs it for {python}") from error

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        do_sample: bool,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        **_: Any,
    ) -> torch.Tensor:
        """[1, W] token ids of one prompt and its answer."""
        prompt = input_ids[0].tolist()
        request = {
            "prompt": prompt, "max_new_tokens": max_new_tokens, "ends": self._ends,
            "temperature": temperature if do_sample else 0.0, "top_k": top_k, "top_p": top_p,
            "seed": torch.initial_seed() % 2**32,
            "num_assistant_tokens": DEFAULT_NUM_ASSISTANT_TOKENS,
        }  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its last words tell why
            self._process.stdin.write(json.dumps(request) + "\n")
        try:
            answer = self._read()
        except RuntimeError as error:
            raise RuntimeError(f"{self.name} ended while it answered: {error}") from error
        self.later_tokens, self.later_seconds = answer["later_tokens"], answer["later_seconds"]
        return torch.tensor([prompt + answer["token_ids"]])

    def _read(self) -> Any:
        """The next line of its output; a RuntimeError says why it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        if status < 0:  # such as an instruction that the processor lacks
            raise RuntimeError(f"it was ended by {signal.Signals(-status).name}")
        self._errors.seek(0)
        last = self._errors.read().strip().rpartition("\n")[2]
        raise RuntimeError(last or f"it ended with status {status}")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate()
