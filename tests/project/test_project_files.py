"""Workflows, Makefiles, templates of issues, the citation and the changelog fit this tree."""

import re
import subprocess

import pytest
import yaml  # Transformers requires it
from support.sources import ROOT, pyproject

import specdec_kernels
from specdec_kernels.versions import SUPPORTED, release

GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path for path in sorted((GITHUB / "workflows").glob("*.yml"))}
NEEDED = 14  # the most targets that a person has to know

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="the workflows are not beside the tests")


def load(path):
    return yaml.safe_load(path.read_text())


def targets(makefile):
    """The targets that a Makefile has rules for, in order, without files."""
    return re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / makefile).read_text(), re.MULTILINE)


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def missing_commands(workflow, known):
    """Targets of make and files that the steps of a workflow name and that do not exist."""
    for step in steps(workflow):
        for line in str(step.get("run", "")).splitlines():
            for arguments in re.findall(r"\bmake ([^|&;]*)", line):
                words = arguments.split()
                named = {f"more {w}" for w in words if w.startswith("TASK=")} or {
                    w for w in words if re.fullmatch(r"[a-z][\w-]*", w)
                }
                yield from (f"make {one}" for one in sorted(named - {*known}))
            scripts = re.findall(r"(?:^|\s)(\.?[\w-]+(?:/[\w.-]+)+)", line)
            yield from (path for path in scripts if not (ROOT / path).exists())
        caches = step.get("with", {}).get("cache-dependency-path", "")
        yield from (path for path in caches.split() if not (ROOT / path).exists())


def pythons(workflow):
    """The versions of Python that each job of a workflow sets up."""
    found = {}
    for name, job in workflow["jobs"].items():
        listed = job.get("strategy", {}).get("matrix", {}).get("python")
        found[name] = listed or [
            step["with"]["python-version"] for step in job["steps"]
            if step.get("uses", "").startswith("actions/setup-python@")
        ]  # fmt: skip
    return found


def test_a_person_needs_few_targets_with_one_rule_each_and_make_lists_them():
    few, others = targets("Makefile"), targets("more.mk")
    assert len(few) <= NEEDED
    assert len({*few, *others}) == len(few) + len(others)
    for command, names, makefile in (("", few, "Makefile"), ("more", others, "more.mk")):
        phony = re.search(r"^\.PHONY: (.*)$", (ROOT / makefile).read_text(), re.MULTILINE)
        assert {*phony[1].split()} == {*names}
        line = ["make", *command.split(), "--no-print-directory"]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
        listed = re.findall(r"^  make (?:more TASK=)?([\w-]+) +\w", done.stdout, re.MULTILINE)
        assert listed == [name for name in names if name != "list"]


def test_there_is_a_workflow_for_each_duty():
    assert {*WORKFLOWS} == {"docs", "lint", "nightly", "test", "wheels"}
    known = {*targets("Makefile"), *(f"more TASK={one}" for one in targets("more.mk"))}
    ci = {"jobs": {"ci": {"steps": [{"run": (ROOT / ".ci/run").read_text()}]}}}
    assert not [one for one in missing_commands(ci, known) if one.startswith("make ")]
    ran = " ".join(str(s.get("run")) for path in WORKFLOWS.values() for s in steps(load(path)))
    for command in ("make lint", "make test ", "make more TASK=test-oldest", "make docs",
                    "make mutants", "make more TASK=sdist", ".ci/run"):  # fmt: skip
        assert command in ran


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_is_whole_and_names_only_what_exists(name):
    workflow = load(WORKFLOWS[name])
    assert workflow["name"] == name
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True], "YAML reads the key `on` as true"
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 300
        assert job["steps"][0]["uses"].startswith("actions/checkout@")
        assert job["steps"][0]["with"] == {"persist-credentials": False}
    for step in steps(workflow):
        assert len(step.keys() & {"uses", "run"}) == 1
        # Whose code runs, and in which version.
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1"))
    known = {*targets("Makefile"), *(f"more TASK={one}" for one in targets("more.mk"))}
    assert not list(missing_commands(workflow, known))
    first, last = (release(SUPPORTED["python"]._asdict()[end]) for end in ("oldest", "newest"))
    for version in (one for versions in pythons(workflow).values() for one in versions):
        assert isinstance(version, str), "3.10 without quotes is 3.1"
        assert version.startswith("$") or first <= release(version) <= last


def test_the_search_finds_what_a_workflow_names_and_does_not_exist():
    workflow = {"jobs": {"one": {"steps": [
        {"run": "make test lnt PYTHON=python"},
        {"run": "make more TASK=tset"},
        {"run": "bash .ci/rnu && make docs\nmake dcos | tail", "with": {}},
        {"run": "python tests/mutants/run.py", "with": {"cache-dependency-path": "poetry.lock"}},
    ]}}}  # fmt: skip
    missing = ["make lnt", "make more TASK=tset", "make dcos", ".ci/rnu", "poetry.lock"]
    assert sorted(missing_commands(workflow, ["docs", "test"])) == sorted(missing)


def test_three_pythons_test_and_the_wheel_serves_every_python():
    project = pyproject()
    declared = [one.rpartition(" ")[2] for one in project["project"]["classifiers"]
                if re.search(r":: Python :: 3\.\d+$", one)]  # fmt: skip
    tested = pythons(load(WORKFLOWS["test"]))
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
    job = load(WORKFLOWS["wheels"])["jobs"]["wheels"]
    assert job["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    for architecture in ("x86_64", "aarch64"):
        assert wheels["linux"][f"manylinux-{architecture}-image"] == "manylinux_2_28"
    assert {*job["env"]} == {*wheels["linux"]["environment-pass"]}
    read = (ROOT / "setup.py").read_text().replace('"', "'")
    for variable in (*job["env"], "SPECDEC_HOST_PYTHONS"):
        assert f"environ.get({variable!r}" in read
    toolkit = re.findall(r"nvcc==(\d+\.\d+)", (ROOT / ".ci/install_nvcc").read_text())
    labels = [f"cu{version.replace('.', '')}" for version in toolkit]
    assert job["strategy"]["matrix"]["cuda"] == ["", *labels]


def test_citation_changelog_and_templates_of_issues_have_their_forms():
    citation = load(ROOT / "CITATION.cff")
    # What version 1.2.0 of the format requires.
    assert citation.keys() > {"cff-version", "message", "title", "authors"}
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert citation["version"] == specdec_kernels.__version__
    assert citation["license"] == pyproject()["project"]["license"]
    for author in (a for work in (citation, *citation["references"]) for a in work["authors"]):
        assert "name" in author or author.keys() >= {"family-names", "given-names"}
    changes = (ROOT / "CHANGELOG.md").read_text()
    heading = r"Unreleased|\d+\.\d+\.\d+ \((unreleased|\d{4}-\d\d-\d\d)\)"
    headings = re.findall(r"^## (.*)$", changes, re.MULTILINE)
    assert all(re.fullmatch(heading, one) for one in headings)
    assert any(one.startswith(f"{specdec_kernels.__version__} (") for one in headings)
    sections = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {*re.findall(r"^### (.*)$", changes, re.MULTILINE)} <= sections
    entries = re.findall(r"^- (.+(?:\n  .+)*)", changes, re.MULTILINE)
    assert not [one for one in entries if not one.endswith(".")]
    for form in map(load, (GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")):
        assert form.keys() == {"name", "description", "labels", "body"}
        fields = [part for part in form["body"] if part["type"] != "markdown"]
        assert {part["type"] for part in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
        assert len({part["id"] for part in fields if part["attributes"]["label"]}) == len(fields)
        assert any(part.get("validations", {}).get("required") for part in fields)


def test_the_steps_of_a_release_name_files_that_exist():
    text = (ROOT / "docs/releasing.md").read_text()
    named = re.findall(r"`((?:[\w-]+/)+[\w.-]+\.\w+|[A-Z]+\.(?:md|cff))`", text)
    assert len(named) >= 6
    assert not [name for name in named if not (ROOT / name).exists()]
