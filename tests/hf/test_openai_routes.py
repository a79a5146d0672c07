"""The routes of OpenAI's API, asked over the loopback interface, also by OpenAI's own client."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from specdec_hf.request.sampling import sequence_seeds
from support.sources import ROOT
from support.text_server import MODEL, NAME, SECONDS, TOKENIZER, Server, alone, serving, until

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def server():
    """A client, and the queue of the server that it is connected to."""
    with serving() as made:
        yield made


class Text:
    """A choice, put together of its chunks where it was streamed."""

    def __init__(self, parts):
        said = [part.get("message") or part.get("delta") or part for part in parts]
        self.text = "".join(one["text"] if "text" in one else one["content"] for one in said)
        self.reason = parts[-1]["finish_reason"]
        self.roles = [one["role"] for one in said if "role" in one]
        self.logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        assert all(part["finish_reason"] is None for part in parts[:-1])

    def listed(self, name):
        """A list of the log probabilities, of all chunks."""
        return [one for part in self.logprobs for one in part[name]]


def ask(client, path, asked):
    """The choices by their index, and all objects of the answer."""
    if not asked.get("stream"):
        answers = [client.post(path, json=asked).json()]
    else:
        with client.stream("POST", path, json=asked) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines.pop() == "data: [DONE]"
        answers = [json.loads(line[6:]) for line in lines]
    parts = {}
    for choice in (choice for answer in answers for choice in answer["choices"]):
        parts.setdefault(choice["index"], []).append(choice)
    return {index: Text(found) for index, found in sorted(parts.items())}, answers


def chat(text):
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_an_answer_has_the_text_of_the_seed(server, path, streams):
    asked = {"seed": 5, "temperature": 0.8, "top_p": 0.9, "stream": streams, "model": NAME}
    if path == COMPLETE:
        prompt, kind = "the cat sat", "text_completion"
        asked |= {"prompt": prompt, "max_tokens": 12, "echo": False, "presence_penalty": 0}
    else:
        prompt, kind = "<user>the cat</s><assistant>", "chat.completion" + ".chunk" * streams
        parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
        asked |= {**chat(parts), "max_completion_tokens": 12, "stop": None, "user": "me"}
    texts, answers = ask(server[0], path, asked)
    assert texts.keys() == {0}
    assert texts[0].text == alone(prompt, max_new_tokens=12, seed=5, temperature=0.8, top_p=0.9)[0]
    assert texts[0].roles == ["assistant"] * (path == CHAT)
    assert texts[0].reason == "length"
    assert {answer["object"] for answer in answers} == {kind}
    assert len({answer["id"] for answer in answers}) == 1
    assert {answer["model"] for answer in answers} == {NAME}
    assert texts[0].logprobs == []
    if not streams:
        read = len(TOKENIZER(prompt)["input_ids"])
        usage = {"prompt_tokens": read, "completion_tokens": 12, "total_tokens": read + 12}
        assert answers[0]["usage"] == usage
    else:
        assert len(answers) > 1
        assert not any("usage" in answer for answer in answers)


@pytest.mark.parametrize("streams", [False, True])
def test_choices_have_seeds_of_their_own(server, streams):
    """Each prompt has ``n`` choices, whose index says whose a piece is."""
    prompts = ["the cat", "a"]
    asked = {"prompt": prompts, "n": 2, "max_tokens": 9, "seed": 3, "stream": streams}
    if streams:
        asked["stream_options"] = {"include_usage": True}
    texts, answers = ask(server[0], COMPLETE, asked)
    seeds = sequence_seeds(3, 4)
    expected = [
        alone(prompts[i // 2], max_new_tokens=9, seed=seed)[0] for i, seed in enumerate(seeds)
    ]
    assert [one.text for one in texts.values()] == expected
    assert len(set(expected)) == 4
    assert answers[-1]["usage"] == {
        "prompt_tokens": 8, "completion_tokens": 36, "total_tokens": 44
    }  # fmt: skip
    if streams:
        assert answers[-1]["choices"] == []
        assert all(answer["usage"] is None for answer in answers[:-1])
        order = [answer["choices"][0]["index"] for answer in answers[:-1]]
        assert order != sorted(order), "the choices came one after the other"


def test_prompts_may_be_token_ids(server):
    ids = TOKENIZER("the cat")["input_ids"]
    asked = {"max_tokens": 5, "seed": 3}
    (expected, _) = ask(server[0], COMPLETE, asked | {"prompt": "the cat"})
    for prompt in (ids, [ids], ["the cat"]):
        texts, _ = ask(server[0], COMPLETE, asked | {"prompt": prompt})
        assert [one.text for one in texts.values()] == [expected[0].text]
    two, _ = ask(server[0], COMPLETE, asked | {"prompt": [ids, ids[:3]]})
    assert two.keys() == {0, 1}


def test_the_length_that_is_not_given(server, monkeypatch):
    """Of a completion 16 tokens, of a chat the limit of the server or what the model has left."""
    (_, (answer,)) = ask(server[0], COMPLETE, {"prompt": "a", "seed": 1})
    assert answer["usage"]["completion_tokens"] == 16
    (_, (answer,)) = ask(server[0], CHAT, {**chat("a"), "seed": 1})
    assert answer["usage"]["total_tokens"] == 256  # the context
    with serving(max_new_tokens=7) as (client, _):
        for path, asked in ((CHAT, chat("a")), (COMPLETE, {"prompt": "a"})):
            (_, (answer,)) = ask(client, path, asked)
            assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_text_ends_before_a_stop_string(server, streams):
    client, queue = server
    asked = {"prompt": "the cat sat", "max_tokens": 30, "seed": 5, "stream": streams}
    whole = ask(client, COMPLETE, asked)[0][0].text
    for start in (5, 6, 8):  # rounds end within some of them
        middle = whole[start : start + 3]
        stopped = ask(client, COMPLETE, asked | {"stop": ["never there", middle]})[0][0]
        assert (stopped.text, stopped.reason) == (whole[: whole.index(middle)], "stop")
    assert ask(client, COMPLETE, asked | {"stop": "never there"})[0][0].text == whole
    until(lambda: all(sequence.cancelled for sequence in queue.submitted))


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_are_those_of_the_model(server, streams):
    """Before temperature and filters, whatever the text was sampled with."""
    client, _ = server
    prompt, new = "the cat sat", 9
    for temperature in (0.0, 0.6):
        asked = {"max_tokens": new, "seed": 5, "temperature": temperature, "stream": streams}
        text, tokens = alone(prompt, max_new_tokens=new, seed=5, temperature=temperature)
        ids = torch.tensor([TOKENIZER(prompt)["input_ids"] + tokens])
        with torch.inference_mode():
            rows = MODEL(ids).logits[0, -new - 1 : -1].log_softmax(dim=-1)
        expected = rows[range(new), tokens]
        best = rows.topk(2, dim=-1)

        found = ask(client, COMPLETE, asked | {"prompt": prompt, "logprobs": 2})[0][0]
        assert found.text == text
        assert found.listed("token_logprobs") == pytest.approx(expected.tolist(), abs=1e-4)
        likeliest = [max(one.values()) for one in found.listed("top_logprobs")]
        assert likeliest == pytest.approx(best.values[:, 0].tolist(), abs=1e-4)
        assert all(1 <= len(one) <= 3 for one in found.listed("top_logprobs"))
        offsets = found.listed("text_offset")
        assert offsets == sorted(offsets)
        for token, begin in zip(found.listed("tokens"), offsets, strict=True):
            assert text[begin:].startswith(token) or "\N{REPLACEMENT CHARACTER}" in token

        read = "<user>a</s><assistant>"
        text, tokens = alone(read, max_new_tokens=new, seed=5, temperature=temperature)
        given = asked | {**chat("a"), "logprobs": True, "top_logprobs": 3}
        content = ask(client, CHAT, given)[0][0].listed("content")
        assert len(content) == new
        for one, token in zip(content, tokens, strict=True):
            assert one["token"] == TOKENIZER.decode([token])
            assert [top["logprob"] for top in one["top_logprobs"]] == sorted(
                (top["logprob"] for top in one["top_logprobs"]), reverse=True
            )
            assert len(one["top_logprobs"]) == 3
            if one["bytes"] is not None:
                assert bytes(one["bytes"]).decode() == one["token"]
        chosen = ask(client, CHAT, asked | {**chat("a"), "logprobs": True})[0][0].listed("content")
        assert [one["logprob"] for one in chosen] == pytest.approx(
            [one["logprob"] for one in content], abs=1e-5
        )
        assert all(one["top_logprobs"] == [] for one in chosen)


def test_log_probabilities_end_with_the_text(server):
    client, _ = server
    asked = {"prompt": "the cat sat", "max_tokens": 30, "seed": 5, "logprobs": 0, "stream": True}
    whole = ask(client, COMPLETE, asked)[0][0]
    assert len(whole.listed("tokens")) == 30
    stop = whole.text[8:11]
    cut = ask(client, COMPLETE, asked | {"stop": stop})[0][0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    count = sum(begin < len(cut.text) for begin in whole.listed("text_offset"))
    assert cut.listed("tokens") == whole.listed("tokens")[:count]
    assert cut.listed("token_logprobs") == pytest.approx(whole.listed("token_logprobs")[:count])


def test_a_chat_needs_a_template():
    class Without:
        """The tokenizer, which has no template."""

        def __getattr__(self, name):
            return getattr(TOKENIZER, name)

        def __call__(self, text):
            return TOKENIZER(text)

        def apply_chat_template(self, *args, **kwargs):
            raise ValueError("there is no\nchat template")

    with serving(tokenizer=Without()) as (client, _):
        error = client.post(CHAT, json=chat("a")).json()["error"]
        assert error["message"] == "messages cannot be encoded: there is no chat template"
        assert client.post(COMPLETE, json={"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.fixture
def openai():
    """The package of OpenAI's client."""
    return pytest.importorskip("openai", reason="the package openai is not installed")


def test_the_client_of_openai_is_served(server, openai):
    client, queue = server
    url = f"{client.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS) as ours:
        assert [model.id for model in ours.models.list()] == [NAME]
        assert ours.models.retrieve(NAME).id == NAME
        messages = [{"role": "user", "content": "the cat"}]
        given = {"model": NAME, "seed": 5, "temperature": 0.8, "extra_body": {"top_k": 40}}
        expected = alone(
            "<user>the cat</s><assistant>", max_new_tokens=12, seed=5, temperature=0.8, top_k=40
        )[0]
        create = ours.chat.completions.create
        answer = create(messages=messages, max_completion_tokens=12, **given)
        assert answer.choices[0].message.content == expected
        assert answer.usage.completion_tokens == 12
        options = {"include_usage": True}
        chunks = list(
            create(
                messages=messages, max_completion_tokens=12, stream=True, stream_options=options,
                logprobs=True, top_logprobs=1, **given,
            )
        )  # fmt: skip
        deltas = [chunk.choices[0] for chunk in chunks[:-1]]
        assert "".join(one.delta.content for one in deltas) == expected
        assert sum(len(one.logprobs.content) for one in deltas) == 12
        assert chunks[-1].usage.completion_tokens == 12
        made = ours.completions.create(prompt="a", n=2, max_tokens=4, logprobs=1, **given)
        assert [one.index for one in made.choices] == [0, 1]
        assert len(made.choices[1].logprobs.top_logprobs) == 4
        for error, wrong in (
            (openai.NotFoundError, {"model": "another"}),
            (openai.BadRequestError, {"logit_bias": {"1": 2}}),
        ):
            with pytest.raises(error) as caught:
                create(messages=messages, **{**given, **wrong})
            assert caught.value.param == next(iter(wrong))
        queue.decoder.fails = True
        with pytest.raises(openai.InternalServerError, match="planted"):
            create(messages=messages, **given)
        with pytest.raises(openai.APIError, match="planted"):
            list(create(messages=messages, stream=True, **given))


def test_many_clients_of_openai_at_once(server, openai):
    client, _ = server
    url = f"{client.base_url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS) as ours,
        ThreadPoolExecutor(12) as pool,
    ):
        calls = [
            pool.submit(ours.completions.create, model=NAME, prompt="a", seed=n, max_tokens=n + 1)
            for n in range(12)
        ]
        texts = [call.result(SECONDS).choices[0].text for call in calls]
    assert texts == [alone("a", max_new_tokens=n + 1, seed=n)[0] for n in range(12)]


PAGE = ROOT / "docs/server.md"


@pytest.fixture
def programs():
    """The programs that docs/server.md prints: of a client and of a server."""
    if not PAGE.is_file():
        pytest.skip("the documents are not beside the tests")
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_client_of_the_page_prints_the_answer(openai, programs, capsys):
    with serving(name="embedded") as (client, _):
        address = "http://127.0.0.1:8000"
        assert address in programs[0]
        exec(programs[0].replace(address, str(client.base_url)), {})
    expected, _ = alone(
        "<user>Why is the sky blue?</s><assistant>",
        max_new_tokens=64, seed=1, temperature=0.7, top_k=40,
    )  # fmt: skip
    assert capsys.readouterr().out == f"{expected}\n"


def test_the_client_of_the_hub_of_the_page_prints_the_text(programs, capsys):
    pytest.importorskip("huggingface_hub")
    with serving() as (client, _):
        exec(programs[1].replace("http://127.0.0.1:8000", str(client.base_url)), {})
    expected, _ = alone("Why is the sky blue?", max_new_tokens=64, seed=0, temperature=0.0)
    assert capsys.readouterr().out == f"{expected}\n"


def test_the_server_of_the_page_is_made(programs, monkeypatch):
    ran = []
    monkeypatch.setattr(Server, "run", lambda server: ran.extend([server]))
    exec(programs[2], {"model": MODEL, "tokenizer": TOKENIZER})
    (server,) = ran
    assert server.config.app.state.service.limits.max_waiting == 16
