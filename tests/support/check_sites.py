"""Finds checks of arguments that no row of a table of bad inputs fails: they have no test."""

import ast
import inspect
import sys
from pathlib import Path


def check_sites(modules):
    """(file, first line, last line) of every call of `require`.

    Left out are `check_same_device`, which needs two devices, and `append` of the cache ops, whose
    bad inputs are in tests/kv.
    """
    for module in modules:
        for f in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(f, ast.FunctionDef) and f.name not in ("append", "check_same_device"):
                for node in ast.walk(f):
                    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require":
                        yield module.__file__, node.lineno, node.end_lineno


def way_to(frame, files):
    """(function, line) of the frames in `files`, from the one that calls `require` outwards."""
    while frame is not None and frame.f_code.co_filename in files:
        yield frame.f_code.co_name, frame.f_lineno
        frame = frame.f_back


def untripped(monkeypatch, modules, calls, shared=()):
    """The sites that no call fails, and the call paths to a site on which no call of an op fails.

    Args:
        modules: those whose sites are looked for.
        calls: (op, a call that raises) for each row of the table.
        shared: modules whose call paths count, but not each of their sites.
    """
    files = {module.__file__ for module in (*modules, *shared)}
    sites = set(check_sites(modules))
    tripped, ways, failed = set(), set(), set()

    def require(condition, message):
        frame = sys._getframe(1)
        way = (op, *way_to(frame, files))
        if frame.f_code.co_name != "check_same_device":
            ways.add(way)
        if not condition:
            file, line = frame.f_code.co_filename, frame.f_lineno
            tripped.update(s for s in sites if s[0] == file and s[1] <= line <= s[2])
            failed.add(way)
            raise RuntimeError(message)

    for module in (*modules, *shared):
        if inspect.isfunction(getattr(module, "require", None)):
            monkeypatch.setattr(module, "require", require)
    for op, call in calls:
        try:
            call()
        except RuntimeError:
            continue
        raise AssertionError(f"a row of {op} raises nothing")
    return sorted(sites - tripped), sorted(ways - failed)
