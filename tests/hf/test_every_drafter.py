"""One table: every drafter leaves greedy text as it is, and sampled text in its distribution."""

import contextlib
import functools
import importlib
import inspect
import itertools
import pkgutil

import numpy as np
import pytest
import specdec_hf.drafters
import specdec_hf.heads
import specdec_papers
import torch
from specdec_hf import Drafter, History, SpeculativeDecoder, TrieTree, generate
from specdec_hf.drafters.merge import TrieDrafter
from specdec_hf.drafters.resolve import resolve_drafter
from specdec_hf.drafting.call import reads_draft
from specdec_hf.drafting.drafter import lossy_rules_of, rules_of
from specdec_hf.drafting.registry import drafters
from specdec_hf.rules import text_depends_on_drafts
from support import drafter_proof, hf_models
from support.drafter_proof import (
    BATCHES,
    SIGNIFICANCE,
    assert_independent_of_batch,
    begun,
    chains_of,
    history_of,
    joint_p_value,
    target,
    with_states,
    with_twin,
    with_wrong_distribution,
)


def resolved(name, model, folder):
    arguments = drafter_proof.make(name, model, folder)
    return resolve_drafter(arguments["drafter"], arguments.get("tree"), model)


def test_every_named_drafter_is_in_the_table():
    assert set(drafter_proof.NAMED) == set(drafters())


def test_every_class_of_drafters_is_in_the_table(tmp_path):
    packages = specdec_hf.drafters, specdec_hf.heads, specdec_papers
    expected, folders = set(), {one.__name__: one.__path__ for one in packages}
    for module in (m for n, path in folders.items() for m in pkgutil.walk_packages(path, f"{n}.")):
        held = vars(importlib.import_module(module.name)).values()
        classes = [one for one in held if inspect.isclass(one) and not inspect.isabstract(one)]
        expected |= {one for one in classes if issubclass(one, Drafter)}
    model = hf_models.tiny("llama")
    made = [resolved(name, model, tmp_path) for name in drafter_proof.ALL]
    for one in made:
        made += getattr(one, "drafters", [])  # of what is made of others
    used = {base for one in made for base in type(one).__mro__}
    assert TrieDrafter in expected
    assert not {one.__name__ for one in expected - used}


def test_every_case_is_proved_by_what_its_rule_reads(tmp_path):
    drawn, one_hot = set(), set()
    for name in drafter_proof.ALL:
        drafter = resolved(name, hf_models.tiny("llama"), tmp_path)
        if not drafter.size:
            (drawn if drafter.draws else one_hot).add(name)
        elif reads_draft(rules_of(drafter)[0]):
            drawn.add(name)
    assert drawn == {*drafter_proof.DRAWN, *drafter_proof.DRAWN_ALIKE}
    assert one_hot == {*drafter_proof.DETERMINISTIC}


@functools.cache
def of_seven_tokens():
    """So few that every drafter is right at times."""
    return hf_models.build("llama", vocab_size=7)


SAMPLED = {"do_sample": True, "max_new_tokens": 8, "seed": [5, 6, 7]}


@pytest.mark.parametrize("name", drafters())
def test_the_entry_of_a_name_says_what_its_drafter_gives_in_a_call(name, tmp_path):
    """The command line reads the entries, and never a draft; `several` is compared below."""
    drafts, forwards = [], []

    def recording(state, call):
        propose, forward = state.propose, state.forward
        state.propose = lambda *told: drafts.append(propose(*told)) or drafts[-1]
        state.forward = lambda *told: forwards.append(forward(*told)) or forwards[-1]

    drafter = with_states(resolved(name, of_seven_tokens(), tmp_path), recording)
    hf_models.decode(of_seven_tokens(), BATCHES[-1], drafter=drafter, **SAMPLED)
    given = [draft for draft in drafts if draft is not None]
    found = {
        "own_tree": {draft.parents is not None for draft in given},
        "draws": {draft.drawn is not None for draft in given},
        "reports_confidence": {draft.confidence is not None for draft in given},
    }
    assert found == {key: {getattr(drafters()[name], key)} for key in found}
    made = any(logits is not None for logits in forwards)
    assert drafters()[name].makes_forward == drafter.needs.target_forward
    assert drafter.needs.target_forward or not made


@functools.cache
def plain_text(rule):
    settings = {} if rule == "greedy" else {**SAMPLED, "rule": rule}
    return hf_models.decode(of_seven_tokens(), BATCHES[-1], **settings).sequences.tolist()


@pytest.mark.parametrize("name", drafter_proof.ALL)
def test_every_drafter_leaves_the_text_as_it_is(name, tmp_path):
    drafter = resolved(name, of_seven_tokens(), tmp_path)
    before = vars(drafter).copy()
    greedy = hf_models.decode(of_seven_tokens(), BATCHES[-1], drafter=drafter)
    assert greedy.sequences.tolist() == plain_text("greedy")
    assert 0 < greedy.stats.accepted < greedy.stats.drafted
    own_tree = drafter.size > 0
    rule, plain = ("target_only", "token") if own_tree else ("match", "match")
    how = {**SAMPLED, "rule": rule, "drafter": drafter}
    sampled = hf_models.decode(of_seven_tokens(), BATCHES[-1], **how)
    assert sampled.sequences.tolist() == plain_text(plain)
    assert vars(drafter) == before, "what it knows of a call lies in its state"


@pytest.mark.parametrize("name", drafter_proof.ALL)
def test_every_drafter_goes_on_between_the_rounds_of_a_prediction(name, tmp_path):
    drafter = resolved(name, of_seven_tokens(), tmp_path)
    texts = [row[max(BATCHES[-1]) :] for row in plain_text("greedy")]
    parts = [[*text[2:6], *text[9:]] for text in texts]  # known for some of the tokens
    got = hf_models.decode(of_seven_tokens(), BATCHES[-1], drafter=drafter, prediction=parts)
    assert got.sequences.tolist() == plain_text("greedy")
    together = got.stats.together
    if drafter.needs.target_forward:
        assert together.predicted == 0
    else:
        assert 0 < together.accepted_predicted <= together.accepted
        assert together.predicted < together.drafted, "the drafter drafts between them"


# Of trees that read Q, beside the best one of the drafter.
TREE_RULES = ("multi_draft", "top_k_plus_one", "k_seq", "traversal")
ONE_OF_EACH_KIND = pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.full if n in drafter_proof.DRAWN_ALIKE else [])
        for n in drafter_proof.ALL
    ],
)


@ONE_OF_EACH_KIND
def test_the_returned_cache_continues_in_plain_generate(name, tmp_path):
    """After five tokens of a stream; and with the drafter itself."""
    model, drafter = of_seven_tokens(), resolved(name, of_seven_tokens(), tmp_path)
    greedy = {"do_sample": False, "max_new_tokens": 5}
    streamed, accepted = [[] for _ in BATCHES[-1]], 0
    inputs = hf_models.prompts(BATCHES[-1], vocab_size=7)
    decoder = SpeculativeDecoder(drafter, guard=False)
    for step in decoder.stream(model, **inputs, **greedy):
        streamed[step.sequence] += step.tokens
        accepted += step.kinds.count("accepted")
    first = hf_models.decode(model, BATCHES[-1], drafter=drafter, **greedy)
    assert streamed == first.sequences[:, -5:].tolist()
    assert accepted == first.stats.accepted or name in drafter_proof.KEEPING
    rest = {
        "input_ids": first.sequences, "attention_mask": first.attention_mask,
        "past_key_values": first.past_key_values, "max_new_tokens": 7, "do_sample": False,
    }  # fmt: skip
    assert generate(model, **rest, drafter=drafter, guard=False).tolist() == plain_text("greedy")
    assert model.generate(**rest).tolist() == plain_text("greedy")


@ONE_OF_EACH_KIND
@pytest.mark.parametrize(
    "rules",
    [("best", "typical"), pytest.param(("token", "block", *TREE_RULES), marks=pytest.mark.full)],
    ids="-".join,
)
def test_a_sequence_does_not_depend_on_its_batch_or_an_earlier_call(name, rules, tmp_path):
    """Its text and its drafts, beside sequences of other limits, which change from round to round.

    Under rules whose text depends on what is drafted: the best of the drafter's own, and others.
    """
    model, _ = target()  # of so few tokens that sequences would learn from one another
    drafter = resolved(name, model, tmp_path)
    keeps = name in drafter_proof.KEEPING
    best, known = rules_of(drafter)[0], {*rules_of(drafter), *lossy_rules_of(drafter)}
    asked = {best if rule == "best" else rule for rule in rules}
    for rule in filter(text_depends_on_drafts, asked & known):
        assert_independent_of_batch(
            lambda: resolved(name, model, tmp_path) if keeps else drafter, model, 16, seed=10,
            temperature=0.7, rule=rule, ragged=True,
        )  # fmt: skip
    if keeps:  # the control: after a call with other seeds it drafts otherwise
        how = {"seed": [50, 51, 52], "do_sample": True, "temperature": 0.7, "max_new_tokens": 16}
        hf_models.decode(model, BATCHES[-1], drafter=drafter, **how)
        made = itertools.chain([resolved(name, model, tmp_path)], itertools.repeat(drafter))
        with pytest.raises(AssertionError):
            assert_independent_of_batch(lambda: next(made), model, 7, temperature=0.7)


@pytest.mark.parametrize("name", drafter_proof.KEEPING)
@pytest.mark.parametrize("rule", ["typical", "greedy"])
def test_a_text_that_depends_on_earlier_calls_has_a_note(name, rule, tmp_path):
    drafter = resolved(name, target()[0], tmp_path)

    def call(seed):
        how = {"do_sample": rule != "greedy", "rule": rule, "max_new_tokens": 24, "gamma": None}
        seeds = [seed, seed + 1, seed + 2]
        return hf_models.decode(target()[0], BATCHES[-1], drafter=drafter, seed=seeds, **how)

    first, _, again = (call(seed) for seed in (5, 50, 5))
    depends = rule == "typical"
    assert any("drafts from earlier calls" in x for x in again.stats.notes) == depends
    assert torch.equal(first.sequences, again.sequences) != depends


@pytest.mark.parametrize(
    "name", ["prompt_lookup", "suffix_automaton", "suffix_automaton, kept", "rest", "nasd"]
)
def test_different_chains_are_those_of_the_sequences_own_limit(name, tmp_path):
    """Chains that differ beyond a limit only would be one, in the place of other continuations."""
    model, rng, different = target()[0], np.random.default_rng(0), 0
    shown = history_of(*rng.integers(0, 4, (40, 30)))
    drafter, limits = resolved(name, model, tmp_path), rng.integers(1, 4, 40)

    def chains(texts, limits):
        state = begun(drafter, len(limits), model=model, num_proposals=3)
        told = History(shown.tokens[texts], shown.lengths[texts], shown.active[texts])
        return chains_of(state.propose(told, limits)) or [[]]

    everyone = np.arange(40)
    together, longest = chains(everyone, limits), chains(everyone, np.full(40, limits.max()))
    for b, limit in enumerate(limits):
        (alone,) = chains([b], limits[[b]])
        within = [[chain[:limit] for chain in rows[b]] for rows in (together, longest)]
        found, cut, expected = ([c for c in x if max(c) >= 0] for x in (*within, alone))
        assert found == expected
        different += cut != expected
    assert drafter.several == (max(map(len, together)) > 1)
    if name in ("prompt_lookup", "suffix_automaton"):
        assert different > 0, "the control: the limit decides which chains there are"


@pytest.mark.parametrize("name", [*drafter_proof.DETERMINISTIC, "random"])
def test_a_draft_without_a_distribution_follows_from_what_its_drafter_was_told(name, tmp_path):
    """So it is a constant under the noise of its verification, as in the ops' exact enumeration.

    "random" is the negative control.
    """
    model, _ = target()
    drafter = with_twin(*(resolved(name, model, tmp_path) for _ in range(2)))
    context = pytest.raises(AssertionError) if name == "random" else contextlib.nullcontext()
    with context:
        how = {"seed": [5, 6, 7], "do_sample": True, "max_new_tokens": 16}
        hf_models.decode(model, BATCHES[-1], drafter=drafter, **how)
        assert len(drafter.rounds) > 3


# One of each way to draw. Drafts without a distribution are constants, as tested above; the
# distribution of a cascade is proved in test_cascades.py.
MECHANISMS = {"ngram", "eagle3_chain", "two models, tree", "merged, drawn"}
MONTE_CARLO = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in MECHANISMS else pytest.mark.full)
        for name in (*drafter_proof.DRAWN, *drafter_proof.DRAWN_ALIKE, "nasd")
    ],
)


@MONTE_CARLO
def test_sampled_text_keeps_its_joint_distribution(name, tmp_path):
    """The first four tokens of 1,000 texts, against the exact probabilities of all 256."""
    drafter = resolved(name, target()[0], tmp_path)
    gamma = {"gamma": None} if drafter.size > 0 else {}
    assert joint_p_value(drafter, "auto", texts=1000, **gamma) > SIGNIFICANCE


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("two models, tree", "traversal"),
        *(pytest.param("model, tree", rule, marks=pytest.mark.full) for rule in TREE_RULES),
    ],
)
def test_texts_of_trees_keep_it_under_every_rule(name, rule, tmp_path):
    """Far from temperature 1, so that children of another temperature would be seen."""
    drafter, sampling = resolved(name, target()[0], tmp_path), {"temperature": 2.0, "top_k": 3}
    p_value = joint_p_value(drafter, rule, texts=1000, gamma=None, **sampling)
    assert p_value > SIGNIFICANCE


@MONTE_CARLO
def test_a_wrong_distribution_is_rejected(name, tmp_path):
    model, _ = target()
    arguments = drafter_proof.make(name, model, tmp_path)
    made, layout = arguments["drafter"], arguments.get("tree")
    if isinstance(layout, TrieTree):
        parts = [with_wrong_distribution(resolve_drafter(one, None, model)) for one in made]
        wrong = TrieDrafter(parts, layout)
    else:
        wrong = with_wrong_distribution(resolve_drafter(made, layout, model))
    gamma = {"gamma": None} if wrong.size else {}
    assert joint_p_value(wrong, "auto", texts=400, **gamma) < SIGNIFICANCE
