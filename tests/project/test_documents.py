"""What documents and code say is true of this tree: each rule once, over all texts that it is for.

A rule finds faults in a text. `RULES` has with each a text that breaks it and the faults of that.
"""

import functools
import json
import re
import subprocess

import pytest
from specdec_hf.cli.app import app
from specdec_hf.cli.prompts import read_prompts
from specdec_vllm.settings import _NAMES
from support.sources import NATIVE, PYTHON, ROOT, anchors, relative
from typer.main import get_command

from specdec_kernels._library import CPU_OPS, INDEXED_OPS, OPS, TRITON_OPS
from specdec_kernels.arguments import rules
from specdec_kernels.versions import SUPPORTED

DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
]
SUFFIXES = {".py", ".md", ".h", ".cpp", ".cu", ".cuh", ".sh", ".toml", ".txt", ".yml", ".mk"}

pytestmark = pytest.mark.skipif(not DOCUMENTS, reason="the documents are not beside the tests")


@functools.cache
def tracked():
    listed = ["git", "ls-files"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:  # not a git checkout
        return [*DOCUMENTS, *PYTHON, *NATIVE]
    paths = [ROOT / line for line in done.stdout.splitlines()]
    return [
        p for p in paths if p.exists() and (p.suffix in SUFFIXES or p.name in ("Makefile", "run"))
    ]


OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@functools.cache
def options_of_commands():
    """The options of each command, by its words."""

    def of(command, name=()):
        if hasattr(command, "commands"):
            below = [of(one, (*name, word)) for word, one in command.commands.items()]
            return {words: options for each in below for words, options in each.items()}
        given = (option for one in command.params for option in (*one.opts, *one.secondary_opts))
        return {name: {"--help", *(option for option in given if option.startswith("--"))}}

    return of(get_command(app))


@functools.cache
def options_of_others():
    """Those of our other programs, and of programs that the documents start."""
    found = {"no-build-isolation", "no-deps", "nproc-per-node", "draft-p-min", "speculative-config"}
    found |= {"task", "weight-format", "cflags", "libs"}
    for path in (*ROOT.glob("*.py"), *ROOT.glob("bench/**/*.py"), *ROOT.glob("tests/device/*.py")):
        names = re.findall(r'"--([\w-]+)"|^    (\w+): ', path.read_text(), re.MULTILINE)
        found |= {(one or other).replace("_", "-") for one, other in names}
    return {f"--{name}" for name in found}


def unknown_options(text):
    """Options that no command has, or that the command of the same line lacks."""
    known = options_of_commands()
    every = {"--version", *options_of_others()}.union(*known.values())
    yield from (option for option in OPTION.findall(text) if option not in every)
    lines = re.findall(r"python -m specdec_hf ([^`#|&<>\n]*)", text.replace("\\\n", " "))
    for line in lines:
        words = line.split()
        if words and not words[0].startswith("--"):
            names = (tuple(words[:n]) for n in (1, 2))
            name = next((one for one in names if one in known), None)
            found = OPTION.findall(line) if name else []
            yield from (f"{name} {one}" for one in found if one not in known[name])
            yield from [] if name else [line]


AT_LEAST = re.compile(rf"\b({'|'.join(SUPPORTED)})\s*>=\s*(\d+\.\d+)", re.IGNORECASE)


def other_minimums(text):
    """Minimum versions that are not those of specdec_kernels/versions.py."""
    for name, version in AT_LEAST.findall(text):
        if version != SUPPORTED[name.lower()].oldest:
            yield f"{name} {version}"


# Documents of the project's planning, which readers of the repository do not have.
OUTSIDE = re.compile(r"\b(?:ALGORITHMS|PEERS|GLOSSARY|DESIGN)(?:\.md\b|,? section|[^\w]+section)")
CITED = re.compile(
    r"`((?:docs|tests|csrc|bench|python|specdec_kernels)/[\w/.-]+\.(?:py|md|h|cpp|cu|cuh|sh))"
)


def citations_of_nothing(text):
    """All but those of the op "example", which CONTRIBUTING.md adds, and of vLLM's own suite."""
    yield from OUTSIDE.findall(text)
    for file, _, anchor in re.findall(r"\b(docs/[\w/-]+\.md)(#([\w-]+))?", text):
        document = ROOT / file
        if not document.exists() or (anchor and anchor not in anchors(document)):
            yield f"{file}{'#' * bool(anchor)}{anchor}"
    for file in CITED.findall(text):
        if not (ROOT / file).exists() and not re.search(r"example\.|^tests/v1/", file):
            yield file


NOT_THESE = "tests/project/test_documents.py"  # the texts that break the rules
RULES = {
    unknown_options: (
        DOCUMENTS,
        "`--prompty`\n  python -m specdec_hf train \\\n  --head X --limit 3  # --tree\n"
        "python -m specdec_hf build x",
        ["--prompty", "('train',) --limit", "build x"],
    ),
    other_minimums: (
        [p for p in tracked() if p.suffix != ".py"],
        "python >= 3.9, torch>=2.10",
        ["python 3.9"],
    ),
    citations_of_nothing: (
        tracked(),
        "PEERS.md and docs/loop.md, docs/lop.md, docs/loop.md#nowhere and `tests/no/test_x.py`",
        ["PEERS.md", "docs/lop.md", "docs/loop.md#nowhere", "tests/no/test_x.py"],
    ),
}


LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]*))?\)")


def dead_links(path, text):
    for to, anchor in LINK.findall(re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)):
        page = path.parent / to if to else path
        if not page.exists() or (anchor and anchor not in anchors(page)):
            yield f"{to}#{anchor}"


def test_the_links_of_every_document_lead_to_a_file_and_a_heading():
    broken = "[a](no.md) [b](README.md#nowhere) [c](https://x.org/y.md) [d](docs/loop.md)"
    assert list(dead_links(ROOT / "README.md", broken)) == ["no.md#", "README.md#nowhere"]
    texts = {path: path.read_text() for path in DOCUMENTS}
    assert not {p: found for p, text in texts.items() if (found := [*dead_links(p, text)])}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_text_breaks_a_rule(rule):
    texts, broken, faults = RULES[rule]
    assert list(rule(broken)) == faults, "the control"
    read = {p: p.read_text() for p in texts if relative(p) != NOT_THESE}
    assert not {relative(p): found for p, text in read.items() if (found := [*rule(text)])}


# How sources read environment variables; those that only tests read are their own.
READS = {
    ".py": r"""["'](SPECDEC_[A-Z_]+)["']|environ(?:\.\w+)?[\[(]["'](\w+)""",
    ".sh": r"\$\{(\w+):-",
    ".txt": r"ENV\{(\w+)\}",
    "": r"^(\w+) *\?=",  # the Makefile
    ".mk": r"^(\w+) *\?=",
} | dict.fromkeys((".h", ".cpp", ".cu", ".cuh"), r'getenv\("(\w+)"')


def test_the_table_of_environment_variables_is_complete():
    page = (ROOT / "docs/command-line.md").read_text()
    table = page.partition("## Environment variables")[2]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    found = set(_NAMES)  # put together from parts
    named = ("setup.py", "CMakeLists.txt", "Makefile", "more.mk", "bench/gpu.sh")
    for path in (*PYTHON, *NATIVE, *map(ROOT.joinpath, named)):
        if ROOT / "tests" not in path.parents:
            for match in re.finditer(READS[path.suffix], path.read_text(), re.MULTILINE):
                found.add(match[match.lastindex])
    assert listed == found


def test_the_table_of_providers_has_every_op_and_rule_as_it_is_served():
    """Rows of `verify_chain` name its rules too; the last two columns are CUDA and Triton."""
    page = (ROOT / "docs/ops.md").read_text().partition("## Providers")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    served = {word: [cell.strip() for cell in cells]
              for names, *cells in rows for word in re.findall(r"`(\w+)`", names)}  # fmt: skip
    assert served.keys() == {*OPS, *rules.RULES}
    for word, (*both, cuda, triton) in served.items():
        of_triton = word in (*TRITON_OPS, *rules.TRITON_RULES)
        here = "no" if word in CPU_OPS else "indexing" if word in INDEXED_OPS else "refused"
        assert both == ["yes", "yes"]
        assert triton == ("yes" if of_triton else here) or word == "verify_chain"
        assert cuda in {"no" if word in CPU_OPS else "yes", "Triton" if of_triton else "yes"}


@pytest.mark.parametrize("page", ["ops.md", "rules.md"])
def test_the_programs_of_the_ops_print_what_stands_below_them(page, capsys):
    text = (ROOT / "docs" / page).read_text()
    programs = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert len(programs) >= {"ops.md": text.count("```python"), "rules.md": 1}[page]
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


@pytest.mark.parametrize(
    "heading", ["The default call in fifteen steps", "Where a rejected token goes"]
)
def test_each_step_on_a_path_through_the_loop_exists(heading):
    page = (ROOT / "docs/design/loop.md").read_text()
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. `([^:`]+):([\w.:]+)`", section, re.MULTILINE)
    assert 8 <= len(steps) == len(re.findall(r"^\d+\. ", section, re.MULTILINE))
    for file, function in steps:
        defined = rf"(def |class |[\w>&*] [*&]?(\w+::)?){re.split(r'[.:]+', function)[-1]}\b"
        assert re.search(defined, (ROOT / file).read_text()), f"{file}:{function}"


def test_the_printed_program_takes_the_first_half_of_each_category(tmp_path, monkeypatch):
    page = (ROOT / "docs/benchmarks.md").read_text()
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
