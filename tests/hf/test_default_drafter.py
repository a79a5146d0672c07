"""The drafter of a call that names none: what it chooses, and that the text is plain decoding's."""

import sys

import pytest
import torch
from specdec_hf import AutoDrafter, generate
from specdec_hf.drafting.registry import AUTO
from specdec_hf.heads.eagle3.files import save_head
from specdec_hf.heads.shipped import HEAD_FOLDER
from support import hf_models
from support.drafter_proof import begun, with_states
from support.hf_models import Clock, head_for
from transformers import GenerationConfig

from bench.tiny_models.build import build

ONE, RAGGED = (9,), (9, 4, 12)
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 5, "seed": 3}
HOW = pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
CHAINS = "drafter 'auto' drafts chains with suffix_automaton: "
NOTHING = "drafter 'auto' drafts nothing: "


def run(model, lengths=ONE, inputs=None, **kwargs):
    inputs = inputs or hf_models.prompts(lengths, vocab_size=11)
    how = {"max_new_tokens": 16, "guard": False, "return_dict_in_generate": True, **kwargs}
    return generate(model, **inputs, **how)


def text_of(out):
    return out.sequences.tolist()


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=["alone", "ragged"])
@HOW
def test_a_default_call_has_the_text_of_plain_decoding(model, lengths, how):
    # Another process that takes the machine's time could let the schedule draft nothing.
    out = run(model, lengths, **how, clock=Clock(0.25))
    assert out.stats.drafter == AUTO
    assert out.stats.accepted > 0
    assert out.stats.notes == []
    assert text_of(out) == text_of(run(model, lengths, **how, drafter=None))


def own(model):
    return model, hf_models.prompts(RAGGED, vocab_size=11)


def embedded(model):
    rows = model.get_input_embeddings()(torch.arange(1, 7)[None])
    return model, {"inputs_embeds": rows.detach()}


THREE = GenerationConfig(num_assistant_tokens=3, pad_token_id=0)
# A model with its inputs, options that a tree or any draft is refused with, and what drafts then.
LIMITS = {
    "cache of the batch": (own, {"cache": "aligned"}, CHAINS),
    "num_assistant_tokens": (own, {"num_assistant_tokens": 3}, CHAINS),
    "generation_config": (own, {"generation_config": THREE}, CHAINS),
    "schedule": (own, {"num_assistant_tokens_schedule": "heuristic"}, CHAINS),
    "block": (own, {"rule": "block"}, CHAINS),
    "encoder": (lambda _: (hf_models.tiny("t5"), hf_models.texts(RAGGED)), {}, CHAINS),
    "ALiBi": (lambda _: own(build("BloomForCausalLM")), {}, CHAINS),
    "state space": (lambda _: own(build("MambaForCausalLM")), {}, NOTHING),
    "beams": (own, {"num_beams": 2}, NOTHING),
    "embeddings": (embedded, {}, NOTHING),
    "no tokens": (own, {"num_assistant_tokens": 0}, NOTHING),
}


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[pytest.mark.full] if x == "ALiBi" else []) for x in LIMITS]
)
def test_calls_that_refuse_trees_get_chains_or_no_drafts_and_a_note(model, case):
    make, options, note = LIMITS[case]
    target, inputs = make(model)
    options = {**GREEDY, **options, "max_new_tokens": 8, "inputs": inputs}
    out = run(target, **options)
    assert text_of(out) == text_of(run(target, **options, drafter=None))
    assert [one.startswith(note) for one in out.stats.notes if AUTO in one] == [True]
    assert (out.stats.drafted > 0) == (note == CHAINS)
    if case not in ("embeddings", "no tokens"):
        with pytest.raises(ValueError):
            run(target, **options, drafter=AutoDrafter())


def test_without_the_native_module_that_copies_need_text_is_decoded_plainly(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "specdec_host", None)
    with pytest.raises(ImportError):
        run(model, drafter="suffix_automaton")
    out = run(model)
    assert out.stats.drafter == "none"
    assert out.stats.notes[0].startswith(NOTHING)


def test_sampled_chains_have_the_text_of_plain_decoding_with_rule_match(model):
    out = run(model, RAGGED, **SAMPLED, cache="aligned")
    plain = run(model, RAGGED, **SAMPLED, cache="aligned", drafter=None, rule="match")
    assert (out.stats.drafter, out.stats.rule) == ("suffix_automaton", "match")
    assert out.stats.accepted > 0
    assert text_of(out) == text_of(plain)


def test_the_tree_is_sized_by_schedule_optimal_and_chains_are_not(model):
    for options, sized in (
        ({}, True),
        ({"num_assistant_tokens_schedule": "constant"}, False),
        ({"cache": "aligned"}, False),
    ):
        rounds = run(model, **GREEDY, **options).stats.round_log[1:]
        assert {"gamma" in one.schedule for one in rounds} == {sized}


def test_half_precision_leaves_one_note_where_the_text_depends_on_timing():
    model = hf_models.build("llama", vocab_size=11).to(torch.bfloat16)
    for guard, options in ((True, {"compile": False}), (True, {}), (False, {"compile": False})):
        notes = run(model, **GREEDY, **options, max_new_tokens=4, guard=guard).stats.notes
        assert any("rounds unlike" in note for note in notes) == (guard and options != {})


@pytest.mark.parametrize("rule", ["match", "target_only"])
def test_each_part_draws_as_the_sequence_that_joins(model, rule):
    """Also on another device, where it has copies of its own, as here."""
    sampling = {name: torch.ones(2) for name in ("temperature", "top_k", "top_p", "min_p")}
    ours, theirs = (
        begun(AutoDrafter(), 2, model=model, rule=rule, seeds=torch.tensor(seeds), **sampling)
        for seeds in ([1, 2], [3, 4])
    )
    for one in ours.sources:
        one.call._placed[model.device] = {"seeds": torch.tensor([1, 2])}
    ours.call.take(0, theirs.call, 1)
    ours.take(0, theirs, 1)
    for one in ours.sources:
        assert one.call.sampling_on(model.device)["seeds"].tolist() == [4, 2]


COPYING = "prompt_lookup, suffix_automaton"


@pytest.fixture
def target(tmp_path):
    model = hf_models.build("llama", vocab_size=11)
    model.config._name_or_path = str(tmp_path)
    return model


def test_it_copies_where_there_is_no_head(target):
    assert begun(AutoDrafter(), 3, model=target).drafter.name == COPYING


@HOW
def test_a_head_beside_the_target_drafts_too(target, tmp_path, how):
    save_head(head_for(target, noise=0.1), tmp_path / HEAD_FOLDER, torch.float32)
    chosen = []
    drafter = with_states(AutoDrafter(), lambda state, call: chosen.append(state.drafter.name))
    out = run(target, RAGGED, drafter=drafter, **how)
    assert chosen == [f"eagle3, {COPYING}"]
    assert out.stats.accepted > 0
    # No draft has a part in the text: it is the target's own with the same noise.
    rule = {"rule": out.stats.rule} if how is SAMPLED else {}
    assert text_of(out) == text_of(run(target, RAGGED, drafter="token_recycling", **how, **rule))


@HOW
@pytest.mark.parametrize("vocab_size", [13, None], ids=["another model", "empty folder"])
def test_a_default_call_goes_on_without_a_wrong_head(target, tmp_path, vocab_size, how):
    before, place = run(target, **how), tmp_path / HEAD_FOLDER
    place.mkdir()
    if vocab_size:
        save_head(head_for(hf_models.build("llama", vocab_size=vocab_size)), place)
    with pytest.raises(ValueError, match=r"a vocabulary of 13, got 11|config\.json") as refused:
        run(target, drafter=AutoDrafter(), **how)
    out = run(target, **how)
    assert (out.stats.drafter, out.stats.rule) == (AUTO, before.stats.rule)
    # Another note may say that the guard, which goes by the clock, let nothing be drafted.
    assert f"drafter 'auto' drafts without the model's head: {refused.value}" in out.stats.notes
    assert text_of(out) == text_of(before)


def test_no_head_drafts_on_an_accelerator(target, tmp_path, monkeypatch):
    """Its trees would be on the device, and cannot be merged with copied text."""
    save_head(head_for(target), tmp_path / HEAD_FOLDER, torch.float32)
    assert AutoDrafter().has_head(target)
    for device in ("cuda:0", "mps"):
        monkeypatch.setattr(type(target), "device", torch.device(device))
        assert not AutoDrafter().has_head(target)


@pytest.mark.parametrize("place", ["loop.plan.choose_cache", "heads.auto.find_head"])
def test_a_fault_of_the_program_is_no_reason_to_draft_otherwise(target, monkeypatch, place):
    monkeypatch.setattr(f"specdec_hf.{place}", lambda *_, **__: int("planted"))
    with pytest.raises(ValueError, match="'planted'"):
        run(target)
