"""Workflows, templates of issues, the citation and the changelog name what exists."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml  # Transformers requires it
from support.sources import PYTHON, ROOT, anchors, pyproject, relative

import specdec_kernels
from specdec_kernels.versions import SUPPORTED, release

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
TEMPLATES = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
MAKEFILE = ROOT / "Makefile"
MORE = ROOT / "more.mk"  # what few people need, each as TASK of `make more`
NEEDED = 14  # the most targets that a person has to know

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="the workflows are not beside the tests")


def name_of(path):
    return path.stem


def load(path):
    return yaml.safe_load(path.read_text())


def targets(makefile):
    """The targets that a Makefile has rules for, in order, without files."""
    return re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE)


def commands():
    """What `make` can be asked for: its targets, and `more` with each of the others."""
    others = [f"more TASK={name}" for name in targets(MORE.read_text())]
    return {*targets(MAKEFILE.read_text()), *others}


def asked(arguments):
    """The commands among what follows `make` on a line."""
    words = re.sub(r"""\s#.*|[|&;].*|(["']).*?\1""", "", arguments).split()
    task = next((word for word in words if word.startswith("TASK=")), "")
    for word in words:
        if re.fullmatch(r"[a-z][\w-]*", word):
            yield f"more {task}" if word == "more" and task else word


def asked_in(text):
    """The commands that a text names: between backticks, in a block, in lines of an example."""
    code = re.findall(r"`make ([^`]*)`", text) + re.findall(r"^    make (.*)$", text, re.MULTILINE)
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        code += re.findall(r"^(?:\w+=\S* )*make (.*)$", block, re.MULTILINE)
    for line in code:
        yield from asked(line)


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def missing_commands(workflow, known):
    """Targets of make and files that the steps of a workflow name and that do not exist."""
    for step in steps(workflow):
        for line in str(step.get("run", "")).splitlines():
            for arguments in re.findall(r"\bmake ([^|&;]*)", line):
                yield from (f"make {one}" for one in asked(arguments) if one not in known)
            scripts = re.findall(r"(?:^|\s)(\.?[\w-]+(?:/[\w.-]+)+)", line)
            yield from (path for path in scripts if not (ROOT / path).exists())
        caches = step.get("with", {}).get("cache-dependency-path", "")
        yield from (path for path in caches.split() if not (ROOT / path).exists())


def pythons(workflow):
    """The versions of Python that each job of a workflow sets up."""
    for name, job in workflow["jobs"].items():
        listed = job.get("strategy", {}).get("matrix", {}).get("python")
        given = [step["with"]["python-version"] for step in job["steps"]
                 if step.get("uses", "").startswith("actions/setup-python@")]  # fmt: skip
        yield name, listed or given


@pytest.mark.parametrize("makefile", [MAKEFILE, MORE], ids=name_of)
def test_the_targets_of_a_makefile_have_one_rule_each(makefile):
    found = targets(makefile.read_text())
    assert len(found) == len({*found})
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile.read_text(), re.MULTILINE)
    assert {*phony.split()} == {*found}


def test_a_person_needs_few_targets_and_make_lists_them():
    few, others = (targets(makefile.read_text()) for makefile in (MAKEFILE, MORE))
    assert len(few) <= NEEDED
    assert not {*few} & {*others}
    for command, names in (("", few), ("more", others)):
        line = ["make", *command.split(), "--no-print-directory"]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
        listed = re.findall(r"^  make (?:more TASK=)?([\w-]+) +\w", done.stdout, re.MULTILINE)
        assert listed == [name for name in names if name != "list"]


TEXTS = [
    path
    for pattern in ("*.md", "*.py", "*.toml", "docs/**/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
]


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_a_document_names_only_targets_that_exist(path):
    assert {*asked_in(path.read_text())} <= commands()


def test_sources_and_continuous_integration_name_only_targets_that_exist():
    plain = {*asked_in("\n".join(path.read_text() for path in PYTHON if path != Path(__file__)))}
    plain |= {*asked_in("".join(f"    {line}" for line in (ROOT / ".ci/run").open()))}
    assert len(plain) > 10
    assert plain <= commands()


def test_the_search_finds_targets_that_do_not_exist():
    text = """`make lnt ARGS="a b"` and `make more TASK=dcos` make nothing.
```
VLLM=1 make tst X=/y | tail  # make other
make
```
    make clan
"""
    assert [*asked_in(text)] == ["lnt", "more TASK=dcos", "clan", "tst"]


def test_there_is_a_workflow_for_each_duty():
    assert {path.stem for path in WORKFLOWS} == {"docs", "lint", "nightly", "test", "wheels"}
    ran = " ".join(str(step.get("run")) for path in WORKFLOWS for step in steps(load(path)))
    for command in ("make lint", "make test ", "make more TASK=test-oldest", "make docs",
                    "make mutants", "make more TASK=sdist", ".ci/run"):  # fmt: skip
        assert command in ran


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_is_whole(path):
    workflow = load(path)
    assert workflow["name"] == path.stem
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True], "YAML reads the key `on` as true"
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 300, name
        assert job["steps"][0]["uses"].startswith("actions/checkout@"), name
        assert job["steps"][0]["with"] == {"persist-credentials": False}, name
    for step in steps(workflow):
        assert len(step.keys() & {"uses", "run"}) == 1
        if "uses" in step:  # whose code runs, and in which version
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_names_only_what_exists(path):
    assert not list(missing_commands(load(path), commands()))


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_takes_pythons_of_the_range_as_texts(path):
    first, last = (release(SUPPORTED["python"]._asdict()[end]) for end in ("oldest", "newest"))
    for name, versions in pythons(load(path)):
        assert versions, name
        for version in versions:
            assert isinstance(version, str), f"{name}: 3.10 without quotes is 3.1"
            if not version.startswith("$"):
                assert first <= release(version) <= last


def test_three_pythons_test_and_the_wheel_serves_every_python():
    project = pyproject()
    declared = [one.rpartition(" ")[2] for one in project["project"]["classifiers"]
                if re.search(r":: Python :: 3\.\d+$", one)]  # fmt: skip
    tested = dict(pythons(load(GITHUB / "workflows/test.yml")))
    assert len(tested["newest"]) == 3
    assert {declared[0], declared[-1]} < {*tested["newest"]} < {*declared}
    assert tested["oldest"] == declared[:1]
    wheels = project["tool"]["cibuildwheel"]
    numbers = [version.replace(".", "") for version in declared]
    assert wheels["build"].split() == [f"cp{number}-*" for number in numbers]
    assert wheels["audit-command"].endswith(" --pythons " + " ".join(declared))
    modules = wheels["linux"]["environment"]["SPECDEC_HOST_PYTHONS"]
    assert modules.split(":") == [f"/opt/python/cp{n}-cp{n}/bin/python" for n in numbers]


def test_the_configuration_of_wheels_names_what_exists():
    """cibuildwheel runs in containers, so what it calls is looked up here."""
    wheels = pyproject()["tool"]["cibuildwheel"]
    for command in (wheels["test-command"], wheels["audit-command"], wheels["linux"]["before-all"]):
        (path,) = re.findall(r"\{project\}/(\S+)", command)
        assert (ROOT / path).is_file()
    for architecture in ("x86_64", "aarch64"):
        assert wheels["linux"][f"manylinux-{architecture}-image"] == "manylinux_2_28"
    job = load(GITHUB / "workflows/wheels.yml")["jobs"]["wheels"]
    assert job["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert {*job["env"]} == {*wheels["linux"]["environment-pass"]}
    read = (ROOT / "setup.py").read_text()
    for variable in (*job["env"], "SPECDEC_HOST_PYTHONS"):
        assert f"environ.get({variable!r}" in read.replace('"', "'")
    toolkit = re.findall(r"nvcc==(\d+\.\d+)", (ROOT / ".ci/install_nvcc").read_text())
    labels = [f"cu{version.replace('.', '')}" for version in toolkit]
    assert job["strategy"]["matrix"]["cuda"] == ["", *labels]


def test_the_search_finds_what_does_not_exist():
    workflow = {"jobs": {"one": {"steps": [
        {"run": "make test lnt PYTHON=python"},
        {"run": "make more TASK=tset"},
        {"run": "bash .ci/rnu && make docs\nmake dcos | tail", "with": {}},
        {"run": "python tests/mutants/run.py", "with": {"cache-dependency-path": "poetry.lock"}},
    ]}}}  # fmt: skip
    known = ["docs", "test"]
    missing = ["make lnt", "make more TASK=tset", "make dcos", ".ci/rnu", "poetry.lock"]
    assert sorted(missing_commands(workflow, known)) == sorted(missing)


KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


@pytest.mark.parametrize("path", TEMPLATES, ids=name_of)
def test_a_template_of_issues_can_be_shown(path):
    form = load(path)
    if path.stem == "config":
        assert form.keys() <= {"blank_issues_enabled", "contact_links"}
        return
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in form["body"]} <= KINDS
    assert all(part["attributes"]["label"] for part in fields)
    ids = [part["id"] for part in fields]
    assert len(ids) == len({*ids}) > 0
    assert any(part.get("validations", {}).get("required") for part in fields)


CITED = {"cff-version", "message", "title", "authors"}  # what version 1.2.0 of the format requires


def test_the_citation_is_that_of_this_version():
    citation = load(ROOT / "CITATION.cff")
    assert citation.keys() > CITED
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["version"] == specdec_kernels.__version__
    assert citation["license"] == pyproject()["project"]["license"]
    for work in (citation, *citation["references"]):
        for author in work["authors"]:
            assert "name" in author or author.keys() >= {"family-names", "given-names"}
    for work in citation["references"]:
        assert work.keys() >= {"type", "title", "authors"}


SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def faults_of_changelog(text):
    """Headings that Keep a Changelog does not have, and entries that are no sentences."""
    for heading in re.findall(r"^## (.*)$", text, re.MULTILINE):
        if not re.fullmatch(r"Unreleased|\d+\.\d+\.\d+ \((unreleased|\d{4}-\d\d-\d\d)\)", heading):
            yield heading
    for release_ in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
        named = re.findall(r"^### (.*)$", release_, re.MULTILINE)
        yield from (name for name in named if name not in SECTIONS or named.count(name) > 1)
        for entry in re.findall(r"^- (.+(?:\n  .+)*)", release_, re.MULTILINE):
            if not entry.endswith(".") or re.match(r"(Fixed|Changed|Added|Renamed):", entry):
                yield entry


def test_the_changelog_has_the_form_of_keep_a_changelog():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert not list(faults_of_changelog(text))
    assert re.search(rf"^## {re.escape(specdec_kernels.__version__)} \(", text, re.MULTILINE)


def test_the_search_finds_faults_of_a_changelog():
    text = "## 1.0\n### Added\n- Fixed: it runs.\n- no stop\n### Mended\n## 1.0.1 (2026-01-02)\n"
    assert list(faults_of_changelog(text)) == ["1.0", "Mended", "Fixed: it runs.", "no stop"]


LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)|\((docs/[\w/.-]+\.md)(#[\w-]+)?\)")
PAGES = (
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "SECURITY.md",
    "docs/releasing.md",
    "docs/versions.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_of_the_project_links_to_exists(page):
    path = ROOT / page
    for match in LINK.finditer(path.read_text()):
        there = ROOT / match[3] if match[3] else path.parent / match[1] if match[1] else path
        assert Path(there).is_file(), match[0]
        anchor = match[2] or match[4]
        assert not anchor or anchor[1:] in anchors(there), match[0]


def test_the_steps_of_a_release_name_files_that_exist():
    text = (ROOT / "docs/releasing.md").read_text()
    named = re.findall(r"`((?:[\w-]+/)+[\w.-]+\.\w+|[A-Z]+\.(?:md|cff))`", text)
    assert len(named) >= 6
    assert not [name for name in named if not (ROOT / name).exists()]
