"""What importing specdec_host loads, and what it says where its native module was not built."""

import os
import subprocess
import sys
from pathlib import Path

import specdec_host


def run(program, folder):
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def test_importing_the_package_loads_no_torch():
    folder = Path(specdec_host.__file__).parents[1]
    done = run("import sys, specdec_host; print('torch' in sys.modules)", folder)
    assert done.stdout == "False\n"


def test_a_missing_module_is_an_import_error_with_the_reason(tmp_path):
    package = tmp_path / "specdec_host"
    package.mkdir()
    for path in Path(specdec_host.__file__).parent.glob("*.py"):
        (package / path.name).write_text(path.read_text())
    done = run("import specdec_host", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: _host is missing beside specdec_host: the native module was not built for "
        "this Python. Install with: pip install --no-build-isolation ."
    )
