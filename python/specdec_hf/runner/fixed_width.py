"""Forwards of one width, whose logits do not depend on how many tokens were drafted.

In 16-bit arithmetic the logits of a token depend on how many tokens its forward has, because other
widths take other kernels, and near ties then fall otherwise. At one width each row must still be
independent of the tokens beside it, of its place among them and of the slots that its mask hides.
Kernels are free in that, so the first use of a width compares logits bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from specdec_hf.runner.fit import Fit, compare, fits_of
from specdec_hf.runner.policy import ForwardPolicy, Widths
from specdec_hf.runner.protocol import Lengths, Runner, context_length, vocab_size_of
from specdec_hf.runner.self_check import undisturbed
from specdec_hf.runner.spec_runner import SpecRunner

_PROMPT, _MOST = 6, 8  # tokens of the checked prompt, and at most how many follow


def fix_width(model: Any, runner: Runner, width: int) -> None:
    """Give all forwards of a runner ``width`` tokens a row.

    Raises:
        ValueError: a cache whose forwards are as wide as the text.
    """
    if not isinstance(runner, SpecRunner):
        raise ValueError(
            f"fixed_width needs cache='spec', and {type(model).__name__} runs with "
            f"cache={runner.kind!r}"
        )
    runner.run_with(replace(runner.policy, widths=Widths(width), omits_mask=frozenset()))


def check_fixed_width(model: Any, runner: SpecRunner) -> None:
    """Compare logits of forwards of one width that feed the same tokens in other pieces.

    The result is remembered for the process.

    Args:
        model: that of the runner.
        runner: gives the width, the number of sequences, and what runs the forwards.

    Raises:
        ValueError: logits that are not equal bit for bit.
    """
    assert runner.policy.widths is not None
    width, batch_size = runner.policy.widths.fixed, len(runner.lengths)
    assert width is not None
    context = context_length(model)
    if context is not None and context < _PROMPT + _MOST:
        return
    eager = runner.policy.compiled is None
    known = fits_of(model)
    key = ("fixed width", width, batch_size, eager, torch.get_num_threads())
    if key not in known:
        with undisturbed(model), torch.inference_mode():
            known[key] = _measure(model, runner, width)
    if known[key].reason is not None:
        raise ValueError(
            f"fixed_width={width} cannot be kept: on this machine the logits of a token of "
            f"{type(model).__name__} depend on its place in a forward, or on the tokens beside it"
        )


def _measure(model: Any, runner: SpecRunner, width: int) -> Fit:
    """Whether rows are independent of what they should be independent of."""
    batch_size, size = len(runner.lengths), min(width, _MOST)
    generator = torch.Generator("cpu").manual_seed(5)
    shape = (batch_size, _PROMPT + size)
    ids = torch.randint(1, vocab_size_of(model), shape, generator=generator, device="cpu")
    # Sequences of a batch differ in length.
    lengths: Lengths = _PROMPT - np.arange(batch_size) % (_PROMPT - 1)
    whole = _logits(model, runner, ids, lengths, [size], Widths(width))
    ways = [
        ([1] * min(size, 3) + [size - 3] * (size > 3), Widths(width)),
        ([size], Widths(width, spare_blocks=1)),
    ]
    rows = [_logits(model, runner, ids, lengths, *way) for way in ways]
    found = compare(rows, [whole] * len(rows), 0.0)
    return Fit(found.difference, found.tolerance, found.fault)


def _logits(
    model: Any,
    like: SpecRunner,
    ids: torch.Tensor,
    lengths: Lengths,
    sizes: list[int],
    widths: Widths,
) -> torch.Tensor:
    """Logits of the tokens that follow the prompts, fed in forwards of these sizes."""
    policy = ForwardPolicy(widths, compiled=like.policy.compiled)
    runner = SpecRunner(model, len(ids), 1, policy)
    prompt = torch.zeros(len(ids), _PROMPT, dtype=torch.int64, device="cpu")
    for b, length in enumerate(lengths.tolist()):
        prompt[b, _PROMPT - length :] = ids[b, :length]
    rows = [runner.forward(prompt.to(model.device), lengths - _PROMPT, 1)]
    for size in sizes:
        fed = torch.stack([ids[b, n : n + size] for b, n in enumerate(lengths.tolist())])
        rows.append(runner.forward(fed.to(model.device), lengths, size))
        lengths = lengths + size
    return torch.cat(rows, dim=1)
