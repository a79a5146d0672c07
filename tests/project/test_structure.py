"""Who may include or import whom, and which file holds what: the rooms of CONTRIBUTING.md."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections import Counter

import pytest
import specdec_hf
from support.sources import (
    CSRC,
    MODULES,
    NATIVE,
    PYTHON,
    ROOT,
    circles,
    import_graph,
    imports,
    includes,
    relative,
)

import specdec_kernels
from specdec_kernels import _library

LONGEST = 600  # lines of a file

pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="the sources are not beside the tests")

INCLUDABLE = {  # folder of csrc -> folders of ours that its files may include
    "include": {"specdec"},
    "cpu": {"specdec", "cpu"},
    "cuda": {"specdec", "cuda"},
    "arguments": {"specdec", "arguments", "torch", "host", "c"},
    "torch": {"specdec", "arguments", "torch", "cpu"},
    "host": {"specdec", "arguments", "host", "cpu"},
    "c": {"specdec", "arguments", "c", "cpu"},
}
OURS = {"specdec", "arguments", "cpu", "cuda", "torch", "host", "c"}
# The headers of csrc/arguments that choose the tensors: of PyTorch, NumPy or the C interface.
CHOOSING = {"tensor.h", "launch.h"}
# Inside csrc/cpu and csrc/cuda: room -> rooms whose headers it may include.
BELOW = {
    "row": {"row"},
    "chain": {"row", "chain"},
    "tree": {"row", "chain", "tree"},
    "kv": {"kv"},
    "history": {"history"},
    "forward": {"kv", "tree", "forward"},  # a layer writes the cache, a head grows trees
}


def folder(path):
    return path.relative_to(CSRC).parts[0]


def room(path):
    """The room of a file in csrc/cpu or csrc/cuda, or None for what all its rooms share."""
    first, *rest = path.relative_to(CSRC).parts
    return rest[0] if first in ("cpu", "cuda") and len(rest) == 2 else None


def test_the_native_sources_are_found():
    assert {folder(p) for p in NATIVE} == INCLUDABLE.keys()
    assert {room(p) for p in NATIVE} == {None, *BELOW}


def test_native_folders_include_only_what_they_may():
    for path, name in [(p, name) for p in NATIVE for name in includes(p)]:
        first = name.split("/")[0]
        stable = re.match(r"torch/(csrc/stable|headeronly|csrc/inductor/aoti_torch/c)/", name)
        if folder(path) != "torch":
            chosen = folder(path) == "arguments" and path.name in CHOOSING
            assert (
                not re.match(r"(torch|ATen|c10|pybind11)/", name)
                or (folder(path) == "host" and name.startswith("pybind11/"))
                or (chosen and name == f"torch/{path.name}")
            ), f"{relative(path)} includes {name}"
        if first in OURS and not stable:
            assert first in INCLUDABLE[folder(path)], f"{relative(path)} includes {name}"
        assert not re.match(r"(ATen|c10|torch/(all|extension|library)\.h)", name)


def test_trees_build_on_chains_and_chains_on_rows_and_never_the_reverse():
    for path, name in [(p, name) for p in NATIVE if room(p) for name in includes(p)]:
        parts = name.split("/")
        if parts[0] == folder(path) and len(parts) == 3:
            assert parts[1] in BELOW[room(path)], f"{relative(path)} includes {name}"
            # CUDA kernels share what both need in `row`.
            assert (folder(path), room(path), parts[1]) != ("cuda", "tree", "chain"), relative(path)


def test_cuda_sources_name_nothing_of_torch():
    for path in NATIVE:
        if folder(path) == "cuda":
            found = re.search(r"\b(torch|at|c10|aten)::|\bTensor\b", path.read_text())
            assert not found, f"{relative(path)} names {found and found[0]}"


# Python packages.

FORBIDDEN = {  # beginning of paths -> what no such file may import
    "specdec_kernels/": r"(transformers|specdec_(?!kernels\b)|numpy|tests|bench)",
    # What goes beyond the loop, it finds by entry points alone.
    "python/specdec_hf/": r"(specdec_(?!hf\b|kernels\b|host\b)|tests|bench|vllm\b)",
    "python/specdec_papers/": r"(specdec_(lab|serve|vllm|sglang)|tests|bench|vllm)\b",
    "python/specdec_lab/": r"(specdec_(serve|vllm|sglang)|tests|bench|vllm)\b",
    "python/specdec_serve/": r"(specdec_(lab|papers|vllm|sglang)|tests|bench|vllm)\b",
    # The plug-in for vLLM knows of the loop how a datastore's tokenizer is checked.
    "python/specdec_vllm/": (
        r"(specdec_hf(?!\.drafters\.fingerprint\.)|specdec_sglang|transformers|tests|bench)\b"
    ),
    "python/specdec_sglang/": r"(specdec_(?!kernels\b|sglang\b)|transformers|tests|bench)",
    "python/specdec_host/": r"(torch|transformers|specdec_(?!host\b)|tests|bench)",
    # The loop does not know the command line.
    "python/specdec_hf/(?!cli/|__main__)": r"specdec_hf\.cli\b",
    # What several tests share is in tests/support. On a device, Triton runs the tests of CUDA.
    "tests/(?!device/)": r"\w+\.test_\w+",
}
# Part of specdec_kernels -> the parts that it may import.
OPS = {
    "_library": {"triton"}, "arguments": set(), "indexing": {"arguments"}, "ops": {"arguments"},
    "reference": {"arguments", "_library"}, "triton": {"arguments"}, "analysis": {"reference"},
    "compat": {"arguments", "ops"}, "sharded": {"arguments", "ops"},
}  # fmt: skip
# The public modules of specdec_kernels beside the package itself.
PUBLIC = ("specdec_kernels.analysis", "specdec_kernels.compat", "specdec_kernels.versions")
PLUGINS = {"vllm": "python/specdec_vllm/", "sglang": "python/specdec_sglang/"}
# Folder of specdec_hf -> what it may import, beside `extras` where asked. `cli` may import all.
BELOW_DRAFTERS = {"drafting", "request", "runner", "schedules"}
LOOP = {
    "schedules": set(), "request": {"runner", "schedules"}, "runner": set(),
    "drafting": BELOW_DRAFTERS - {"drafting"}, "drafters": BELOW_DRAFTERS,
    "heads": BELOW_DRAFTERS | {"drafters"}, "loop": BELOW_DRAFTERS | {"drafters"},
    "extras": BELOW_DRAFTERS | {"drafters", "heads", "loop"},
}  # fmt: skip


PARTS = [("specdec_kernels", OPS, part) for part in OPS] + [
    ("specdec_hf", LOOP, part) for part in LOOP
]


@pytest.mark.parametrize("paths", FORBIDDEN)
def test_packages_import_only_what_they_may(paths):
    files = [path for path in PYTHON if re.match(paths, relative(path))]
    assert files
    for path in files:
        wrong = {n for n in imports(path) if re.match(FORBIDDEN[paths], n)}
        assert not wrong, f"{relative(path)} imports {wrong}"


@pytest.mark.parametrize(
    ("package", "below", "part"), PARTS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_the_parts_of_a_package_import_only_what_they_may(package, below, part):
    folder = MODULES[package].parent
    for module, path in MODULES.items():
        if module.split(".")[:2] == [package, part]:
            for name in imports(path):
                other = name.split(".")
                if other[0] == package and (folder / other[1]).is_dir():
                    known = below[part] | {part, "extras"}
                    assert other[1] in known, f"{relative(path)} imports {name}"


@pytest.mark.parametrize("language", ["reference", "triton"])
def test_rooms_of_kernels_build_on_each_other_as_the_native_ones_do(language):
    for module, path in MODULES.items():
        parts = module.split(".")
        # Triton samples a row as the bonus row of a chain without drafts.
        if parts[1:] == ["triton", "row", "sample"]:
            continue
        if parts[1:2] == [language] and len(parts) > 2 and parts[2] in BELOW:
            for name in imports(path):
                other = name.split(".")
                if other[:2] == ["specdec_kernels", language] and other[2] in BELOW:
                    assert other[2] in BELOW[parts[2]], f"{relative(path)} imports {name}"


def test_the_loop_and_the_plugins_use_only_the_public_api_of_the_ops():
    for path in PYTHON:
        if relative(path).startswith("python/") and "specdec_host" not in relative(path):
            # torch.ops.mkldnn is part of PyTorch, and torch.ops.specdec_hf is defined there.
            found = re.search(r"torch\.ops\b(?!\.(mkldnn|specdec_hf)\b)", path.read_text())
            assert not found, relative(path)
            for name in imports(path):
                module, _, attribute = name.rpartition(".")
                if name.split(".")[0] == "specdec_kernels" and not name.startswith(PUBLIC):
                    public = attribute in {*specdec_kernels.__all__, "__version__"}
                    assert not module or (module == "specdec_kernels" and public), (
                        f"{relative(path)} imports {name}"
                    )


def test_the_ops_may_be_imported_under_another_name():
    """So that `kernels` loads them beside the package; `_ops.py` has the namespace of the ops."""
    for path in [path for path in PYTHON if relative(path).startswith("specdec_kernels/")]:
        for node in ast.walk(ast.parse(path.read_text())):
            named = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            named += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            named += [node.attr] if isinstance(node, ast.Attribute) else []
            named += [node.value] if isinstance(node, ast.Constant) else []
            for name in named:
                assert not re.match(r"specdec_kernels($|::|\.)", str(name)), (
                    f"{relative(path)} names the package or the namespace: {name}"
                )


@pytest.mark.parametrize("server", PLUGINS)
def test_one_file_of_a_plugin_names_what_it_uses_of_the_server(server):
    for path in PYTHON:
        if relative(path).startswith(PLUGINS[server]) and path.name != f"{server}_interface.py":
            assert not re.search(rf'"{server}\.(?!plugins|general_plugins)', path.read_text())
            assert not {n for n in imports(path) if n.split(".")[0] == server}


def test_no_module_imports_in_a_circle():
    """Imports inside functions count."""
    graph = import_graph()
    assert graph["specdec_kernels"] >= {"specdec_kernels._library"}
    assert graph["specdec_hf.options"] >= {"specdec_hf.drafters.resolve"}  # inside a function
    assert not circles(graph)
    graph["specdec_hf.drafters.resolve"].add("specdec_hf.options")  # the control
    assert circles(graph)


# Files.


def test_no_file_is_too_long_to_read():
    ledger = (ROOT / "tests/mutants").glob("*.toml")
    lines = {relative(p): len(p.read_text().splitlines()) for p in (*NATIVE, *PYTHON, *ledger)}
    assert not {name: n for name, n in lines.items() if n > LONGEST}


def test_a_rule_is_in_few_files():
    """Rule top_beta has two parameters and reads the row once more. A link is no file."""
    named = {p.resolve() for p in (*NATIVE, *PYTHON) if re.search("(?i)top_?beta", p.read_text())}
    assert len([p for p in named if "tests" not in p.parts]) <= 18, named


# Budgets of the tests. They go down: who needs more takes something else away. The lines rose by
# what proves grow_tree_, masks, penalties and grammars, and then the C interface, kept tokens,
# results of the caller, the prefix cache, predictions, calls of tools and vLLM's V2 runner. The
# planted faults are not counted: each new mechanism must bring its own.

TEST_LINES = 53_986  # of all files below tests/ but the ledger of faults
SUPPORT_LINES = 2_225
HELPERS = 2  # modules of ours that a reader of one test file has to know
FILES_WITH_MORE_HELPERS = 29
DUPLICATES = 3  # names that several test functions have
parsed = functools.cache(ast.parse)
HELPING = (
    "support", "proofs", "packages", "simt", "fuzz", "device", "mutants",
    "c", "kv", "hf", "host", "compat", "sharded", "project", "vllm_plugin",
)  # fmt: skip


@functools.cache
def texts_of_tests():
    """Path -> text of every file of the tests."""
    command = ["git", "ls-files", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    paths = map(ROOT.joinpath, done.stdout.splitlines())
    if done.returncode != 0:  # not a git checkout
        paths = (p for p in (ROOT / "tests").rglob("*.*") if "__pycache__" not in p.parts)
    return {relative(p): p.read_text() for p in paths if p.is_file()}


def lines_below(texts, folder):
    counted = [
        n for n in texts if n.startswith(folder) and not re.match(r"tests/mutants/.*toml", n)
    ]
    return sum(len(texts[name].splitlines()) for name in counted)


def helpers_of(text):
    """The modules of ours beside the tests that a file of tests imports."""
    found = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            plain = node.module in HELPING and node.module != "proofs"
            found |= {f"{node.module}.{a.name}" for a in node.names} if plain else {node.module}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return {name for name in found if name.split(".")[0] in HELPING}


def duplicates(texts):
    """The names that test functions of several places have."""
    names = Counter(
        node.name
        for path, text in texts.items()
        if path.endswith(".py")
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )
    return sorted(name for name, count in names.items() if count > 1)


def over_budget(texts, test_lines, support_lines, files, names):
    """What a suite has more of than it may."""
    many = [
        path for path, text in texts.items()
        if path.rpartition("/")[2].startswith("test_") and path.endswith(".py")
        and len(helpers_of(text)) > HELPERS
    ]  # fmt: skip
    found = {
        "lines of tests": (lines_below(texts, "tests/"), test_lines),
        "lines of tests/support": (lines_below(texts, "tests/support/"), support_lines),
        "files with more helpers than two": (len(many), files),
        "names of several tests": (len(duplicates(texts)), names),
    }
    return {what: numbers for what, numbers in found.items() if numbers[0] > numbers[1]}


def test_the_tests_keep_to_their_budgets():
    given = (TEST_LINES, SUPPORT_LINES, FILES_WITH_MORE_HELPERS, DUPLICATES)
    assert not over_budget(texts_of_tests(), *given)


def test_a_suite_over_each_budget_is_found():
    """The control: each number is one too small for this suite, and together they fit it."""
    test = "from support import a, b\nimport proofs\ndef test_x(): pass\n"
    texts = {"tests/a/test_a.py": test, "tests/support/b.py": "def test_x(): pass\n", "t.py": test}
    fitting = (4, 1, 1, 1)
    assert helpers_of(test) == {"support.a", "support.b", "proofs"}
    assert not over_budget(texts, *fitting)
    for i in range(len(fitting)):
        tight = (n - (k == i) for k, n in enumerate(fitting))
        assert len(over_budget(texts, *tight)) == 1


# Files and lines of the loop that it loads alone and with its default drafter; they only go down.
CLOSURES = {"specdec_hf.api": (58, 10_384), "specdec_hf.api, specdec_hf.heads.auto": (71, 12_889)}
LIMITS = {"fields of a class": 14, "own imports of a module": 14, "lines of a function": 60}
# What may exceed them: arguments and results of the public functions, with their types and texts.
ABOVE = {"CommonOptions", "DrafterEntry", "SpecStats", "api", "generate"}


def closure(module):
    """The modules of specdec_hf that importing one loads."""
    code = f"import sys, {module}; print(*(m for m in sys.modules if m in {[*MODULES]}))"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in loaded if name.split(".")[0] == "specdec_hf"]


def beyond(texts, graph, limits):
    """For each limit, what exceeds it in these modules."""
    found = {what: [] for what in limits}
    for module, text in texts.items():
        sizes = [("own imports of a module", module, len(graph[module]))]
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.ClassDef):
                held = sum(isinstance(one, ast.AnnAssign) for one in node.body)
                sizes.append(("fields of a class", f"{module}.{node.name}", held))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = node.end_lineno - node.lineno + 1
                sizes.append(("lines of a function", f"{module}.{node.name}", size))
        for what, name, size in sizes:
            if size > limits[what]:
                found[what].append(name)
    return found


def test_the_loop_keeps_to_its_budgets():
    texts = {m: p.read_text() for m, p in MODULES.items() if m.split(".")[0] == "specdec_hf"}
    for modules, (files, lines) in CLOSURES.items():
        loaded = closure(modules)
        assert len(loaded) <= files, loaded
        assert sum(len(texts[name].splitlines()) for name in loaded) <= lines, modules
        assert not any(name.startswith("specdec_hf.extras") for name in loaded)
    graph = {m: {n for n in names if n in texts} for m, names in import_graph().items()}
    found = beyond(texts, graph, LIMITS).values()
    assert {name.rpartition(".")[2] for names in found for name in names} == ABOVE


def test_what_exceeds_a_limit_of_the_loop_is_found():
    """The control: a limit of one less finds what fits."""
    texts = {"a": "class A:\n    x: int\n    y: int\ndef f():\n    pass\n"}
    limits = {"fields of a class": 2, "own imports of a module": 3, "lines of a function": 2}
    assert not any(beyond(texts, {"a": "bcd"}, limits).values())
    tight = {what: most - 1 for what, most in limits.items()}
    assert [*beyond(texts, {"a": "bcd"}, tight).values()] == [["a.A"], ["a"], ["a.f"]]
    assert {"specdec_hf.loop.rounds", "specdec_hf.options"} <= {*closure("specdec_hf.api")}


def test_what_the_loop_makes_is_on_a_device_that_it_names():
    for path in (ROOT / "python/specdec_hf").glob("[delrs]*/*.py"):  # but heads and cli
        for call in (n for n in ast.walk(parsed(path.read_text())) if isinstance(n, ast.Call)):
            if re.fullmatch(r"torch\.(arange|full|ones|tensor|zeros)", ast.unparse(call.func)):
                assert {None, "device"} & {one.arg for one in call.keywords}, ast.unparse(call)


# The table of ops says in which room and file an op is; see _library.OPS.
TRITON_ONLY = ("tree.layout", "tree.expand_tree")  # on CUDA devices


def files_of(where):
    """For each part of the repository, the paths of which one must exist for an op of `where`."""
    room, file = where.split(".")
    names = (file, f"{room}_{file}")
    parts = {
        "include": [f"csrc/include/specdec/{n}.h" for n in (*names, room)],
        "cpu": [f"csrc/cpu/{room}/{file}.cpp"],
        "cuda": [f"csrc/cuda/{room}/{file}.cu"],
        "torch": [f"csrc/torch/ops/{n}.cpp" for n in names],
        "reference": [f"specdec_kernels/reference/{room}/{file}.py"],
        "triton": [f"specdec_kernels/triton/{room}/{file}.py"],
    }
    if where in TRITON_ONLY:
        del parts["cuda"]
    if room == "forward":  # on the CPU alone
        del parts["cuda"]
    if where not in {_library.OPS[op] for op in _library.TRITON_OPS}:
        del parts["triton"]
    return parts


@pytest.mark.parametrize("op", _library.OPS)
def test_an_op_has_the_same_file_name_in_every_language(op):
    where = _library.OPS[op]
    for part, paths in files_of(where).items():
        found = [p for p in paths if (ROOT / p).exists()]
        assert found, f"{op} ({where}) has none of {paths} in {part}"
        if part == "torch":
            (text,) = [(ROOT / p).read_text() for p in found]
            assert re.search(rf"\b{op}\b", text)
            assert "m.def(" in text or "define<" in text


def test_no_public_name_of_the_loop_is_a_module():
    """Importing such a module would put it in the place of the lazily loaded name."""
    for name in specdec_hf.__all__:
        assert importlib.util.find_spec(f"specdec_hf.{name}") is None, name
