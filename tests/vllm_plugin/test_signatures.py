"""The comparison of a vLLM with what the plug-in expects, on sources that are not vLLM's."""

import io
import tarfile
import zipfile
from importlib import metadata

import pytest
from specdec_vllm import signatures
from specdec_vllm.vllm_interface import REJECTION, REJECTION_V2, RUNNER, SUPPORTED, replaced_in
from support import vllm_overlay

UTILS = f"{REJECTION_V2}_utils"


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


def packed(files, folder, kind="tree"):
    """A source tree, a wheel or an sdist of these files."""
    path = {"tree": folder, "wheel": folder / "vllm.whl", "sdist": folder / "vllm.tar.gz"}[kind]
    if kind == "tree":
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    elif kind == "wheel":
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
    else:
        with tarfile.open(path, "w:gz") as archive:
            for name, text in files.items():
                member = tarfile.TarInfo(f"vllm-1/{name}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
    return path


def printed(capsys, *paths):
    """The exit status, the cells of each function, and the lines below the table."""
    status = signatures.main([*map(str, paths)])
    table, _, below = capsys.readouterr().out.partition("\n\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return status, {name.strip("`"): cells for name, *cells in rows}, below.splitlines()


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize("kind", ["tree", "wheel", "sdist"])
def test_what_the_plugin_was_written_for_is_the_same(tmp_path, capsys, kind, version):
    status, rows, below = printed(capsys, packed(package(f"{version}.1"), tmp_path, kind))
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


def test_each_version_is_compared_with_what_was_written_for_it(tmp_path, capsys):
    trees = [tmp_path / name for name in ("0.32", "0.33", "0.34", "unstated")]
    for tree, version in zip(trees, ("0.32.0", "0.33.0", "0.34.0", "0.33.0"), strict=True):
        packed(package(version), tree)
    (trees[-1] / "vllm/_version.py").unlink()
    status, rows, _ = printed(capsys, *trees)
    assert status == 0
    assert rows["function"] == ["0.32.0", "0.33.0", "0.34.0", f"not stated, as {SUPPORTED[-1]}"]
    assert rows["vllm.v1.sample.sampler.mixed_sample_eligible"] == ["not replaced", *["same"] * 3]
    older = package("0.32.0") | {"vllm/_version.py": "version = '0.33.0'"}
    status, rows, _ = printed(capsys, packed(older, tmp_path, "wheel"))
    assert status == 1
    assert rows[f"{REJECTION}.rejection_sample"] == ["other"]


def test_an_imported_function_is_found_where_it_is_defined(tmp_path, capsys):
    files = package("0.33.0")
    place, utils = (f"{m.replace('.', '/')}.py" for m in (REJECTION_V2, UTILS))
    (line,) = (one for one in files[place].splitlines() if one.startswith("def rejection_sample("))
    files[place] = files[place].replace(line, f"from {UTILS} import verify as rejection_sample")
    files[utils] = line.replace("rejection_sample", "verify")
    status, rows, _ = printed(capsys, packed(files, tmp_path))
    assert status == 0
    files[utils] = "def rejection_sample(): pass\n"
    status, rows, _ = printed(capsys, packed(files, tmp_path))
    assert rows[f"{REJECTION_V2}.rejection_sample"] == ["other"]


def test_another_path_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "text.whl").write_text("no archive")
    (tmp_path / "empty").mkdir()
    for path in map(tmp_path.joinpath, ("absent.whl", "text.whl", "empty")):
        with pytest.raises(SystemExit, match="2"):
            signatures.main([str(path)])
        expected = f"PATH must be a wheel, an sdist or a source tree of vLLM, got {path}\n"
        assert capsys.readouterr().err.endswith(expected)


def test_files_of_another_version_are_laid_over_the_installed_libraries(tmp_path, monkeypatch):
    library = tmp_path / "site" / "vllm" / "attention" / "_C.abi3.so"
    library.parent.mkdir(parents=True)
    library.touch()
    overlay = tmp_path / "overlay"
    vllm_overlay.lay(package("0.33.7"), tmp_path / "site" / "vllm", overlay)
    assert (overlay / "vllm" / "attention" / "_C.abi3.so").resolve() == library.resolve()
    assert signatures.version_of(signatures.sources(overlay)) == "0.33.7"
    monkeypatch.syspath_prepend(overlay)
    assert metadata.version("vllm") == "0.33.7+cpu"
