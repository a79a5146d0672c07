"""The C interface gives the bits of the torch ops, and its programs what they decide."""

import re

import proofs
import pytest
import torch
from c import library as c
from torch.utils._pytree import tree_map

import specdec_kernels

pytestmark = c.MARKS

CASES = [
    pytest.param(case, id=f"{op}-{case}", marks=[pytest.mark.full] if case.heavy else [])
    for op in c.OPS
    for case in proofs.cases(op, heavy=True)
]


@pytest.mark.parametrize("case", CASES)
def test_the_c_interface_leaves_the_bytes_of_the_torch_op(case):
    theirs = case.args()
    ours = tree_map(lambda x: proofs.copied(x) if isinstance(x, torch.Tensor) else x, theirs)
    expected = c.returned(case.op, theirs)
    given = dict(zip(c.arguments_of(case.op), ours, strict=True))
    outputs, guards = c.poisoned(expected)
    assert c.call(case.op, c.filled(case.op, given, outputs)) == ""
    c.check_outputs(given, outputs, expected)
    proofs.same_buffers("arguments", ours, theirs)
    assert all((guard == c.POISON).all() for guard in guards)


def test_a_vector_with_gaps_or_in_int32_is_copied():
    """On the processor; the arguments of the cases are contiguous and int64."""
    case = next(one for one in proofs.cases("sample") if one.args()[0].shape[0] > 2)
    given = dict(zip(c.arguments_of("sample"), case.args(), strict=True))
    vectors = dict(seeds=-torch.arange(9, 9 + len(given["seeds"])), positions=given["positions"])
    for change in (torch.Tensor.int, lambda x: x.repeat_interleave(2)[::2], torch.Tensor.long):
        args = given | {name: change(vector) for name, vector in vectors.items()}
        expected = c.returned("sample", [*args.values()])
        outputs, _ = c.poisoned(expected)
        assert c.call("sample", c.filled("sample", args, outputs)) == ""
        c.check_outputs(args, outputs, expected)


def test_empty_batches_and_nan_are_among_the_cases():
    assert all(any(0 in case.args()[0].shape for case in proofs.cases(op)) for op in c.WORKSPACE)
    for op in ("verify_chain", "verify_tree"):
        cases = [proofs.copied(case.args()[0]).isnan().any() for case in proofs.cases(op)]
        assert any(cases), op


def test_the_library_says_what_it_is():
    library = c.library()
    major, minor, patch = map(int, specdec_kernels.__version__.split(".")[:3])
    assert library.specdec_version() == major * 10000 + minor * 100 + patch
    assert library.specdec_cpu_capability().decode() == specdec_kernels.cpu_capability()
    before = library.specdec_get_num_threads()
    assert library.specdec_set_num_threads(3) == 0
    assert library.specdec_get_num_threads() == 3
    assert library.specdec_set_num_threads(0) == 1
    assert c.last_error() == "threads must be in [1, 1024], got 0"
    assert library.specdec_set_num_threads(before) == 0
    assert not library.specdec_has_cuda()


def test_the_library_exports_what_the_header_declares():
    (path,) = c.installed().glob("lib*/libspecdec_kernels.so")
    exported = {line.split()[-1] for line in c.run("nm", "-D", "--defined-only", path).splitlines()}
    assert exported == set(re.findall(r"SPECDEC_API[\w*\s]+?\b(specdec_\w+)\(", c.PLAIN))
    needed = c.run("readelf", "-d", path)
    assert "libspecdec_kernels.so.0]" in needed
    assert not re.search("torch|python", needed)


# Programs.


def verdict_lines(drafts, verdict):
    for b, tokens in enumerate(verdict.tokens.tolist()):
        accepted, status = verdict.num_accepted[b], verdict.status[b]
        shown = "".join(f" {t}" for t in tokens if t >= 0)
        drafted = "".join(f" {t}" for t in drafts[b])
        yield f"sequence {b}: drafted{drafted}, accepted {accepted}, tokens{shown}, status {status}"


def chain_lines():
    b, i, v = torch.meshgrid(*map(torch.arange, (3, 5, 16)), indexing="ij")
    target = 0.5 * ((7 * b + 5 * i + 3 * v * v) % 11).float()
    draft = (target + 0.125 * ((v + b) % 3))[:, :-1].contiguous()
    seeds, positions = torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30])
    sampled = specdec_kernels.sample(
        draft.view(12, 16), top_p=0.9, seeds=seeds.repeat_interleave(4),
        positions=(positions[:, None] + torch.arange(4)).view(-1),
    )  # fmt: skip
    statistics = [x.view(3, 4) for x in (sampled.logsumexp, sampled.threshold)]
    drafts = sampled.tokens.view(3, 4)
    verdict = specdec_kernels.verify_chain(
        target, drafts, specdec_kernels.SampledDraft(draft, *statistics, 1.0), seeds=seeds,
        positions=positions,
    )  # fmt: skip
    return [*verdict_lines(drafts.tolist(), verdict)]


def ragged_lines():
    row, v = torch.meshgrid(torch.arange(7), torch.arange(16), indexing="ij")
    drafts = torch.tensor([[5, 3, 0], [-1] * 3, [14, -1, -1]], dtype=torch.int32)
    verdict = specdec_kernels.verify_chain(
        ((5 * row + 3 * v * v) % 11).float(), drafts, seeds=torch.tensor([1, 2, 3]),
        positions=torch.tensor([10, 20, 30]), temperature=torch.tensor([0.0, 0.7, 1.5]),
        target_indptr=torch.tensor([0, 4, 5, 7]), max_new_tokens=torch.tensor([2, 100, 100]),
    )  # fmt: skip
    drafts = [[t for t in one if t >= 0] for one in drafts.tolist()]
    return [*verdict_lines(drafts, verdict), "refused: temperature must be [3], got [1]"]


LINES = {"verify_chain.c": chain_lines, "verify_ragged.cpp": ragged_lines}


@pytest.mark.parametrize("source", LINES)
def test_a_program_prints_what_the_torch_op_decides(source, tmp_path):
    made = c.program(tmp_path, c.ROOT / "examples/c" / source)
    lines = LINES[source]()
    assert c.run(made).splitlines() == lines
    assert max(int(n) for line in lines for n in re.findall(r"accepted (\d)", line)) > 1


def test_cmake_finds_the_library_and_either_form_of_it_runs(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    text = (c.ROOT / "examples/c/CMakeLists.txt").read_text()
    both = text + "add_executable(static verify_chain.c)\n"
    both += "target_link_libraries(static PRIVATE specdec::kernels_static)\n"
    (source / "CMakeLists.txt").write_text(both)
    for name in LINES:
        (source / name).symlink_to(c.ROOT / "examples/c" / name)
    build = tmp_path / "build"
    c.run("cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={c.installed()}")
    c.run("cmake", "--build", build)
    for made, lines in (
        ("verify_chain", chain_lines),
        ("verify_ragged", ragged_lines),
        ("static", chain_lines),
    ):
        assert c.run(build / made).splitlines() == lines()
