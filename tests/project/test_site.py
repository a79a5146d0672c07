"""The documentation site: the places of ops, the names of the loop, and its claims."""

import re
import sys
from itertools import chain

import pytest
from support.sources import ROOT

import specdec_kernels

SITE = ROOT / "docs/site"
if SITE.is_dir():
    sys.path.append(str(SITE))
    import sources

pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="the documents are not beside the tests")


def test_each_op_and_each_class_has_one_place():
    """Ops and their classes have pages; what several ops share is at the end of docs/ops.md."""
    ops = sources.ops()
    assert ops.keys() == {*specdec_kernels._library.OPS, "state_select_", "kept_to_csr"}
    assert ops["verify_chain"] == ["Verdict"]
    assert ops["verify_tree"] == ["TreeVerdict", "Tree"]
    (shared,) = re.findall(r"members: \[(.*?)\]", (ROOT / "docs/ops.md").read_text(), re.DOTALL)
    placed = [*ops, *chain.from_iterable(ops.values()), *re.findall(r"\w+", shared)]
    public = {name for name in specdec_kernels.__all__ if not name.isupper()}
    assert sorted(placed) == sorted(public - {"Rule", "TreeRule"})


@pytest.mark.parametrize("package", ["specdec_hf", "specdec_papers", "specdec_serve"])
def test_the_names_of_a_package_are_those_that_it_exports(package):
    names = [name.rpartition(".")[2] for name in sources.names_of(package)]
    assert names == pytest.importorskip(package).__all__


# The page of claims: rows of a claim with a link to its figures, a command, a machine, a commit.


def test_a_claim_has_a_command_that_exists():
    page = (ROOT / "docs/claims.md").read_text()
    rows = re.findall(r"^\| \[(.*?)\]\((\S+?)\) \| (.*?) \|(?: (.*?) \| (.*?) \|)?$", page, re.M)
    assert len(rows) == len(re.findall(r"^\| \[", page, re.M)) > 30
    for claim, _, command, machine, commit in rows:
        assert bool(machine) == bool(commit), claim
        programs = re.findall(r"`([^`]*)`", command)
        assert programs or command == "by hand", claim
        for program in programs:
            for module in re.findall(r"python -m (bench\.\w+)", program):
                path = ROOT / module.replace(".", "/")
                assert path.is_dir() or path.with_suffix(".py").exists(), program
            for path in re.findall(r"\b(?:tests|bench)/[\w/.]+", program):
                assert (ROOT / path).exists(), program
    named = {*re.findall(r"commit ([0-9a-f]{7,})", (ROOT / "README.md").read_text())}
    assert set() < named <= {commit.split(",")[0] for *_, commit in rows}
