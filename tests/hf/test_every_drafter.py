"""One table: every drafter leaves greedy text as it is, and sampled text in its distribution."""

import importlib
import inspect
import pkgutil

import pytest
from specdec_hf import Drafter, TreeDrafter, TrieTree, drafters
from specdec_hf.drafters.registry import DRAFTERS
from specdec_hf.drafters.resolve import parts_of, resolve_drafter
from specdec_hf.drafters.trees.trie import TrieDrafter
from support import drafter_cases, hf_models
from support.drafter_proof import (
    assert_greedy_identical,
    assert_independent_of_batch,
    joint_p_value,
    target,
    with_wrong_distribution,
)
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.providers import SIGNIFICANCE

ELSEWHERE = {"RemoteDrafter": "test_remote_drafter.py, which starts another process"}
# The distribution of their drafts cannot be wrong: no rule for them reads it.
WITHOUT_DISTRIBUTION = {"merged trees"}


def resolved(name, model, folder):
    """The drafter of a case."""
    arguments = drafter_cases.make(name, model, folder)
    return resolve_drafter(arguments["drafter"], arguments.get("tree"), model)


def test_every_named_drafter_is_in_the_table():
    assert set(drafter_cases.NAMED) == set(DRAFTERS)


def test_every_class_of_drafters_is_in_the_table(tmp_path):
    expected = set()
    for module in pkgutil.walk_packages(drafters.__path__, "specdec_hf.drafters."):
        held = vars(importlib.import_module(module.name)).values()
        classes = [one for one in held if inspect.isclass(one) and not inspect.isabstract(one)]
        expected |= {one for one in classes if issubclass(one, Drafter | TreeDrafter)}
    model = hf_models.tiny("llama")
    made = [resolved(name, model, tmp_path) for name in drafter_cases.ALL]
    used = {base for one in made for part in parts_of(one) for base in type(part).__mro__}
    missing = {one.__name__ for one in expected - used}
    assert missing == set(ELSEWHERE)


@pytest.mark.parametrize("name", drafter_cases.ALL)
def test_greedy_text_is_that_of_plain_generation(name, tmp_path):
    """For one sequence, and for a ragged batch of three."""
    model = hf_models.build("llama", vocab_size=7)  # so few that every drafter is right at times
    stats = assert_greedy_identical(
        lambda: drafter_cases.make(name, model, tmp_path).pop("drafter"), model,
        tree=drafter_cases.make(name, model, tmp_path).get("tree"),
    )  # fmt: skip
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("rule", ["auto", "match"])
@pytest.mark.parametrize("name", drafter_cases.ALL)
def test_a_sequence_does_not_depend_on_its_batch_or_an_earlier_call(name, rule, tmp_path):
    model, _ = target()  # of so few tokens that sequences would learn from one another
    drafter = resolved(name, model, tmp_path)
    assert_independent_of_batch(lambda: drafter, model, rule=rule, temperature=0.7)


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True], ids=["one prompt", "ragged"])
@pytest.mark.parametrize("name", drafter_cases.ALL)
def test_sampled_text_keeps_its_joint_distribution(name, ragged, tmp_path):
    """The first four tokens, against the exact probabilities of all 256 texts.

    There are 1,000 texts a prompt or more; the negative control is rejected with 300. Faults show
    most after the third prompt, which is taken where there is one prompt.
    """
    drafter = resolved(name, target()[0], tmp_path)
    texts = {"texts": 3000, "ragged": True} if ragged else {"texts": 1500, "prompt": 2}
    assert p_value(drafter, **texts) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in drafter_cases.ALL if n not in WITHOUT_DISTRIBUTION])
def test_a_wrong_distribution_is_rejected(name, tmp_path):
    """Negative control of every case above, with fewer texts."""
    model, _ = target()
    arguments = drafter_cases.make(name, model, tmp_path)
    made, layout = arguments["drafter"], arguments.get("tree")
    if isinstance(layout, TrieTree):
        parts = [with_wrong_distribution(resolve_drafter(one, None, model)) for one in made]
        wrong = TrieDrafter(parts, layout)
    else:
        wrong = with_wrong_distribution(resolve_drafter(made, layout, model))
    assert p_value(wrong, texts=900, ragged=True) < SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_sampled_text_of_one_sequence_a_call_keeps_its_joint_distribution(wrong, tmp_path):
    """Sequences alone go without a mask where it hides nothing.

    ``wrong`` is the negative control, which half the texts reject after the second prompt.
    """
    drafter = resolved("early_exit", target()[0], tmp_path)
    if wrong:
        drafter = with_wrong_distribution(drafter)
    texts = 150 if wrong else 300
    p_value = joint_p_value(drafter, "auto", texts=texts, prompt=1, alone=True)
    assert (p_value < SIGNIFICANCE) == wrong


def p_value(drafter, **texts):
    gamma = {"gamma": None} if isinstance(drafter, TreeDrafter) else {}
    return joint_p_value(drafter, "auto", **texts, **gamma)
