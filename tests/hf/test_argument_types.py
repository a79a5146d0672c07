"""Arguments of the loop's public functions and of drafters are refused by name and value.

WRONG and OTHERS have rows for every argument of the functions.
"""

import inspect
import re
import textwrap
from dataclasses import fields

import numpy as np
import pytest
import specdec_host as host
import torch
import typer
from specdec_hf import (
    BenefitGuard,
    DistilledDrafter,
    EagleTree,
    EarlyExitDrafter,
    HorizontalCascade,
    KeptTexts,
    LayersDrafter,
    LayerSkipDrafter,
    LookaheadDrafter,
    ModelDrafter,
    NasdDrafter,
    PromptLookupDrafter,
    RemoteDrafter,
    RestDrafter,
    SpeculativeDecoder,
    SuffixAutomatonDrafter,
    TextDrafter,
    TokenRecyclingDrafter,
    TreeSpec,
    TrieTree,
    VerticalCascade,
    check_drafter,
    generate,
)
from specdec_hf.cli.app import app
from specdec_hf.drafters.ngram import NgramDrafter
from specdec_hf.drafters.ngram_table import NgramTable
from specdec_hf.options import ALIASES, COMMON, Options
from specdec_host import Corpus
from support import hf_models
from support.letters import letters
from support.sources import ROOT
from transformers import GenerationConfig

import specdec_kernels as kernels

pytestmark = pytest.mark.quick

MODEL = "a causal language model of Transformers, or a wrapper that forwards to one"
INTEGER, NUMBER = ("an integer", [True, 1.5, "3"]), ("a number", [True, "a"])
SAMPLING = {
    "temperature": ("finite and >= 0", [True, "a"]),
    "top_k": ("an integer >= 0", [True, "a"]),
    "top_p": ("in (0, 1]", [True, "a"]),
    "min_p": ("in [0, 1]", ["a", np.bool_(False)]),
}
# Argument -> what it must be, and values of a wrong type.
WRONG = {
    **SAMPLING,
    **dict.fromkeys(("lenience", "typical_epsilon", "typical_delta"), NUMBER),
    **dict.fromkeys(("top_beta_distance", "max_loss"), NUMBER),
    **dict.fromkeys(("num_assistant_beams", "top_beta_rank", "n", "size", "depth"), INTEGER),
    **dict.fromkeys(("width", "branching", "sequences", "max_ngram", "min_ngram"), INTEGER),
    **dict.fromkeys(("window", "pause"), INTEGER),
    **dict.fromkeys(("self_check", "compile", "stops"), ("True or False", [1, "yes"])),
    **dict.fromkeys(("rule", "cache"), ("a string", [None])),
    **dict.fromkeys(("parents", "accuracies", "acceptance"), ("a sequence", [3, 0.5, "ab"])),
    "num_assistant_tokens": ("an integer in [0, 1024]", [2.0, "5", [5], np.bool_(True)]),
    "drafter": (f"None, the name of a drafter, a folder, a Drafter or {MODEL}", [3]),
    "num_assistant_tokens_schedule": ("a string or a Schedule", [3]),
    "ablate": ("None or a string", [True]),
    "tree": ("a TreeSpec, EagleTree, TrieTree or a tuple of branchings", ["x"]),
    "seed": ("an int or one int per sequence", [True, 1.5, [1, True], torch.Generator()]),
    "guard": ("None, True, False or a BenefitGuard", [1]),
    "profile": ("None or the path of a file", [3]),
    "streamer": ("None or an object with put() and end()", [3]),
    "trace": ("None or a function", [3]),
    "clock": ("a function that gives seconds", [3]),
    "model": (MODEL, [None, 3, "prompt_lookup"]),
    "tokenizer": ("None or a tokenizer of Transformers", [3]),
    "stop_strings": ("a string or a list of them", [3, ["a", 3]]),
    "min_probability": ("a number in [0, 1]", [True, "a"]),
}
# Values whose message has another beginning.
OTHERS = [
    (generate, "inputs", 3, "must be"),
    (generate, "input_ids", "a", "must be"),
    (generate, "drafter", ["prompt_lookup", 3], "got 3"),
    (generate, "tree", (2, True), "tree must be an integer in [1, 1024], got True"),
    (generate, "tree", (2, 1.5), "tree must be an integer in [1, 1024], got 1.5"),
    (generate, "model", torch.nn.Linear(2, 2), f"{MODEL}, got Linear"),
    (ModelDrafter, "model", hf_models.tiny("llama").model, f"{MODEL}, got LlamaModel"),
    (TreeSpec, "parents", (-1, 0.0), "parents[1] must be an integer, got 0.0"),
    (TreeSpec, "parents", (-1, False), "parents[1] must be an integer, got False"),
    (TreeSpec, "ranks", 3, "ranks must be a sequence, got 3"),
    (TreeSpec, "ranks", (None,), "ranks[0] must be an integer, got None"),
    (TreeSpec.branching, "widths", 3, "branching must be a sequence, got 3"),
    (TreeSpec.branching, "widths", (True,), "branching must be an integer in [1, 1024], got True"),
    (TreeSpec.medusa, "ranks", 3, "branching must be a sequence, got 3"),
    (TreeSpec.medusa, "accuracies", [3], "accuracies[0] must be a sequence, got 3"),
    (TreeSpec.medusa, "accuracies", [[True]], "accuracies[0][0] must be a number in [0, 1], got T"),
    (TreeSpec.sequoia, "acceptance", ["a"], "acceptance[0] must be a number in [0, 1], got 'a'"),
    (PromptLookupDrafter, "max_ngram", None, "max_ngram must be an integer, got None"),
    (BenefitGuard, "window", None, "window must be an integer, got None"),
]
# The functions, and what their other arguments are while one is wrong.
GOOD = {
    generate: {},
    SpeculativeDecoder: {},
    TreeSpec: {"parents": (-1,)},
    TreeSpec.chain: {},
    TreeSpec.branching: {},
    TreeSpec.medusa: {"ranks": (1,), "size": 1, "accuracies": [[0.5]]},
    TreeSpec.sequoia: {"acceptance": [0.5], "size": 2},
    EagleTree: {},
    TrieTree: {},
    PromptLookupDrafter: {},
    ModelDrafter: {"model": hf_models.tiny("llama")},
    BenefitGuard: {},
}


def rows_of(function):
    """Wrong values for every argument of a function: its name, the value, and the message."""
    rows = [row[1:] for row in OTHERS if row[0] == function]
    for name, parameter in inspect.signature(function).parameters.items():
        said = "num_assistant_tokens" if name in ALIASES else name
        if said in WRONG:
            rule, values = WRONG[said]
            rows += [(name, value, f"{said} must be {rule}") for value in values]
        elif parameter.kind is not parameter.VAR_KEYWORD:
            assert name in [row[0] for row in rows], "the table has no row for this argument"
    return rows


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
    return function(**{**GOOD[function], **kwargs})


@pytest.mark.parametrize("function", GOOD, ids=lambda f: f.__name__)
def test_a_wrong_type_is_refused_by_name(function):
    wrong = []
    for name, value, message in rows_of(function):
        try:
            text = f"no error: {call(function, **{name: value})}"
        except TypeError as error:
            text = str(error)
        printed = isinstance(value, int | float | str) and "input" not in name
        if message not in text or "\n" in text or (printed and f"got {value!r}" not in text):
            wrong.append((name, value, text))
    assert wrong == []


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


# The options of the loop are declared once: what is made of the declaration.

OWN_WORDS = {"drafter", "tree", "guard"}  # of the command line, whose values are others
PAGE = ROOT / "docs" / "loop.md"


def link(found):
    page, section = found["page"], found["section"]
    label = section[1:].replace("-", " ") if section else page
    return f"[{label}]({'' if page == PAGE.name and section else page}{section})"


def listed():
    """Each option with its default and text, as the page has it."""
    for option in fields(Options):
        if option.name not in ALIASES:
            value = option.default
            default = (
                f"{value.__module__}.{value.__name__}"
                if callable(value)
                else repr(value).replace("'", '"')
            )
            text = option.metadata["text"].replace("``", "`")
            text = re.sub(r"docs/(?P<page>[\w-]+\.md)(?P<section>(#[\w-]+)?)", link, text)
            item = f"`{option.name}={default}`: {text}"
            yield textwrap.fill(
                item, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
            )


@pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")
def test_the_page_ends_with_the_options():
    text = "\n".join(listed())
    assert PAGE.read_text().endswith(f"\n\n{text}\n"), text


def test_help_has_every_option_with_its_type_default_and_text():
    signature = inspect.signature(generate).parameters
    shown = " ".join(inspect.getdoc(generate).split())
    for option in fields(Options):
        parameter = signature[option.name]
        assert (parameter.annotation, parameter.default) == (option.type, option.default)
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert f"{option.name}: {option.metadata['text']}" in shown
    assert "OPTIONS" not in shown
    mine = inspect.signature(SpeculativeDecoder).parameters.keys()
    assert mine - {"tokenizer", "stop_strings"} == {option.name for option in fields(Options)}


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_command_line_takes_the_common_options_with_their_texts(command):
    found = {one.name: one for one in typer.main.get_command(app).commands[command].params}
    assert found.keys() >= COMMON.keys()
    for name in COMMON.keys() - OWN_WORDS:
        sentence, _, _ = COMMON[name].metadata["text"].partition(". ")
        assert found[name].help.lower().startswith(sentence.lower())


# Drafters, cascades and the tables they read.

CORPUS = Corpus(np.array([1, 2, 3]))
TEXTS = [np.array([1])]
WIDE = TreeSpec.branching((3, 2))


def model():
    return hf_models.tiny("llama")


def text_drafter(**arguments):
    names = {"assistant_tokenizer": letters("abc"), "tokenizer": letters("abc"), **arguments}
    return TextDrafter(model(), **names)


VALUES = {
    "min_ngram must be in [1, max_ngram = 2], got 3": lambda: PromptLookupDrafter(2, 3),
    "order must be an integer in [1, 8], got 0": lambda: NgramDrafter(order=0),
    "table must be given with learn=False": lambda: NgramDrafter(learn=False),
    "min_context must be an integer in [0,": lambda: NgramDrafter(min_context=3),
    "hold ids in [0, 9), got 9": lambda: NgramTable.build([np.array([9])], 9, 2),
    "texts must hold at least one token": lambda: NgramTable.build([], 9, 2),
    "order must be an integer in [1, 8], got 9": lambda: NgramTable.build(TEXTS, 9, 9),
    "min_count must be at least 1": lambda: NgramTable.build(TEXTS, 9, 2, 0),
    "must name an n-gram table, got README.md": lambda: NgramTable.load("README.md"),
    "max_ngram must be an integer in [1, 1024], got 0": lambda: NasdDrafter(max_ngram=0),
    "min_ngram must be at most max_ngram=4, got 5": lambda: NasdDrafter(min_ngram=5),
    "top_k must be an integer in [0, 1024], got -1": lambda: NasdDrafter(top_k=-1),
    "min_match must be at least 1, got 0": lambda: RestDrafter(CORPUS, 0),
    "min_match must be at most 2, got 3": lambda: RestDrafter(CORPUS, 3, 2),
    "min_match must be at most 4, got 5": lambda: SuffixAutomatonDrafter(min_match=5, max_match=4),
    "must be in [0, 1], got 2.0": lambda: SuffixAutomatonDrafter(min_confidence=2),
    "hold ids in [0, 2^31), got -1": lambda: SuffixAutomatonDrafter(np.array([-1])),
    "keep must be at least 0, got -1": lambda: SuffixAutomatonDrafter(keep=-1),
    "max_bytes must be at least 8, got 7": lambda: KeptTexts(7),
    "bytes such as 64MiB, got '64MB'": lambda: SuffixAutomatonDrafter.from_text("keep=64MB"),
    "window must be an integer in [1, 1024], got 0": lambda: LookaheadDrafter(window=0),
    "ngram must be an integer in [2, 1024], got 1": lambda: LookaheadDrafter(ngram=1),
    "must be in [2, 1025], got 1206": lambda: LookaheadDrafter(window=600),
    "must be in [2, 1025], got 1": lambda: LookaheadDrafter(1, 2, 0),
    "three integers W,N,G, got '4,3'": lambda: LookaheadDrafter.from_text("4,3"),
    "three integers W,N,G, got '4,3,-1'": lambda: LookaheadDrafter.from_text("4,3,-1"),
    "ranks of tree must be below top_k=2, got 2": lambda: TokenRecyclingDrafter(WIDE, 2),
    "top_k must be an integer in [1, 1024], got 0": lambda: TokenRecyclingDrafter(top_k=0),
    "assistant_lookbehind must be at least 1, got 0": lambda: text_drafter(assistant_lookbehind=0),
    "tokens must be at least 1, got 0": lambda: VerticalCascade(model(), model(), 0),
    "in a cascade, got NgramDrafter": lambda: VerticalCascade(model(), NgramDrafter()),
    "in a cascade, got TextDrafter": lambda: HorizontalCascade([model(), text_drafter()], [1]),
    "drafters must be 2 to 8, got 0": lambda: HorizontalCascade([], []),
    "counts must be 1 numbers": lambda: HorizontalCascade([model()] * 2, [0]),
    "learning_rate must be above 0 and finite, got 0": lambda: DistilledDrafter(model(), 0),
    "steps must be at least 1, got 0": lambda: DistilledDrafter(model(), steps=0),
    "max_positions must be at least 1": lambda: DistilledDrafter(model(), max_positions=0),
    "temperature must be": lambda: DistilledDrafter(model(), temperature=-1),
    "drafter must be given, got None": lambda: check_drafter(None, model()),
    "samples must be ": lambda: check_drafter("random", model(), samples=0),
}
TYPES = {
    "order must be an integer in [1, 8], got T": lambda: NgramDrafter(order=True),
    "table must be None or an NgramTable, got 3": lambda: NgramDrafter(3),
    "order must be an integer": lambda: NgramTable.build(TEXTS, 9, 2.5),
    "fingerprint must be bytes, got 'f'": lambda: NgramTable.build(TEXTS, 9, 2, fingerprint="f"),
    "top_k must be an integer ": lambda: NasdDrafter(top_k=True),
    "corpus must be a Corpus, got list": lambda: RestDrafter([1]),
    "corpus must be a Corpus or None, got list": lambda: SuffixAutomatonDrafter([1]),
    "max_match must be an integer, got 2.5": lambda: SuffixAutomatonDrafter(max_match=2.5),
    "keep must be": lambda: SuffixAutomatonDrafter(keep="1MiB"),
    "guesses must be an integer ": lambda: LookaheadDrafter(guesses=True),
    "text_ngrams must be True or False, got 1": lambda: LookaheadDrafter(text_ngrams=1),
    "tree must be None or a TreeSpec, got (2, 1)": lambda: TokenRecyclingDrafter((2, 1)),
    "inherit must be True or False, got 1": lambda: TokenRecyclingDrafter(inherit=1),
    "tokenizer must be a tokenizer of Transformers, got 3": lambda: text_drafter(tokenizer=3),
    "target_lookbehind must be an integer, got 2.0": lambda: text_drafter(target_lookbehind=2.0),
    "learning_rate must be a number, got 'x'": lambda: DistilledDrafter(model(), "x"),
    "model must be a causal language model of T": lambda: DistilledDrafter("x"),
    "model must be a causal language model": lambda: VerticalCascade(3, model()),
    "a cascade must hold Drafters, names of d": lambda: VerticalCascade(model(), 3),
    "must be an integer, got 2.0": lambda: VerticalCascade(model(), model(), 2.0),
    "counts[0] must be an integer, got 'a'": lambda: HorizontalCascade([model()] * 2, ["a"]),
    "layers must be an integer, got 2": lambda: EarlyExitDrafter(2.0),
    "last must be an integer, got None": lambda: LayerSkipDrafter(1, None),
    "max_new_tokens must be ": lambda: check_drafter("random", model(), max_new_tokens=1.5),
    "rank must be an integer, got '1'": lambda: RemoteDrafter("1"),
}
CASES = [(ValueError, *case) for case in VALUES.items()]
CASES += [(TypeError, *case) for case in TYPES.items()]


@pytest.mark.parametrize(("error", "message", "make"), CASES, ids=[case[1] for case in CASES])
def test_a_wrong_argument_is_named(error, message, make):
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value)
