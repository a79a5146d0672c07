"""What `make test` leaves out since it passed and nothing changed, and what it must not."""

from types import SimpleNamespace

import pytest
from support import sources, unchanged

MARKED = "import helper\npytestmark = pytest.mark.training\n"


class Cache(dict):
    def set(self, key, value):
        self[key] = value


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two test files, one marked, and a helper of both."""
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(unchanged, "TESTS", tmp_path)
    monkeypatch.setattr(unchanged, "_surroundings", lambda: b"")
    unchanged._module.cache_clear()
    (tmp_path / "test_marked.py").write_text(MARKED)
    (tmp_path / "test_other.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("one = 1\n")
    yield tmp_path
    unchanged._module.cache_clear()


def run(cache, *, fails=(), keyword="", source=pytest.Config.ArgsSource.TESTPATHS, exitstatus=0):
    """The files that a run leaves out, before it runs the others."""
    config = SimpleNamespace(
        cache=cache, args_source=source, ArgsSource=pytest.Config.ArgsSource,
        option=SimpleNamespace(keyword=keyword),
    )  # fmt: skip
    lane = unchanged.Lane(config)
    for file in {"test_marked.py", "test_other.py"} - lane.left_out:
        lane.pytest_runtest_logreport(SimpleNamespace(nodeid=f"{file}::t", failed=file in fails))
    lane.pytest_sessionfinish(SimpleNamespace(config=config), exitstatus)
    return lane.left_out


def test_a_marked_file_that_passed_is_left_out_until_what_it_imports_changes(folder):
    cache = Cache()
    assert [run(cache), run(cache), run(cache)] == [set(), {"test_marked.py"}, {"test_marked.py"}]
    (folder / "helper.py").write_text("one = 2\n")
    assert [run(cache), run(cache)] == [set(), {"test_marked.py"}]


@pytest.mark.parametrize(
    "how",
    [
        {"fails": ["test_marked.py"], "exitstatus": 1},
        {"keyword": "some"},
        {"source": pytest.Config.ArgsSource.ARGS},
        {"exitstatus": 2},
    ],
    ids=["it failed", "a part of it ran", "chosen by hand", "interrupted"],
)
@pytest.mark.usefixtures("folder")
def test_a_file_that_did_not_pass_whole_is_not_left_out(how):
    cache = Cache()
    run(cache, **how)
    assert run(cache) == set()


def test_what_a_file_loads_late_or_names_in_a_text_is_reached():
    reached = {sources.relative(p) for p in unchanged.reached(sources.ROOT / "tests/conftest.py")}
    assert {"tests/support/lanes.py", "tests/conftest.py"} <= reached
    (loop,) = (path for name, path in sources.MODULES.items() if name == "specdec_hf")
    names = {module for module, path in sources.MODULES.items() if path in unchanged.reached(loop)}
    # By the stub of the package, by the register of drafters, and by an entry point.
    assert {"specdec_hf.api", "specdec_hf.drafters.copying", "specdec_papers.medusa"} <= names
    assert "specdec_vllm.plugin" not in names
