"""Sampling parameters of SGLang's requests, and the distributions that they describe."""

from types import SimpleNamespace

import torch

TOP_K_ALL = 1 << 30  # how SGLang writes that there is no top-k


def sampling_info(b, cls=SimpleNamespace, **given):
    """What its steps read of a `SamplingBatchInfo`, or one itself."""
    rows = dict(temperatures=1.0, top_ks=TOP_K_ALL, top_ps=1.0, min_ps=0.0)
    others = {name: given.pop(name) for name in given.keys() - rows}
    values = {name: torch.as_tensor(x).expand(b).clone() for name, x in (rows | given).items()}
    values["temperatures"], values["top_ks"] = (
        values["temperatures"][:, None],
        values["top_ks"].int(),
    )
    greedy = values["top_ks"] <= 1
    flags = dict(
        is_all_greedy=bool(greedy.all()), is_any_greedy=bool(greedy.any()), vocab_size=0,
        need_top_p_sampling=True, need_top_k_sampling=True, need_min_p_sampling=True, device="cpu",
    )  # fmt: skip
    return cls(**values, **flags, **dict(sampling_seed=None) | others)


def expected(row, temperatures=1.0, top_ks=0, top_ps=1.0, min_ps=0.0):
    """P of a row, in the order of SGLang's sampler."""
    p = (row.double() / temperatures).softmax(-1)
    if top_ks:
        p = torch.where(p < p.sort().values[-top_ks], 0.0, p)
        p = p / p.sum()
    down = p.sort(descending=True)
    p[down.indices[down.values.cumsum(-1) - down.values >= top_ps]] = 0.0
    p[p < min_ps * p.max()] = 0.0
    return p / p.sum()
