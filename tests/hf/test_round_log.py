"""`SpecStats.round_log`: its counts and times are those of the statistics."""

import json
import time

import pytest
from specdec_hf import TrieTree, generate
from specdec_hf.cache import spec_cache
from specdec_hf.decode import commit, tree_round
from specdec_hf.drafters.trees import trie
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from transformers import LlamaModel

CALLS = {
    "plain": {"drafter": None},
    "model": {"drafter": "model", "do_sample": True, "seed": 1, "guard": False},
    "tree": {"drafter": "model", "tree": (2, 1), "guard": False},
}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        self.now += 0.25
        return self.now


@pytest.mark.parametrize("kind", CALLS)
def test_the_log_of_rounds_adds_up_to_the_statistics(kind):
    options = {"do_sample": False, **CALLS[kind]}
    if options["drafter"] is not None:
        options["drafter"] = hf_models.perturbed("llama")
    out = generate(
        hf_models.tiny("llama"), **hf_models.prompts((9, 4, 12)), **options, max_new_tokens=9,
        clock=Clock(), return_dict_in_generate=True,
    )  # fmt: skip
    stats, log = out.stats, out.stats.round_log
    assert len(log) == stats.rounds
    for b, one in enumerate(stats.sequences):
        assert sum(record.drafted[b] for record in log) == one.drafted
        assert sum(record.accepted[b] for record in log) == one.accepted
        assert sum(record.emitted[b] for record in log) == one.new_tokens
    for phase, seconds in stats.time_split.items():
        assert sum(getattr(record, phase) for record in log) == seconds
    assert log[0].began == 0.25
    assert all(record.seconds == 0.75 for record in log)
    ends = [record.began + record.seconds for record in log]
    assert all(record.began >= end for record, end in zip(log[1:], ends, strict=False))
    written = json.loads(json.dumps(stats.to_dict()))["round_log"]
    assert written == [record.to_dict() for record in log]


def test_sequences_that_have_ended_draft_nothing():
    model = hf_models.tiny("llama")
    inputs = hf_models.prompts((9, 4))
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    stop = int(plain[0, inputs["input_ids"].shape[1] + 1])
    out = generate(
        model, **inputs, drafter=model, guard=False, gamma=1, eos_token_id=stop, do_sample=False,
        max_new_tokens=12, return_dict_in_generate=True,
    )  # fmt: skip
    ended = [b for b in range(2) if out.stats.sequences[b].rounds < out.stats.rounds]
    assert ended
    last = out.stats.round_log[-1]
    assert all(last.drafted[b] == last.emitted[b] == 0 for b in ended)


PLACES = {  # phase -> what is part of it, and runs in every round with a tree
    "draft": (trie.TrieDrafter, "propose"),
    "target": (LlamaModel, "forward"),
    "verification": (tree_round, "verify_tree"),
    "cache": (spec_cache.SpecCache, "_move_cursor"),
    "host": (commit, "_cut"),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PLACES)
def test_seconds_are_counted_to_the_phase_that_took_them(monkeypatch, phase):
    owner, name = PLACES[phase]
    original = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(0.1)
        return original(*args, **kwargs)

    model = hf_models.tiny("llama")
    settings = {"drafter": "prompt_lookup", "tree": TrieTree(), "guard": False, "do_sample": False}
    settings |= {"max_new_tokens": 12, "return_dict_in_generate": True}
    generate(model, **hf_models.prompts((9,)), **settings)
    monkeypatch.setattr(owner, name, slow)
    began = time.perf_counter()
    stats = generate(model, **hf_models.prompts((9,)), **settings).stats
    split = stats.time_split
    assert max(split, key=split.get) == phase
    assert split[phase] > 0.1
    assert sum(split.values()) < time.perf_counter() - began


def test_a_sequence_without_drafts_has_no_token_statistics():
    """A drafter that drafts at once for the whole batch gives them to the others."""
    out = generate(
        hf_models.tiny("llama"), **hf_models.prompts((9, 4, 12)), drafter="suffix_automaton",
        num_assistant_tokens_schedule="egag", guard=False, do_sample=False, max_new_tokens=16,
        return_dict_in_generate=True,
    )  # fmt: skip
    found = [
        (drafted > 0, h_norm is not None)
        for record in out.stats.round_log[1:]
        for drafted, h_norm in zip(record.drafted, record.schedule["h_norm"], strict=True)
        if any(record.drafted)
    ]
    assert all(drafts == known for drafts, known in found)
    assert {drafts for drafts, _ in found} == {True, False}
