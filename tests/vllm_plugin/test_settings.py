"""The environment variables of the plug-in, and what it does where it must not act."""

import sys
import types

import pytest
from specdec_vllm import DRAFTERS, RULES, Settings, plugin, register, vllm_interface


def test_without_variables_it_is_on_and_follows_the_configuration_of_vllm():
    assert Settings.from_environment({"PATH": "/bin"}) == Settings(enabled=True, rule=None)


def test_variables_are_read():
    given = {
        "SPECDEC_VLLM": "0",
        "SPECDEC_VLLM_RULE": "typical",
        "SPECDEC_VLLM_TYPICAL_EPSILON": "0.2",
        "SPECDEC_VLLM_TYPICAL_DELTA": "3",
    }
    assert Settings.from_environment(given) == Settings(False, "typical", 0.2, 3.0)
    assert [Settings.from_environment({"SPECDEC_VLLM_RULE": r}).rule for r in RULES] == [*RULES]
    drafters = [Settings.from_environment({"SPECDEC_VLLM_DRAFTER": d}).drafter for d in DRAFTERS]
    assert [":".join(filter(None, drafter)) for drafter in drafters] == [*DRAFTERS]
    file = Settings.from_environment({"SPECDEC_VLLM_DRAFTER": "rest:a:b"}).drafter.file
    assert file == "a:b"


DRAFTER_RULE = "must be one of prompt_lookup, suffix_automaton, suffix_automaton:FILE, rest:FILE"
WRONG_DRAFTERS = ("", "ngram", "rest", "rest:", "suffix_automaton:", "prompt_lookup:3")
KEEP_RULE = (
    "must not have keep=, because the drafts of a request must not depend on the texts of others"
)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("", "yes", "must be 0 or 1, got 'yes'"),
        ("", "", "must be 0 or 1, got ''"),
        ("_RULE", "greedy", "must be one of token, block, match, typical, got 'greedy'"),
        *(("_DRAFTER", wrong, f"{DRAFTER_RULE}, got '{wrong}'") for wrong in WRONG_DRAFTERS),
        (
            "_DRAFTER",
            "suffix_automaton:keep=1MiB",
            f"{KEEP_RULE}, got 'suffix_automaton:keep=1MiB'",
        ),
    ],
)
def test_a_wrong_variable_is_refused_by_name(name, text, message):
    with pytest.raises(ValueError) as caught:
        Settings.from_environment({f"SPECDEC_VLLM{name}": text})
    assert str(caught.value) == f"SPECDEC_VLLM{name} {message}"


@pytest.mark.parametrize(
    ("name", "rule", "text", "message"),
    [
        ("EPSILON", "typical", "1.5", "must be a number in [0, 1], got '1.5'"),
        ("DELTA", "typical", "inf", "must be a number in [0, 1e+09], got 'inf'"),
        ("DELTA", "typical", "nan", "must be a number in [0, 1e+09], got 'nan'"),
        ("EPSILON", "match", "0.09", "is for SPECDEC_VLLM_RULE=typical alone, got '0.09' with "
         "SPECDEC_VLLM_RULE=match"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_of_rule_typical_is_refused_by_name(name, rule, text, message):
    name = f"SPECDEC_VLLM_TYPICAL_{name}"
    with pytest.raises(ValueError) as caught:
        Settings.from_environment({"SPECDEC_VLLM_RULE": rule, name: text})
    assert str(caught.value) == f"{name} {message}"


def test_an_unknown_variable_is_refused_with_the_names_of_all():
    with pytest.raises(ValueError) as caught:
        Settings.from_environment({"SPECDEC_VLLM_RULES": "match"})
    assert str(caught.value) == (
        "environment variables of specdec_vllm must be of SPECDEC_VLLM, SPECDEC_VLLM_RULE, "
        "SPECDEC_VLLM_TYPICAL_EPSILON, SPECDEC_VLLM_TYPICAL_DELTA, SPECDEC_VLLM_DRAFTER, got "
        "SPECDEC_VLLM_RULES"
    )


@pytest.fixture
def other_vllm(monkeypatch):
    """A vLLM of a version that nobody has looked at."""
    module = types.ModuleType("vllm")
    module.__version__ = "0.99.1"
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.usefixtures("other_vllm")
def test_an_unknown_version_is_left_as_it_is_with_a_warning(monkeypatch, logged):
    monkeypatch.setattr(vllm_interface, "replace", lambda *_: pytest.fail("it was replaced"))
    register()
    assert logged == ["specdec_vllm leaves vLLM as it is: version 0.99.1 is not one of 0.32, 0.33"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("self, logits, metadata", None),
        ("self, logits", "got self logits"),
        ("self, logits, /, metadata, *rest, **more", "got self logits metadata rest more"),
        (None, "got nothing"),
    ],
)
def test_a_function_of_a_module_that_is_not_loaded_is_compared_too(
    monkeypatch, tmp_path, logged, arguments, reason
):
    defined = "pass" if arguments is None else f"def _sample({arguments}): pass"
    source = f'raise ImportError("nobody loads it")\nclass Runner:\n    {defined}\n'
    (tmp_path / "late_runner_of_vllm.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = types.ModuleType("vllm")
    module.__version__ = "0.32.0"
    monkeypatch.setitem(sys.modules, "vllm", module)
    place = ("late_runner_of_vllm", "Runner._sample")
    monkeypatch.setattr(vllm_interface, "REPLACED", {})
    monkeypatch.setattr(vllm_interface, "REPLACED_V2", {})
    monkeypatch.setattr(vllm_interface, "REPLACED_LATE", {place: "self logits metadata"})
    installed = []
    monkeypatch.setattr(plugin, "install", installed.append)
    register()
    if reason is None:
        assert installed
    else:
        assert not installed
        assert logged == [
            "specdec_vllm leaves vLLM as it is: late_runner_of_vllm.Runner._sample must take self "
            f"logits metadata, {reason}"
        ]


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


def test_switched_off_it_does_not_even_look_at_vllm(monkeypatch):
    monkeypatch.setenv("SPECDEC_VLLM", "0")
    monkeypatch.setattr(vllm_interface, "unsupported", lambda: pytest.fail("it looked"))
    register()
