"""Comparisons: of outputs, naming the worst element; of whole buffers; and of samples."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from specdec_kernels import _library, reference

# The outputs of each op; few ops name none in their schema.
OUTPUTS = {
    op: [r.name.removesuffix("_out") or f"output {i}" for i, r in enumerate(schema.returns)]
    for op in _library.OPS
    for schema in [getattr(torch.ops.specdec_kernels, op).default._schema]
}
# Providers that round differently draw different tokens only where a uniform lies this close to a
# step of the cumulative distribution: the share of draws in which that may happen.
MAX_TIE_RATE = 2e-5
SIGNIFICANCE = 1e-6  # a statistical test fails below this p-value; seeds are fixed


def assert_close(name, got, want, atol=0.0, rtol=0.0):
    """Fail with the worst element, its index and both values; NaN equals NaN, inf equals inf."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: {got.dtype}, not {want.dtype}"
    if got.numel() == 0:
        return
    a, b = got.double(), want.double()
    same = (a == b) | (a.isnan() & b.isnan())
    excess = torch.where(same, 0.0, (a - b).abs() - atol - rtol * b.abs()).nan_to_num(torch.inf)
    if float(excess.max()) > 0:
        i = int(excess.argmax())
        at = tuple(int(n) for n in np.unravel_index(i, got.shape))
        raise AssertionError(
            f"{name}{list(at)} is {got.flatten()[i].item()!r}, not {want.flatten()[i].item()!r} "
            f"({int((excess > 0).sum())} of {got.numel()} differ)"
        )


def assert_bits(got, want):
    """Equal bit for bit, but for the payload of NaN; zeros keep their sign."""
    assert_close("numbers", got, want)
    assert torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan())


def assert_outputs_close(op, got, want):
    """Compare ids, counts and status exactly, and float outputs to rounding of float32."""
    for name, g, w in zip(OUTPUTS[op], got, want, strict=True):
        tolerance = {
            "logprobs": 1e-5, "logsumexp": 2e-6, "threshold": 1e-6, "accept_probs": 2e-5,
            "scores": 4e-6,
        }.get(name, 0.0)  # fmt: skip
        assert_close(name, g, w, atol=tolerance, rtol=tolerance)


def assert_outputs_equal(op, got, want):
    """Compare all outputs of an op bit for bit."""
    for name, g, w in zip(OUTPUTS[op], got, want, strict=True):
        assert_close(name, g, w)


def tensors(values):
    """The tensors among values, and in lists and tuples among them."""
    flat = [t for v in values for t in (v if isinstance(v, (list, tuple)) else [v])]
    return [t for t in flat if torch.is_tensor(t)]


def assert_all_equal(got, want):
    """Compare two lists of tensors bit for bit."""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_close(f"tensor {i}", g, w)


def chi_square(tokens, probs):
    """p-value of tokens against their distribution; cells with under 5 expected are joined."""
    n = len(tokens)
    counts = torch.bincount(tokens, minlength=len(probs)).numpy().astype(float)
    expected = probs.numpy() * n
    assert counts[expected == 0].sum() == 0
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    cut = int((expected >= 5).sum())
    if expected[cut:].sum() > 0:
        counts = np.append(counts[:cut], counts[cut:].sum())
        expected = np.append(expected[:cut], expected[cut:].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return 1.0
    return chi_square_of_counts(counts, expected * counts.sum() / expected.sum())


def chi_square_of_counts(counts, expected):
    """p-value of counts against those expected; scipy.stats would take a second to import."""
    from scipy.special import chdtrc  # noqa: PLC0415  # benchmarks do without it

    return float(chdtrc(len(counts) - 1, ((counts - expected) ** 2 / expected).sum()))


def whole_buffer(view):
    """All bytes of the memory that a view belongs to."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def copied(view, device="cpu"):
    """The same view of a copy of its whole buffer."""
    buffer = whole_buffer(view).to(device, copy=True).view(view.dtype)
    return buffer.as_strided(view.shape, view.stride(), view.storage_offset())


def same(name, got, want):
    """Equal bit for bit, NaNs included; names the first element that differs."""
    got, want = (t.cpu().clone(memory_format=torch.contiguous_format) for t in (got, want))
    assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{name}: another shape or dtype"
    differ = got.view(torch.uint8) != want.view(torch.uint8) if got.dim() else got != want
    if differ.any():
        per_element = differ.view(*want.shape, -1).any(-1)
        at = per_element.nonzero()[0].tolist()
        raise AssertionError(
            f"{name}{at} is {got[tuple(at)].item()!r}, not {want[tuple(at)].item()!r} "
            f"({int(per_element.sum())} of {want.numel()} differ)"
        )


def _named_tensors(values):
    pairs, _ = tree_flatten_with_path(values)
    return {keystr(path): x for path, x in pairs if isinstance(x, torch.Tensor)}


def same_tensors(name, got, want):
    """`same` for all tensors in two nested structures, and for the buffers around them."""
    got, want = _named_tensors(got), _named_tensors(want)
    assert got.keys() == want.keys(), f"{name}: {sorted(got)}, not {sorted(want)}"
    for key, tensor in want.items():
        same(f"{name}{key}", got[key], tensor)


def same_buffers(name, got, want):
    """The buffers around all tensors in two nested structures are equal bit for bit."""
    got, want = _named_tensors(got), _named_tensors(want)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        same(f"{name}{key}", got[key], tensor)
        same(f"buffer of {name}{key}", whole_buffer(got[key]), whole_buffer(tensor))


def check(op, case, device="cpu"):
    """`op` leaves the same bytes in every buffer as the reference, and returns the same."""
    want = case.args()
    got = tree_map(lambda x: copied(x, device) if isinstance(x, torch.Tensor) else x, want)
    expected = getattr(reference, case.op)(*want)
    returned = op(*got)
    same_buffers(f"{case.op}{case} arguments", got, want)
    same_tensors(f"{case.op}{case} outputs", returned, expected)
