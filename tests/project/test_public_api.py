"""The public API: names, docstrings and their examples, and the error of a missing library."""

import doctest
import importlib
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.sources import MODULES, ROOT

import specdec_kernels

PACKAGE = Path(specdec_kernels.__file__).parent


PROOFS = {f"proofs.{path.stem}": path for path in (ROOT / "tests/proofs").glob("*.py")}
WITH_EXAMPLES = {m: path for m, path in {**MODULES, **PROOFS}.items() if ">>> " in path.read_text()}


@pytest.mark.parametrize("name", sorted(WITH_EXAMPLES))
def test_examples_of_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch})
    assert result.failed == 0
    assert result.attempted > 0 or "+SKIP" in WITH_EXAMPLES[name].read_text()


CLASSES = [kind for kind in vars(specdec_kernels).values() if isinstance(kind, type)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_torch_load_reads_what_torch_save_wrote_of_a_public_class(kind):
    """With `weights_only`, which is the default and refuses what it does not know."""
    if kind is specdec_kernels.Status:
        saved = kind(0b101)
    elif not hasattr(kind, "_fields"):
        one, layer = specdec_kernels.pack_linear(torch.eye(2)), specdec_kernels.PackedDecoderLayer
        saved = layer([torch.ones(2)] * 2, [one] * 3, one, [one] * 3, 1e-5, 0.5)
        if kind is not layer:
            saved = specdec_kernels.PackedDecoderLayers([saved])
        if kind is specdec_kernels.PackedHead:
            saved = kind(saved, torch.eye(2), torch.ones(2), one)
    else:
        saved = kind(*(torch.arange(n) for n, _ in enumerate(kind._fields)))
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded) is kind
    assert repr(loaded) == repr(saved)


# PyTorch, which takes seconds to load, is loaded once.
IMPORT_TWICE = """
import pathlib, sys
for content in (None, b"junk"):
    if content:
        pathlib.Path("specdec_kernels/_C.so").write_bytes(content)
    try:
        import specdec_kernels
    except ImportError as error:
        print(str(error).splitlines()[0])
    for name in [name for name in sys.modules if name.startswith("specdec_kernels")]:
        del sys.modules[name]
try:
    import renamed
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_missing_library_is_an_import_error_with_the_reason(tmp_path):
    """There is no silent fallback if `_C.so` is absent, no library, or that of another package."""
    without = shutil.ignore_patterns("_C.so", "__pycache__")
    for name in ("specdec_kernels", "renamed"):
        shutil.copytree(PACKAGE, tmp_path / name, ignore=without)
    (tmp_path / "renamed/_C.so").symlink_to(PACKAGE / "_C.so")
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_TWICE], cwd=tmp_path, capture_output=True, text=True,
        check=True, env={"PYTHONPATH": str(tmp_path), "PATH": ""},
    )  # fmt: skip
    absent, junk, renamed = done.stdout.splitlines()
    assert re.match(r"_C\.so is missing .* was not built", absent)
    assert junk.startswith("_C.so does not load under torch")
    assert renamed == "_C.so was built for another package: it has no torch.ops.renamed"


def test_a_tree_of_0_dim_tensors_is_refused():
    target, one = torch.zeros(1, 1, 5), torch.zeros(1, dtype=torch.int64)
    tree = specdec_kernels.Tree(one[0], one[0])
    with pytest.raises(RuntimeError, match=r"tree tokens must be \[B, N\], got \[\]"):
        specdec_kernels.verify_tree(target, tree, rule="greedy", seeds=one, positions=one)
