"""Sequences that join a batch between its rounds have the text and the counts of their own call."""

import functools
import re

import numpy as np
import pytest
import torch
from specdec_hf import (
    EagleTree,
    ModelDrafter,
    PromptLookupDrafter,
    SpeculativeDecoder,
    SuffixAutomatonDrafter,
    TrieTree,
    generate,
)
from specdec_hf.heads.shipped import HEAD_FOLDER
from specdec_hf.loop.session import CommittedTokens, Session
from specdec_hf.loop.streaming import run_stream
from support import hf_models
from support.drafter_proof import call_of, datastore, with_states
from support.hf_models import eagle_folder, head_folder

MODEL = hf_models.build("llama", vocab_size=11)  # few tokens, so that texts repeat themselves
NOISY = hf_models.with_noise(MODEL, 0.1)
PROMPTS = ([5, 6, 7, 5, 6], [8], [9, 4, 9], [1, 2, 3, 1, 2, 3, 1, 2], [4], [3, 3, 3], [7, 2])
ASKED = (
    {"max_new_tokens": 9, "seed": 5},
    {"max_new_tokens": 3, "seed": 6, "temperature": 0.7, "top_k": 5},
    {"max_new_tokens": 14, "seed": 7, "temperature": 0.0},
    {"max_new_tokens": 6, "seed": 8, "top_p": 0.9},
    {"max_new_tokens": 1, "seed": 9},
    {"max_new_tokens": 20, "seed": -10, "temperature": 1.3, "min_p": 0.05},
    {"max_new_tokens": 12, "seed": 11, "temperature": 0.4},
)
NEUTRAL = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
OPTIONS = {"rule": "match", "guard": False, "num_assistant_tokens_schedule": "constant"}


def head_beside(folder):
    head_folder(MODEL, folder).rename(folder / HEAD_FOLDER)
    model = hf_models.build("llama", vocab_size=11)
    model.config._name_or_path = str(folder)
    return model


DRAFTERS = {
    "none": lambda folder: {"drafter": None},
    "prompt_lookup": lambda folder: {"drafter": "prompt_lookup"},
    "suffix_automaton": lambda folder: {"drafter": "suffix_automaton"},
    "rest": lambda folder: {"drafter": datastore(MODEL, folder)},
    "auto": lambda folder: {"drafter": "auto"},
    "auto, head": lambda folder: {"drafter": "auto", "model": head_beside(folder)},
    "model": lambda folder: {"drafter": NOISY},
    "model, own sampling": lambda folder: {"drafter": ModelDrafter(NOISY, temperature=0.5)},
    "model, tree": lambda folder: {"drafter": NOISY, "tree": EagleTree(2, 3, 5)},
    "several": lambda folder: {"drafter": [NOISY, "prompt_lookup"], "tree": TrieTree(3, 4, 7)},
    "eagle3": lambda folder: {"drafter": f"eagle3:{head_folder(MODEL, folder)}"},
    "eagle3_chain": lambda folder: {"drafter": f"eagle3_chain:{head_folder(MODEL, folder)}"},
    "eagle": lambda folder: {"drafter": f"eagle:{eagle_folder(MODEL, folder)}"},
    "eagle_chain": lambda folder: {"drafter": f"eagle_chain:{eagle_folder(MODEL, folder)}"},
}


def arguments(k, prompt=None, **more):
    return {**NEUTRAL, **ASKED[k], "input_ids": torch.tensor([prompt or PROMPTS[k]]), **more}


def alone(k, model=MODEL, prompt=None, **options):
    """The new tokens of a request in a call of its own, and what is counted of it."""
    asked = arguments(k, prompt)
    out = generate(model, **asked, **OPTIONS | options, return_dict_in_generate=True)
    new = out.sequences[0, asked["input_ids"].shape[1] :].tolist()
    return new, out.stats.sequences[0].to_dict()


@functools.cache
def text_of(k):
    return alone(k, drafter=None)[0]


class Arrivals:
    """A source of requests that come one after the other, each some rounds after the one before."""

    def __init__(self, order, every, batch_size):
        self.order, self.every, self.batch_size = list(order), every, batch_size
        self.rounds = self.asked = 0

    def __call__(self, running):
        self.asked += 1
        due = self.rounds >= self.every or not running
        if due and self.order and running < self.batch_size:
            self.rounds = 0
            return arguments(self.order.pop(0))
        self.rounds += 1
        return None


def decode(order, source, model=MODEL, first=None, chunk=None, **options):
    decoder = SpeculativeDecoder(**OPTIONS | options)
    given = arguments(order[0]) if first is None else first
    stream = decoder.stream(model, **given, source=source, prefill_chunk_size=chunk)
    steps, out = run_stream(stream, lambda _: None)
    texts = [[] for _ in out.stats.sequences]
    for one in steps:
        texts[one.sequence] += one.tokens
    return texts, steps, out.stats


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_sequence_that_joins_has_its_own_text_and_counts(tmp_path, name):
    for every, size, chunk, order in (
        (0, 2, None, [5, 4, 0, 3, 1, 2, 6]),
        (1, 3, 2, [0, 2, 1, 3, 4, 5, 6]),
    ):
        (folder := tmp_path / str(size)).mkdir()
        options = DRAFTERS[name](folder)
        arrivals = Arrivals(order[1:], every, size)
        texts, _, stats = decode(order, arrivals, chunk=chunk, **options)
        if every == 0:
            expected = [alone(k, **options) for k in range(7)]
        assert texts == [expected[k][0] for k in order] == [text_of(k) for k in order]
        assert [one.to_dict() for one in stats.sequences] == [expected[k][1] for k in order]
        assert stats.seeds == [ASKED[k]["seed"] for k in order]
        assert (stats.accepted > 0) is (name != "none")


@pytest.mark.parametrize("every", range(2, 8))
def test_it_may_join_at_any_round(every):
    for order in (range(7), range(6, -1, -1)):
        source = Arrivals(order[1:], every, 3)
        texts, _, stats = decode(order, source, drafter="suffix_automaton")
        assert texts == [text_of(k) for k in order]
        assert stats.rounds == len(stats.round_log) == len(stats.gammas)
        emitted = sum(sum(record.emitted) for record in stats.round_log)
        assert emitted == stats.new_tokens == sum(map(len, texts))


LONG = [3, 1, 4, 1, 5, 9] * 8


def coming(*requests):
    """A source of these requests, one after the other; None is a turn without one."""
    waiting = list(requests)
    return lambda running: waiting.pop(0) if waiting else None


@pytest.mark.parametrize("name", ["none", "model", "eagle3"])
def test_the_others_have_a_round_between_two_chunks_of_a_long_prompt(tmp_path, name, forwards):
    options = DRAFTERS[name](tmp_path)
    expected = alone(5, prompt=LONG, **options)
    decode([2], Arrivals([0], 0, 2), **options)
    forwards.clear()
    first = arguments(2, max_new_tokens=70)  # it runs until all is read
    texts, steps, stats = decode([2], coming(arguments(5, LONG)), first=first, chunk=10, **options)
    assert (texts[1], stats.sequences[1].to_dict()) == expected
    numbers = [one.sequence for one in steps]
    # Its first token comes with the fifth chunk.
    assert numbers[: numbers.index(1)] == [0] * (6 if name == "none" else 5)
    if name == "none":
        # The first prompt counts as a pass, which is longer than a chunk.
        assert [one[2] for one in forwards[:11]] == [3, 1, 10, 1, 10, 1, 10, 1, 10, 1, 8]
    assert max(size for count, _, size, _ in forwards if count == 1) == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_a_prompt_leave_the_bits_of_the_whole_in_the_cache(dtype, monkeypatch):
    """On packed weights, by which the bits of a token follow from the text before it alone."""
    moved, take = [], Session.take

    def watched(self, b, other, index):
        take(self, b, other, index)
        if other.sequences.numbers == [1]:
            layers = [layer.buffers for layer in other.runner.cache.spec_layers]
            moved.append([x[0, :, : len(LONG)].clone() for pair in layers for x in pair])

    monkeypatch.setattr(Session, "take", watched)
    model = hf_models.build("llama", vocab_size=11).to(dtype)
    for chunk in (7, 1000):
        _, _, stats = decode(
            [2], coming(arguments(5, LONG)), model=model, chunk=chunk, drafter=None
        )
        assert stats.forwards == "packed"
    chunks, whole = moved
    assert all(torch.equal(a, b) for a, b in zip(chunks, whole, strict=True))


@pytest.mark.parametrize("name", ["none", "suffix_automaton", "model", "auto, head"])
def test_what_a_prompt_has_in_common_with_a_text_that_runs_is_not_read_again(
    tmp_path, name, forwards
):
    """As of several choices of one request; the keys of the last token of a text are not there."""
    options = DRAFTERS[name](tmp_path)
    expected = [alone(2, prompt=LONG, **options)]
    text = [*LONG, *expected[0][0][:4]]
    prompts = [LONG, [9, 9], LONG, [*text, 9, 9], LONG[:20], [*LONG[:20], 9, 9]]
    expected += [alone(5, prompt=prompt, **options) for prompt in prompts[1:]]
    decode([2], Arrivals([0], 0, 2), **options)
    forwards.clear()
    source = coming(*(arguments(5, prompt) for prompt in prompts[1:]))
    texts, _, stats = decode([2], source, first=arguments(2, LONG), **options)
    found = zip(texts, (one.to_dict() for one in stats.sequences), strict=True)
    assert list(found) == expected
    if name in ("none", "suffix_automaton"):
        alone_read = [size for count, _, size, _ in forwards if count == 1]
        assert alone_read == [48, 2, 1, 6, 1, 2]


def test_a_drafter_sees_the_seed_and_the_temperature_of_the_sequence():
    order, seen = [2, 5, 0, 6], {}

    def watched(state, call):
        def watching(texts, draft):
            for b in np.flatnonzero(texts.active):
                temperature = round(float(call.sampling.temperature[b]), 3)
                seen.setdefault(int(call.seeds[b]), set()).add(temperature)
            return draft

        hf_models.told(state, watching)

    drafter = with_states(PromptLookupDrafter(), watched)
    decode(order, Arrivals(order[1:], 1, 2), drafter=drafter)
    assert seen == {ASKED[k]["seed"]: {ASKED[k].get("temperature", 1.0)} for k in order}


def test_what_a_call_has_on_another_device_follows_a_sequence_that_joins():
    """There it has copies of its own, as here."""

    def told(seeds, temperatures):
        others = {"top_k": torch.zeros(2, dtype=int), "top_p": torch.ones(2)}
        call = call_of(MODEL, "match", seeds=torch.tensor(seeds), min_p=torch.zeros(2),
                       temperature=torch.tensor(temperatures), **others)  # fmt: skip
        held = call.sampling_on(MODEL.device)
        call._placed[MODEL.device] = {name: value.clone() for name, value in held.items()}
        return call

    ours, theirs = told([1, 2], [0.5, 0.6]), told([3, 4], [0.7, 0.8])
    ours.take(0, theirs, 1)
    held = ours.sampling_on(MODEL.device)
    assert held["seeds"].tolist() == [4, 2]
    assert held["temperature"].tolist() == torch.tensor([0.8, 0.6]).tolist()


def test_zeros_follow_the_text_of_a_sequence_that_was_moved():
    def history(*texts):
        tokens = np.zeros((len(texts), 6), dtype=np.int64)
        for b, text in enumerate(texts):
            tokens[b, : len(text)] = text
        return CommittedTokens(tokens, np.array([len(t) for t in texts]), np.ones(len(texts), bool))

    ours, theirs = history([1, 2, 3, 4], [5]), history([6], [7, 8])
    theirs.append(0, [9] * 8)  # beyond the columns that there are
    for b, index, text in ((0, 1, [7, 8]), (1, 0, [6] + [9] * 8)):
        ours.take(b, theirs, index)
        for tokens in (ours.tokens, ours.read_only().tokens):
            assert tokens[b].tolist() == text + [0] * (tokens.shape[1] - len(text))
    assert ours.lengths.tolist() == [2, 9]


class Sticky(PromptLookupDrafter):
    """Its states are of a subclass, which may keep more than the class below it knows of."""

    def begin(self, call):
        return type("Keeps", (type(super().begin(call)),), {})(self, call)


CLOSED = {
    "a rule that reads drafts": ({"rule": "token"}, "under rule 'token' a text may depend"),
    "a subclass": ({"drafter": Sticky()}, r"drafter prompt_lookup \(Sticky\) cannot move"),
    "kept texts": ({"drafter": SuffixAutomatonDrafter(keep=99)}, "cannot move a sequence"),
    "a drafter with other state": ({"drafter": "lookahead"}, "cannot move a sequence"),
    "a schedule with a state": (
        {"num_assistant_tokens_schedule": "heuristic"}, "schedule 'heuristic' cannot move",
    ),
    "another cache": ({"cache": "aligned"}, "cache='aligned' holds what its sequences share"),
    "a cache for each": ({"cache": "dynamic"}, "cache='dynamic' holds"),
}  # fmt: skip


@pytest.mark.parametrize("case", CLOSED)
def test_a_batch_that_none_can_join_says_why_and_begins_with_those_that_wait(case):
    options, why = CLOSED[case]
    source = Arrivals([1, 2, 4], 0, 3)
    texts, steps, stats = decode([0], source, **{"drafter": "prompt_lookup"} | options)
    assert source.asked == 3  # before the first round, until it had none
    (note,) = [note for note in stats.notes if note.startswith("sequences wait for the next")]
    assert re.search(why, note), note
    assert [len(text) for text in texts] == [ASKED[k]["max_new_tokens"] for k in (0, 1, 2)]
    if "rule" not in options:
        assert texts == [text_of(k) for k in (0, 1, 2)]
    assert [one.finished for one in steps if one.finished] == ["length"] * 3


def test_angles_by_the_longest_sequence_close_a_batch():
    """Chunks, and what is copied of another text, would have the angles of short texts.

    Outputs of every token close it, too: they are those of the sequences that began it.
    """
    model = hf_models.build("llama", vocab_size=11)
    half = model.config.head_dim // 2
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 32.0,
        "original_max_position_embeddings": 16, "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
    }  # fmt: skip
    turns = "rotary embedding 'longrope' turns by"
    for given in (rope, {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}):
        model.config.rope_parameters = given
        _, _, stats = decode([0], coming(arguments(5, LONG)), model=model, drafter=None)
        assert any(turns in note for note in stats.notes)
        assert len(stats.sequences) == 1
    source = Arrivals([1], 0, 2)
    first = arguments(0, output_logits=True, return_dict_in_generate=True)
    _, _, stats = decode([0], source, first=first, drafter=None)
    assert source.asked == 0
    assert any("it collects logits" in note for note in stats.notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, "source .* sequence at a time, got 2"),
        ({"output_scores": True, "return_dict_in_generate": True}, "source .* it collects scores"),
        ({"do_sample": False}, "its rule is 'greedy' in a batch of rule 'target_only'"),
        (5, "prefill_chunk_size=5 is not supported"),
        (0, "prefill_chunk_size must be at least 1, got 0"),
    ],
)
def test_a_sequence_that_cannot_join_is_refused_by_name(given, message):
    sampled, options = isinstance(given, dict), {"drafter": "auto", "rule": "auto"}
    source = (lambda running: arguments(1) | given) if sampled or given == 0 else None
    with pytest.raises(ValueError, match=message):
        decode([0], source, chunk=None if sampled else given, **options)
