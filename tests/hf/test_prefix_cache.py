"""Prompts that begin with texts of earlier requests have the text of a queue that keeps nothing."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from specdec_hf import SpeculativeDecoder
from specdec_hf.extras.prefix_cache import MIN_TOKENS, Prefix, PrefixCache
from specdec_hf.heads.shipped import HEAD_FOLDER
from specdec_hf.loop.streaming import run_stream
from specdec_hf.runner.spec_cache import SpecCache
from specdec_serve.batch_queue import BatchQueue
from support import hf_models

pytestmark = pytest.mark.server

MODEL = hf_models.build("llama", vocab_size=11)
OPTIONS = {"rule": "match", "guard": False, "num_assistant_tokens_schedule": "constant"}
SECONDS = 120


def with_head(folder):
    hf_models.head_folder(MODEL, folder).rename(folder / HEAD_FOLDER)
    model = hf_models.build("llama", vocab_size=11)
    model.config._name_or_path = str(folder)
    return model


DRAFTERS = {
    "none": lambda folder: (MODEL, None),
    "suffix_automaton": lambda folder: (MODEL, "suffix_automaton"),
    "model": lambda folder: (MODEL, hf_models.with_noise(MODEL, 0.1)),
    "auto, head": lambda folder: (with_head(folder), "auto"),
    "eagle_chain": lambda folder: (MODEL, f"eagle_chain:{hf_models.eagle_folder(MODEL, folder)}"),
    "sliding": lambda folder: (
        hf_models.build("mistral", vocab_size=11, sliding_window=6),
        "prompt_lookup",
    ),
}


def sampling(rng):
    temperature, top_k, seed = rng.choice([0.0, 0.7, 1.3]), rng.integers(9), rng.integers(99)
    return {"temperature": temperature.item(), "top_k": top_k.item(), "seed": seed.item()}


async def tokens_of(sequence):
    return [token async for step in sequence for token in step.tokens]


async def conversations(queue, seed, salts=("", "b")):
    """Texts of chats that go on at once, with what a turn adds; some turns are given up."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 11, 20).tolist()
    plans = [
        [(rng.integers(0, 11, rng.integers(1, 9)).tolist(), int(rng.integers(1, 24)), sampling(rng),
          rng.random() < 0.2) for _ in range(4)]
        for _ in range(5)
    ]  # fmt: skip

    async def chat(number, turns):
        prompt, made = [*system[: rng.integers(4, 20)]], []
        for new, size, drawn, leaves in turns:
            prompt = prompt + new
            one = queue.submit(
                prompt, max_new_tokens=size, cache_salt=salts[number % len(salts)], **drawn
            )
            text = []
            async for step in one:
                text += step.tokens
                one.cancelled = leaves and len(text) > 2
            text = text[:3] if leaves else text  # when it is seen depends on the clock
            made.append((tuple(prompt), tuple(text)))
            assert 0 <= one.prefix.num_cached < len(prompt)
            prompt = prompt + text
        return made

    return await asyncio.gather(*(chat(*one) for one in enumerate(plans)))


def queued(body, model=MODEL, drafter=None, prefix_cache=10**6, **options):
    async def decode():
        decoder = SpeculativeDecoder(drafter, **OPTIONS | options)
        async with BatchQueue(model, decoder, 3, 7, prefix_cache) as queue:
            return await body(queue), queue.prefix_cache

    return asyncio.run(asyncio.wait_for(decode(), SECONDS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DRAFTERS)
def test_conversations_have_the_texts_of_a_queue_that_keeps_nothing(tmp_path, name, dtype):
    model, drafter = DRAFTERS[name](tmp_path)
    if dtype == torch.bfloat16:
        model = (copy.deepcopy(model) if model is MODEL else model).to(dtype)
    for seed, memory in ((0, 10**6), (1, 30_000)):
        expected, _ = queued(lambda queue, s=seed: conversations(queue, s), model, None, 0)
        found, store = queued(lambda queue, s=seed: conversations(queue, s), model, drafter, memory)
        assert found == expected
        assert store.hits > (0 if memory < 10**6 else 5)
        assert store.reused_tokens >= MIN_TOKENS * store.hits
        assert 0 < store.bytes <= memory
        assert (store.evictions > 0) is (memory < 10**6)


LONG = [3, 1, 4, 1, 5, 9] * 8
OTHER = [2, 7, 1, 8] * 8


def asked(store, prompt, *, model=MODEL, drafter=None, salt="", new=8, cancelled=None, **options):
    """The text of a call, what is counted of it, and how many tokens of its prompt were copied."""
    prefix = Prefix(salt)
    decoder = SpeculativeDecoder(drafter, **OPTIONS | options)
    ids = torch.tensor([prompt])
    stream = decoder.stream(
        model, ids, attention_mask=torch.ones_like(ids), seed=3, max_new_tokens=new,
        do_sample=True, top_k=0, source=lambda running: None, prefill_chunk_size=20,
        prefix=prefix, cancelled=cancelled, prefix_cache=store,
    )  # fmt: skip
    steps, out = run_stream(stream, lambda _: None)
    text = [token for step in steps for token in step.tokens]
    return text, out.stats.sequences[0].to_dict(), prefix.num_cached


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_next_turn_reads_what_is_new_and_drafts_as_if_it_had_read_all(tmp_path, name, forwards):
    """Heads have the hidden states of the whole text, so that their drafts are the same."""
    model, drafter = DRAFTERS[name](tmp_path)
    expected = [asked(None, LONG, model=model, drafter=drafter, new=20)]
    turn = [*LONG, *expected[0][0], 9, 9, 9]
    expected.append(asked(None, turn, model=model, drafter=drafter, new=20))
    store = PrefixCache(10**7)
    for prompt, cached, (text, counts, _) in zip((LONG, turn), (0, 67), expected, strict=True):
        forwards.clear()
        assert asked(store, prompt, model=model, drafter=drafter, new=20) == (text, counts, cached)
        if cached and name in ("none", "suffix_automaton", "auto, head"):
            assert forwards[0][1:3] == (67, 4)
    assert (store.queries, store.hits, store.reused_tokens, len(store)) == (2, 1, 67, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_of_a_text_has_the_bits_of_a_prompt(tmp_path, dtype):
    """Of rounds with trees of drafts, whose paths were moved in the cache, on packed weights."""
    model = with_head(tmp_path).to(dtype)
    drafted, read = PrefixCache(10**7), PrefixCache(10**7)
    new, counts, _ = asked(drafted, LONG, model=model, drafter="auto", new=40)
    assert counts["accepted"] > 0
    asked(read, [*LONG, *new[:-1]], model=model, drafter="auto", new=1)
    (one,), (other,) = ([kept.text for kept in store._kept.values()] for store in (drafted, read))
    assert one.tokens.tolist() == other.tokens.tolist() == [*LONG, *new[:-1]]
    pairs = zip(one.cache.spec_layers, other.cache.spec_layers, strict=True)
    for mine, its in pairs:
        for a, b in zip(mine.buffers, its.buffers, strict=True):
            assert torch.equal(a[:, :, :87], b[:, :, :87])
    for layers, (states,) in one.states.items():
        assert torch.equal(states, other.states[layers][0])


def test_the_text_that_was_used_the_longest_time_ago_goes_first():
    """Of two texts one of which begins with the other, the longer one alone is kept."""
    store = PrefixCache(10**7)
    asked(store, OTHER, new=1)
    per_token = 2 * MODEL.config.num_hidden_layers * 2 * MODEL.config.head_dim * 4
    assert store.bytes == 33 * per_token  # the last slot is never seen

    def kept():
        return [one.text.tokens.tolist() for one in store._kept.values()]

    store = PrefixCache(per_token * (3 * 33 + 10))
    second, third, fourth = [n + 1 for n in OTHER], [n + 2 for n in OTHER], OTHER[::-1]
    near = [*OTHER[:20], *[0] * 12]
    for prompt in (OTHER, second, third):
        asked(store, prompt, new=1)
    assert asked(store, near, new=1)[2] == 20  # in the place of the second, since the first is used
    assert kept() == [third, OTHER, near]
    asked(store, third, new=1)
    asked(store, fourth, new=1)
    assert kept() == [near, third, fourth]
    assert (store.evictions, store.bytes) == (2, 3 * 33 * per_token)
    asked(store, [*fourth[:-1], 0, 0], new=1)  # which is no beginning of it
    asked(store, [*fourth, 5, 5], new=1)
    assert kept() == [third, [*fourth[:-1], 0, 0], [*fourth, 5, 5]]
    assert (store.evictions, store.bytes) == (3, (33 + 34 + 35) * per_token)
    asked(store, LONG * 3, new=1)  # of which as much is kept as fits
    assert kept() == [(LONG * 3)[: 3 * 33 + 10 - 1]]
    assert asked(store, LONG * 3, new=1)[2] == 3 * 33 + 10 - 1
    store.clear()
    assert (len(store), store.bytes) == (0, 0)


def test_short_prefixes_and_texts_of_another_salt_are_read():
    store = PrefixCache(10**7)
    expected = asked(store, LONG, salt="a")[0]
    assert asked(store, [*LONG, 1], salt="b")[2] == asked(store, [*LONG, 1])[2] == 0
    assert asked(store, LONG, salt="a")[::2] == (expected, len(LONG) - 1)
    for length in (MIN_TOKENS - 1, MIN_TOKENS):
        taken = asked(store, [*LONG[:length], 0, 0], salt="a")[2]
        assert taken == (length if length >= MIN_TOKENS else 0)


def test_sequences_that_run_share_with_those_of_their_salt():
    async def body(queue):
        sequences = [
            queue.submit(LONG, max_new_tokens=30, seed=seed, cache_salt=salt)
            for seed, salt in enumerate(("a", "a", "b"))
        ]
        texts = await asyncio.gather(*map(tokens_of, sequences))
        return texts, [one.prefix.num_cached for one in sequences]

    (found, cached), _ = queued(body)
    (expected, without), _ = queued(body, prefix_cache=0)
    assert found == expected
    for counts in (cached, without):
        assert counts[0] + counts[1] > counts[2] == 0


CHANGES = {
    "written through data": lambda model: model.lm_head.weight.data.mul_(-1),
    "a norm": lambda model: model.model.norm.weight.data.mul_(-1),
    "an adapter": lambda model: model.model.active_adapters.__setitem__(0, "b"),
    "another layer": lambda model: model.model.layers.__setitem__(0, model.model.layers[1]),
}


@pytest.mark.parametrize("compiles", [None, False], ids=["packed", "own forwards"])
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_taken_of_other_weights(change, compiles):
    model = hf_models.build("llama", vocab_size=11)
    model.model.active_adapters = ["a"]
    store = PrefixCache(10**7)
    for taken in (0, len(LONG) - 1):
        assert asked(store, LONG, model=model, compile=compiles)[2] == taken
    CHANGES[change](model)
    expected = asked(None, LONG, model=model, compile=compiles)[0]
    assert asked(store, LONG, model=model, compile=compiles)[::2] == (expected, 0)
    assert asked(store, LONG, compile=compiles)[2] == 0  # of another model
    assert len(store) == 1


UNUSED = {
    "16 bits": ({"compile": False}, "the model's own forwards run in bfloat16"),
    "a batch that none joins": ({"drafter": "lookahead"}, "cannot move a sequence from one call"),
    "another cache": ({"cache": "aligned"}, "cache='aligned' holds what its sequences share"),
}


@pytest.mark.parametrize("case", UNUSED)
def test_nothing_is_kept_where_a_text_could_change_or_none_joins(case):
    options, why = UNUSED[case]
    model = hf_models.build("llama", vocab_size=11).to(torch.bfloat16)
    store = PrefixCache(10**7)
    for _ in range(2):
        assert asked(store, LONG, model=model, **options)[2] == 0
        assert why in store.reason
    assert len(store) == 0
    asked(store, LONG, model=model)
    assert (store.reason, len(store)) == ("", 1)


@pytest.mark.parametrize("name", ["none", "auto, head"])
def test_a_prompt_that_is_given_up_is_kept_as_far_as_it_was_read(tmp_path, name):
    """Without the hidden states, which its first round would give, it serves no head."""
    model, drafter = DRAFTERS[name](tmp_path)
    expected = asked(None, LONG, model=model, drafter=drafter)[:2]
    store, turns = PrefixCache(10**7), iter([False, False, True])
    given = {"model": model, "drafter": drafter}
    assert asked(store, LONG, cancelled=lambda: next(turns), **given)[0] == []
    assert asked(store, LONG, **given) == (*expected, 40 if name == "none" else 0)


def test_the_prompts_of_one_call_are_kept_one_by_one():
    store, ids = PrefixCache(10**7), torch.tensor([OTHER, OTHER[::-1]])
    expected = [asked(None, prompt)[0] for prompt in ids.tolist()]
    stream = SpeculativeDecoder(None, **OPTIONS).stream(
        MODEL, ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=True,
        source=lambda running: None, prefix_cache=store,
    )  # fmt: skip
    list(stream)
    for prompt, text in zip(ids.tolist(), expected, strict=True):
        assert asked(store, prompt)[::2] == (text, len(prompt) - 1)


def test_a_text_that_an_error_ends_is_not_kept():
    model = hf_models.build("llama", vocab_size=11)
    model.get_input_embeddings().weight.data[10] = torch.nan
    store = PrefixCache(10**7)
    for prompt in ([*LONG, 10], [10, *LONG]):
        assert asked(store, prompt, model=model)[0] == []
    assert len(store) == 0


def test_a_text_for_which_there_is_no_memory_ends_no_other(monkeypatch):
    store = PrefixCache(10**7)
    expected = asked(store, LONG)[0]
    monkeypatch.setattr(SpecCache, "take", lambda *_: (_ for _ in ()).throw(MemoryError))
    assert asked(store, OTHER)[0] == asked(None, OTHER)[0]
    assert (len(store), store.bytes) == (0, 0)
    monkeypatch.undo()
    assert asked(store, LONG)[::2] == (expected, 0)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"prefix_cache": -1}, ValueError, "prefix_cache must be at least 0, got -1"),
        ({"prefix_cache": "1GB"}, TypeError, "prefix_cache must be an integer, got '1GB'"),
    ],
)
def test_a_limit_that_is_no_size_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        BatchQueue(MODEL, SpeculativeDecoder(None, **OPTIONS), **given)
    for name, one in (("prefix", Prefix()), ("prefix_cache", PrefixCache(1))):
        with pytest.raises(ValueError, match=f"{name} must be None without a source, got "):
            list(SpeculativeDecoder(None).stream(MODEL, torch.tensor([[4]]), **{name: one}))
    with pytest.raises(TypeError, match="cache_salt must be a string, got 5"):
        BatchQueue(MODEL, SpeculativeDecoder(None, **OPTIONS)).submit(
            [4], max_new_tokens=2, seed=1, cache_salt=5
        )


@pytest.mark.model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chat_with_the_embedded_model_goes_on_as_without(dtype):
    model, tokenizer, _ = hf_models.smollm()
    if dtype == torch.bfloat16:
        model = copy.deepcopy(model).to(dtype)

    async def chat(queue):
        messages, found = [{"role": "system", "content": "Answer briefly, as to a child."}], []
        for n, question in enumerate(("Why is the sky blue?", "And at night?", "Who found that?")):
            messages.append({"role": "user", "content": question})
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            one = queue.submit(ids, max_new_tokens=16, seed=n, temperature=0.8 * (n % 2))
            text = await tokens_of(one)
            found.append((text, len(ids), one.prefix.num_cached))
            messages.append({"role": "assistant", "content": tokenizer.decode(text)})
        return found

    without, _ = queued(chat, model, "auto", 0)
    found, store = queued(chat, model, "auto", 10**8)
    assert [text for text, *_ in found] == [text for text, *_ in without]
    assert store.hits == 2
    first, *later = (taken / size for _, size, taken in found)
    assert first == 0
    assert min(later) > 0.4
