"""Code and documents use the words of the field, and what they cite exists."""

import ast
import functools
import re
import subprocess

import pytest
from support.sources import ROOT

# A word that a reader does not expect -> the word of the field.
WORDS = {
    "law": "distribution",
    "laws": "distributions",
    "lawful": "valid",
    "coin": "uniform",
    "coins": "uniforms",
    "judge": "verifier",
    "judges": "decides",
    "judged": "decided",
    "race": "Gumbel-max sampling",
    "stands": "is accepted",
    "stood": "were accepted",
    "fallen": "rejected",
    "corrected": "recovered",
    "shaping": "logits processing",
    "team": "block group",
    "teams": "block groups",
    "liar": "negative control",
    "liars": "negative controls",
    "lying": "wrong",
    "lies about": "has a wrong",
    "lies_about": "has_a_wrong",
}
# Also inside of names, such as draft_law and DraftLaw.
WORD = re.compile(
    rf"(?<![A-Za-z])({'|'.join(WORDS)})(?![A-Za-z])"
    r"|(?<=[a-z])(Law|Laws|Coin|Coins|Judge|Race|Team|Liar)(?![a-z])",
    re.IGNORECASE,
)
CAMEL = re.compile(r"^(?:Laws?|Coins?|Judge|Race|Team|Liar)$")
# Documents of the project's planning, which readers of the repository do not have.
OUTSIDE = re.compile(r"\b(ALGORITHMS|PEERS|GLOSSARY|DESIGN)(\.md\b|,? section|[^\w]+section)")
SUFFIXES = {".py", ".md", ".h", ".cpp", ".cu", ".cuh", ".sh", ".toml", ".txt", ".yml", ".cfg"}
# (path, part of the line) -> why the word is right there.
ALLOWED = {
    ("tests/project/test_words.py", ""): "the table of the words",
    ("tests/vllm_plugin/excepted.txt", "exponential_race"): "the name of a test of vLLM",
}


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


def words_in(line):
    """Words of the private language in a line."""
    lowered = line.lower()
    if not any(word in lowered for word in WORDS):  # several times as fast as the search
        return
    line = re.sub(r"\brace conditions?\b", "", line, flags=re.IGNORECASE)
    for found in WORD.finditer(line):
        inside = found.start() > 0 and line[found.start() - 1].isalpha()
        if not inside or CAMEL.match(found[0]):
            yield found[0]


def test_everything_is_said_in_the_words_of_the_field():
    wrong = [
        f"{name}:{number}: {word} (say {WORDS[word.lower()]})"
        for name, number, line in lines()
        for word in words_in(line)
        if not any(name == path and part in line for path, part in ALLOWED)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("the law of p, and q_law", ["law", "law"]),
        ("struct DraftLaw {", ["Law"]),
        ("a race condition, found by racecheck", []),
        ("flaw, lawn, coincide, trace, understands, stand", []),
        ("The Gumbel race", ["race"]),
        ("steam, familiar, WarpTeam and liars", ["Team", "liars"]),
        ("a drafter that lies about it, which lies behind test_lying", ["lies about", "lying"]),
    ],
)
def test_the_search_finds_words_and_parts_of_names(line, words):
    assert list(words_in(line)) == words


def test_nothing_cites_a_document_outside_of_the_repository():
    wrong = [
        f"{name}:{number}: {line.strip()}"
        for name, number, line in lines()
        if OUTSIDE.search(line) and name != "tests/project/test_words.py"
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def anchors(document):
    """The anchors of a document's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ +(.+)$", document.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


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


def test_files_that_documents_cite_exist():
    """All but those of the op "example", which CONTRIBUTING.md adds in its instructions."""
    wrong = [
        f"{name}:{number}: {file}"
        for name, number, line in lines()
        for file in CITED.findall(line)
        if name.endswith(".md") and not (ROOT / file).exists() and "example." not in file
    ]
    assert not wrong, "\n" + "\n".join(wrong)


# The path of a rejected token: a numbered list of functions, each "path:function".

PATH_OF_A_TOKEN = ROOT / "docs/design/loop.md"
HEADING = re.compile(r"^## (?:Where a rejected token goes|The walk of a rejected token)\n", re.M)
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


def test_each_step_on_the_path_of_a_rejected_token_exists():
    _, section = HEADING.split(PATH_OF_A_TOKEN.read_text())
    section = section.partition("\n## ")[0]
    steps = STEP.findall(section)
    assert len(steps) == len(NUMBERED.findall(section)) >= 8
    missing = [
        f"{file}:{function}" for file, function in steps
        if not (ROOT / file).exists() or not defines(ROOT / file, function)
    ]  # fmt: skip
    assert not missing


def test_the_search_for_a_step_tells_functions_from_calls(tmp_path):
    native, python = tmp_path / "a.cpp", tmp_path / "a.py"
    native.write_text(
        "class A {\n  void inside() {\n    other();\n  }\n};\n"
        "static int64_t decide(int n) {\n  return other(n);\n}\n"
        "void C::outside(int n) {\n  A::other(n);\n}\n"
    )
    python.write_text("class A:\n    def f(self):\n        return g()\n")
    for function in ("decide", "A::inside", "C::outside"):
        assert defines(native, function)
    for function in ("A::other", "B::outside", "other"):
        assert not defines(native, function)
    assert defines(python, "A.f")
    assert not defines(python, "g")
