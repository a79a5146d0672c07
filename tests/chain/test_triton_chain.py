"""The Triton provider in the interpreter, and its kernels compiled for devices that are not here.

Tests of all providers are in tests/row and tests/chain. Here are those of Triton alone: its noise,
tiles, scan blocks and lists.
"""

import itertools
import json
import math
import os
from pathlib import Path

import pytest

pytest.importorskip("triton")
os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is decorated

import torch
import triton
import triton.language as tl
from proofs import assert_outputs_close
from support.programs import output_of
from support.providers import provider, sample, sampling_arguments, small_tiles, verify  # noqa: F401

from specdec_kernels import Status, reference
from specdec_kernels.arguments.rules import METHODS, NOISES
from specdec_kernels.reference.row import noise
from specdec_kernels.triton.row import noise as triton_noise

AHEAD_OF_TIME = Path(__file__).parents[2] / "tests/device/triton_aot.py"
FILTERS = {"top_k": 40, "top_p": 0.9}


def verified(*args, **options):
    return verify(provider("verify_chain", "triton"), *args, **options)


# Noise.


@triton.jit
def _exponentials(seed, position, tile, out, TILE: tl.constexpr):
    noise = triton_noise.tile_exponentials(
        tile, tl.load(seed), tl.load(position), triton_noise.SHARED, TILE
    )
    tl.store(out + tl.arange(0, TILE), noise)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize(
    ("position", "tile", "index"), [(3, 0, None), (23, 494, 3499), (5, 412, 3048)],
    ids=["usual", "word39-has-a-tail", "word110-has-a-tail"],
)  # fmt: skip
def test_exponentials_keep_their_precision_and_their_tail(position, tile, index):
    out = torch.empty(4096)
    one = torch.tensor
    _exponentials[(1,)](one([7]), one([position]), tile, out, TILE=4096)
    # The specification, at the tokens of this tile only.
    picked = range(4096) if index is None else range(index - 4, index + 5)
    for i in picked:
        v = tile * 4096 + i
        x = noise.philox(7, v // 4, position, noise.SHARED)[v % 4]
        if i == index:
            assert x < 256
            tail = noise.philox(7, v // 4, position, noise.SHARED + noise.TAIL)[v % 4]
            want = (x * 2.0**32 + tail + 0.5) * 2.0**-64
        else:
            u = torch.tensor((x + 0.5) * 2.0**-32, dtype=torch.float64)
            want = float(-torch.log1p(-u))
        assert float(out[i]) == pytest.approx(want, rel=6e-7), (v, x)


# Tiles, scan blocks, lists.


@pytest.mark.full
@pytest.mark.parametrize(
    ("rule", "filters"),
    [
        *itertools.product(["block", "match"], [{}, FILTERS]), ("token", FILTERS), ("greedy", {}),
        ("lenient", {}),
    ],
    ids=lambda x: x if isinstance(x, str) else "filtered" if x else "plain",
)  # fmt: skip
@pytest.mark.usefixtures("small_tiles")
def test_many_tiles_and_scan_blocks(rule, filters):
    """V = 4500 has 18 tiles of 256 in 2 scan blocks, and tokens are drawn from both."""
    g = torch.Generator().manual_seed(5)
    n, v = 2, 4500
    target = torch.randn(n, 2, v, generator=g)
    draft = target[:, :1] + 0.1 * torch.randn(n, 1, v, generator=g)
    target[0, :, 4096:] += 6
    target[1, :, :4096] += 6
    rest = (target, torch.randint(0, v, (n, 1), generator=g), draft)
    options = dict(rule=rule, seeds=torch.arange(n), positions=torch.arange(n), **filters)
    want = verify(reference.verify_chain, *rest, **options)
    assert_outputs_close("verify_chain", verified(*rest, **options), want)
    assert {int(t) >= 4096 for t in want[0].flatten() if t >= 0} == {False, True}


EDGES = {
    "floor": (dict(top_k=9), 3.0), "as-many-as-spans": (dict(top_k=63), 1.0),
    "more-than-spans": (dict(top_k=64, min_p=0.01), 3.0),
    "more-than-a-list": (dict(top_k=300, top_p=0.9), 1.0), "top-p-alone": (dict(top_p=0.9), 5.0),
    "flat-top-p": (dict(top_p=0.7), 0.01), "min-p-alone": (dict(min_p=0.2), 0.5),
    "ties": (dict(top_k=9, top_p=0.8), 0.5), "all-equal": (dict(top_k=3), 0.0),
    "signed-zeros": (dict(top_k=3), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.usefixtures("small_tiles")
def test_a_filter_lists_its_survivors_or_searches_the_whole_row(edge):
    """V = 1001 has 63 spans of 16; a list takes 256 tokens, and some rows have more survivors."""
    filters, spread = EDGES[edge]
    logits = spread * torch.randn(3, 1001, generator=torch.Generator().manual_seed(7))
    logits[1, ::2] = -math.inf
    logits[2] = (logits[2] * 2).round() / 2
    if edge == "signed-zeros":
        logits = -logits.abs()
        logits[:, ::100], logits[:, 50::100] = 0.0, -0.0
    for stream in ("draft", "shared"):
        options = dict(noise=stream, seeds=torch.arange(3), **filters)
        want = sample(reference.sample, logits, **options)
        got = sample(provider("sample", "triton"), logits, **options)
        assert_outputs_close("sample", got, want)


@pytest.mark.parametrize("form", ["probs", "sampled"])
def test_a_draft_row_is_checked_whole_where_few_tokens_are_listed(form):
    """The wrong entry is that of a token which no filter leaves."""
    target, draft = torch.zeros(1, 2, 600), torch.full((1, 1, 600), 0.001)
    target[..., ::300], draft[..., 7] = 5.0, math.inf
    sampled = (torch.zeros(1, 1).double(), torch.zeros(1, 1), 1.0) if form == "sampled" else None
    kind = "logits" if sampled else "probs"
    target = target if sampled else target.softmax(-1)
    options = dict(kind=kind, sampled=sampled, top_k=2)
    got = verified(target, torch.tensor([[4]]), draft, **options)
    want = verify(reference.verify_chain, target, torch.tensor([[4]]), draft, **options)
    assert_outputs_close("verify_chain", got, want)
    assert int(got[2]) == Status.DRAFT_INVALID


def test_match_takes_the_noise_of_each_position_over_two_tiles():
    """The drafts are the tokens of plain sampling, all of them in the second tile."""
    target = torch.zeros(1, 4, 5000)
    target[..., 4096:] = 20.0
    seeds, positions = torch.full((4,), 3), torch.arange(4) + 7
    how = NOISES.index("shared"), METHODS.index("gumbel")
    want = reference.sample(target[0], *sampling_arguments(), None, seeds, positions, *how)[0]
    got = verified(target, want[None, :3], rule="match", seeds=3, positions=7)
    assert got[0].tolist() == [want.tolist()]


@pytest.mark.parametrize("form", ["wide", "mapped", pytest.param("sparse", marks=pytest.mark.full)])
@pytest.mark.usefixtures("small_tiles")
def test_many_tiles_of_a_draft_with_a_vocabulary_of_its_own(form):
    """More tiles than the target has, columns in random order, more ids than one step takes."""
    g = torch.Generator().manual_seed(11)
    n, v, d = 2, 600, {"wide": 900, "mapped": 300, "sparse": 40}[form]
    target = torch.randn(n, 3, v, generator=g)
    draft, ids, columns = torch.randn(n, 2, d, generator=g), None, None
    tokens = torch.randint(0, v, (n, 2), generator=g)
    if form == "mapped":
        columns = torch.randperm(v, generator=g).to(torch.int32)  # half of them are no column
    if form == "sparse":
        ids = torch.randint(-1, v, draft.shape, generator=g)
        draft = draft.softmax(-1)
        tokens = ids[..., 7].clamp(min=0)
    for rule in ("token", "block"):
        options = dict(rule=rule, ids=ids, columns=columns, seeds=torch.arange(n))
        want = verify(reference.verify_chain, target, tokens, draft, **options)
        assert_outputs_close("verify_chain", verified(target, tokens, draft, **options), want)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("indptr", [[0, 2, 2], [0, 0, 3], [-5, 2, 99]], ids=str)
@pytest.mark.parametrize(
    "form",
    [*(pytest.param(f, marks=pytest.mark.full) for f in ("logits", "probs", "sparse")), "sampled"],
)
def test_a_ragged_draft_without_the_row_is_as_no_draft(indptr, form):
    """target_indptr is data: whatever it holds, nothing outside the rows may be read."""
    g = torch.Generator().manual_seed(9)
    rows, v = min(max(indptr), 3), 11
    target = torch.randn(rows, v, generator=g).softmax(-1)
    draft = torch.full((rows - 2, v), 1 / v)
    sampled = (torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2), 1.0)
    for rule in ("token", "block"):
        tokens, _, status, _, _ = verified(
            target, torch.full((2, 2), 4), draft, rule=rule,
            ids=torch.arange(v).expand(rows - 2, v) if form == "sparse" else None,
            sampled=sampled if form == "sampled" else None,
            kind="probs" if form == "probs" else "logits",
            target_indptr=torch.tensor(indptr, dtype=torch.int32),
            uniforms=torch.full((2, 3), 0.999, dtype=torch.float64),
        )  # fmt: skip
        for b in range(2):
            begin, end = (min(max(n, 0), rows) for n in indptr[b : b + 2])
            # The first draft of a sequence is row begin - b of the draft, if it is a row at all.
            missing = end - begin > 1 and not 0 <= begin - b < len(draft)
            assert bool(status[b] & 2) == missing
            assert (0 <= int(tokens[b, 0]) < v) == (end > begin)


# The compiler, and the import.


def run_python(*args):
    return output_of(*args, TRITON_INTERPRET="0")


@pytest.mark.build
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942"])
def test_every_kernel_compiles_ahead_of_time(target):
    printed = run_python(AHEAD_OF_TIME, target)
    assert "compiled" in printed
    print(printed)


@pytest.mark.build
def test_other_values_and_slices_of_small_arguments_compile_no_kernel_anew():
    """Triton is asked for the key of each kernel; rows are the control."""
    printed = run_python(AHEAD_OF_TIME, "--specialized")
    found = {kernel: {*names} for kernel, names in json.loads(printed).items()}
    rows = {f"target_{name}" for name in ("rows", "stride_b", "stride_i", "v")}
    rows |= {f"draft_{name}" for name in ("rows", "stride_b", "stride_i", "d", "ids", "columns")}
    kernels = ("tile_statistics", "summarize_rows", "fill_residuals", "draw")
    assert all(found[name] == rows for name in kernels)


@pytest.mark.build  # a process that loads torch
def test_importing_the_package_does_not_import_triton():
    run_python(
        "-c", "import sys, torch; before = 'triton' in sys.modules; import specdec_kernels; "
        "sys.exit('triton' in sys.modules and not before)"
    )  # fmt: skip
