"""The environment variables of the plug-in, and what it does where it must not act."""

import sys
import types

import pytest
from specdec_vllm import DRAFTERS, RULES, Settings, register, vllm_interface


def test_the_variables_of_the_plugin_are_read():
    assert Settings.from_environment({"PATH": "/bin"}) == Settings(enabled=True, rule=None)
    given = {"": "0", "_RULE": "typical", "_TYPICAL_EPSILON": "0.2", "_TYPICAL_DELTA": "3"}
    found = Settings.from_environment({f"SPECDEC_VLLM{name}": x for name, x in given.items()})
    assert found == Settings(False, "typical", 0.2, 3.0)
    assert [Settings.from_environment({"SPECDEC_VLLM_RULE": r}).rule for r in RULES] == [*RULES]
    named = (*DRAFTERS, "rest:a:b")
    drafters = [Settings.from_environment({"SPECDEC_VLLM_DRAFTER": d}).drafter for d in named]
    assert [":".join(filter(None, drafter)) for drafter in drafters] == [*named]


ALL = (
    "SPECDEC_VLLM, SPECDEC_VLLM_RULE, SPECDEC_VLLM_TYPICAL_EPSILON, SPECDEC_VLLM_TYPICAL_DELTA, "
    "SPECDEC_VLLM_DRAFTER"
)
OF_DRAFTERS = "must be one of prompt_lookup, suffix_automaton, suffix_automaton:FILE, rest:FILE"
WRONG_DRAFTERS = ("", "rest", "suffix_automaton:", "prompt_lookup:3")


@pytest.mark.parametrize(
    ("name", "text", "rule", "message"),
    [
        ("", "yes", None, "must be 0 or 1, got 'yes'"),
        ("_RULE", "greedy", None, "must be one of token, block, match, typical, got 'greedy'"),
        *(("_DRAFTER", d, None, f"{OF_DRAFTERS}, got '{d}'") for d in WRONG_DRAFTERS),
        *(("_DRAFTER", f"suffix_automaton:{kept}", None,
           "must not have keep=, because the drafts of a request must not depend on the texts of "
           f"others, got 'suffix_automaton:{kept}'") for kept in ("keep=1MiB", "store,keep=1MiB")),
        ("_TYPICAL_DELTA", "inf", "typical", "must be a number in [0, 1e+09], got 'inf'"),
        ("_TYPICAL_EPSILON", "0.09", "match",
         "is for SPECDEC_VLLM_RULE=typical alone, got '0.09' with SPECDEC_VLLM_RULE=match"),
        ("_RULES", "match", None, ALL),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_refused_by_name(name, text, rule, message):
    given = {"SPECDEC_VLLM_RULE": rule} if rule else {}
    with pytest.raises(ValueError) as caught:
        Settings.from_environment(given | {f"SPECDEC_VLLM{name}": text})
    unknown = "environment variables of specdec_vllm must be of {}, got SPECDEC_VLLM_RULES"
    expected = unknown.format(ALL) if message is ALL else f"SPECDEC_VLLM{name} {message}"
    assert str(caught.value) == expected


def test_an_unknown_version_is_left_alone_and_off_nothing_is_looked_at(monkeypatch, logged):
    module = types.ModuleType("vllm")
    module.__version__ = "0.99.1"
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_interface, "replace", lambda *_: pytest.fail("it was replaced"))
    register()
    assert logged == ["specdec_vllm leaves vLLM as it is: version 0.99.1 is not one of 0.32, 0.33"]
    monkeypatch.setenv("SPECDEC_VLLM", "0")
    monkeypatch.setattr(vllm_interface, "unsupported", lambda: pytest.fail("it looked"))
    register()


def test_a_function_is_replaced_once_and_given_back(monkeypatch):
    module = types.ModuleType("sampler_of_vllm")
    module.sample = lambda: "vLLM's"
    monkeypatch.setitem(sys.modules, "sampler_of_vllm", module)

    def make(original, settings):
        return lambda: f"ours, not {original()}"

    for _ in range(2):
        vllm_interface.replace(("sampler_of_vllm", "sample"), make, Settings())
    assert module.sample() == "ours, not vLLM's"
    vllm_interface.restore()
    assert module.sample() == "vLLM's"
