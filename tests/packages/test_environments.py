"""Which Pythons a release serves, and what an environment of its test holds."""

import json
import re
import sys

from packages import environments, pythons
from packages.environments import Row, install_and_run


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_release_serves_what_has_headers_and_is_released(tmp_path, monkeypatch):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(pythons, "FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    for said, served in (
        (".cpython-312-x86_64-linux-gnu.so {} final", True),
        (".cpython-399-x86_64-linux-gnu.so {} final", False),
        (".cpython-313t-x86_64-linux-gnu.so {} final", False),
        (".pypy311-pp73-x86_64-linux-gnu.so {} final", False),
        (".cpython-314-x86_64-linux-gnu.so {} candidate", False),
        (".cpython-312-x86_64-linux-gnu.so {}/nowhere final", False),
    ):
        text = f"#!/bin/sh\necho '{said.format(tmp_path)}'\n"
        found = program(tmp_path / "bin/python3.14", text)
        assert pythons.find_pythons() == ({"3.12": found} if served else {}), said


# Stands for a Python: it makes an environment of which the interpreter writes down each call.
INTERPRETER = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]), file=open({{log!r}}, "a"))
print("said")
sys.exit({{fails!r}} in " ".join(sys.argv))
"""
PYTHON = """#!/bin/sh
mkdir -p $3/bin; cp {} $3/bin/python
"""


def calls(folder, monkeypatch, fails="never", extra="host"):
    log = folder / "log"
    made = program(folder / "made", INTERPRETER.format(log=str(log), fails=fails))
    python = program(folder / "base/python", PYTHON.format(made))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    result = install_and_run(folder / "own", python, "2.11", folder / "a-1-py3-none-any.whl", extra)
    return result, [json.loads(line) for line in log.read_text().splitlines()]


def test_an_environment_has_no_compiler_and_nothing_of_this_one(tmp_path, monkeypatch):
    (worked, said), made = calls(tmp_path, monkeypatch, extra="host,hf")
    assert (worked, said) == (True, "said")
    torch, wheel, check, command_line = (arguments for arguments, _ in made)
    assert "--no-cache-dir" in torch
    assert torch[-1] == "torch==2.11.*"
    assert wheel[-1] == f"specdec-kernels[host,hf] @ {(tmp_path / 'a-1-py3-none-any.whl').as_uri()}"
    assert check == ["-I", str(environments.SMOKE)]
    assert command_line == ["-I", "-m", "specdec_hf", "info"]
    for _, variables in made:
        assert variables["PATH"] == str(tmp_path / "own/bin")
        assert variables["PIP_NO_INDEX"] == "1"
        assert "PYTHONPATH" not in variables


def test_an_environment_that_fails_is_in_the_table_and_ends_with_1(tmp_path, monkeypatch, capsys):
    calls(tmp_path, monkeypatch, fails="torch==2.13")
    monkeypatch.setattr(environments, "find_pythons", lambda: {"3.11": tmp_path / "base/python"})
    pairs = [("3.11", "2.13"), ("3.11", "2.11"), ("3.12", "2.10")]
    arguments = [word for pair in pairs for word in ("--pair", *pair)]
    monkeypatch.setattr(
        sys, "argv", ["environments.py", "a.whl", *arguments, "--folder", str(tmp_path)]
    )
    assert environments.main() == 1
    failed, passed, missing = capsys.readouterr().out.splitlines()[-3:]
    assert re.fullmatch(r"\| 3.11 \| 2.13 \| 0 \| \d+ \| FAILED \|", failed)
    assert re.fullmatch(r"\| 3.11 \| 2.11 \| 0 \| \d+ \| passed \|", passed)
    assert missing == str(Row("3.12", "2.10", 0, 0, "not tested: this Python is not here"))
    assert not [*tmp_path.glob("environment-*")], "they are removed"
    monkeypatch.setattr(environments, "find_pythons", dict)
    monkeypatch.setattr(sys, "argv", ["environments.py", "a.whl"])
    assert environments.main() == 1, "no environment at all"
    assert capsys.readouterr().out.count("not tested") == len(environments.PAIRS) > 4
