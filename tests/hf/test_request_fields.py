"""Fields of requests: their types, the values that change nothing, and the roles of a chat."""

import pytest
from support import cli_models
from support.text_server import NAME, alone, serving

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
TOOLS = cli_models.TEMPLATE + "{# knows the role 'tool' #}"


@pytest.fixture(scope="module")
def client():
    with serving() as (made, _):
        yield made


def good(path):
    asked = {"model": NAME, "seed": 5, "max_tokens": 5}
    text = {"prompt": "the cat"} if path == COMPLETE else chat("user")
    return asked | text


def chat(role, content="the cat", **fields):
    return {"messages": [{"role": role, "content": content, **fields}]}


def text_of(client, path, asked):
    """The text of the only choice."""
    answer = client.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["text"] if path == COMPLETE else choice["message"]["content"]


def error_of(client, path, asked):
    answer = client.post(path, json=asked)
    assert answer.status_code == 400, (asked, answer.text)
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "field", "values"),
    [
        (COMPLETE, "temperature", [True, "1"]),
        (COMPLETE, "top_p", [True, "1"]),
        (COMPLETE, "n", [True, "1", 1.0]),
        (COMPLETE, "max_tokens", [True, "8"]),
        (COMPLETE, "seed", [True, "8"]),
        (COMPLETE, "stream", [1, "yes"]),
        (COMPLETE, "echo", [0, "false"]),
        (COMPLETE, "logprobs", [True, "2"]),
        (COMPLETE, "user", [3]),
        (COMPLETE, "presence_penalty", [False, "0"]),
        (CHAT, "logprobs", [1, "true"]),
        (CHAT, "top_logprobs", [True]),
        (CHAT, "max_completion_tokens", [True, "8"]),
        (CHAT, "metadata", [{"a": 1}]),
    ],
)
def test_a_value_of_another_type_is_refused(client, path, field, values):
    for value in values:
        error = error_of(client, path, good(path) | {field: value})
        name = "metadata.a" if field == "metadata" else field
        assert error["param"] == name
        assert error["message"].startswith(f"{name} must be "), error
        wrong = 1 if field == "metadata" else value
        assert error["message"].endswith(f"{wrong!r}"), error


def test_integers_are_numbers(client):
    asked = good(COMPLETE)
    whole = text_of(client, COMPLETE, asked | {"temperature": 1, "top_p": 1})
    assert whole == text_of(client, COMPLETE, asked)


NEUTRAL = {  # values that change nothing; values that would
    "user": (["me"], []),
    "metadata": ([{}, {"a": "b"}], []),
    "presence_penalty": ([0, 0.0], [0.5]),
    "frequency_penalty": ([0, 0.0], [-0.5]),
    "repetition_penalty": ([1, 1.0], [1.1]),
    "ignore_eos": ([False], [True]),
    "logit_bias": ([{}], [{"3": 1}]),
    "store": ([False], [True]),
    "service_tier": (["auto", "default"], ["flex"]),
    "top_k": ([-1, 0], [-2]),
}
NEUTRAL_OF_CHATS = {
    "tools": ([[]], [[{"type": "function"}]]),
    "tool_choice": (["none", "auto"], ["required", {"type": "function"}]),
    "parallel_tool_calls": ([True, False], []),
    "response_format": ([{"type": "text"}], [{"type": "json_object"}]),
    "modalities": ([["text"]], [["text", "audio"]]),
}
NEUTRAL_OF_COMPLETIONS = {"best_of": ([1], [2]), "echo": ([False], [True])}


@pytest.mark.parametrize(
    ("path", "table"),
    [(COMPLETE, NEUTRAL | NEUTRAL_OF_COMPLETIONS), (CHAT, NEUTRAL | NEUTRAL_OF_CHATS)],
)
def test_values_that_change_nothing_are_taken_and_others_are_refused(client, path, table):
    asked = good(path)
    expected = text_of(client, path, asked)
    for nth in (0, -1):
        neutral = {name: values[nth] for name, (values, _) in table.items()}
        assert text_of(client, path, asked | neutral) == expected
    assert text_of(client, path, asked | dict.fromkeys(table)) == expected
    for name, (_, others) in table.items():
        for value in others:
            error = error_of(client, path, asked | {name: value})
            assert error["param"] == name
            assert error["message"].startswith(f"{name} must be "), error
            assert ", got " in error["message"]


def test_a_developer_is_the_system(client):
    """The template of these tests writes the role."""
    asked = good(CHAT)
    expected = alone("<system>the cat</s><assistant>", max_new_tokens=5, seed=5)[0]
    for role in ("system", "developer"):
        assert text_of(client, CHAT, asked | chat(role)) == expected
    answered = {"refusal": None, "tool_calls": [], "annotations": [], "name": "a"}
    expected = alone("<assistant>the cat</s><assistant>", max_new_tokens=5, seed=5)[0]
    assert text_of(client, CHAT, asked | chat("assistant", **answered)) == expected
    error = error_of(client, CHAT, asked | chat("assistant", tool_calls=[{"id": "a"}]))
    assert error["param"] == "messages.0.tool_calls"


CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("fields", "name", "rule"),
    [
        ({"tool_calls": CALLS}, "tool_calls", "must be [], got [{'id': 'a'"),
        ({"function_call": CALLS[0]["function"]}, "function_call", "must not be given"),
        ({"audio": {"id": "a"}}, "audio", "must not be given"),
        ({"annotations": CALLS}, "annotations", "must be []"),
        ({}, "content", "must be given"),
        ({"tool_calls": []}, "content", "must be given"),
    ],
)
def test_a_message_without_content_is_refused_by_what_it_has(client, fields, name, rule):
    """A history with tool calls was told that its content must be given, which is null there."""
    for content in ({}, {"content": None}):
        answered = {"role": "assistant", **content, **fields}
        turns = [{"role": "user", "content": "a"}, answered, {"role": "tool", "content": "b"}]
        error = error_of(client, CHAT, {"messages": turns})
        assert error["param"] == f"messages.1.{name}"
        assert error["message"].startswith(f"messages.1.{name} {rule}"), error


def test_lists_have_limits(client):
    turns = [{"role": "user", "content": "a"}] * 2049
    error = error_of(client, CHAT, {"messages": turns})
    assert error["message"] == "messages must have at most 2048 messages, got list of length 2049"
    pairs = {f"{n}": "a" for n in range(17)}
    error = error_of(client, CHAT, good(CHAT) | {"metadata": pairs})
    assert error["message"] == "metadata must have at most 16 pairs, got dict of length 17"


def test_the_role_of_a_tool_needs_a_template_that_knows_it(client):
    asked = good(CHAT) | chat("tool", tool_call_id="a")
    error = error_of(client, CHAT, asked)
    line = "must be a role that the chat template of the model names, got 'tool'"
    assert (error["param"], error["message"]) == ("messages.0.role", f"messages.0.role {line}")
    expected = alone("<tool>the cat</s><assistant>", max_new_tokens=5, seed=5)[0]
    with serving(tokenizer=cli_models.tokenizer(TOOLS)) as (knows, _):
        assert text_of(knows, CHAT, asked) == expected


def test_a_template_reads_the_name_of_who_speaks():
    named = cli_models.TEMPLATE.replace("{{ m.role }}", "{{ m.role }} {{ m.name | default('?') }}")
    with serving(tokenizer=cli_models.tokenizer(named)) as (knows, _):
        for fields, name in (({"name": "Ada"}, "Ada"), ({}, "?"), ({"name": None}, "?")):
            expected = alone(f"<user {name}>the cat</s><assistant>", max_new_tokens=5, seed=5)[0]
            assert text_of(knows, CHAT, good(CHAT) | chat("user", **fields)) == expected
