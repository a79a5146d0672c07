"""What a server answers follows from the request, whatever is drafted and whoever else is served.

A table of stop strings and drafters, over a model whose generation config derives something of each
prompt and whose ends lie inside of drafts. Text, usage, finish reason, log probabilities and
streams, beside others that join and leave, are those of a server without drafts that serves the
request alone.
"""

import functools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from specdec_hf import generate
from support import cli_models, hf_models, toy_tokenizers
from support.text_server import SECONDS, serving

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
VOCAB = 258
MODEL = hf_models.build("llama", vocab_size=VOCAB)
ENDS = [0, 30, 121, 72]  # so that some texts end inside of drafts
# Derived from the length and the tokens of each prompt.
MODEL.generation_config.update(eos_token_id=ENDS, min_length=14, encoder_repetition_penalty=3.0)
TOKENIZER = toy_tokenizers.small_pieces(VOCAB)
TOKENIZER.chat_template = cli_models.TEMPLATE
NEW = 40
# The oracle drafts with the noise of the target, so that all of its drafts are accepted.
DRAFTERS = {
    "oracle": MODEL, "model": hf_models.with_noise(MODEL, 0.02), "lookup": "prompt_lookup",
    "auto": "auto", "automaton": "suffix_automaton",
    "nasd": "nasd",  # whose batches nothing joins
}  # fmt: skip
STOPS = [
    [],
    ["\n\naaa", "b"],
    ["ab\nb", "\nb"],  # one within the other
    ["b\naa", "aab", "a a"],  # that overlap
    [" b", "b", "a b", "aa b"],  # that end together
    ["aaaaaaaa", "bbbbbbbb", "\n\n\n\n", "zz"],  # nearly there, again and again
    ["aa" * 3000, "  "],
]
PROMPTS = ["ab ba", "a", " bb"]


def requests():
    """Each stop in each place of the batch, some with log probabilities."""
    for n, stop in enumerate(STOPS):
        asked = {"max_tokens": NEW, "seed": n, "stop": stop, "temperature": [1.0, 0.8, 0.0][n % 3]}
        yield COMPLETE, asked | {"prompt": PROMPTS[n % 3], "logprobs": 2}
        yield COMPLETE, asked | {"prompt": PROMPTS[:2], "n": 2}
        said = [{"role": "user", "content": PROMPTS[n % 3]}]
        yield CHAT, asked | {"messages": said, "logprobs": True, "top_logprobs": 1}


def answer(client, path, asked, *, streams):
    """The choices, put together of their chunks, and the usage."""
    if not streams:
        whole = client.post(path, json=asked).json()
        return [part(choice) for choice in whole["choices"]], whole["usage"]
    asked = asked | {"stream": True, "stream_options": {"include_usage": True}}
    lines = client.post(path, json=asked).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
    parts = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        parts.setdefault(choice["index"], []).append(part(choice))
    return [joined(parts[index]) for index in sorted(parts)], chunks[-1]["usage"]


def leave(client, path, asked):
    """Read the first event of a stream, and go."""
    with client.stream("POST", path, json=asked | {"stream": True}) as events:
        next(events.iter_lines())


def part(choice):
    """The text of a choice or a chunk, its reason, and its lists of log probabilities."""
    said = choice.get("message") or choice.get("delta") or choice
    listed = {
        name: one for name, one in (choice["logprobs"] or {}).items() if isinstance(one, list)
    }
    return said["text" if "text" in said else "content"], choice["finish_reason"], listed


def joined(parts):
    text, (*others, reason), listed = zip(*parts, strict=True)
    assert set(others) <= {None}
    return "".join(text), reason, {
        name: [one for some in listed for one in some[name]] for name in listed[0]
    }  # fmt: skip


def rounded(value):
    """Log probabilities as far as forwards of other widths agree on them."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


@functools.cache
def alone():
    """The answers without drafts, one after the other."""
    with serving(1, None, TOKENIZER, model=MODEL) as (client, _):
        return [rounded(answer(client, *one, streams=False)) for one in requests()]


def test_a_text_ends_with_the_token_that_completes_the_first_stop_string():
    """By definition: tokens are decoded behind their prompt, one more each time."""
    ends = set()
    for (path, asked), (choices, usage) in zip(requests(), alone(), strict=True):
        if path != COMPLETE or asked.get("n"):
            continue
        inputs = TOKENIZER(asked["prompt"], return_tensors="pt")
        ids = inputs["input_ids"]
        out = generate(
            MODEL, **inputs, drafter=None, rule="match", seed=asked["seed"], max_new_tokens=NEW,
            do_sample=True, temperature=asked["temperature"], top_k=0, top_p=1.0,
        )  # fmt: skip
        new = out[0, ids.shape[1] :].tolist()
        before = TOKENIZER.decode(ids[0])
        for count in range(1, len(new) + 1):
            text = TOKENIZER.decode(torch.cat([ids[0], torch.tensor(new[:count])]))
            text = text.removeprefix(before)
            found = [text.index(one) for one in asked["stop"] if one in text]
            if found:
                break
        reason = "stop" if found or new[-1] in ENDS else "length"
        assert choices[0][:2] == [text[: min(found, default=None)], reason]
        assert usage["completion_tokens"] == count
        ends.add((reason, bool(found), count < NEW))
    assert {("stop", True, True), ("stop", False, True), ("length", False, False)} <= ends


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_are_those_without_drafts_alone_and_beside_others(drafter):
    """Root: what a round had drawn behind a stop string was counted, and of several strings in it
    the one that began first made the cut."""
    options = {"guard": False, "num_assistant_tokens": 7}
    options |= {"num_assistant_tokens_schedule": "constant"} if drafter != "auto" else {}
    with serving(4, DRAFTERS[drafter], TOKENIZER, model=MODEL, options=options) as (client, queue):
        for (path, asked), expected in zip(requests(), alone(), strict=True):
            assert rounded(answer(client, path, asked, streams=False)) == expected, asked
        with ThreadPoolExecutor(6) as pool:
            calls = []
            for path, asked in requests():
                calls.append(pool.submit(answer, client, path, asked, streams=True))
                pool.submit(leave, client, path, asked)
            found = [rounded(call.result(SECONDS)) for call in calls]
        for (_, asked), one, expected in zip(requests(), found, alone(), strict=True):
            assert one == expected, asked
        assert queue.decoder.longest_step > 1, "no drafts"
        assert queue.decoder.most_running > 1, "no neighbours"


def test_the_first_word_keeps_its_blank_on_every_route():
    """Root: the new tokens were decoded alone, and this decoder takes away a blank that begins.

    The offsets of log probabilities are places in the same text.
    """
    prompt = "ab ba"
    inputs = TOKENIZER(prompt, return_tensors="pt")
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    seeds = iter(range(100))
    text, seed = "", 0
    while not text.startswith(" "):
        seed = next(seeds)
        out = generate(
            MODEL, **inputs, **settings, drafter=None, rule="match", seed=seed, max_new_tokens=8
        )
        text = TOKENIZER.decode(out[0]).removeprefix(prompt)
    asked = {"prompt": prompt, "max_tokens": 8, "seed": seed, "logprobs": 0}
    with serving(1, None, TOKENIZER, model=MODEL) as (client, _):
        for streams in (False, True):
            ((found, _, listed),), _ = answer(client, COMPLETE, asked, streams=streams)
            assert found == "".join(listed["tokens"]) == text
            assert [
                found[begin:].startswith(token)
                for token, begin in zip(listed["tokens"], listed["text_offset"], strict=True)
            ] == [True] * 8
        given = {"max_new_tokens": 8, "seed": seed, "do_sample": True}
        body = {"inputs": prompt, "parameters": given}
        assert client.post("/generate", json=body).json()["generated_text"] == text
        lines = client.post("/generate_stream", json=body).text.split("\n\n")
        events = [json.loads(line[5:]) for line in lines if line]
        assert "".join(event["token"]["text"] for event in events) == text
        assert events[-1]["generated_text"] == text
