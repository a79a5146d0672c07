"""The routes of text-generation-inference: its defaults, its fields, and the hub's own client."""

import json

import pytest
from support.text_server import MODEL, NAME, SECONDS, TOKENIZER, alone, serving

hub = pytest.importorskip("huggingface_hub")
PROMPT, NEW = "the cat sat", 12


@pytest.fixture(scope="module")
def client():
    with serving() as (made, _):
        yield made


def greedy(new=NEW):
    return alone(PROMPT, max_new_tokens=new, seed=0, temperature=0.0)


def sampled(**given):
    return alone(PROMPT, max_new_tokens=NEW, **({"seed": 5} | given))


def ask(client, path="/generate", **parameters):
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": NEW, "seed": 5, **parameters}}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_is_greedy_unless_something_says_that_it_is_sampled(client):
    """It was sampled at temperature 1."""
    assert ask(client) == {"generated_text": greedy()[0]}
    for same in ({"do_sample": False}, {"temperature": 1.0}, {"top_k": 0}, {"top_p": 1.0}):
        assert ask(client, **same)["generated_text"] == greedy()[0]
    assert ask(client, do_sample=True)["generated_text"] == sampled()[0]
    for given in ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}):
        assert ask(client, **given)["generated_text"] == sampled(**given)[0]
    assert sampled()[0] != greedy()[0]
    answer = client.post("/generate", json={"inputs": PROMPT})  # without any parameter
    assert answer.json() == {"generated_text": greedy(100)[0]}


NEUTRAL = {  # values that change nothing; values that would
    "best_of": ([1], [2]),
    "decoder_input_details": ([False], [True]),
    "frequency_penalty": ([0.0, 0], [0.5]),
    "repetition_penalty": ([1.0], [1.1]),
    "stop": ([[]], [["a"]]),
    "top_n_tokens": ([0], [2]),
    "typical_p": ([1.0], [0.5]),
    "watermark": ([False], [True, 0]),
    "return_full_text": ([False], [1]),
    "adapter_id": ([], ["a"]),
    "grammar": ([], [{"type": "regex", "value": "a"}]),
    "truncate": ([], [3]),
}


def test_values_that_change_nothing_are_taken_and_others_are_refused(client):
    for nth in (0, -1):
        neutral = {name: values[nth] for name, (values, _) in NEUTRAL.items() if values}
        assert ask(client, **neutral) == {"generated_text": greedy()[0]}
    assert ask(client, **dict.fromkeys(NEUTRAL)) == {"generated_text": greedy()[0]}
    for name, (_, others) in NEUTRAL.items():
        for value in others:
            body = {"inputs": PROMPT, "parameters": {name: value}}
            for path in ("/", "/generate", "/generate_stream"):
                answer = client.post(path, json=body)
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert error["param"] == f"parameters.{name}"
                assert error["message"].startswith(f"parameters.{name} must ")


def test_details_are_given_where_they_are_asked_for(client):
    text, ids = sampled()
    answer = ask(client, do_sample=True, details=True, return_full_text=True)
    assert answer["generated_text"] == PROMPT + text
    details = answer["details"]
    tokens = details.pop("tokens")
    assert details == {
        "finish_reason": "length", "generated_tokens": NEW, "seed": 5, "prefill": []
    }  # fmt: skip
    assert [token["id"] for token in tokens] == ids
    assert "".join(token["text"] for token in tokens) == text
    assert all(token["logprob"] < 0 and token["special"] is False for token in tokens)
    assert ask(client, details=True)["details"]["seed"] is None  # nothing was drawn


def test_the_end_of_a_text_is_a_special_token(client, monkeypatch):
    """Its text is left out, and it is counted."""
    end = TOKENIZER.eos_token_id
    monkeypatch.setattr(MODEL.generation_config, "eos_token_id", end)
    ending = f"{PROMPT}</s>"
    for seed in range(400):
        ids = alone(ending, max_new_tokens=40, seed=seed)[1]
        if ids[-1] == end:
            break
    body = {"inputs": ending, "parameters": {"max_new_tokens": 40, "seed": seed}}
    body["parameters"] |= {"do_sample": True, "details": True}
    answer = client.post("/generate", json=body).json()
    *others, last = answer["details"]["tokens"]
    assert (last["id"], last["text"], last["special"]) == (end, "", True)
    assert not any(token["special"] for token in others)
    assert answer["details"]["finish_reason"] == "eos_token"
    assert answer["details"]["generated_tokens"] == len(ids)


@pytest.mark.parametrize("path", ["", "/generate", "/generate_stream"])
def test_the_client_of_the_hub_is_served(client, path):
    """It asks the address of the server itself, unless its user names a route."""
    address = str(client.base_url).rstrip("/") + path
    ours = hub.InferenceClient(model=address, timeout=SECONDS)
    generate, given = ours.text_generation, {"max_new_tokens": NEW}
    text, ids = greedy()
    if path != "/generate_stream":  # whose answer is always a stream
        assert generate(PROMPT, **given) == text
        assert generate(PROMPT, do_sample=True, seed=5, **given) == sampled()[0]
        found = generate(PROMPT, details=True, return_full_text=True, **given)
        assert found.generated_text == PROMPT + text
        assert found.details.finish_reason == "length"
        assert [token.id for token in found.details.tokens] == ids
        assert len(generate(PROMPT)) > len(text)
    pieces = list(generate(PROMPT, stream=True, **given))
    assert len(pieces) == NEW
    assert "".join(pieces) == text
    events = list(generate(PROMPT, stream=True, details=True, temperature=0.7, seed=5, **given))
    expected, ids = sampled(temperature=0.7)
    assert [event.token.id for event in events] == ids
    assert [event.index for event in events] == list(range(1, NEW + 1))
    assert "".join(event.token.text for event in events) == expected
    assert events[-1].generated_text == expected
    details = events[-1].details
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("length", NEW, 5)
    assert details.input_length == len(PROMPT)
    with pytest.raises(hub.errors.BadRequestError, match=r"parameters\.truncate must not be given"):
        generate(PROMPT, truncate=3, **given)


def test_chats_of_the_client_of_the_hub_are_served(client):
    """It names a model of its own where its user names none."""
    address = str(client.base_url).rstrip("/")
    messages = [{"role": "user", "content": "the cat"}]
    given = {"max_tokens": NEW, "seed": 5}
    expected = alone("<user>the cat</s><assistant>", max_new_tokens=NEW, seed=5)[0]
    ours = hub.InferenceClient(model=address, timeout=SECONDS)
    for named in ({}, {"model": NAME}):
        answer = ours.chat_completion(messages, **given, **named)
        assert answer.choices[0].message.content == expected
        chunks = ours.chat_completion(messages, stream=True, **given, **named)
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected


def test_the_client_of_the_hub_brings_a_key():
    with serving(access={"api_key": "secret"}) as (client, _):
        address = str(client.base_url).rstrip("/")
        given = {"prompt": PROMPT, "max_new_tokens": NEW}
        ours = hub.InferenceClient(model=address, token="secret", timeout=SECONDS)
        assert ours.text_generation(**given) == greedy()[0]
        other = hub.InferenceClient(model=address, token="other", timeout=SECONDS)
        with pytest.raises(hub.errors.HfHubHTTPError, match="401"):
            other.text_generation(**given)


def test_a_fault_in_a_stream_is_an_event():
    with serving() as (client, queue):
        queue.decoder.fails = True
        body = {"inputs": PROMPT, "stream": True}
        for path in ("/", "/generate", "/generate_stream"):
            (line,) = [one for one in client.post(path, json=body).text.splitlines() if one]
            error = json.loads(line.removeprefix("data: "))["error"]
            assert error["message"].endswith("RuntimeError: planted")
