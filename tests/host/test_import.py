"""What importing specdec_host loads, and what it says where its native module was not built."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import specdec_host

FOLDER = Path(specdec_host.__file__).parents[1]


def run(program, folder=FOLDER, **variables):
    environment = os.environ | {"PYTHONPATH": str(folder)} | variables
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


CALLS = """
import sys, numpy as np, specdec_host as host
one = np.zeros(1, np.int64)
target, draws = np.eye(3, dtype=np.float32)[None], dict(seeds=one, positions=one)
host.sample(target[0, :1], **draws)
host.verify_chain(target, np.zeros((1, 2), np.int64), **draws)
tree = host.Tree(np.zeros((1, 2), np.int64), np.array([[-1, 0]]))
host.verify_tree(target, tree, rule="target_only", **draws)
assert not {"torch", "specdec_kernels"} & sys.modules.keys()
"""


def test_importing_it_and_calling_its_ops_loads_no_torch():
    done = run(CALLS)
    assert done.returncode == 0, done.stderr


def test_what_is_missing_or_misspelt_is_an_import_error_with_the_reason(tmp_path):
    package = Path(specdec_host.__file__).parent
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(package, tmp_path / "specdec_host", ignore=ignored)
    load = "import specdec_host"
    for done, message in (
        (
            run(load, SPECDEC_CPU_CAPABILITY="avx"),
            "SPECDEC_CPU_CAPABILITY must be one of avx512, avx2, plain, got avx",
        ),
        (
            run(f"import sys; sys.modules['numpy'] = None; {load}"),
            "specdec_host needs NumPy: pip install numpy",
        ),
        (
            run(load, tmp_path),
            f"_host{EXTENSION_SUFFIXES[0]} is missing beside specdec_host: it was not built for "
            "this Python. Build it: pip install --no-binary specdec-kernels specdec-kernels, or in "
            "the folder of the sources: pip install .",
        ),
    ):
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"ImportError: {message}"
