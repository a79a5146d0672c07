"""Providers, and short calls of the ops.

A provider is one implementation of an op: "reference" (the float64 specification), "cpp" (the C++
CPU kernels), "triton" (in Triton's interpreter) or "cuda" (the CUDA source compiled for the CPU by
the shim of `tests/simt`). `provider(op, name)` returns the function, which takes the arguments of
the op's schema; `sample`, `verify` and `verify_tree` call it with those of the public function.
"""

from __future__ import annotations

import numpy as np
import proofs
import pytest
import torch
from proofs import tensors
from simt import emulator
from support import triton_interpreter

from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.rules import KINDS, METHODS, NOISES, RULES, TREE_RULES, TRITON_RULES

SHIM_PROVIDERS = ["cuda"] if emulator.available else []
KERNEL_PROVIDERS = [n for n in ("cpp", "triton") if n in proofs.providers("verify_chain")]
if "triton" in KERNEL_PROVIDERS:
    triton_interpreter.patch_once()
KERNEL_PROVIDERS += SHIM_PROVIDERS
ALL_PROVIDERS = ["reference", *KERNEL_PROVIDERS]
# Those with every op and every rule of `verify_chain`.
WHOLE_PROVIDERS = [n for n in ALL_PROVIDERS if n != "triton"]
# Triton's interpreter takes 0.05 to 1 s for each row.
FAST_PROVIDERS = ["reference", "cpp", *SHIM_PROVIDERS]
# For tests that call an op so often that `make test` leaves both emulators out.
HEAVY_PROVIDERS = [
    pytest.param(name, marks=[] if name in {"reference", "cpp"} else pytest.mark.full)
    for name in ALL_PROVIDERS
]

# For tests that enumerate a toy model, which takes the reference up to a second each. `make test`
# compares the emulator with C++ in tests/simt, and leaves its enumerations to `make test-all`.
ENUMERATED_PROVIDERS = [
    pytest.param("reference", marks=pytest.mark.slow),
    "cpp",
    *(pytest.param(name, marks=pytest.mark.full) for name in SHIM_PROVIDERS),
]


def enumerated(forms, some):
    """(provider, *form): in `make test` all for C++ and some for the reference, in `make quick`
    some for C++."""
    every = {"cpp": forms, "reference": some}
    return [
        pytest.param(
            name,
            *(form if isinstance(form, tuple) else (form,)),
            marks=[
                *([pytest.mark.slow] if name == "reference" or form not in some else []),
                *([pytest.mark.full] if name in SHIM_PROVIDERS or form not in every[name] else []),
            ],
        )
        for name in ("cpp", "reference", *SHIM_PROVIDERS)
        for form in forms
    ]


def serves(name, case):
    """Whether a provider has the rule of a case of `verify_chain`; true of cases of other ops."""
    chain = name == "triton" and case.op == "verify_chain"
    return not chain or ChainArguments(*case.args()).rule_name in TRITON_RULES


def provider_cases(op):
    """(provider, case) pairs to compare with the specification: fewer rows for the interpreter."""
    return [
        pytest.param(n, c, id=f"{n}-{c}")
        for n in proofs.providers(op)
        for c in proofs.cases(op, heavy=n != "triton", rows=6 if n == "triton" else None)
        if n != "reference" and serves(n, c)
    ]


def provider(op, name):
    """The function with which a provider implements an op."""
    return emulator.library().op(op) if name == "cuda" else proofs.providers(op)[name]


def run_case(case, name="cpp", args=None):
    """Outputs of a provider, with its arguments where the op works in place."""
    args = args or case.args()
    out = tensors([provider(case.op, name)(*args)])
    return out + tensors(args) if case.op.endswith("_") else out


def sampling_arguments(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The eight sampling arguments of an op: for each parameter a tensor or None, and a scalar."""
    out = []
    for value, off in ((temperature, 1.0), (top_k, 0), (top_p, 1.0), (min_p, 0.0)):
        out += [value, off] if isinstance(value, torch.Tensor) else [None, value]
    return out


def number(value, names):
    """The number by which an op takes a name; a number stays as it is."""
    return names.index(value) if isinstance(value, str) else value


def per_sequence(value, n):
    """[n] int64: a tensor as it is, a scalar repeated."""
    return value if isinstance(value, torch.Tensor) else torch.full((n,), value, dtype=torch.int64)


def sample(
    op, logits, *, bitmask=None, seeds=0, positions=0, noise="draft", method=None, **filters
):
    """Call an implementation of `sample` with the arguments of the public function."""
    n = len(logits)
    method = method or ("gumbel" if noise == "shared" else "cdf")
    seeds, positions = per_sequence(seeds, n), per_sequence(positions, n)
    return op(
        logits, *sampling_arguments(**filters), bitmask, seeds, positions, number(noise, NOISES),
        number(method, METHODS),
    )  # fmt: skip


def verify(op, target, tokens, draft=None, *, sampled=None, ids=None, columns=None, kind="logits",
           draft_rows=None, rule="token", bitmask=None, draft_bitmask=None, seeds=0, positions=0,
           target_indptr=None, uniforms=None, lenience=1.0, epsilon=0.09, delta=0.3, beta=1,
           tau=0.0, rates=None, eos_token_ids=None, max_new_tokens=None, logprobs=True,
           accept_probs=True, **filters):  # fmt: skip
    """Call an implementation of `verify_chain` with the arguments of the public function.

    sampled: logsumexp, threshold and temperature of a `SampledDraft`, whose logits are `draft`.
    ids: those of a `SparseDraft`, whose probabilities are `draft`. columns: those of a `DraftMap`.
    beta, tau: `top_beta_rank` and `top_beta_distance`. rates: `synthetic_rates`.
    """
    n = len(tokens)
    logsumexp, threshold, t = sampled or (None, None, 1.0)
    ts, t = (t, 1.0) if isinstance(t, torch.Tensor) else (None, t)
    return op(
        target, tokens, draft, ids, columns, logsumexp, threshold, ts, t, draft_bitmask, draft_rows,
        number(kind, KINDS), number(rule, RULES), *sampling_arguments(**filters), bitmask,
        per_sequence(seeds, n), per_sequence(positions, n),
        target_indptr, uniforms, lenience, epsilon, delta, beta, tau, rates, eos_token_ids,
        max_new_tokens, logprobs, accept_probs,
    )  # fmt: skip


def verify_tree(op, target, tokens, parents, draft=None, *, rule, sampled=None, ids=None,
                columns=None, draft_rows=None, kind="logits", bitmask=None, draft_bitmask=None,
                seeds=0, positions=0, target_indptr=None, uniforms=None, epsilon=0.09, delta=0.3,
                eos_token_ids=None, max_new_tokens=None, max_depth=None, logprobs=True,
                accept_probs=True, **filters):  # fmt: skip
    """Call an implementation of `verify_tree`; the arguments of drafts are those of `verify`."""
    b = len(tokens)
    logsumexp, threshold, t = sampled or (None, None, 1.0)
    ts, t = (t, 1.0) if isinstance(t, torch.Tensor) else (None, t)
    return op(
        target, tokens, parents, draft, ids, columns, logsumexp, threshold, ts, t, draft_bitmask,
        draft_rows, number(kind, KINDS), number(rule, TREE_RULES), *sampling_arguments(**filters),
        bitmask,
        per_sequence(seeds, b), per_sequence(positions, b),
        target_indptr, uniforms, epsilon, delta, eos_token_ids, max_new_tokens,
        tokens.shape[1] if max_depth is None else max_depth, logprobs, accept_probs,
    )  # fmt: skip


def philox_words(seeds, counters, positions, stream):
    """Philox4x32-10 over NumPy arrays, written from the paper: [..., 4] uint32."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    seeds, counters, positions = np.broadcast_arrays(
        *(np.asarray(x).astype(np.int64).view(np.uint64) for x in (seeds, counters, positions))
    )
    key = [seeds & mask, seeds >> shift]
    c = [counters & mask, positions & mask, positions >> shift, np.full_like(counters, stream)]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> shift) ^ c[1] ^ key[0], b & mask, (a >> shift) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + np.uint64(0x9E3779B9)) & mask, (key[1] + np.uint64(0xBB67AE85)) & mask]
    return np.stack(c, -1).astype(np.uint32)


def philox_uniforms(seeds, positions, stream):
    """[n] float64 in [0, 1): 53 bits of words 0 and 1 of counter 0."""
    words = philox_words(seeds, 0, positions, stream).astype(np.uint64)
    return ((words[..., 0] | words[..., 1] << np.uint64(32)) >> np.uint64(11)) * 2.0**-53


@pytest.fixture
def small_tiles(monkeypatch):
    """Use tiles of 256 and scan blocks of 16, so that a small row has several of each."""
    from specdec_kernels.triton import launch  # noqa: PLC0415

    for name in ("TILE", "CHUNK", "LIST"):
        monkeypatch.setattr(launch, name, 256)
    monkeypatch.setattr(launch, "MAX_BLOCK", 16)
    launch.tiling.cache_clear()
    yield
    launch.tiling.cache_clear()


# The cases of `verify_tree` with which providers prove what a result may depend on.
TREE_CASES = [
    *(proofs.tree_case(6, 7, 257, rule=r) for r in TREE_RULES),
    proofs.tree_case(6, 7, 257, torch.bfloat16, rows="shared", filters="tensor"),
    proofs.tree_case(6, 7, 257, draft="sampled", rows="flat", filters="tensor"),
    proofs.tree_case(6, 7, 257, kind="probs", rows="flat"),
    proofs.tree_case(6, 7, 257, rule="multi_draft_wor", draft="sparse", rows="shared"),
    proofs.tree_case(6, 7, 257, rule="traversal", draft="mapped-sampled", filters="tensor"),
    proofs.tree_case(6, 7, 257, rule="k_seq", kind="probs", rows="shared"),
]
TREE_PAIRS = [("cpp", c) for c in TREE_CASES] + [
    (n, proofs.tree_case(3, 3, 67, rule=r, rows="shared"))
    for n in SHIM_PROVIDERS
    for r in TREE_RULES
]
