"""Every argument of the loop's public functions refuses a wrong type by name and value.

TABLE has a row for every argument: a value of a wrong type, and the message.
"""

import inspect

import numpy as np
import pytest
import specdec_host as host
import torch
from specdec_hf import (
    BenefitGuard,
    EagleTree,
    LayersDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    SpeculativeDecoder,
    TreeSpec,
    TrieTree,
    generate,
)
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from transformers import GenerationConfig

import specdec_kernels as kernels

pytestmark = pytest.mark.quick

DRAFTER = "drafter must be None, the name of a drafter, a Drafter or a causal language model of"
NUMBER = "num_assistant_tokens must be an integer in [0, 1024]"
OF_LOOP = {
    "drafter": [
        (3, f"{DRAFTER} Transformers, or a wrapper that forwards to one, got 3"),
        (["prompt_lookup", 3], "got 3"),
    ],
    "num_assistant_tokens": [(2.0, f"{NUMBER}, got 2.0"), (np.bool_(True), f"{NUMBER}, got ")],
    "gamma": [("5", f"{NUMBER}, got '5'")],
    "num_speculative_tokens": [([5], f"{NUMBER}, got [5]")],
    "num_assistant_tokens_schedule": [
        (3, "num_assistant_tokens_schedule must be a string or a Schedule, got 3")
    ],
    "num_assistant_beams": [(2.0, "num_assistant_beams must be an integer, got 2.0")],
    "rule": [(None, "rule must be a string, got None")],
    "lenience": [("a", "lenience must be a number, got 'a'"), (True, "got True")],
    "typical_epsilon": [("a", "typical_epsilon must be a number, got 'a'"), (True, "got True")],
    "typical_delta": [([1], "typical_delta must be a number, got [1]"), (True, "got True")],
    "top_beta_rank": [(1.5, "top_beta_rank must be an integer in [1, 2147483647], got 1.5")],
    "top_beta_distance": [("a", "top_beta_distance must be a number, got 'a'"), (True, "got True")],
    "ablate": [(True, "ablate must be None or a string, got True")],
    "tree": [
        ("x", "tree must be a TreeSpec, EagleTree, TrieTree or a tuple of branchings, got 'x'"),
        ((2, True), "tree must be an integer in [1, 1024], got True"),
        ((2, 1.5), "tree must be an integer in [1, 1024], got 1.5"),
    ],
    "cache": [(None, "cache must be a string, got None")],
    "seed": [
        (True, "seed must be an int or one int per sequence, got True"),
        (1.5, "seed must be an int or one int per sequence, got 1.5"),
        ([1, True], "seed must be an int or one int per sequence"),
        (torch.Generator(), "seed must be an int or one int per sequence"),
    ],
    "guard": [(1, "guard must be None, True, False or a BenefitGuard, got 1")],
    "self_check": [(1, "self_check must be True or False, got 1")],
    "compile": [("yes", "compile must be True or False, got 'yes'")],
    "profile": [(3, "profile must be None or the path of a file, got 3")],
    "streamer": [(3, "streamer must be None or an object with put() and end(), got 3")],
    "trace": [(3, "trace must be None or a function, got 3")],
    "clock": [(3, "clock must be a function that gives seconds, got 3")],
}
PROBABILITY = [
    (True, "min_probability must be a number in [0, 1], got True"),
    ("a", "min_probability must be a number in [0, 1], got 'a'"),
]
SAMPLING = {
    "temperature": [
        ("a", "temperature must be finite and >= 0, got 'a'"),
        (True, "temperature must be finite and >= 0, got True"),
    ],
    "top_k": [
        ("a", "top_k must be an integer >= 0, got 'a'"),
        (True, "top_k must be an integer >= 0, got True"),
    ],
    "top_p": [("a", "top_p must be in (0, 1], got 'a'"), (True, "got True")],
    "min_p": [("a", "min_p must be in [0, 1], got 'a'"), (np.bool_(False), "got ")],
}
INTEGER = [(True, "got True"), (1.5, "got 1.5"), ("3", "got '3'")]
TABLE = {
    generate: {
        **OF_LOOP,
        "model": [
            (3, "model must be a causal language model of Transformers, or a wrapper that"),
            (torch.nn.Linear(2, 2), "forwards to one, got Linear"),
        ],
        "inputs": [(3, "must be"), ("a", "must be")],
        "input_ids": [(3, "must be"), ("a", "must be")],
    },
    SpeculativeDecoder: {
        **OF_LOOP,
        "tokenizer": [(3, "tokenizer must be None or a tokenizer of Transformers, got 3")],
        "stop_strings": [
            (3, "stop_strings must be a string or a list of them, got 3"),
            (["a", 3], "stop_strings must be a string or a list of them, got 3"),
        ],
    },
    TreeSpec: {
        "parents": [
            (3, "parents must be a sequence, got 3"),
            ("ab", "parents must be a sequence, got 'ab'"),
            ((-1, 0.0), "parents[1] must be an integer, got 0.0"),
            ((-1, False), "parents[1] must be an integer, got False"),
        ],
        "ranks": [
            (3, "ranks must be a sequence, got 3"),
            ((None,), "ranks[0] must be an integer, got None"),
        ],
    },
    TreeSpec.chain: {"n": INTEGER},
    TreeSpec.branching: {
        "widths": [(3, "branching must be a sequence, got 3"), ((True,), "got True")]
    },
    TreeSpec.medusa: {
        "ranks": [(3, "branching must be a sequence, got 3")],
        "size": INTEGER,
        "accuracies": [
            (3, "accuracies must be a sequence, got 3"),
            ([3], "accuracies[0] must be a sequence, got 3"),
            ([[True]], "accuracies[0][0] must be a number in [0, 1], got True"),
        ],
    },
    TreeSpec.sequoia: {
        "acceptance": [
            (0.5, "acceptance must be a sequence, got 0.5"),
            (["a"], "acceptance[0] must be a number in [0, 1], got 'a'"),
        ],
        "size": INTEGER,
        "depth": INTEGER,
        "branching": INTEGER,
    },
    EagleTree: {
        **dict.fromkeys(("width", "depth", "size"), INTEGER),
        "min_probability": PROBABILITY,
    },
    TrieTree: {
        "sequences": INTEGER,
        "depth": INTEGER,
        "size": INTEGER,
        "min_probability": PROBABILITY,
    },
    PromptLookupDrafter: {
        "max_ngram": [*INTEGER, (None, "max_ngram must be an integer, got None")],
        "min_ngram": INTEGER,
    },
    ModelDrafter: {
        "model": [
            (None, "model must be a causal language model of Transformers, or a wrapper that"),
            ("prompt_lookup", "forwards to one, got 'prompt_lookup'"),
            (hf_models.tiny("llama").model, "forwards to one, got LlamaModel"),
        ],
        "cache": [(None, "cache must be a string, got None")],
        **SAMPLING,
    },
    BenefitGuard: {
        "window": [*INTEGER, (None, "window must be an integer, got None")],
        "pause": INTEGER,
        "stops": [(1, "stops must be True or False, got 1")],
        "max_loss": [(True, "max_loss must be a number, got True"), ("3", "got '3'")],
    },
}
# What the other arguments are while one is wrong.
GOOD = {
    TreeSpec: {"parents": (-1,)},
    TreeSpec.medusa: {"ranks": (1,), "size": 1, "accuracies": [[0.5]]},
    TreeSpec.sequoia: {"acceptance": [0.5], "size": 2},
    ModelDrafter: {"model": hf_models.tiny("llama")},
}
ROWS = [
    (function, name, value, message)
    for function, arguments in TABLE.items()
    for name, rows in arguments.items()
    for value, message in rows
]


def call(function, **kwargs):
    """Call a function with good arguments and these; the loop runs for a decoder's too."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    if function is generate:
        good = {"model": model, "max_new_tokens": 2}
        if "inputs" not in kwargs and "input_ids" not in kwargs:
            good["input_ids"] = inputs["input_ids"]
        return generate(**{**good, **kwargs})
    if function is SpeculativeDecoder:
        decoder = SpeculativeDecoder(**kwargs)
        return model.generate(**inputs, max_new_tokens=2, custom_generate=decoder)
    return function(**{**GOOD.get(function, {}), **kwargs})


@pytest.mark.parametrize("function", TABLE, ids=lambda f: f.__name__)
def test_a_wrong_type_is_refused_by_name(function):
    wrong = []
    for _, name, value, message in (row for row in ROWS if row[0] is function):
        try:
            text = f"no error: {call(function, **{name: value})}"
        except TypeError as error:
            text = str(error)
        if message not in text or "\n" in text:
            wrong.append((name, value, text))
    assert wrong == []


@pytest.mark.parametrize("function", TABLE, ids=lambda f: f.__name__)
def test_the_table_has_every_argument(function):
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    assert named == set(TABLE[function])


@pytest.mark.parametrize("name", SAMPLING)
def test_a_flag_is_no_sampling_parameter(name):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    for value in (True, [False], np.array([True]), torch.tensor([True])):
        with pytest.raises(TypeError, match=f"^{name} must be .*, got (True|False)$"):
            generate(model, **inputs, do_sample=True, max_new_tokens=2, **{name: value})
    with pytest.raises(TypeError, match=f"^{name} must be .*, got True$"):
        LayersDrafter(1, **{name: True})


@pytest.mark.parametrize("kind", [np.int8, np.uint64])
def test_integers_of_any_type_are_integers(kind):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    for name in ("num_assistant_tokens", "gamma", "num_speculative_tokens"):
        out = generate(
            model, **inputs, drafter=PromptLookupDrafter(kind(3), kind(1)), **{name: kind(2)},
            seed=3, max_new_tokens=30, do_sample=False, return_dict_in_generate=True,
            guard=BenefitGuard(window=kind(2), pause=kind(2)),
        )  # fmt: skip
        assert max(out.stats.gammas) == 2
    assert TreeSpec.chain(kind(2)) == TreeSpec((-1, kind(0)))
    assert TrieTree(kind(2), kind(3), kind(4)) == TrieTree(2, 3, 4)
    tree = EagleTree(kind(12), kind(2), kind(4))
    assert tree.width**2 == 144
    drafter = hf_models.tiny("llama")
    generate(model, **inputs, drafter=drafter, tree=tree, max_new_tokens=4, do_sample=False)


class Wrapper(torch.nn.Module):
    """Wraps a model as PEFT does: the attributes are those of the model inside."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model, name)

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


@pytest.mark.parametrize("tree", [None, (2, 2)], ids=["chain", "tree"])
def test_wrapped_models_draft_and_are_targets(tree):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4))
    wrapped = Wrapper(Wrapper(hf_models.perturbed("llama")))
    settings = {"max_new_tokens": 8, "do_sample": False}
    for target, drafter in ((model, wrapped), (wrapped, model)):
        expected = target.generate(**inputs, **settings)
        got = generate(
            target, **inputs, **settings, drafter=drafter, tree=tree, return_dict_in_generate=True
        )
        assert got.sequences.tolist() == expected.tolist()
        assert got.stats.accepted > 0


def test_a_compiled_model_drafts_and_is_a_target():
    """The type is what matters here; with the stance nothing is traced, which takes seconds."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    compiled = torch.compile(model, backend="eager")
    settings = {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    with torch.compiler.set_stance("force_eager"):
        got = generate(
            compiled, **inputs, **settings, drafter=compiled, return_dict_in_generate=True
        )
    assert got.sequences.tolist() == expected.tolist()
    assert got.stats.accepted == got.stats.drafted > 0


def test_a_model_of_prompt_tuning_is_refused():
    wrapped = Wrapper(hf_models.build("llama"))
    wrapped.active_peft_config = type("Config", (), {"is_prompt_learning": True})()
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    for name, kwargs in (("model", {"model": wrapped}), ("drafter", {"drafter": wrapped})):
        with pytest.raises(ValueError, match=f"{name} must have no virtual tokens, got Wrapper"):
            generate(**{"model": model, **inputs, **kwargs})


FIELDS = {
    name: kind
    for kind, names in (
        ("an integer", "max_length max_new_tokens min_length min_new_tokens num_return_sequences"),
        ("an integer", "num_beams no_repeat_ngram_size encoder_no_repeat_ngram_size pad_token_id"),
        ("an integer", "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit"),
        ("a number", "max_time length_penalty repetition_penalty encoder_repetition_penalty"),
        ("a number", "assistant_confidence_threshold"),
    )
    for name in names.split()
}


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("where", ["argument", "generation_config", "model.generation_config"])
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_the_generation_config_that_is_no_number_is_refused_by_name(name, where):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    given = {name: "5"}
    if where == "generation_config":
        config = GenerationConfig()
        setattr(config, name, "5")
        given = {"generation_config": config}
    elif where == "model.generation_config":
        model, given = hf_models.build("llama"), {}
        setattr(model.generation_config, name, "5")
    with pytest.raises(TypeError, match=rf"^{name} must be {FIELDS[name]}, got '5'$"):
        generate(model, **inputs, **given)


def test_fields_that_are_numbers_or_none_are_taken():
    inputs = hf_models.prompts((9,))
    nothing = dict.fromkeys(name for name in FIELDS if name != "max_new_tokens")
    sampling = {"temperature": None, "top_k": None, "top_p": None, "do_sample": True, "seed": 1}
    number = np.int64(3)
    out = generate(hf_models.tiny("llama"), **inputs, **nothing, **sampling, max_new_tokens=number)
    assert out.shape == (1, 12)


PRINTED = {
    "array": (np.ones((300, 7)), "ndarray [300, 7]"),
    "tensor": (torch.ones(2), "Tensor [2]"),
    "long": (list(range(99)), "list of length 99"),
    "nested": ([np.ones((300, 7))], "list of length 1"),
    "text": (("a" * 200,), "tuple of length 1"),
    "string": ("a" * 101, "str of length 101"),
    "module": (torch.nn.Sequential(torch.nn.Linear(2, 2)), "Sequential"),
    "list": ([1, 2], "[1, 2]"),
    "number": (np.float32(2.5), "np.float32(2.5)"),
    "0-dim": (torch.tensor(3.5), "tensor(3.5000)"),
}


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("kind", PRINTED)
@pytest.mark.parametrize("package", ["specdec_hf", "specdec_kernels", "specdec_host"])
def test_a_message_prints_a_large_value_by_its_type_and_size(package, kind):
    value, text = PRINTED[kind]
    calls = {
        "specdec_hf": lambda: generate(hf_models.tiny("llama"), gamma=value),
        "specdec_kernels": lambda: kernels.draft_positions(torch.tensor([1]), value, rule="token"),
        "specdec_host": lambda: host.draft_positions(np.array([1]), value, rule="token"),
    }
    with pytest.raises(TypeError) as raised:
        calls[package]()
    assert str(raised.value).endswith(f", got {text}")
