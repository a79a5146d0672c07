"""The loops of the CUDA kernels issue no more instructions than bench/sass/budgets.py allows.

The figures are read from the machine code in `_C.so`, or from the sources if these are newer.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import subprocess

import pytest
import triton

import specdec_kernels
from bench.sass import budgets, routes
from bench.sass.code import parse_graph
from bench.sass.kernels import (
    FLAGS,
    NVCC,
    ROOT,
    blocks_per_multiprocessor,
    compiled,
    cubins,
    library_is_current,
    programs,
    read_kernels,
    shared_bytes,
)
from bench.sass.loops import Work, find_loops

pytestmark = pytest.mark.build

needs_nvcc = pytest.mark.skipif(not NVCC, reason="needs nvcc")

# Basic blocks -> (instructions, successors). An iteration loads for two rounds at once.
BLOCKS = {
    "entry": (["MOV R1, 0x1"], ["head"]),
    "head": (["LDG.E.128 R4, desc[UR4][R2.64]", "LDG.E.128 R12, desc[UR4][R2.64]"], ["round"]),
    "round": (["@!P1 MUFU.EX2 R8, R4", "@P0 BRA `(slow)"], ["slow", "fast"]),
    "slow": (["MUFU.LG2 R8, R8", "BRA `(fast)"], ["fast"]),
    "fast": (
        ["FADD R9, R8, R9", "STG.E desc[UR4][R2.64], R9", "@P3 BRA `(round)"],
        ["round", "tail"],
    ),
    "tail": (["@P4 BRA `(head)"], ["head", "end"]),
    "end": (["EXIT"], []),
}
WORK = Work("test", {r"MUFU\.EX2": 1, r"STG": 1}, {r"LDG\S*\.128": 1}, entries=32)


def graph(blocks):
    """What nvdisasm writes for basic blocks."""
    lines, offset = ['subgraph "cluster_kernel" {'], 0
    for name, (instructions, successors) in blocks.items():
        label = "<entry>"
        for text in instructions:
            label += f"{offset:04x}:   {text} ;".replace(" ", r"\ ") + r"\l"
            offset += 16
        lines += [f'"{name}"', f'[label="{{{label}}}"]']
        lines += [f'"{name}":exit0:e -> "{to}":entry:n [style=solid];' for to in successors]
    return "\n".join([*lines, "}"])


SUMS = """
__global__ void kernel(const float4* in, float* out, int n) {
  #pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 256) {
    float4 v = in[i];
    float sum = v.x + v.z + v.w;
    #pragma unroll
    for (int k = 0; k < ADDITIONS; ++k) asm volatile("add.f32 %0, %0, %1;" : "+f"(sum) : "f"(v.y));
    out[i] = sum;
  }
}
"""


@pytest.fixture(scope="module")
def kernels():
    """The kernels of this project, from the library if it was built from these sources."""
    library = specdec_kernels.has_cuda_kernels() and library_is_current()
    if not library and not NVCC:
        pytest.skip("needs nvcc, or a library with CUDA kernels that is newer than their sources")
    with cubins(list(budgets.SOURCES.values()), library=library) as files:
        return [kernel for file in files for kernel in read_kernels(file, budgets.NAMES)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return shared_bytes(tmp_path_factory.mktemp("shared"))


def named(kernels, name):
    found = [kernel for kernel in kernels if name in kernel.code.name]
    assert found, f"no kernel is called {name}"
    return found


def cheapest(kernels, budget):
    """The loop of each kernel that does the work, or None."""
    return [next(iter(find_loops(kernel.code, budget.work)), None) for kernel in kernels]


def excess(loops, budget):
    """The loops that cost more than their ceiling, or could not be found."""
    return [loop for loop in loops if loop is None or loop.per_512 > budget.ceiling]


@pytest.mark.parametrize(
    "budget", budgets.LOOPS, ids=lambda b: f"{budgets.NAMES[b.kernel]}: {b.work.name}"
)
def test_a_loop_keeps_to_its_ceiling(kernels, budget):
    loops = cheapest(named(kernels, budget.kernel), budget)
    assert not excess(loops, budget)
    # With room below its ceiling, a loop could become slower unseen.
    most = max(loop.per_512 for loop in loops)
    assert most > budget.ceiling - 1, f"lower the ceiling of {budget.work.name} to {most:g}"


@needs_nvcc
@pytest.mark.parametrize("budget", budgets.KERNELS, ids=lambda b: budgets.NAMES[b.kernel])
def test_a_kernel_keeps_to_its_ceilings(kernels, budget, shared):
    for kernel in named(kernels, budget.kernel):
        assert kernel.registers <= budget.registers
        assert blocks_per_multiprocessor(kernel.registers, shared) >= budget.least_blocks
        assert kernel.code.size <= budget.code_kib * 1024
        assert kernel.stack == kernel.local_accesses == 0


def test_one_more_instruction_in_a_loop_is_found(kernels):
    budget = next(b for b in budgets.LOOPS if b.kernel == budgets.SAMPLE)
    mutants = copy.deepcopy(named(kernels, budget.kernel))
    before = cheapest(mutants, budget)
    for kernel, loop in zip(mutants, before, strict=True):
        kernel.code.blocks[loop.path[0].name].instructions.insert(0, "FADD R0, R0, R0")
    after = cheapest(mutants, budget)
    for loop, longer in zip(before, after, strict=True):
        assert longer.instructions == loop.instructions + 1
    at_its_ceiling = dataclasses.replace(budget, ceiling=max(loop.per_512 for loop in before))
    assert excess(after, at_its_ceiling)


@needs_nvcc
def test_instructions_of_a_compiled_loop_are_counted(tmp_path):
    source = tmp_path / "sums.cu"
    source.write_text(SUMS)
    work = Work("sums", {"STG": 1}, {r"LDG\S*\.128": 1}, entries=32, rounds=(1,))

    def loop(additions):
        [kernel] = read_kernels(compiled(source, tmp_path, f"-DADDITIONS={additions}"))
        return find_loops(kernel.code, work)[0]

    shorter, longer = loop(40), loop(41)
    assert shorter.opcodes["FADD"] == 42
    assert longer.instructions == shorter.instructions + 1
    assert longer.per_512 == 16 * longer.instructions


def test_the_cheapest_path_that_does_the_work_is_counted():
    [kernel] = parse_graph(graph(BLOCKS))
    assert kernel.size == 16 * 12
    [loop] = find_loops(kernel, WORK)
    assert (loop.rounds, loop.instructions) == (2, 2 + 2 * 5 + 1)
    assert loop.per_512 == 13 * 512 / 64
    assert loop.opcodes["STG"] == 2
    # Nothing is loaded in a path round the inner loop alone.
    [inner] = find_loops(kernel, dataclasses.replace(WORK, loads={}))
    assert inner.instructions == 5
    [slow] = find_loops(kernel, dataclasses.replace(WORK, at_least={r"MUFU\.LG2": 1}))
    assert slow.instructions == 2 + 2 * 7 + 1


@pytest.mark.parametrize(
    "change",
    [
        {"exactly": {r"MUFU\.EX2": 1, "STG": 2}},
        {"exactly": {r"MUFU\.EX2": 1, "BAR": 1}},
        {"at_least": {"FADD": 2}},
        {"loads": {r"LDG\S*\.128": 3}},
        {"rounds": (1,)},
    ],
    ids=str,
)
def test_work_that_no_loop_does_is_not_found(change):
    [kernel] = parse_graph(graph(BLOCKS))
    assert not find_loops(kernel, dataclasses.replace(WORK, **change))


def test_a_path_that_calls_a_function_is_no_path_of_a_loop():
    blocks = {**BLOCKS, "fast": (["CALL.REL.NOINC `(f)", *BLOCKS["fast"][0]], BLOCKS["fast"][1])}
    [kernel] = parse_graph(graph(blocks))
    assert not find_loops(kernel, WORK)


@pytest.mark.parametrize(
    ("registers", "shared", "blocks"),
    [(128, 25504, 2), (80, 25504, 3), (64, 25504, 4), (32, 0, 8), (32, 60000, 3), (255, 0, 1)],
)
def test_blocks_of_a_multiprocessor(registers, shared, blocks):
    assert blocks_per_multiprocessor(registers, shared) == blocks


def test_the_flags_are_those_of_the_build():
    build = (ROOT / "CMakeLists.txt").read_text()
    assert "-fmad=false" in FLAGS
    assert "-fmad=false" in build
    assert "CUDA_STANDARD 17" in build
    assert "-std=c++17" in FLAGS


# A kernel that branches by a table, calls a function from two places, and has a loop. Instruction
# -> (text, stall count, the line of SOURCE that it is of).
SOURCE = """
__device__ float half(float x) {
  return x / 2;
}
__device__ void rare() {
  if (x) { half(x); }
}
template <class T>
__global__ void __launch_bounds__(256, 4)
    kernel(T job) {
  for (;;) { rare(); }
}
"""
LISTED = (
    (".text.kernel:", None, 0),
    ("MOV R1, 0x1", 2, 10),
    ('BRX R2 -0x10 (*"BRANCH_TARGETS .L_a,.L_b"*)', 5, 10),
    (".L_a:", None, 0),
    ("@P0 BRA `(.L_c)", 7, 6),
    ("CALL.REL.NOINC `(half)", 3, 6),
    ("FADD R3, R3, R3", 11, 6),
    ("BRA `(.L_c)", 4, 6),
    (".L_b:", None, 0),
    ("CALL.REL.NOINC `(half)", 3, 10),
    ("IADD R2, R2, 0x1", 1, 10),
    (".L_c:", None, 0),
    ("@P1 BRA `(.L_a)", 5, 10),
    ("EXIT", 0, 10),
    ("half:", None, 0),
    ("FMUL R3, R3, 0.5", 4, 3),
    ("RET.REL.NODEC R4 `(kernel)", 6, 3),
)


def listing(path):
    """What nvdisasm prints of LISTED, and the stall counts."""
    lines, stalls = [], list[routes.Control]()
    for text, stall, line in LISTED:
        if stall is None:
            lines.append(text)
            continue
        lines.append(f'\t//## File "{path}", line {line} inlined at "{path}", line 10')
        lines.append(f'\t//## File "{path}", line 10')
        lines.append(f"        /*{16 * len(stalls):04x}*/                   {text} ;")
        stalls.append(routes.Control(stall))
    return "\n".join(lines), {"kernel": stalls}


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setattr(routes, "ROOT", tmp_path)
    source = tmp_path / "source.cu"
    source.write_text(SOURCE)
    [found] = routes.parse_listing(*listing(source))
    return found


def test_functions_are_found_where_they_are_defined():
    assert list(routes.definitions(SOURCE)) == [("half", 2, 4), ("rare", 5, 7), ("kernel", 10, 12)]


@pytest.mark.parametrize(
    ("stops", "cycles"),
    [
        # By the table to the first label, and over the call there.
        (("EXIT",), 2 + 5 + 7 + 5 + 1),
        (("rare", "EXIT"), 2 + 5 + 7 + 5 + 1),
        # To the second label, through the function, and out.
        (("half",), 2 + 5 + 3 + 4),
        (("half", "EXIT"), 2 + 5 + 3 + 4 + 6 + 1 + 5 + 1),
        (("rare", "half", "EXIT"), 2 + 5 + 7 + 3 + 4 + 6 + 11 + 4 + 5 + 1),
        (("half", "rare", "EXIT"), 2 + 5 + 3 + 4 + 6 + 1 + 5 + 7 + 5 + 1),
        (("RET", "rare", "RET", "EXIT"), 20 + 1 + 5 + 7 + 3 + 4 + 6 + 11 + 4 + 5 + 1),
        (("unknown",), None),
    ],
    ids=str,
)
def test_the_cheapest_path_along_a_route(program, stops, cycles):
    cost = routes.cheapest(program, routes.Route("", stops))
    assert (cost and cost.cycles) == cycles


def instructions(*controls, opcode="FADD", begin=0):
    """Instructions in a row with these stall counts, held counters and awaited counters."""
    return [
        routes.Instruction(begin + i, "", opcode, (), True, routes.Control(*control), frozenset())
        for i, control in enumerate(controls)
    ]


def test_a_warp_waits_for_the_results_that_it_uses():
    load = instructions((2, 3), opcode="LDS")
    for awaited, cycles in ((1 << 3, 29 + 4), (1 << 2, 2 + 4)):
        assert routes.elapsed([*load, *instructions((4, routes.NONE, awaited))]) == cycles
    # Two results behind one counter; what is issued in between takes no time of its own.
    path = [*load, *instructions((5,)), *load, *instructions((1, routes.NONE, 1 << 3))]
    assert routes.elapsed(path) == 7 + 29 + 1
    # No source tells how long a shuffle takes.
    shuffle = instructions((2, 3), opcode="SHFL")
    assert routes.elapsed([*shuffle, *instructions((4, routes.NONE, 1 << 3))]) == 6


def test_code_comes_from_memory_line_by_line():
    def lines(first, count):
        return instructions(*[(5,)] * routes.LINE * count, begin=first * routes.LINE)

    line = 5 * routes.LINE
    assert routes.elapsed(lines(0, 1)) == line
    assert routes.elapsed(lines(0, 1), 1000) == 1000 + line
    # The lines of the buffer come with the first one. The next was asked for when that came.
    buffered = 1000 + (1 + routes.AHEAD) * line
    assert routes.elapsed(lines(0, 1 + routes.AHEAD), 1000) == buffered
    assert routes.elapsed(lines(0, 2 + routes.AHEAD), 1000) == 2000 + line + line
    # A jump waits anew, but not to a line that was asked for or was executed before.
    assert routes.elapsed([*lines(0, 1), *lines(50, 1)], 1000) == 2 * (1000 + line)
    assert routes.elapsed([*lines(0, 1), *lines(routes.AHEAD, 1)], 1000) == 1000 + 2 * line
    again = [*lines(0, 1), *lines(50, 1), *lines(0, 1)]
    assert routes.elapsed(again, 1000) == 2 * (1000 + line) + line


def test_an_instruction_that_is_not_listed_is_refused(tmp_path):
    text, stalls = listing(tmp_path / "none.cu")
    with pytest.raises(ValueError, match="instruction 2 of kernel is not listed"):
        list(routes.parse_listing(text.replace("/*0020*/", "//"), stalls))


@needs_nvcc
def test_stall_counts_are_those_of_the_encoding_that_nvdisasm_prints(tmp_path):
    source = tmp_path / "sums.cu"
    source.write_text(SUMS)
    cubin = compiled(source, tmp_path, "-DADDITIONS=9", "-lineinfo")
    [(name, counts)] = routes.controls(cubin).items()
    tool = triton.knobs.nvidia.nvdisasm.path
    printed = subprocess.run([tool, "-hex", cubin], capture_output=True, text=True, check=True)
    uppers = re.findall(r"^\s+/\* 0x([0-9a-f]{16}) \*/$", printed.stdout, re.MULTILINE)
    words = [int(word, 16) for word in uppers]
    assert counts == [(word >> 41 & 15, word >> 46 & 7, word >> 52 & 63) for word in words]
    # Each of these additions waits for the one before it.
    [found] = routes.read_programs(tool, cubin)
    assert found.name == name
    added = [i for i in found.instructions if i.text.startswith("FADD")]
    assert sum(i.cycles == 4 for i in added) >= 8
    # The first ones of an iteration wait for its load.
    [load] = (i for i in found.instructions if i.text.startswith("LDG.E.128"))
    assert any(i.control.awaited >> load.control.written & 1 for i in added)


@pytest.fixture(scope="module")
def routed():
    if not NVCC:
        pytest.skip("needs nvcc")
    return programs(dict.fromkeys(budgets.SOURCES[b.kernel] for b in budgets.ROUTES))


@pytest.mark.parametrize(
    "budget", budgets.ROUTES, ids=lambda b: f"{budgets.NAMES[b.kernel]}: {b.route.name}"
)
def test_a_route_keeps_to_its_ceiling(routed, budget):
    costs = [routes.cheapest(p, budget.route) for p in routed if budget.kernel in p.name]
    assert costs
    assert all(costs)
    for part in ("cycles", "warm", "cold"):
        most, ceiling = max(getattr(cost, part) for cost in costs), getattr(budget, part)
        assert most <= ceiling, part
        assert most > 0.98 * ceiling, f"lower the ceiling of {budget.route.name}, {part}, to {most}"
