"""The source files of the repository, and the graph of imports of its Python packages."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "specdec_kernels"
NATIVE = sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh"))
PYTHON = sorted(
    p for folder in ("specdec_kernels", "python", "tests", "bench", "examples")
    for p in (ROOT / folder).rglob("*.py")
)  # fmt: skip


def toml(path: Path) -> dict[str, Any]:
    # Environments that do not build have other versions of setuptools.
    from setuptools.compat.py310 import tomllib  # noqa: PLC0415

    return tomllib.loads(path.read_text())


def pyproject() -> dict[str, Any]:
    """What pyproject.toml says."""
    return toml(ROOT / "pyproject.toml")


def relative(path):
    return path.relative_to(ROOT).as_posix()


def includes(path):
    """The headers that a native file includes, system headers too."""
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def module_name(path):
    """The dotted name under which a file of the packages is imported."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts[1:] if parts[0] == "python" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Module -> file, of what is installed.
MODULES = {module_name(p): p for p in PYTHON if relative(p).startswith(("specdec_", "python/"))}


@functools.cache
def imports(path):
    """Dotted names that a file imports, also inside functions: of modules, or of names in them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = absolute("." * node.level + (node.module or ""), path)
            found |= {f"{source}.{a.name}" for a in node.names}
    return found


def absolute(module, path):
    """The module that a `from` statement of a file names, with the leading dots resolved."""
    name = module.lstrip(".")
    level = len(module) - len(name)
    if not level:
        return name
    parents = module_name(path).split(".")
    base = parents[: len(parents) - level + (path.name == "__init__.py")]
    return ".".join([*base, name] if name else base)


def import_graph():
    """Module -> the modules of ours that it imports by name."""
    graph = {}
    for module, path in MODULES.items():
        # `from a import b` imports the module a.b where there is one, else takes b out of a.
        found = {n if n in MODULES else n.rpartition(".")[0] for n in imports(path)}
        graph[module] = found & MODULES.keys() - {module}
    return graph


def circles(graph):
    """The circles of a graph, each as the list of its nodes with the first one repeated."""
    done, path, found = set(), [], []

    def visit(node):
        if node in path:
            found.append([*path[path.index(node) :], node])
        elif node not in done:
            path.append(node)
            for successor in sorted(graph[node]):
                visit(successor)
            path.pop()
            done.add(node)

    for node in sorted(graph):
        visit(node)
    return found


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ +(.+)$", document.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }
