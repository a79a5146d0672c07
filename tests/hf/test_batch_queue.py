"""The life of a `BatchQueue`: how sequences begin, end, fail and are cancelled, one by one."""

import asyncio
import threading

import pytest
import torch
from specdec_hf import SpeculativeDecoder, generate
from specdec_serve import batch_queue
from specdec_serve.batch_queue import BatchQueue
from support import hf_models

pytestmark = pytest.mark.server

MODEL = hf_models.build("llama")
DRAFTER = hf_models.with_noise(MODEL, 0.02)
PROMPTS = [
    ([5, 6, 7, 5, 6], {"max_new_tokens": 9, "seed": 5}),
    ([8], {"max_new_tokens": 3, "seed": 6, "temperature": 0.7, "top_k": 20, "min_p": 0.01}),
    ([9, 4, 9], {"max_new_tokens": 12, "seed": 7, "temperature": 0.0, "top_p": 0.9}),
]
SECONDS = 30  # that anything here may take at most


def alone(prompt, *, max_new_tokens, seed, **sampling):
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **sampling}
    out = generate(
        MODEL, torch.tensor([prompt]), drafter=None, rule="match", seed=seed,
        max_new_tokens=max_new_tokens, **settings,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


TEXTS = [alone(prompt, **given) for prompt, given in PROMPTS]


class Watched(SpeculativeDecoder):
    """Counts batches and their sizes, waits behind each step for its gate, and fails where told."""

    fails = None  # behind a step of the sequence of this number
    batches, largest = 0, 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()
        self.gate.set()

    def stream(self, model, ids, *, source, **kwargs):
        def counted(running):
            given = source(running)
            self.largest = max(self.largest, running + (given is not None))
            return given

        self.batches += 1
        for step in super().stream(model, ids, source=counted, **kwargs):
            yield step
            assert self.gate.wait(SECONDS)
            if step.sequence == self.fails:
                self.fails = None
                raise MemoryError("planted")


def watched(drafter=DRAFTER, **more):
    return Watched(drafter, rule="match", **more)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


def in_queue(body, decoder=None, batch_size=8, **more):
    async def decode():
        async with BatchQueue(MODEL, decoder or watched(), batch_size, **more) as queue:
            return await body(queue)

    return run(decode())


def held(drafter="suffix_automaton"):
    decoder = watched(drafter)
    decoder.gate.clear()
    return decoder


async def tokens_of(sequence):
    return [token async for step in sequence for token in step.tokens]


async def steps_of(sequence):
    return [step async for step in sequence]


def test_an_ended_sequence_may_be_read_again():
    async def body(queue):
        sequence = queue.submit(*PROMPTS[0][:1], **PROMPTS[0][1])
        return await tokens_of(sequence), await tokens_of(sequence)

    first, again = in_queue(body)
    assert first
    assert again == []


async def last_of(sequence):
    return (await steps_of(sequence))[-1]


async def texts_of(queue, prompts=PROMPTS):
    waiting = [queue.submit(prompt, **given) for prompt, given in prompts]
    return [await tokens_of(sequence) for sequence in waiting]


@pytest.mark.parametrize(
    ("batch_size", "most", "drafter", "batches"),
    [
        (1, 9, DRAFTER, 1),
        (1, 2, DRAFTER, 2),  # a batch takes no more than so many sequences
        (2, 9, "prompt_lookup", 1),
        (2, 9, "lookahead", 2),  # which no sequence joins
    ],
)
def test_a_batch_is_never_larger_than_its_size(batch_size, most, drafter, batches, monkeypatch):
    monkeypatch.setattr(batch_queue, "MAX_SEQUENCES", most)
    decoder = watched(drafter)
    assert in_queue(texts_of, decoder, batch_size) == TEXTS
    assert (decoder.batches, decoder.largest) == (batches, batch_size)
    # Negative control: with the noise of its neighbour a text is another one.
    assert TEXTS[0] != alone(PROMPTS[0][0], **PROMPTS[0][1] | {"seed": 6})


@pytest.mark.parametrize("is_eos", [False, True])
@pytest.mark.parametrize("drafter", [None, MODEL])
def test_a_sequence_ends_with_the_token_at_which_it_is_to_stop(drafter, is_eos, monkeypatch):
    """Also where that is its last, or an end by itself; the others go on."""
    text = alone([4, 5], max_new_tokens=12, seed=2)
    ends = text.index(text[6]) + 1
    monkeypatch.setattr(MODEL.generation_config, "eos_token_id", text[6] if is_eos else None)

    async def decoded(queue):
        given = {"seed": 2, "stop": lambda new: text[6] in new}
        sequences = [queue.submit([4, 5], max_new_tokens=n, **given) for n in (ends - 1, ends, 200)]
        sequences.append(queue.submit([4, 5], max_new_tokens=12, seed=2))
        return [await steps_of(sequence) for sequence in sequences]

    found = in_queue(decoded, watched(drafter))
    tokens = [[token for step in steps for token in step.tokens] for steps in found]
    assert tokens == [text[: ends - 1], text[:ends], text[:ends], text[:ends] if is_eos else text]
    stopped = "eos" if is_eos else "criteria"
    reasons = [steps[-1].finished for steps in found]
    assert reasons == ["length", stopped, stopped, "eos" if is_eos else "length"]


def test_an_error_of_a_batch_is_also_that_of_a_sequence_that_has_joined():
    decoder = held(DRAFTER)

    async def fail(queue):
        first = queue.submit([9], max_new_tokens=200, seed=1)
        await anext(aiter(first))
        second = queue.submit([4, 5], max_new_tokens=200, seed=2)
        third = queue.submit(PROMPTS[0][0], **PROMPTS[0][1])
        decoder.fails = 1
        decoder.gate.set()
        await anext(aiter(second))
        for failed in (first, second):
            with pytest.raises(MemoryError, match="planted"):
                await tokens_of(failed)
        return await tokens_of(third)

    assert in_queue(fail, decoder, 2) == TEXTS[0]


def test_a_sequence_joins_those_that_run_and_is_cancelled_alone():
    decoder = held()

    async def join(queue):
        first = queue.submit([9], max_new_tokens=200, seed=1)
        await anext(aiter(first))
        joined = [queue.submit(prompt, **given) for prompt, given in PROMPTS]
        dropped, waits = (queue.submit([4], max_new_tokens=200, seed=2) for _ in range(2))
        waits.cancelled = True
        decoder.gate.set()
        texts = [await tokens_of(sequence) for sequence in joined]
        await anext(aiter(dropped))
        dropped.cancelled = True
        ends = [await steps_of(sequence) for sequence in (dropped, waits)]
        first.cancelled = True
        return texts, ends, await last_of(first)

    texts, ends, last = in_queue(join, decoder, 2)
    assert texts == TEXTS
    assert [steps[-1].finished for steps in ends] == ["cancelled", "cancelled"]
    assert [(step.sequence, step.tokens) for step in ends[1]] == [(-1, [])]
    assert last.finished == "cancelled"


def test_a_long_prompt_is_given_up_with_its_sequence():
    decoder = held()

    async def give_up(queue):
        first = queue.submit([9], max_new_tokens=200, seed=1)
        await anext(aiter(first))
        long = queue.submit([4, 5] * 50, max_new_tokens=9, seed=2)
        while decoder.largest < 2:
            decoder.gate.set()
            await asyncio.sleep(0)
        long.cancelled = True
        steps = await steps_of(long)
        first.cancelled = True
        return [(step.tokens, step.finished) for step in steps]

    assert in_queue(give_up, decoder, 2, prefill_chunk_size=5) == [([], "cancelled")]


def test_sequences_that_wait_when_the_queue_ends_are_told_so():
    async def decode():
        async with BatchQueue(MODEL, watched(), 1) as queue:
            running, waits = (queue.submit([4], max_new_tokens=200, seed=s) for s in (1, 2))
            running.cancelled = bool(await anext(aiter(running)))
        for late in (lambda: tokens_of(waits), lambda: queue.submit([4], **PROMPTS[0][1])):
            with pytest.raises(RuntimeError, match="BatchQueue has ended; submit within"):
                await late()

    run(decode())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(input_ids=[]), ValueError, "1 to 254 tokens, .* of 256 less max_new_tokens, got 0"),
        (dict(input_ids=[4] * 255), ValueError, "must have 1 to 254 tokens, .*, got 255"),
        (dict(input_ids=["a"]), TypeError, r"input_ids\[0\] must be an integer in .*, got 'a'"),
        (dict(input_ids=[4, 67]), ValueError, r"input_ids\[1\] must be .* in \[0, 66\], got 67"),
        (dict(max_new_tokens=256), ValueError, "max_new_tokens must be at most 255, .* got 256"),
        (dict(temperature=1e39), ValueError, r"temperature must be .* in float32, got 1e\+39"),
        (dict(top_p=0.0), ValueError, r"top_p must be in \(0, 1\], got 0.0"),
        (dict(top_k=[3]), TypeError, r"top_k must be an integer >= 0, got \[3\]"),
        (dict(seed=2**63), ValueError, r"seed must be in \[-2\*\*63, 2\*\*63\), got"),
        (dict(stop=["a"]), TypeError, r"stop must be None or a function of token ids, got \['a'\]"),
        (dict(num_top_logprobs=-1), ValueError, "num_top_logprobs must be at least 0, got -1"),
    ],
)
def test_a_wrong_argument_is_refused_before_it_waits(given, error, message):
    good = dict(input_ids=[4], max_new_tokens=2, seed=1)
    with pytest.raises(error, match=message):
        BatchQueue(MODEL, watched()).submit(**good | given)


@pytest.mark.parametrize("name", ["batch_size", "prefill_chunk_size"])
def test_the_sizes_of_a_queue_are_at_least_1(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        BatchQueue(MODEL, watched(), **{name: 0})
