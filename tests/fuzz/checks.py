"""The properties that every result of an op has, whatever the arguments were."""

from __future__ import annotations

import proofs
import torch
from proofs import assert_bits, assert_close, copied, intervals, same_buffers, same_tensors, tensors
from proofs.forward import layers_by_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from specdec_kernels import Status, _library, reference

BAD_PARAMETER, OUT_OF_RANGE = int(Status.BAD_PARAMETER), int(Status.DRAFT_OUT_OF_RANGE)
ALL_BITS = sum(Status) - Status.KEPT_CUT  # those of the verifiers
REFUSALS = (RuntimeError, TypeError, ValueError)  # of arguments, by an op or its public function
# Their results are compared with the reference's, byte for byte.
COMPARED = (
    *_library.CACHE_OPS, "tree_attention", "rerank_tree", "build_trie", "ngram_propose",
)  # fmt: skip


class Recorder(TorchDispatchMode):
    """Keeps the arguments with which a public function calls its op, and checks the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "specdec_kernels":
            return function(*args, **(kwargs or {}))
        self.calls.append((function, args))
        return call_and_check(function, args)


def call_and_check(function, args):
    """Call an op and check what it returns; whatever it raises passes through."""
    op = function._schema.name.split("::")[1]
    copies = no_refusal(op, copies_of, args) if op in COMPARED and comparable(args) else None
    out = function(*args)
    if any(t.device.type != "cpu" or t.numel() > 2**24 for t in tensors(args)):
        return out
    given = dict(zip((a.name for a in function._schema.arguments), args, strict=False))
    outputs = out if isinstance(out, (tuple, list)) else () if out is None else (out,)
    if op in CHECKS:
        no_refusal(op, CHECKS[op], given, *outputs)
    if copies is not None:
        no_refusal(op, compare_with_reference, op, args, outputs, copies)
    return out


def no_refusal(op, function, *args):
    """The result of a check. An error in it must not count as a refusal by the op, which ran."""
    try:
        return function(*args)
    except REFUSALS as error:
        raise AssertionError(f"{op}: {function.__name__} refused what ran: {error}") from error


def comparable(args):
    """Whether the arguments are small, and no two of them share memory."""
    given = tensors(args)
    starts = [t.untyped_storage().data_ptr() for t in given if t.numel()]
    return (
        all(t.device.type == "cpu" and t.numel() < 2**16 for t in given)
        and len(starts) == len(set(starts))
        and all(isinstance(v, int) and abs(v) < 2**16 for v in args if isinstance(v, int))
    )


def copies_of(args):
    """Copies of everything, where a view becomes the same view of a copy of its whole memory."""
    return tree_map_only(torch.Tensor, copied, args)


def compare_with_reference(op, args, outputs, copies):
    """Outputs and all memory of the arguments, also what surrounds the views."""
    want = proofs.providers(op)["reference"](*copies)
    same_tensors(f"{op} outputs", outputs, () if want is None else tree_leaves(want))
    same_buffers(f"{op} arguments", args, copies)


def assert_in(name, x, low, high):
    """All values in [low, high)."""
    if x.numel():
        assert low <= int(x.min()) <= int(x.max()) < high, f"{name} not in [{low}, {high}): {x}"


def out_of_range(given, n):
    """[n] bool: whether a sampling parameter of the sequence or row is out of range."""
    bad = torch.zeros(n, dtype=torch.bool)
    t, k, p, m = (given[name] for name in ("temperatures", "top_ks", "top_ps", "min_ps"))
    if t is not None:
        bad |= ~((t >= 0) & (t < torch.inf))
    if k is not None:
        bad |= k < 0
    if p is not None:
        bad |= ~((p > 0) & (p <= 1))
    if m is not None:
        bad |= ~((m >= 0) & (m <= 1))
    return bad


def allowed_tokens(bitmask, shape):
    """[.., V] bool; everything without a bitmask."""
    if bitmask is None:
        return torch.ones(shape, dtype=torch.bool)
    bits = bitmask[..., None] >> torch.arange(32) & 1
    return bits.flatten(-2)[..., : shape[-1]] == 1


def check_sample(given, tokens, logprobs, logsumexp, threshold, status):
    n, v = given["logits"].shape
    assert_in("tokens", tokens, -1, v)
    bad = out_of_range(given, n)
    allowed = allowed_tokens(given["token_bitmask"], (n, v))
    row = given["logits"].float().where(allowed, -torch.inf)
    invalid = row.isnan().any(-1) | ~row.amax(-1).isfinite() if n else bad
    fault = torch.where(allowed.any(-1), int(Status.TARGET_INVALID), int(Status.NOTHING_ALLOWED))
    want = torch.where(bad, BAD_PARAMETER, torch.where(invalid, fault, 0))
    assert status.tolist() == want.tolist(), f"status is {status}, not {want}"
    assert ((tokens == -1) == (status != 0)).all(), f"tokens {tokens}, status {status}"
    for name, x in (("logprobs", logprobs), ("logsumexp", logsumexp), ("threshold", threshold)):
        assert not x.isnan().any(), f"{name} is {x}"


def check_kept_tokens(given, ids, logprobs, counts, status):
    n, v = ids.shape[-1], given["target"].shape[-1]
    assert_in("ids", ids, -1, v)
    assert_in("counts", counts, 0, v + 1)
    there = torch.arange(n) < counts[..., None]
    assert ((ids >= 0) == there).all(), f"ids {ids}, counts {counts}"
    assert ((logprobs > -torch.inf) == there).all(), f"logprobs {logprobs}, counts {counts}"
    assert ((status == int(Status.KEPT_CUT)) == (counts > n)).all(), f"{counts}, status {status}"
    assert (counts[(status & ~int(Status.KEPT_CUT)) != 0] == 0).all(), f"{counts}, status {status}"
    assert (logprobs[..., 1:] <= logprobs[..., :-1]).all(), f"logprobs {logprobs}"
    sums = logprobs.double().exp().sum(-1)
    whole = (counts > 0) & (counts <= n)
    assert ((sums[whole] - 1).abs() < 1e-4).all(), f"probabilities add up to {sums}"
    assert (sums < 1 + 1e-4).all(), f"probabilities add up to {sums}"


def check_verdict(given, drafted, tokens, num_accepted, status, logprobs, accept_probs):
    """The checks that chains and trees share; `drafted` are the tokens that were passed."""
    b, width = tokens.shape
    v = given["target"].shape[-1]
    assert_in("status", status, 0, ALL_BITS + 1)
    assert_in("num_accepted", num_accepted, 0, width)
    emitted = tokens >= 0
    counts = emitted.sum(-1)
    assert_in("tokens", tokens, -1, v)
    assert (emitted == (torch.arange(width) < counts[:, None])).all(), f"tokens: {tokens}"
    assert ((counts == num_accepted) | (counts == num_accepted + 1)).all(), f"{tokens}"
    # Nor is one NaN. Probabilities that are given may be as large as a float.
    assert (logprobs < 89).all(), f"logprobs: {logprobs}"
    if logprobs.numel():
        assert (logprobs[~emitted] == 0).all(), f"logprobs: {logprobs}"
    known = accept_probs[~accept_probs.isnan()]
    assert ((known >= 0) & (known <= 1)).all(), f"accept_probs: {accept_probs}"
    bad = out_of_range(given, b)
    if given["uniforms"] is not None:
        bad |= ~((given["uniforms"] >= 0) & (given["uniforms"] < 1)).all(-1)
    refused = (status & BAD_PARAMETER) != 0
    assert not (bad & ~refused).any(), f"status is {status}, out of range: {bad}"
    assert (counts[refused] == 0).all(), f"emitted under BAD_PARAMETER: {tokens}"
    target = given["target"]
    if given["target_indptr"] is None and b and given["max_new_tokens"] is None:
        nothing = target[:, 0].isnan().all(-1) & ~refused
        fault = Status.TARGET_INVALID | Status.NOTHING_ALLOWED
        invalid = (status & int(fault)) != 0
        assert not (nothing & ~invalid).any(), f"status is {status}, row 0 invalid: {nothing}"


def check_verify_chain(given, *outputs):
    drafted = given["draft_token_ids"]
    check_verdict(given, drafted, *outputs)
    tokens, num_accepted = outputs[:2]
    if given["token_bitmask"] is not None and given["target_indptr"] is None:
        allowed = allowed_tokens(given["token_bitmask"], given["target"].shape)
        emitted = allowed.gather(-1, tokens.long().clamp(min=0)[..., None])[..., 0]
        assert (emitted | (tokens < 0)).all(), f"emitted {tokens}, which the bitmask forbids"
    kept = torch.arange(drafted.shape[1]) < num_accepted[:, None]
    assert (tokens[:, :-1][kept] == drafted[kept]).all(), f"accepted {tokens} of {drafted}"


def check_verify_tree(given, path, *outputs):
    drafted, parents = given["tree_tokens"], given["parents"]
    check_verdict(given, drafted, *outputs)
    tokens, num_accepted, status = outputs[:3]
    n = drafted.shape[1]
    assert_in("path", path, -1, n)
    for b, row in enumerate(path.tolist()):
        nodes = row[: int(num_accepted[b])]
        assert all(x == -1 for x in row[len(nodes) :]), f"path: {path}"
        assert nodes == sorted(set(nodes)), f"path: {path}"
        assert -1 not in nodes, f"path: {path}"
        assert [int(drafted[b, x]) for x in nodes] == tokens[b, : len(nodes)].tolist()
    if given["target_indptr"] is None and n:
        wrong = (parents < -1) | (parents >= torch.arange(n)) | (drafted < -1)
        missing = wrong.any(-1) & ((status & (OUT_OF_RANGE | BAD_PARAMETER)) == 0)
        assert not missing.any(), f"status is {status}, nodes out of range: {wrong}"


def check_expand_tree(given, tokens, scores, frontier):
    _, f, width = tokens.shape
    assert_in("tokens", tokens, -1, given["logits"].shape[-1])
    assert_in("frontier", frontier, 0, f * width)
    assert ((tokens == -1) == (scores == -torch.inf)).all(), f"{tokens} {scores}"
    assert not scores.isnan().any(), f"scores: {scores}"


def check_pack_linear(given, panels):
    bits = {4: torch.int32, 2: torch.int16}[panels.itemsize]
    assert torch.equal(panels.view(bits), reference.pack_linear(given["weight"]).view(bits))


def check_pack_blocks(given, panels):
    assert torch.equal(panels, reference.pack_blocks(given["blocks"], given["format"]))


def check_unpack_blocks(given, weight):
    assert_bits(weight, reference.unpack_blocks(*given.values()))


def check_packed_linear(given, y):
    x, panels, bias = given["x"], given["panels"], given["bias"]
    k, n = given["in_features"], given["out_features"]
    if panels.dtype == torch.uint8:
        panels = reference.pack_linear(reference.unpack_blocks(panels, k, n).to(x.dtype))
    magnitude = reference.packed_linear(x.double().abs(), panels.abs(), k, n, None)
    want = reference.packed_linear(x.double(), panels, k, n, bias)
    largest = 1e30 if y.dtype != torch.float16 else 6e4
    bound = 2.0**-20 * magnitude + torch.finfo(y.dtype).eps * want.abs() + 1e-7
    near = (y.double() - want).abs() <= bound
    assert (near | (magnitude >= largest) | ~magnitude.isfinite() | ~want.isfinite()).all()


def check_cached_attention(given, out):
    """An output lies between the least and the largest visible value, unless numbers overflow."""
    query, keys, values, mask = (given[name] for name in ("query", "keys", "values", "mask"))
    batch, heads, queries, _ = query.shape
    group = heads // keys.shape[1]
    assert out.shape == (batch, queries, heads, values.shape[3])
    assert out.is_contiguous()
    seen = torch.ones(batch, 1, queries, keys.shape[2], dtype=torch.bool) if mask is None else mask
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(queries)):
        key, value = (x[b, h // group][seen[b, 0, i]].double() for x in (keys, values))
        if len(key) == 0:
            assert not out[b, i, h].any()
            continue
        products = key.abs() @ query[b, h, i].double().abs()
        scale = query.shape[3] ** -0.5 if given["scale"] is None else given["scale"]
        if not (products * max(abs(scale), 1) < 1e30).all() or not (value.abs() < 1e30).all():
            continue  # a NaN, an infinity or an overflow
        slack = torch.finfo(out.dtype).eps * value.abs().amax(0) + 1e-30
        got = out[b, i, h].double()
        assert ((got >= value.amin(0) - slack) & (got <= value.amax(0) + slack)).all()


def moderate(given):
    """Whether all numbers are finite, and no product of float32 overflows."""
    given = [t for t in tensors(given.values()) if t.is_floating_point()]
    return all(bool((t.abs() < 1e6).all()) for t in given)


def check_norm_qkv_rope(given, *out):
    lead, size = given["x"].shape[:2], given["cos"].shape[2]
    for y, outputs in zip(out, given["out_features"], strict=True):
        assert y.shape == (*lead, outputs // size, size)
        assert y.is_contiguous()
    if moderate(given):
        for y, interval in zip(out, intervals.norm_qkv_rope(**given), strict=True):
            assert interval.holds(y).all()


def check_output_norm_mlp(given, y):
    assert y.shape == given["residual"].shape
    assert y.is_contiguous()
    if moderate(given):
        assert intervals.output_norm_mlp(**given)[0].holds(y).all()


def check_decoder_layers(given, y):
    """Once more by the ops that it consists of: the same tokens go to the same slots."""
    assert y.shape[-3:] == (*given["x"].shape[:2], len(given["norms"][1]))
    assert y.is_contiguous()
    if comparable(tuple(given.values())):
        written = copies_of(given["caches"])
        assert_close("y", y, layers_by_ops(**given | {"caches": written}))
        for cache, want in zip(given["caches"], written, strict=True):
            assert_close("a cache", cache, want)


# By op, whose functions are named after it.
CHECKS = {
    op: globals()[check] for op in _library.OPS if (check := f"check_{op.rstrip('_')}") in globals()
}
