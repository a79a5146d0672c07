"""Workflows, Makefiles and the configuration of wheels fit this tree."""

import re
import subprocess

import pytest
import yaml  # Transformers requires it
from support.sources import ROOT, pyproject

import specdec_kernels
from specdec_kernels.versions import SUPPORTED, release

WORKFLOWS = {path.stem: path for path in sorted(ROOT.glob(".github/workflows/*.yml"))}
NEEDED = 14  # the most targets that a person has to know

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="the workflows are not beside the tests")


def load(path):
    return yaml.safe_load(path.read_text())


def targets(makefile):
    """The targets that a Makefile has rules for, in order, without files."""
    return re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / makefile).read_text(), re.MULTILINE)


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


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


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_is_whole_and_pins_what_it_uses(name):
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
    first, last = (release(SUPPORTED["python"]._asdict()[end]) for end in ("oldest", "newest"))
    for version in (one for versions in pythons(workflow).values() for one in versions):
        assert isinstance(version, str), "3.10 without quotes is 3.1"
        assert version.startswith("$") or first <= release(version) <= last


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


def test_the_citation_and_the_changelog_have_the_version():
    version = specdec_kernels.__version__
    assert load(ROOT / "CITATION.cff")["version"] == version
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text()
