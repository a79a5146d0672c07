"""Arguments of public functions and of drafters are refused by name, with the value.

The wrong types follow from the annotations: what a parameter does not declare is refused. Tables
hold what no annotation says.
"""

import functools
import inspect
import math
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import specdec_hf as loop
import specdec_host as host
import specdec_papers as papers
import torch
from specdec_hf import (
    BenefitGuard,
    EagleTree,
    SpeculativeDecoder,
    TreeSpec,
    TrieTree,
    check_drafter,
    check_rule,
    generate,
    warm_up,
)
from specdec_hf.options import ALIASES, Options
from specdec_hf.trees import as_layout
from specdec_host import Corpus
from specdec_papers import compat
from specdec_papers.ngram import NgramDrafter
from specdec_papers.ngram_table import NgramTable
from support import hf_models
from support.cli_models import letters
from transformers import GenerationConfig

import specdec_kernels as kernels

pytestmark = pytest.mark.quick

TINY = hf_models.tiny("llama")
CORPUS, TEXTS = Corpus(np.array([1, 2, 3])), [np.array([1])]
TOKENIZERS = {"assistant_tokenizer": letters("abc"), "tokenizer": letters("abc")}
# The functions, and what their other arguments are while one is wrong.
GOOD = {
    generate: {"model": TINY, **hf_models.prompts((9,)), "max_new_tokens": 2},
    SpeculativeDecoder: {},
    check_drafter: {"drafter": "random", "model": TINY},
    check_rule: {"rule": lambda P, Q, tokens, uniforms: (0, P[0])},
    BenefitGuard: {},
    TreeSpec: {"parents": (-1,)},
    TreeSpec.chain: {"n": 1},
    TreeSpec.branching: {"widths": (1,)},
    TreeSpec.medusa: {"ranks": (1,), "size": 1, "accuracies": [[0.5]]},
    TreeSpec.sequoia: {"acceptance": [0.5], "size": 2},
    EagleTree: {},
    TrieTree: {},
    loop.KeptTexts: {"max_bytes": 8},
    NgramTable.build: {"texts": TEXTS, "vocab_size": 9, "order": 2},
    loop.PromptLookupDrafter: {},
    loop.ModelDrafter: {"model": TINY},
    papers.DistilledDrafter: {"model": TINY},
    papers.EarlyExitDrafter: {"layers": 1},
    papers.LayersDrafter: {"layers": 1},
    papers.LayerSkipDrafter: {"first": 1, "last": 1},
    papers.LookaheadDrafter: {},
    papers.NasdDrafter: {},
    NgramDrafter: {},
    loop.RestDrafter: {"corpus": CORPUS},
    papers.SparseCacheDrafter: {},
    loop.SuffixAutomatonDrafter: {},
    papers.OtherVocabularyDrafter: {"model": TINY, **TOKENIZERS},
    papers.TokenRecyclingDrafter: {},
    papers.VerticalCascade: {"model": TINY, "drafter": TINY},
    papers.HorizontalCascade: {"drafters": [TINY, TINY], "counts": [1]},
    compat.TopKNucleusProcessor: {"temperature": 1.0, "top_k": 2, "top_p": 0.5},
    compat.autoregressive_generate: {"inputs": [1, 2], "model": TINY, "max_gen_len": 1},
    compat.beam_search_generate: {"inputs": [1, 2], "model": TINY, "max_gen_len": 1},
    compat.speculative_generate: {
        "inputs": [1, 2], "drafter": TINY, "target": TINY, "max_gen_len": 1, "use_egag": True
    },
}  # fmt: skip
# Values, and the annotations under which each of them may be taken.
POOL = [
    (True, {"bool"}), (np.bool_(True), {"bool"}), (1, {"int", "float"}), (1.5, {"float"}),
    ("3", {"str", "os.PathLike[str]"}), (None, {"None"}), (object(), set()),
]  # fmt: skip
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
NOT_DERIVED = {  # "Any" is in a table below; these are sequences, which no value of the pool is
    (papers.HorizontalCascade, "drafters"), (NgramTable.build, "texts"), (check_drafter, "rules"),
    (TreeSpec, "ranks"),
}  # fmt: skip
SAID = {
    **dict.fromkeys(ALIASES, "num_assistant_tokens"),
    **dict.fromkeys(("widths", "ranks"), "branching"),
    "inputs": "input_ids",
    "egag_ema_beta": "beta",
}


def derived():
    """(function, name, value) of every parameter with a value of no type that it declares."""
    for function in GOOD:
        for name, parameter in inspect.signature(function).parameters.items():
            declared = set(str(parameter.annotation).split(" | "))
            if name == "top_k":
                declared.add("float")  # 3.0 is an integer there
            known = "Any" not in declared and parameter.kind is not parameter.VAR_KEYWORD
            if known and (function, name) not in NOT_DERIVED:
                yield from (
                    (function, name, value) for value, types in POOL if not types & declared
                )


def wrongly(function, **wrong):
    """A call with other arguments that are right."""
    good = {**GOOD[function]}
    if "inputs" in wrong:
        good.pop("input_ids", None)
    return function(**{**good, **wrong})


def refusal(function, error, **wrong):
    """The message with which arguments are refused."""
    with pytest.raises(error) as raised:
        wrongly(function, **wrong)
    return str(raised.value)


@pytest.mark.parametrize("function", GOOD, ids=lambda f: f.__qualname__)
def test_a_wrong_type_is_refused_by_name(function):
    for _, name, value in (row for row in derived() if row[0] == function):
        text = refusal(function, TypeError, **{name: value})
        said = f"{name} must be ", f"{SAID.get(name, name)} must be "
        assert text.startswith(said), (name, value, text)
        assert f"got {value!r}" in text or f"got {type(value).__name__}" in text, (name, text)
        assert "\n" not in text


def test_every_parameter_is_tried():
    assert len([*derived()]) > 600


@pytest.mark.parametrize("name", SAMPLING)
def test_a_flag_is_no_sampling_parameter(name):
    for value in (True, [False], np.array([True]), torch.tensor([True]), np.bool_(False), "a"):
        found = refusal(generate, TypeError, do_sample=True, **{name: value})
        assert re.search(rf"^{name} must be .*, got (True|False|np.False_|'a')$", found)
    for function in (papers.LayersDrafter, loop.ModelDrafter):
        assert refusal(function, TypeError, **{name: True}).endswith(", got True")


@pytest.mark.parametrize("kind", [np.int8, np.uint64])
def test_integers_of_any_type_are_integers(kind):
    given = {**GOOD[generate], "max_new_tokens": 30, "do_sample": False, "seed": 3}
    for name in ("num_assistant_tokens", *ALIASES):
        out = generate(
            **given, drafter=loop.PromptLookupDrafter(kind(3), kind(1)), **{name: kind(2)},
            guard=BenefitGuard(window=kind(2), pause=kind(2)), return_dict_in_generate=True,
        )  # fmt: skip
        assert max(out.stats.gammas) == 2
    assert TreeSpec.chain(kind(2)) == TreeSpec((-1, kind(0)))
    assert TrieTree(kind(2), kind(3), kind(4)) == TrieTree(2, 3, 4)
    tree = EagleTree(kind(12), kind(2), kind(4))
    assert tree.width**2 == 144
    generate(**{**given, "max_new_tokens": 4}, drafter=TINY, tree=tree)


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
def test_wrapped_and_compiled_models_draft_and_are_targets(tree):
    """Of a compiled model its type matters: with the stance nothing is traced, which takes long."""
    inputs = hf_models.prompts((9, 4))
    wrapped = Wrapper(Wrapper(hf_models.perturbed("llama")))
    settings = {"max_new_tokens": 8, "do_sample": False}
    compiled = torch.compile(TINY, backend="eager")
    for target, drafter in ((TINY, wrapped), (wrapped, TINY), (compiled, compiled)):
        with torch.compiler.set_stance("force_eager"):
            expected = target.generate(**inputs, **settings)
            got = generate(
                target, **inputs, **settings, drafter=drafter, tree=tree,
                return_dict_in_generate=True,
            )  # fmt: skip
        assert got.sequences.tolist() == expected.tolist()
        assert got.stats.accepted > 0


def test_a_model_of_prompt_tuning_is_refused():
    wrapped = Wrapper(hf_models.build("llama"))
    wrapped.active_peft_config = type("Config", (), {"is_prompt_learning": True})()
    for name in ("model", "drafter"):
        text = refusal(generate, ValueError, **{name: wrapped})
        assert f"{name} must have no virtual tokens, got Wrapper" in text


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


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_the_generation_config_that_is_no_number_is_refused_by_name(name):
    config, model = GenerationConfig(), hf_models.build("llama")
    setattr(config, name, "5")
    setattr(model.generation_config, name, "5")
    for given in ({name: "5"}, {"generation_config": config}, {"model": model}):
        with pytest.raises(TypeError, match=rf"^{name} must be {FIELDS[name]}, got '5'$"):
            generate(**{"model": TINY, **hf_models.prompts((9,)), **given})


PRINTED = {
    "array": (np.ones((300, 7)), "ndarray [300, 7]"),
    "long": (list(range(99)), "list of length 99"),
    "string": ("a" * 101, "str of length 101"),
    "module": (torch.nn.Sequential(torch.nn.Linear(2, 2)), "Sequential"),
    "0-dim": (torch.tensor(3.5), "tensor(3.5000)"),
}


@pytest.mark.parametrize("kind", PRINTED)
def test_a_message_prints_a_large_value_by_its_type_and_size(kind):
    value, text = PRINTED[kind]
    for call in (
        lambda: generate(TINY, gamma=value),
        lambda: kernels.draft_positions(torch.tensor([1]), value, rule="token"),
        lambda: host.draft_positions(np.array([1]), value, rule="token"),
    ):
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value).endswith(f", got {text}")


PAGE = Path(__file__).parents[2] / "docs" / "loop.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")
def test_the_page_ends_with_the_options():
    page = " ".join(PAGE.read_text().replace("`", "").split())
    for option in (one for one in fields(Options) if one.name not in ALIASES):
        value = option.default
        name = f"{value.__module__}.{value.__name__}" if callable(value) else repr(value)
        begins = option.metadata["text"].replace("`", "").partition("docs/")[0][:60]
        item = f"- {option.name}={name}: {begins}".replace("'", '"')
        assert item in page.replace("'", '"'), item


def test_the_loop_refuses_what_is_out_of_the_range_of_an_option_as_its_check_does():
    refused = []
    for option in fields(Options):
        for value in (-1, 0, math.nan, math.inf, 2**40):
            try:
                option.metadata["check"](option.name, value)
            except ValueError as error:
                refused.append((option.name, value, str(error)))
            except TypeError:
                continue
    assert len({name for name, _, _ in refused}) > 5
    for name, value, message in refused:
        assert refusal(generate, ValueError, **{name: value}) == message


def test_generate_has_every_option_with_its_type_default_and_text():
    parameters = list(inspect.signature(generate).parameters.values())
    shown = " ".join(inspect.getdoc(generate).split())
    for option, parameter in zip(fields(Options), parameters[3:-1], strict=True):
        assert (parameter.name, parameter.default) == (option.name, option.default)
        assert option.type in (parameter.annotation, "Any")
        assert f"{option.name}: {option.metadata['text']}" in shown
    mine = inspect.signature(SpeculativeDecoder).parameters.keys()
    assert mine - {"tokenizer", "stop_strings"} == {option.name for option in fields(Options)}


WIDE, sparse = TreeSpec.branching((3, 2)), papers.SparseCacheDrafter.from_text
MODEL = "a causal language model of Transformers, or a wrapper that forwards to one"
VALUES = {
    # What no annotation says.
    f"model must be {MODEL}, got None": lambda: wrongly(generate, model=None),
    "tree must be an integer in [1, 1024], got T": lambda: wrongly(generate, tree=(2, True)),
    "must be a string or a list of them": lambda: SpeculativeDecoder(stop_strings=["a", 3]),
    "parents[1] must be an integer, got 0.0": lambda: TreeSpec((-1, 0.0)),
    "accuracies[0] must be a sequence, got 3": lambda: wrongly(TreeSpec.medusa, accuracies=[3]),
    "corpus must be a Corpus, got list": lambda: loop.RestDrafter([1]),
    "a cascade must hold Drafters, names of d": lambda: papers.VerticalCascade(TINY, 3),
    "counts[0] must be an integer, got 'a'": lambda: papers.HorizontalCascade([TINY, TINY], ["a"]),
    "batch_sizes must be a sequence, got 8": lambda: warm_up(TINY, 8),
    "batch_sizes[1] must be at least 1, got 0": lambda: warm_up(TINY, (1, 0)),
    "batch_sizes must have at least one number, got none": lambda: warm_up(TINY, ()),
    # Layouts of trees.
    "parents must have 1 to 1024 entries, got 0": lambda: TreeSpec(()),
    "parents[1] must be in [-1, 1), got 1": lambda: TreeSpec((-1, 1)),
    "ranks must have 2 entries, got 1": lambda: TreeSpec((-1, -1), (0,)),
    "ranks[1] must be at least 2": lambda: TreeSpec((-1, -1), (1, 1)),
    "branching must have at least one entry, got none": lambda: TreeSpec.branching(()),
    "branching must have at most 1024 nodes": lambda: TreeSpec.branching((32, 32)),
    "accuracies must be given when size is": lambda: TreeSpec.medusa((2,), 1),
    "accuracies must cover rank 1 of head 1": lambda: TreeSpec.medusa(
        (2, 2), 3, [[0.5, 0.1], [0.5]]
    ),
    "acceptance[1] must be a number in [0, 1], got 1.5": lambda: TreeSpec.sequoia([0.5, 1.5], 3),
    "acceptance must have at least one entry": lambda: TreeSpec.sequoia([], 3),
    "width must be an integer in [1, 64], got 65": lambda: EagleTree(width=65),
    "tree must have at least one entry, got none": lambda: as_layout(()),
    "tree must be a TreeSpec, EagleTree, TrieTree or a tuple": lambda: as_layout(3),
    # Values out of a range.
    "min_ngram must be in [1, max_ngram = 2], got 3": lambda: loop.PromptLookupDrafter(2, 3),
    "order must be an integer in [1, 8], got 0": lambda: NgramDrafter(order=0),
    "table must be given with learn=False": lambda: NgramDrafter(learn=False),
    "hold ids in [0, 9), got 9": lambda: NgramTable.build([np.array([9])], 9, 2),
    "must name an n-gram table, got README.md": lambda: NgramTable.load("README.md"),
    "min_ngram must be at most max_ngram=4, got 5": lambda: papers.NasdDrafter(min_ngram=5),
    "top_k must be an integer in [0, 1024], got -1": lambda: papers.NasdDrafter(top_k=-1),
    "pause must be at least 1, got 0": lambda: BenefitGuard(pause=0),
    "min_match must be at most 2, got 3": lambda: loop.RestDrafter(CORPUS, 3, 2),
    "must be in [0, 1], got 2.0": lambda: loop.SuffixAutomatonDrafter(min_confidence=2),
    "max_bytes must be at least 8, got 7": lambda: loop.SuffixAutomatonDrafter.from_text(
        "keep=7"  # a number without a unit is of bytes
    ).for_target(TINY),
    "bytes such as 64MiB, got '64MB'": lambda: loop.SuffixAutomatonDrafter.from_text("keep=64MB"),
    "ngram must be an integer in [2, 1024], got 1": lambda: papers.LookaheadDrafter(ngram=1),
    "must be in [2, 1025], got 1": lambda: papers.LookaheadDrafter(1, 2, 0),
    "three integers W,N,G, got '4,3,-1'": lambda: papers.LookaheadDrafter.from_text("4,3,-1"),
    "ranks of tree must be below top_k=2, got 2": lambda: papers.TokenRecyclingDrafter(WIDE, 2),
    "assistant_lookbehind must be at least 1, got 0": lambda: papers.OtherVocabularyDrafter(
        TINY, **TOKENIZERS, assistant_lookbehind=0
    ),
    "in a cascade, got OtherVocabularyDrafter": lambda: papers.HorizontalCascade(
        [TINY, papers.OtherVocabularyDrafter(TINY, **TOKENIZERS)], [1]
    ),
    "drafters must be 2 to 8, got 0": lambda: papers.HorizontalCascade([], []),
    "learning_rate must be above 0 and finite, got 0": lambda: papers.DistilledDrafter(TINY, 0),
    "drafter must be given, got None": lambda: check_drafter(None, TINY),
    "must be at least sinks + recent = 9, got 8": lambda: sparse("budget=8,recent=9,sinks=0"),
    "recent must be at least chunk = 8, got 7": lambda: sparse("budget=64,chunk=8,recent=7"),
    "recent, interval, got 'budget=64,sink=4'": lambda: sparse("budget=64,sink=4"),
    **{
        f"{name} must be an integer in [{low}, {2**31 - 1}], got {number}": functools.partial(
            sparse, f"{name}={number}"
        )
        for name, low in (("budget", 1), ("chunk", 1), ("sinks", 0), ("recent", 1), ("interval", 1))
        for number in (low - 1, 2**31)
    },
}


@pytest.mark.parametrize("message", VALUES)
def test_a_wrong_argument_is_named(message):
    with pytest.raises((TypeError, ValueError)) as raised:
        VALUES[message]()
    assert message in str(raised.value)
