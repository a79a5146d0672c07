"""What a server answers follows from the request, whatever is drafted and whoever else is served.

A table of stop strings and drafters, over a model whose generation config derives something of each
prompt and whose ends lie inside of drafts. Text, usage, finish reason, log probabilities and
streams of every route, beside others that join and leave, are those of a server without drafts that
serves the request alone, and those are what `generate` gives.
"""

import functools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from specdec_hf import generate
from specdec_hf.request.sampling import sequence_seeds
from support import cli_models, hf_models
from support.text_server import SECONDS, serving

pytestmark = pytest.mark.server

COMPLETE, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
VOCAB = 258
MODEL = hf_models.build("llama", vocab_size=VOCAB)
ENDS = [0, 30, 121, 72]  # so that some texts end inside of drafts
# Derived from the length and the tokens of each prompt.
MODEL.generation_config.update(eos_token_id=ENDS, min_length=14, encoder_repetition_penalty=3.0)
TOKENIZER = cli_models.small_pieces(VOCAB)
TOKENIZER.chat_template = cli_models.TEMPLATE
NEW = 40
# The oracle drafts with the noise of the target, so that all of its drafts are accepted.
DRAFTERS = {
    "oracle": MODEL, "model": hf_models.with_noise(MODEL, 0.02), "lookup": "prompt_lookup",
    "auto": "auto", "automaton": "suffix_automaton",
    "nasd": "nasd",  # whose batches nothing joins
}  # fmt: skip
STOPS = [
    [], ["\n\naaa", "b"],
    ["ab\nb", "\nb"],  # one within the other
    ["b\naa", "aab", "a a"],  # that overlap
    [" b", "b", "a b", "aa b"],  # that end together
    ["aaaaaaaa", "bbbbbbbb", "\n\n\n\n", "zz"],  # nearly there, again and again
    ["aa" * 3000, "  "],
]  # fmt: skip
PROMPTS = ["ab ba", "a", " bb"]


def requests():
    """Each stop in each place of the batch, some with log probabilities."""
    for n, stop in enumerate(STOPS):
        drawn = {"seed": n, "temperature": [1.0, 0.8, 0.0][n % 3]}
        asked = drawn | {"max_tokens": NEW, "stop": stop}
        yield COMPLETE, asked | {"prompt": PROMPTS[n % 3], "logprobs": 2}
        yield COMPLETE, asked | {"prompt": PROMPTS[:2], "n": 2}
        said = [{"role": "user", "content": PROMPTS[n % 3]}]
        yield CHAT, asked | {"messages": said, "logprobs": True, "top_logprobs": 1}
        if n < 3:
            given = drawn | {"max_new_tokens": NEW, "details": True}
            yield GENERATE, {"inputs": PROMPTS[n], "parameters": given}


def answer(client, path, asked, *, streams):
    """The choices, put together of their chunks, and the usage without what others had read."""
    if not streams:
        whole = client.post(path, json=asked).json()
        whole.get("usage", {}).pop("prompt_tokens_details", None)
        if path == GENERATE:
            return [generated(whole, whole["details"]["tokens"])], whole["details"]["seed"]
        return [part(choice) for choice in whole["choices"]], whole["usage"]
    asked = asked | {"stream": True}
    asked |= {"stream_options": {"include_usage": True}} if path != GENERATE else {}
    lines = client.post(path, json=asked).text.split("\n\n")
    chunks = [json.loads(line[5:]) for line in lines if line and line != "data: [DONE]"]
    if path == GENERATE:
        *_, last = chunks
        tokens = [chunk["token"] for chunk in chunks]
        assert "".join(token["text"] for token in tokens) == last["generated_text"]
        assert [chunk["index"] for chunk in chunks] == list(range(1, len(tokens) + 1))
        return [generated(last, tokens)], last["details"]["seed"]
    parts = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        parts.setdefault(choice["index"], []).append(part(choice))
    del chunks[-1]["usage"]["prompt_tokens_details"]
    return [joined(parts[index]) for index in sorted(parts)], chunks[-1]["usage"]


def generated(found, tokens):
    assert found["details"]["generated_tokens"] == len(tokens)
    listed = {name: [token[name] for token in tokens] for name in ("id", "logprob")}
    return found["generated_text"], found["details"]["finish_reason"], listed


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


def leave(client, path, asked):
    with client.stream("POST", path, json=asked | {"stream": True}) as events:
        next(events.iter_lines())


def rounded(value):
    """Log probabilities as far as forwards of other widths agree on them."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


@functools.cache
def alone():
    with serving(1, None, TOKENIZER, model=MODEL) as (client, _):
        return [rounded(answer(client, *one, streams=False)) for one in requests()]


def decoded(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def texts_by_definition(path, asked):
    """(text, reason, number of tokens, whether a stop string ended it) of each choice.

    Tokens are decoded behind their prompt, one more each time.
    """
    given = asked.get("parameters", asked)
    if path == CHAT:
        named = TOKENIZER.apply_chat_template(
            asked["messages"], add_generation_prompt=True, return_dict=False
        )
        prompts = [named]
    else:
        named = asked.get("prompt", asked.get("inputs"))
        prompts = TOKENIZER([named] if isinstance(named, str) else named)["input_ids"]
    prompts = [ids for ids in prompts for _ in range(given.get("n", 1))]
    for ids, seed in zip(prompts, sequence_seeds(given["seed"], len(prompts)), strict=True):
        out = generate(
            MODEL, torch.tensor([ids]), drafter=None, rule="match", seed=seed, max_new_tokens=NEW,
            do_sample=path != GENERATE or given["temperature"] != 1.0,
            temperature=given["temperature"], top_k=0, top_p=1.0,
        )  # fmt: skip
        new, before = out[0, len(ids) :].tolist(), decoded(ids)
        for count in range(1, len(new) + 1):
            text = decoded(ids + new[:count]).removeprefix(before)
            found = [text.index(one) for one in given.get("stop", ()) if one in text]
            if found:
                break
        ends = "stop" if found or new[-1] in ENDS else "length"
        ends = "eos_token" if path == GENERATE and ends == "stop" else ends
        yield text[: min(found, default=None)], ends, count, bool(found)


def test_a_text_ends_with_the_token_that_completes_the_first_stop_string():
    """Each choice has a seed of its own, and the blank of a first word stays behind its prompt."""
    ends, blanks = set(), 0
    for (path, asked), (choices, usage) in zip(requests(), alone(), strict=True):
        expected = list(texts_by_definition(path, asked))
        assert [tuple(choice[:2]) for choice in choices] == [one[:2] for one in expected], asked
        if path != GENERATE:
            assert usage["completion_tokens"] == sum(count for *_, count, _ in expected)
        for text, reason, count, by_string in expected:
            blanks += text.startswith(" ")
            ends.add((reason, by_string, count < NEW))
        for text, _, listed in choices:
            for token, begin in zip(
                listed.get("tokens", ()), listed.get("text_offset", ()), strict=True
            ):
                assert token.startswith(text[begin : begin + len(token)])
    wanted = {("stop", True, True), ("stop", False, True), ("length", False, False)}
    assert wanted | {("eos_token", False, True)} <= ends
    assert blanks > 1


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_are_those_without_drafts_alone_and_beside_others(drafter):
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
