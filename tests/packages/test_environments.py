"""Which Pythons a release serves, and what an environment of its test holds."""

import sys

from packages import pythons


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
