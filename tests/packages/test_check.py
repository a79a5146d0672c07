"""The checks of a wheel find each fault in one that is whole but for it."""

import base64
import hashlib
import io
import shutil
import subprocess
import sys
import zipfile

import pytest
from packages.check import MODULE, expected_files, faults, faults_of_library
from support.sources import ROOT

import specdec_kernels

pytestmark = pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")

VERSION = specdec_kernels.__version__
INFO = f"specdec_kernels-{VERSION}.dist-info"
PYTHON = f"cp3{sys.version_info.minor}"
LIBRARY = "specdec_kernels/_C.so"


@pytest.fixture(scope="module")
def files():
    """Name -> content of the files of a wheel with the libraries that the tests run."""
    found = {}
    for name in expected_files():
        where = ROOT if name.startswith("specdec_kernels/") else ROOT / "python"
        found[name] = (where / name).read_bytes()
    found[LIBRARY] = (ROOT / LIBRARY).read_bytes()
    for path in (ROOT / "python/specdec_host").glob(f"_host.cpython-3{sys.version_info.minor}-*"):
        found[f"specdec_host/{path.name}"] = path.read_bytes()
        module = MODULE.fullmatch(f"specdec_host/{path.name}")
    found[f"{INFO}/METADATA"] = f"Version: {VERSION}\n".encode()
    found[f"{INFO}/WHEEL"] = f"Tag: {PYTHON}-{PYTHON}-linux_{module[2]}\n".encode()
    for name in ("entry_points.txt", "top_level.txt", "licenses/LICENSE"):
        found[f"{INFO}/{name}"] = b""
    return found


def write(folder, files, tags=None):
    """A wheel of these files with its record, named by its tags."""
    tags = tags or files[f"{INFO}/WHEEL"].decode().split()[1]
    path = folder / f"specdec_kernels-{VERSION}-{tags}.whl"
    record = io.StringIO()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as wheel:
        for name, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            record.write(f"{name},sha256={digest},{len(data)}\n")
            wheel.writestr(name, data)
        wheel.writestr(f"{INFO}/RECORD", record.getvalue() + f"{INFO}/RECORD,,\n")
    return path


def test_a_whole_wheel_has_no_fault_and_what_was_changed_later_is_found(tmp_path, files):
    path = write(tmp_path, files)
    assert not list(faults(path))
    with zipfile.ZipFile(path, "a") as wheel, pytest.warns(UserWarning, match="Duplicate"):
        wheel.writestr("specdec_kernels/py.typed", "changed")
    (found,) = faults(path)
    assert found == "specdec_kernels/py.typed must have the hash and the size of RECORD"


def test_what_is_too_much_or_missing_is_named(tmp_path, files):
    changed = files | {"tests/test_row.py": b"", "specdec_kernels/__pycache__/a.pyc": b""}
    del changed["specdec_hf/cli/prompts.jsonl"], changed["specdec_kernels/triton/launch.py"]
    assert list(faults(write(tmp_path, changed))) == [
        "specdec_hf/cli/prompts.jsonl is missing",
        "specdec_kernels/triton/launch.py is missing",
        "specdec_kernels/__pycache__/a.pyc must not be there",
        "tests/test_row.py must not be there",
    ]


SOURCE = """
extern "C" int other_function();
extern "C" int specdec_visible() { return other_function(); }
namespace std { template <class T> void local() {} }
template void std::local<int>();
extern "C" const char* PyInit__host() { return "/home/builder/include/torch.h"; }
"""


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a compiler")
def test_faults_of_a_library_are_named(tmp_path):
    (tmp_path / "one.cpp").write_text(SOURCE)
    command = "c++ -shared -fPIC one.cpp -o one.so -Wl,-rpath,/opt/lib -Wl,--no-as-needed -lresolv"
    subprocess.run(command.split(), cwd=tmp_path, check=True)
    found = list(faults_of_library(tmp_path / "one.so", LIBRARY, "linux_x86_64"))
    for expected in (
        "must need only (aoti_torch_|torch_|stable_torch_)\\w+ beside the system, needs other_fun",
        "must export [], exports ['PyInit__host', '_ZSt5localIiEvv', 'specdec_visible']",
        "must have no RUNPATH, has /opt/lib",
        "must need only libraries of the system, needs libresolv.so.2",
        "must name no path of the build, names /home/builder/include/torch.h",
    ):
        assert any(fault.startswith(f"{LIBRARY} {expected}") for fault in found), (expected, found)
    host = list(faults_of_library(tmp_path / "one.so", "specdec_host/_host.so", "linux_x86_64"))
    assert any("must export ['PyInit__host'], exports" in fault for fault in host)
