"""SGLang's files, read and not imported: where they are, and the arguments of their functions.

The environment variable SGLANG_SOURCE names a folder that holds `sglang/`, such as an unpacked
wheel; otherwise an installed SGLang is read.
"""

import ast
import functools
import importlib.util
import os
from pathlib import Path


def source():
    """The folder `sglang`, or None."""
    if named := os.environ.get("SGLANG_SOURCE"):
        folder = Path(named) / "sglang"
        if not (folder / "version.py").is_file():
            raise FileNotFoundError(f"SGLANG_SOURCE must name a folder with sglang/, got {named}")
        return folder
    spec = importlib.util.find_spec("sglang")
    return Path(spec.origin).parent if spec and spec.origin else None


def path_of(module):
    return source().joinpath(*module.split(".")[1:]).with_suffix(".py")


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def arguments(module, function):
    """The names of a function of a module, or "nothing"."""
    found = [n for n in tree(path_of(module)).body if getattr(n, "name", None) == function]
    if not found:
        return "nothing"
    a = found[-1].args
    return " ".join(x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs))


def calls(names):
    """(file, function, keywords) of every call of one of these functions by its name."""
    for path in sorted(source().glob("srt/**/*.py")):
        text = path.read_text(encoding="utf-8")
        if any(name in text for name in names):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    name = node.func.id.removesuffix("_func")
                    if name in names:
                        yield path.name, name, [k.arg for k in node.keywords], len(node.args)
