"""Runs the tests of specdec_host on the module that a sanitizer watches, without torch.

The tests that load torch or the native libraries of others are left out.

python tests/fuzz/host.py build/sanitize
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.run import ROOT, environment, package_with


def main(build: Path) -> int:
    (module,) = build.glob("_host*.so")
    paths = f"{package_with(module, ROOT / 'python/specdec_host')} {ROOT / 'tests'}"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--noconftest"),
        *("--import-mode=importlib", "-p", "no:cacheprovider", "-o", f"pythonpath={paths}"),
        *("--ignore-glob=*/test_torch_*", "--ignore-glob=*/test_*_example.py"),
        str(ROOT / "tests/host"),
    ]
    settings = environment(build / "_C.so") | {"PYTHONPATH": ""}
    return subprocess.run(command, env=settings, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
