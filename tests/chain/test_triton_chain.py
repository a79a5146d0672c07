"""The Triton provider in the interpreter, and its kernels compiled for devices that are not here.

Tests of all providers are in tests/row and tests/chain. Here are those of Triton alone: its noise,
schedules, tiles and scan blocks.
"""

import itertools
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("triton")
os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is decorated

import proofs
import torch
import triton
import triton.language as tl
from proofs import assert_outputs_close, assert_outputs_equal
from support.programs import output_of
from support.providers import provider, sampling_arguments, small_tiles, verify  # noqa: F401

from specdec_kernels import reference
from specdec_kernels.arguments.rules import METHODS, NOISES
from specdec_kernels.reference.row import noise
from specdec_kernels.triton import launch
from specdec_kernels.triton.row import noise as triton_noise

AHEAD_OF_TIME = Path(__file__).parents[2] / "tests/device/triton_aot.py"
FILTERS = {"top_k": 40, "top_p": 0.9}


def both_schedules(op, args, monkeypatch):
    """The outputs of an op, which must be the same bits in both schedules."""
    out = []
    for split in (False, True):
        monkeypatch.setattr(launch, "force_row_parallel", split)
        out.append(provider(op, "triton")(*args))
    assert_outputs_equal(op, *out)
    return out[0]


def verify_both(monkeypatch, *args, **options):
    """`verify_chain` of both schedules."""
    return verify(lambda *a: both_schedules("verify_chain", a, monkeypatch), *args, **options)


# Noise.


@triton.jit
def _exponentials(seed, position, tile, out, TILE: tl.constexpr):
    noise = triton_noise.tile_exponentials(
        tile, tl.load(seed), tl.load(position), triton_noise.SHARED, TILE
    )
    tl.store(out + tl.arange(0, TILE), noise)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize(
    ("position", "tile", "index"),
    [(3, 0, None), (23, 494, 3499), (5, 412, 3048)],
    ids=["usual", "word39-has-a-tail", "word110-has-a-tail"],
)
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


# The cases agree with the specification in test_verify_chain.py and tests/row/test_sample.py.
CASES = [case for op in ("sample", "verify_chain") for case in proofs.cases(op, rows=6)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case}")
def test_both_schedules_give_the_same_bits(case, monkeypatch):
    both_schedules(case.op, case.args(), monkeypatch)


# Tiles, scan blocks, views, launches.


@pytest.mark.full
@pytest.mark.parametrize(
    ("rule", "filters"),
    [
        *itertools.product(["block", "match"], [{}, FILTERS]),
        ("token", FILTERS),
        ("greedy", {}),
        ("lenient", {}),
        ("typical", {}),
    ],
    ids=lambda x: x if isinstance(x, str) else "filtered" if x else "plain",
)
@pytest.mark.usefixtures("small_tiles")
def test_many_tiles_and_scan_blocks(rule, filters, monkeypatch):
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
    assert_outputs_close("verify_chain", verify_both(monkeypatch, *rest, **options), want)
    assert {int(t) >= 4096 for t in want[0].flatten() if t >= 0} == {False, True}


def test_match_takes_the_noise_of_each_position_over_two_tiles(monkeypatch):
    """The drafts are the tokens of plain sampling, all of them in the second tile."""
    target = torch.zeros(1, 4, 5000)
    target[..., 4096:] = 20.0
    seeds, positions = torch.full((4,), 3), torch.arange(4) + 7
    how = NOISES.index("shared"), METHODS.index("gumbel")
    want = reference.sample(target[0], *sampling_arguments(), seeds, positions, *how)[0]
    got = verify_both(monkeypatch, target, want[None, :3], rule="match", seeds=3, positions=7)
    assert got[0].tolist() == [want.tolist()]


@pytest.mark.parametrize("form", ["wide", "mapped", pytest.param("sparse", marks=pytest.mark.full)])
@pytest.mark.usefixtures("small_tiles")
def test_many_tiles_of_a_draft_with_a_vocabulary_of_its_own(form, monkeypatch):
    """More tiles than the target has, columns in random order, more ids than one step takes."""
    g = torch.Generator().manual_seed(11)
    n, v, d = 2, 600, {"wide": 900, "mapped": 300, "sparse": 40}[form]
    target = torch.randn(n, 3, v, generator=g)
    draft, ids, columns = torch.randn(n, 2, d, generator=g), None, None
    tokens = torch.randint(0, v, (n, 2), generator=g)
    if form == "mapped":
        columns = torch.randperm(v, generator=g).to(torch.int32)  # half of them are no column
    if form == "sparse":
        monkeypatch.setattr(launch, "width", lambda k: 16)
        ids = torch.randint(-1, v, draft.shape, generator=g)
        draft = draft.softmax(-1)
        tokens = ids[..., 7].clamp(min=0)
    for rule in ("token", "block"):
        options = dict(rule=rule, ids=ids, columns=columns, seeds=torch.arange(n))
        want = verify(reference.verify_chain, target, tokens, draft, **options)
        assert_outputs_close(
            "verify_chain", verify_both(monkeypatch, target, tokens, draft, **options), want
        )


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("indptr", [[0, 2, 2], [0, 0, 3], [-5, 2, 99]], ids=str)
@pytest.mark.parametrize(
    "form",
    [*(pytest.param(f, marks=pytest.mark.full) for f in ("logits", "probs", "sparse")), "sampled"],
)
def test_a_ragged_draft_without_the_row_is_as_no_draft(indptr, form, monkeypatch):
    """target_indptr is data: whatever it holds, nothing outside the rows may be read."""
    g = torch.Generator().manual_seed(9)
    rows, v = min(max(indptr), 3), 11
    target = torch.randn(rows, v, generator=g).softmax(-1)
    draft = torch.full((rows - 2, v), 1 / v)
    sampled = (torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2), 1.0)
    for rule in ("token", "block"):
        tokens, _, status, _, _ = verify_both(
            monkeypatch, target, torch.full((2, 2), 4), draft, rule=rule,
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
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
def test_every_kernel_compiles_ahead_of_time(target):
    printed = run_python(AHEAD_OF_TIME, target)
    assert "compiled" in printed
    print(printed)


@pytest.mark.build
def test_other_values_and_slices_of_small_arguments_compile_no_kernel_anew():
    """Triton is asked for the key of each kernel; rows are the control."""
    printed = run_python(AHEAD_OF_TIME, "--specialized")
    found = {kernel: {*names} for kernel, names in json.loads(printed).items()}
    rows = {"target", "target_stride_b", "target_stride_i", "v", "draft", "draft_stride_b"}
    rows |= {"draft_stride_i", "d"}
    listed = {"draft_ids", "draft_columns"}
    assert found["sample_tiles"] == found["sample_rows"] == {"logits", "row_stride", "v"}
    assert found["chain_tiles"] == rows
    assert found["chain_sequences"] == found["tree_sequences"] == rows | listed
    caches = [name for name in found if name.endswith(("_words", "shorten", "_rings", "_rows"))]
    assert all(not found[n] for n in caches if n not in {"attention_rows", "sample_rows"})


@pytest.mark.build  # a process that loads torch
def test_importing_the_package_does_not_import_triton():
    run_python(
        "-c", "import sys, torch; before = 'triton' in sys.modules; import specdec_kernels; "
        "sys.exit('triton' in sys.modules and not before)"
    )  # fmt: skip
