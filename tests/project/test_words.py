"""What code and documents cite exists."""

import ast
import functools
import re
import subprocess

import pytest
from support.sources import ROOT, anchors

# Documents of the project's planning, which readers of the repository do not have.
OUTSIDE = re.compile(r"\b(ALGORITHMS|PEERS|GLOSSARY|DESIGN)(\.md\b|,? section|[^\w]+section)")
SUFFIXES = {".py", ".md", ".h", ".cpp", ".cu", ".cuh", ".sh", ".toml", ".txt", ".yml", ".mk"}


def tracked():
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / line for line in done.stdout.splitlines()]
    plain = {"Makefile", "run"}
    return [p for p in paths if p.exists() and (p.suffix in SUFFIXES or p.name in plain)]


@functools.cache
def lines():
    """(file, number, line) of everything that is tracked."""
    return [
        (path.relative_to(ROOT).as_posix(), number, line)
        for path in tracked()
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]


def test_nothing_cites_a_document_outside_of_the_repository():
    wrong = [
        f"{name}:{number}: {line.strip()}"
        for name, number, line in lines()
        if ("section" in line or ".md" in line)
        and OUTSIDE.search(line)
        and name != "tests/project/test_words.py"
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_citations_of_documents_lead_to_a_file_and_a_heading():
    wrong = []
    for name, number, line in lines():
        for file, _, anchor in re.findall(r"\b(docs/[\w/-]+\.md)(#([\w-]+))?", line):
            document = ROOT / file
            if not document.exists() or (anchor and anchor not in anchors(document)):
                wrong.append(f"{name}:{number}: {file}{'#' * bool(anchor)}{anchor}")
    assert not wrong, "\n" + "\n".join(wrong)


CITED = re.compile(
    r"`((?:docs|tests|csrc|bench|python|specdec_kernels)/[\w/.-]+\.(?:py|md|h|cpp|cu|cuh|sh))"
)


def test_cited_files_exist():
    """All but those of the op "example", which CONTRIBUTING.md adds, and of vLLM's own suite."""
    wrong = [
        f"{name}:{number}: {file}"
        for name, number, line in lines()
        for file in CITED.findall(line)
        if not (ROOT / file).exists()
        and "example." not in file
        and not file.startswith("tests/v1/")
    ]
    assert not wrong, "\n" + "\n".join(wrong)


# The paths through the loop: numbered lists of functions, each "path:function".

PATHS = ROOT / "docs/design/loop.md"
MOST_STEPS = {"The default call in fifteen steps": 15, "Where a rejected token goes": 40}
NUMBERED = re.compile(r"^\d+\. ", re.MULTILINE)
STEP = re.compile(r"^\d+\. `([^:`]+):([\w.:]+)`", re.MULTILINE)


def defines(path, function):
    """Whether a file defines a function, given as `name`, `Class.name` or `Class::name`."""
    text = path.read_text()
    if path.suffix == ".py":
        body = ast.parse(text).body
        for part in function.split("."):
            found = [node for node in body if getattr(node, "name", None) == part]
            body = getattr(found[0], "body", []) if found else []
        return bool(found)
    owner, _, name = function.rpartition("::")
    # A type, then the name and its parameters: in the body of its class or after the class's name.
    start = r"^(?![ \t]*(?:return|else|throw)\b)[\w:<>,&*() \t]*[\w>&*)][ \t]+[*&]?"
    defined = re.search(rf"{start}({owner}::)?{name}\(", text, re.MULTILINE)
    return bool(
        defined and (not owner or defined[1] or re.search(rf"^class {owner}\b", text, re.M))
    )


@pytest.mark.parametrize("heading", MOST_STEPS)
def test_each_step_on_a_path_through_the_loop_exists(heading):
    section = PATHS.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    steps = STEP.findall(section)
    assert 8 <= len(steps) == len(NUMBERED.findall(section)) <= MOST_STEPS[heading]
    missing = [
        f"{file}:{function}" for file, function in steps
        if not (ROOT / file).exists() or not defines(ROOT / file, function)
    ]  # fmt: skip
    assert not missing
