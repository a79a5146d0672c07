"""Workflows are whole and pin what they use, and what cites the project has its version."""

import re

import pytest
import yaml  # Transformers requires it
from support.sources import ROOT

import specdec_kernels

WORKFLOWS = {path.stem: path for path in sorted(ROOT.glob(".github/workflows/*.yml"))}

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="the workflows are not beside the tests")


def load(path):
    return yaml.safe_load(path.read_text())


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


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


def test_the_citation_and_the_changelog_have_the_version():
    version = specdec_kernels.__version__
    assert load(ROOT / "CITATION.cff")["version"] == version
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text()
