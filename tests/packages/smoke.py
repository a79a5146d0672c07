"""What must work of an installed wheel: python -I smoke.py, in an empty folder.

It prints the versions of Python, torch and the package. What it imports must be installed in this
environment.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path

import numpy as np
import specdec_host as h
import torch

import specdec_kernels as s


def of_this_environment(*modules):
    for module in modules:
        path = Path(module.__file__).resolve()
        assert Path(sys.prefix).resolve() in path.parents, f"{path} is not in {sys.prefix}"


def ops_of_torch():
    """The CPU kernels verify drafts and change a cache; returns what specdec_host must repeat."""
    assert s.providers()["verify_chain"]["cpu"] == "cpp"
    target, draft = 3 * torch.sin(torch.arange(2.0 * 8 * 4 * 999)).reshape(2, 8, 4, 999)
    seeds, positions = torch.arange(8), torch.arange(8) + 100
    best = target.argmax(-1)
    given = best[:, :3].clone()
    given[1::2, 1] += 1
    verdict = s.verify_chain(target, given, rule="greedy", seeds=seeds, positions=positions)
    assert verdict.num_accepted.tolist() == [3, 1] * 4
    assert verdict.tokens[::2].equal(best[::2])
    assert verdict.tokens[1::2, :2].equal(best[1::2, :2])
    steps = s.draft_positions(positions, 3, rule="token").reshape(-1)
    rows = draft[:, :3].reshape(-1, 999)
    drafted = s.sample(rows, temperature=0.8, seeds=seeds.repeat_interleave(3), positions=steps)
    q = [draft[:, :3], *(x.reshape(8, 3) for x in (drafted.logsumexp, drafted.threshold))]
    arguments = [target, drafted.tokens.reshape(8, 3)]
    options = dict(temperature=0.8, top_p=0.95, seeds=seeds, positions=positions)
    verdict = s.verify_chain(*arguments, s.SampledDraft(*q, 0.8), **options)
    assert 0 < verdict.num_accepted.sum() < 24
    assert not verdict.status.any()
    cache, new = torch.zeros(1, 1, 3, 1), torch.ones(1, 1, 2, 1)
    s.kv_append_([cache], [new], torch.tensor([1]))
    s.kv_truncate_([cache], torch.tensor([3]), torch.tensor([2]), zero_fill=True)
    assert cache.flatten().tolist() == [0, 1, 0]
    return arguments, q, options, verdict


def host(arguments, q, options, verdict):
    """specdec_host gives the bits of the torch op, and copies drafts."""
    options = options | {name: np.asarray(options[name]) for name in ("seeds", "positions")}
    draft = h.SampledDraft(*map(np.asarray, q), 0.8)
    repeated = h.verify_chain(*map(np.asarray, arguments), draft, **options)
    assert (repeated.tokens == verdict.tokens.numpy()).all()
    assert (repeated.logprobs == verdict.logprobs.numpy()).all()
    text = h.SuffixAutomaton()
    text.append(np.array([5, 6, 7, 5, 6, 8, 5, 6, 8, 5, 6]))
    assert text.propose(gamma=3, count=2).tokens.tolist() == [[8, 5, 6], [7, 5, 6]]


def main():
    of_this_environment(s, h)
    host(*ops_of_torch())
    installed = importlib.metadata.version("specdec-kernels")
    assert installed.partition("+")[0] == s.__version__, installed
    python = platform.python_version()
    print(f"Python {python}, torch {torch.__version__}, specdec-kernels {installed}")


if __name__ == "__main__":
    main()
