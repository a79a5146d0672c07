"""The routes of text-generation-inference: a whole exchange, its defaults, and the hub's client."""

import json

import pytest
from support.text_server import SECONDS, alone

pytestmark = pytest.mark.server

hub = pytest.importorskip("huggingface_hub")
PROMPT, NEW = "the cat sat", 12


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
    for same in ({}, {"do_sample": False}, {"temperature": 1.0}, {"top_k": 0}, {"top_p": 1.0}):
        assert ask(client, **same) == {"generated_text": greedy()[0]}
    assert ask(client, do_sample=True)["generated_text"] == sampled()[0]
    for given in ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}):
        assert ask(client, **given)["generated_text"] == sampled(**given)[0]
    assert sampled()[0] != greedy()[0]
    answer = client.post("/generate", json={"inputs": PROMPT})  # without any parameter
    assert answer.json() == {"generated_text": greedy(100)[0]}
    assert ask(client, path="/") == [{"generated_text": greedy()[0]}]


def test_a_text_is_written_as_text_generation_inference_writes_it(client):
    text, ids = sampled()
    asked = {"do_sample": True, "details": True, "return_full_text": True}
    answer = ask(client, **asked)
    details = {"finish_reason": "length", "generated_tokens": NEW, "seed": 5}
    tokens = answer["details"].pop("tokens")
    assert answer == {"generated_text": PROMPT + text, "details": {**details, "prefill": []}}
    logprobs = [token.pop("logprob") for token in tokens]
    assert max(logprobs) < 0
    assert [token.pop("id") for token in tokens] == ids
    assert "".join(token.pop("text") for token in tokens) == text
    assert tokens == [{"special": False}] * NEW
    assert ask(client, details=True)["details"]["seed"] is None  # nothing was drawn

    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": NEW, "seed": 5, **asked}}
    lines = client.post("/generate_stream", json=body).text.split("\n\n")[:-1]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["token"].pop("id") for event in events] == ids
    found = [event["token"].pop("logprob") for event in events]
    assert found == pytest.approx(logprobs, abs=1e-4)
    assert "".join(event["token"].pop("text") for event in events) == text
    nothing = {"token": {"special": False}, "generated_text": None, "details": None}
    last = {"generated_text": PROMPT + text, "details": {**details, "input_length": len(PROMPT)}}
    ends = [{}] * (NEW - 1) + [last]
    assert events == [{"index": n, **nothing, **end} for n, end in enumerate(ends, 1)]


@pytest.mark.parametrize("path", ["", "/generate", "/generate_stream"])
def test_the_client_of_the_hub_is_served(client, path):
    """It asks the address of the server itself, unless its user names a route."""
    address = str(client.base_url).rstrip("/") + path
    generate = hub.InferenceClient(model=address, timeout=SECONDS).text_generation
    given = {"max_new_tokens": NEW}
    text, _ = greedy()
    if path != "/generate_stream":  # whose answer is always a stream
        assert generate(PROMPT, **given) == text
        assert generate(PROMPT, do_sample=True, seed=5, **given) == sampled()[0]
    events = list(generate(PROMPT, stream=True, details=True, temperature=0.7, seed=5, **given))
    expected, ids = sampled(temperature=0.7)
    assert [event.token.id for event in events] == ids
    assert events[-1].generated_text == expected
    details = events[-1].details
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("length", NEW, 5)
    with pytest.raises(hub.errors.BadRequestError, match=r"parameters\.truncate must not be given"):
        generate(PROMPT, truncate=3, **given)
