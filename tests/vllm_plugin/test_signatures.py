"""The comparison of a vLLM with what the plug-in expects, on sources that are not vLLM's."""

import zipfile

import pytest
from specdec_vllm import signatures
from specdec_vllm.vllm_interface import REJECTION, REJECTION_V2, RUNNER, SUPPORTED, replaced_in


def package(version, **other):
    """The files of a vLLM whose functions take what is expected, or `other` by their last name."""
    lines = {}
    for (module, name), takes in replaced_in(version).items():
        parent, _, function = name.rpartition(".")
        given = other.get(function, takes)
        lines.setdefault((module, parent), []).append(
            f"def {function}({', '.join(given.split())}): pass" if given else "pass"
        )
    files = dict.fromkeys((module for module, _ in lines), 'raise ImportError("nobody loads it")\n')
    for (module, parent), found in lines.items():
        indent = f"class {parent}:\n    " if parent else ""
        files[module] += indent + ("\n    " if parent else "\n").join(found) + "\n"
    files |= {"vllm.__init__": "", "vllm._version": f"__version__ = version = '{version}'\n"}
    return {f"{module.replace('.', '/')}.py": text for module, text in files.items()}


def packed(files, folder):
    """A wheel of these files."""
    with zipfile.ZipFile(folder / "vllm.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return folder / "vllm.whl"


def printed(capsys, *paths):
    """The exit status, the cells of each function, and the lines below the table."""
    status = signatures.main([*map(str, paths)])
    table, _, below = capsys.readouterr().out.partition("\n\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return status, {name.strip("`"): cells for name, *cells in rows}, below.splitlines()


@pytest.mark.parametrize("version", SUPPORTED)
def test_what_the_plugin_was_written_for_is_the_same(tmp_path, capsys, version):
    status, rows, below = printed(capsys, packed(package(f"{version}.1"), tmp_path))
    assert (status, below) == (0, [])
    assert rows.pop("function") == [f"{version}.1"]
    del rows["---"]
    assert rows == {".".join(place): ["same"] for place in replaced_in(version)}


def test_a_function_with_other_arguments_or_none_is_named(tmp_path, capsys):
    files = package("0.33.0", rejection_sample="draft_token_ids", _sample=None)
    status, rows, below = printed(capsys, packed(files, tmp_path))
    assert status == 1
    named = {f"{REJECTION}.rejection_sample", f"{REJECTION_V2}.rejection_sample"}
    named |= {f"{RUNNER}.GPUModelRunner._sample"}
    assert {name for name, cells in rows.items() if cells == ["other"]} == named
    assert (
        f"0.33.0: {RUNNER}.GPUModelRunner._sample must take self logits spec_decode_metadata, "
        "got nothing" in below
    )
    assert len(below) == 3
