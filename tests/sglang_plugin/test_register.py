"""What the plug-in does where it must not act: other versions, platforms and functions."""

import sys
import types

import pytest
from compat import sglang_loops
from specdec_sglang import register, sglang_interface
from specdec_sglang.sglang_interface import DESCEND, SAMPLE, SUPPORTED, USED


@pytest.fixture
def other(monkeypatch, logged):
    """Modules under SGLang's names: by default the version and the functions that are supported.

    `hooked` has what the plug-in registers, `logged` what it says.
    """
    modules, hooked = {}, []
    names = {place[0] for place in USED} | {
        "sglang.version", "sglang.srt.utils", "sglang.srt.plugins.hook_registry",
    }  # fmt: skip
    for name in names:
        for i in range(name.count(".") + 1):
            parent = ".".join(name.split(".")[: i + 1])
            module = modules.setdefault(parent, types.ModuleType(parent))
            monkeypatch.setitem(sys.modules, parent, module)
    modules["sglang.version"].__version__ = SUPPORTED[0]
    modules["sglang.srt.utils"].is_cpu = lambda: True
    registry = modules["sglang.srt.plugins.hook_registry"]
    registry.HookType = types.SimpleNamespace(AROUND="around")
    registry.HookRegistry = types.SimpleNamespace(
        register=lambda target, hook, kind: hooked.append((target, kind))
    )
    for (module, function), names in USED.items():
        define(modules[module], function, names)
    return types.SimpleNamespace(modules=modules, hooked=hooked, logged=logged)


def define(module, function, names):
    exec(f"def {function}({', '.join(names.split())}): pass", vars(module))


def test_a_supported_version_is_hooked_at_two_functions(other):
    register()
    assert other.hooked == [(".".join(SAMPLE), "around"), (".".join(DESCEND), "around")]
    assert other.logged == []


LEAVES = "specdec_sglang leaves SGLang as it is: "


@pytest.mark.parametrize("place", USED, ids=lambda place: place[1])
@pytest.mark.parametrize("more", [" more", None], ids=["another", "none"])
def test_a_function_with_other_arguments_is_named(other, place, more):
    module, function = place
    del vars(other.modules[module])[function]
    if more:
        define(other.modules[module], function, USED[place] + more)
    register()
    got = f"{USED[place]}{more}" if more else "nothing"
    named = f"{module}.{function} must take {USED[place]}, got {got}"
    assert (other.hooked, other.logged) == ([], [LEAVES + named])


def test_another_version_or_platform_is_left_as_it_is(other, monkeypatch):
    other.modules["sglang.version"].__version__ = "0.5.24"
    register()
    said = [f"{LEAVES}version 0.5.24 is not one of 0.5.23"]
    assert (other.hooked, other.logged) == ([], said)
    other.modules["sglang.srt.utils"].is_cpu = lambda: False
    monkeypatch.setattr(sglang_interface, "unsupported", lambda: pytest.fail("it looked"))
    register()
    assert (other.hooked, other.logged) == ([], said)


def test_switched_off_it_does_not_even_look_and_other_words_are_refused(monkeypatch):
    monkeypatch.setattr(sglang_interface, "other_platform", lambda: pytest.fail("it looked"))
    monkeypatch.setenv("SPECDEC_SGLANG", "0")
    register()
    for text in ("", "yes"):
        monkeypatch.setenv("SPECDEC_SGLANG", text)
        with pytest.raises(ValueError, match=f"SPECDEC_SGLANG must be 0 or 1, got {text!r}$"):
            register()


@pytest.mark.skipif(
    sglang_loops.source() is None,
    reason="SGLang is not installed, and SGLANG_SOURCE names no folder with its files",
)
@pytest.mark.parametrize("place", USED, ids=lambda place: place[1])
def test_the_arguments_are_those_of_its_files(place):
    assert sglang_loops.arguments(*place) == USED[place]
