"""Which checks of arguments a table of bad inputs fails: a check that no row fails has no test."""

import ast
import inspect
import sys
from pathlib import Path


def check_sites(modules):
    """(file, first line, last line) of every `require`, but where devices are compared."""
    for module in modules:
        for f in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(f, ast.FunctionDef) and f.name not in ("kv_append_", "same_device"):
                for node in ast.walk(f):
                    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require":
                        yield module.__file__, node.lineno, node.end_lineno


def way_to(frame, files):
    """(function, line) of every frame of the checks, from the one that requires outwards."""
    while frame is not None and frame.f_code.co_filename in files:
        yield frame.f_code.co_name, frame.f_lineno
        frame = frame.f_back


def untripped(monkeypatch, modules, calls, shared=()):
    """Sites that no call fails, and ways to a site that an op goes and never fails on.

    Args:
        calls: (op, a call that raises) of each row of the table.
        shared: modules of which the ways count and not each site.
    """
    files = {module.__file__ for module in (*modules, *shared)}
    sites = set(check_sites(modules))
    tripped, ways, failed = set(), set(), set()

    def require(condition, message):
        frame = sys._getframe(1)
        way = (op, *way_to(frame, files))
        if frame.f_code.co_name != "same_device":
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
