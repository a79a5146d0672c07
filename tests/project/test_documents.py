"""Documents are readable as they are, and name only options that their commands have."""

import functools
import json
import re

import pytest
from specdec_hf.cli.app import app
from specdec_hf.cli.prompts import read_prompts
from specdec_vllm.settings import _NAMES
from support.sources import NATIVE, PYTHON, ROOT
from typer.main import get_command

WIDTH = 120  # columns
# Options of other programs: our files that read them, or the names of the programs.
OTHERS = {
    "--all": "tests/support/triton_aot.py",
    "--batch": "bench/vllm_throughput.py",
    "--budget": "bench/sweep.py",
    "--context": "bench/sparse_cache.py",
    "--draft-p-min": "llama.cpp",
    "--every": "bench/online_distillation.py",
    "--held-out": "bench/online_distillation.py",
    "--hostile": "bench/server_load.py",
    "--joins": "bench/server_load.py",
    "--learning-rate": "bench/online_distillation.py",
    "--no-build-isolation": "pip",
    "--no-deps": "pip",
    "--nproc-per-node": "torchrun",
    "--only": "bench/sweep.py",
    "--op": "bench/sweep.py",
    "--part": "bench/forward.py",
    "--passes": "bench/vllm_throughput.py",
    "--prepare": "bench/peers/flashinfer_headers.py",
    "--processor-time": "bench/sparse_cache.py",
    "--quick": "bench/sweep.py",
    "--ranks": "bench/sharded.py",
    "--repo-id": "hub_kernel.py",
    "--routes": "bench/sass/__main__.py",
    "--speculative-config": "vLLM",
    "--texts": "bench/sparse_cache.py",
    "--tokens": "bench/vllm_throughput.py",
    "--turns": "bench/sparse_cache.py",
    "--vocab": "bench/sharded.py",
}
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMAND = re.compile(r"python -m specdec_hf ([^`#|&<>\n]*)")

pytestmark = pytest.mark.skipif(not DOCUMENTS, reason="the documents are not beside the tests")


@functools.cache
def known_options():
    """The options of each command, by its words."""
    return commands(get_command(app))


def commands(command, name=()):
    if hasattr(command, "commands"):
        below = [commands(one, (*name, word)) for word, one in command.commands.items()]
        return {words: options for each in below for words, options in each.items()}
    given = (option for one in command.params for option in (*one.opts, *one.secondary_opts))
    return {name: {"--help", *(option for option in given if option.startswith("--"))}}


def wrong_options(text, known):
    """Options in a text that no command has, or that the command of the same line lacks."""
    every = {"--version", *OTHERS}.union(*known.values())
    yield from (option for option in OPTION.findall(text) if option not in every)
    for line in COMMAND.findall(text.replace("\\\n", " ")):
        words = line.split()
        if words and words[0].startswith("--"):
            continue
        name = next((tuple(words[:n]) for n in (1, 2) if tuple(words[:n]) in known), None)
        if name is None:
            yield line
        else:
            yield from (f"{name} {one}" for one in OPTION.findall(line) if one not in known[name])


# The tests that run the programs of a document, and compare what they give.
RUN_BY = {
    "README.md": "tests/hf/test_pages.py",
    "docs/analysis.md": "tests/hf/test_pages.py",
    "docs/benchmarks.md": "tests/project/test_documents.py",
    "docs/choosing.md": "tests/hf/test_pages.py",
    "docs/compat.md": "tests/compat/test_page.py",
    "docs/derivations.md": "tests/project/test_documents.py",
    "docs/draft-models.md": "tests/hf/test_pages.py",
    "docs/drafters.md": "tests/hf/test_pages.py",
    "docs/forwards.md": "tests/hf/test_pages.py",
    "docs/heads.md": "tests/hf/test_heads.py",
    "docs/hub-kernels.md": "tests/support/loaded_kernel.py",
    "docs/loop.md": "tests/hf/test_pages.py",
    "docs/numpy.md": "tests/host/test_numpy_page.py",
    "docs/ops.md": "tests/project/test_documents.py",
    "docs/rules.md": "tests/project/test_documents.py",
    "docs/server.md": "tests/hf/test_openai_routes.py",
    "docs/sglang.md": "tests/sglang_plugin/test_engine.py",
    "docs/transformers.md": "tests/hf/test_pages.py",
    "docs/vllm.md": "tests/vllm_plugin/test_page.py",
    "docs/vocabulary-parallel.md": "tests/sharded/test_page.py",
    "examples/hub/README.md": "tests/hf/test_pages.py",
}


def languages(text):
    """The language of each block of a document, "" where it names none."""
    return re.findall(r"^ *```([^\n]*)\n.*?^ *```$", text, re.MULTILINE | re.DOTALL)


def wide_lines(text):
    """Numbers of lines that are too wide; code, tables and formulas cannot be broken."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if len(line) > WIDTH and not code and not line.lstrip().startswith(("|", "$$")):
            yield number


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_document_names_only_options_that_exist(path):
    assert not list(wrong_options(path.read_text(), known_options()))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_lines_of_a_document_are_not_too_wide(path):
    assert not list(wide_lines(path.read_text()))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_programs_of_a_document_are_run(path):
    """Blocks without a language are commands and what programs print."""
    name = path.relative_to(ROOT).as_posix()
    found = set(languages(path.read_text()))
    assert found <= {"", "python"}
    assert ("python" in found) == (name in RUN_BY)
    if name in RUN_BY:
        text = (ROOT / RUN_BY[name]).read_text()
        assert path.name in text
        assert re.search(r"```python|\bblocks\(", text)


def test_options_of_our_other_programs_exist():
    for option, program in OTHERS.items():
        if program.endswith(".py"):
            parameter = option.removeprefix("--")
            found = re.search(rf'"{option}"|^    {parameter}: ', (ROOT / program).read_text(), re.M)
            assert found, f"{program} has no {option}"


# How sources read environment variables; those that only tests read are their own.
READS = {
    ".py": r"""["'](SPECDEC_[A-Z_]+)["']|environ(?:\.\w+)?[\[(]["'](\w+)""",
    ".sh": r"\$\{(\w+):-",
    ".txt": r"ENV\{(\w+)\}",
    "": r"^(\w+) *\?=",  # the Makefile
    ".mk": r"^(\w+) *\?=",
} | dict.fromkeys((".h", ".cpp", ".cu", ".cuh"), r'getenv\("(\w+)"')


def environment_variables():
    """Those that the sources read."""
    found = set(_NAMES)  # put together from parts
    named = ("setup.py", "CMakeLists.txt", "Makefile", "more.mk", "bench/gpu.sh")
    for path in (*PYTHON, *NATIVE, *map(ROOT.joinpath, named)):
        if ROOT / "tests" not in path.parents:
            for match in re.finditer(READS[path.suffix], path.read_text(), re.MULTILINE):
                found.add(match[match.lastindex])
    return found


def test_the_table_of_environment_variables_is_complete():
    page = (ROOT / "docs/command-line.md").read_text()
    table = page.partition("## Environment variables")[2]
    listed = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == environment_variables()


def test_the_printed_program_takes_the_first_half_of_each_category(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    (program,) = re.findall(r"```python\n(.*?question\.jsonl.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    # Categories in turns, one of an odd number, and a character that ends a line for `splitlines`.
    lines = [
        {"question_id": i, "category": "abb"[i % 3], "turns": [f"é {i}\u2028"]} for i in range(14)
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "question.jsonl").write_text(text, encoding="utf-8")
    exec(program, {})
    half = read_prompts(tmp_path / "spec_bench_dev.jsonl")
    assert [(p.category, p.name) for p in half] == [
        ("a", "0"), ("a", "3"), ("b", "1"), ("b", "2"), ("b", "4"), ("b", "5")
    ]  # fmt: skip
    assert half[0].turns == ["é 0\u2028"]


@pytest.mark.parametrize("page", ["ops.md", "rules.md"])
def test_the_programs_of_the_ops_print_what_stands_below_them(page, capsys):
    text = (ROOT / "docs" / page).read_text()
    programs = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert len(programs) >= {"ops.md": languages(text).count("python"), "rules.md": 1}[page]
    for program, printed in programs:
        exec(program, {})
        assert capsys.readouterr().out == printed


def test_the_derivation_of_block_verification_adds_up(capsys):
    """The program compares the distribution itself, and prints what docs/rules.md says."""
    page = (ROOT / "docs/derivations.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out == "10/9 11/9\n"
    assert "10/9 under `token` and 11/9 under `block`" in (ROOT / "docs/rules.md").read_text()
    # Three tokens, of which two are missing, tell wrong rules from the right one.
    wider = program.replace("tokens = (0, 1)", "tokens = (0, 1, 2)").replace(
        re.search(r"^P, Q = (.*)$", program, re.MULTILINE)[1],
        "([Fraction(n, 20) for n in row] for row in ((10, 6, 4), (16, 3, 1)))",
    )
    assert wider.count("20") == 1
    exec(wider, {})
    without_the_first = wider.replace("c2 = min(1, c1 * r2)", "c2 = min(1, r2)")
    without_factor = wider.replace("residual(c1)", "residual(1)")
    for wrong in (without_the_first, without_factor):
        assert wrong != wider
        with pytest.raises(AssertionError):
            exec(wrong, {})


def test_the_search_finds_wrong_options_and_wide_lines():
    assert languages("```\na\n```\n  ```python\nb\n  ```\n") == ["", "python"]
    known = known_options()
    assert known["train",] > {"--head", "--texts"}
    assert ("build", "ngram") in known
    text = (
        "`--prompt`, `--prompty`\n  python -m specdec_hf train \\\n  --head X --limit 3  # --tree"
    )
    assert list(wrong_options(text, known)) == ["--prompty", "('train',) --limit"]
    assert list(wrong_options("python -m specdec_hf build x", known)) == ["build x"]
    wide = "x" * (WIDTH + 1)
    assert list(wide_lines(f"a\n{wide}\n| {wide}\n```\n{wide}\n```\n{wide}")) == [2, 7]
