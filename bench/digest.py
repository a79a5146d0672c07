"""Digests of the texts and counts of every drafter, and of what every op returns.

Two commits must print the same on one machine where nothing but the structure of the loop changed:

    PYTHONPATH=$PWD:$PWD/python:$PWD/tests python bench/digest.py > /tmp/before.txt

A line names a call, then a digest of its texts and of what was drafted and accepted, or the error
that refuses it. Nothing goes by the clock, so that a call gives one text.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import proofs
import torch
from support import drafter_proof, hf_models

LENGTHS = ((9,), (9, 1, 12))
DTYPES = (torch.float32, torch.bfloat16)
CACHES = ("auto", "spec", "aligned", "dynamic")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "match": {"do_sample": True, "rule": "match"},
    "typical": {"do_sample": True, "rule": "typical", "top_k": 5},
}


def digest_of(value: Any) -> str:
    """Twelve hexadecimal digits of everything that tensors, arrays and lists hold."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            found.update(str((one.dtype, tuple(one.shape))).encode())
            found.update(one.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(one, np.ndarray):
            found.update(one.tobytes())
        elif isinstance(one, list | tuple):
            for part in one:
                add(part)
        else:
            found.update(repr(one).encode())

    add(value)
    return found.hexdigest()[:12]


def calls_of_drafters() -> Iterator[tuple[str, str]]:
    """Every drafter by dtype, cache, batch and way to decode."""
    for dtype in DTYPES:
        model = hf_models.build("llama", vocab_size=7).to(dtype)
        for name, cache in itertools.product([None, *drafter_proof.ALL], CACHES):
            for (way, settings), lengths in itertools.product(WAYS.items(), LENGTHS):
                how = {**settings, "cache": cache, "max_new_tokens": 12}
                if how.get("do_sample"):
                    how["seed"] = list(range(5, 5 + len(lengths)))
                with tempfile.TemporaryDirectory() as folder:
                    yield (
                        f"{name} {dtype} {cache} {way} {lengths}",
                        told(name, model, Path(folder), lengths, how),
                    )


def told(
    name: str | None, model: Any, folder: Path, lengths: tuple[int, ...], how: dict[str, Any]
) -> str:
    """The digest of a call, or why it is refused."""
    made = {"drafter": None} if name is None else drafter_proof.make(name, model, folder)
    if name == "auto":  # its own schedule goes by the clock
        made["num_assistant_tokens_schedule"] = "constant"
    try:
        out = hf_models.decode(model, lengths, **made, **how)
    except Exception as error:  # whatever refuses it
        return f"{type(error).__name__}: {str(error).replace(str(folder), 'FOLDER')[:100]!r}"
    stats = [
        (one.drafted, one.accepted, one.acceptance_histogram, one.stop_reason)
        for one in out.stats.sequences
    ]
    return f"{digest_of([out.sequences, stats])} {out.stats.accepted} of {out.stats.drafted}"


def calls_of_ops() -> Iterator[tuple[str, str]]:
    """Every case of every op on the CPU."""
    for case in proofs.CASES:
        if not case.heavy:
            args = case.args()
            out = proofs.providers(case.op)["cpp"](*args)
            changed = [one for one in args if isinstance(one, torch.Tensor | list)]
            yield f"{case.op} {case.id}", digest_of([out, changed])


def main() -> None:
    """Print a line for every call, and on the error stream how many there are."""
    torch.set_num_threads(1)
    count = 0
    for what, found in itertools.chain(calls_of_ops(), calls_of_drafters()):
        print(f"{what}: {found}")
        count += 1
    print(f"{count} calls", file=sys.stderr)


if __name__ == "__main__":
    main()
