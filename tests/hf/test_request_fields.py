"""Fields of requests: what each takes and refuses, derived from its declaration, and the others.

A field that is refused is named in one line, in the form of OpenAI's API.
"""

from typing import Any, get_args, get_origin

import pytest
from support import cli_models
from support.text_server import EXTRA, NAME, alone, serving

pytest.importorskip("fastapi", reason=EXTRA)

from annotated_types import Ge, Gt, Le, Lt
from specdec_serve.fields import ChatRequest, CompletionRequest, GenerateParameters

pytestmark = pytest.mark.server

GENERATE, COMPLETE, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
BODIES = {GENERATE: GenerateParameters, COMPLETE: CompletionRequest, CHAT: ChatRequest}
# What the table of declarations leaves out: what says which text is asked for, and a nested object.
SPECIAL = {"prompt", "messages", "model", "stream_options", "response_format", "grammar"}
SPECIAL |= {"prediction", "tool_choice", "tools"}
JSON = {"Content-Type": "application/json"}


def chat(role, content="the cat", **fields):
    return {"messages": [{"role": role, "content": content, **fields}]}


def good(path, **fields):
    if path == GENERATE:
        given = {"max_new_tokens": 5, "seed": 5, "do_sample": True, **fields}
        return {"inputs": "the cat", "parameters": given}
    text = {"prompt": "the cat"} if path == COMPLETE else chat("user")
    return {"model": NAME, "seed": 5, "max_tokens": 5, **text, **fields}


def text_of(client, path, asked):
    answer = client.post(path, json=asked)
    assert answer.status_code == 200, (asked, answer.text)
    if path == GENERATE:
        return answer.json()["generated_text"]
    (choice,) = answer.json()["choices"]
    return choice["text"] if path == COMPLETE else choice["message"]["content"]


def refused(answer, status=400):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) <= 300
    assert "Input should" not in error["message"], "the words of Pydantic"
    return error


# Values that change nothing, beside the default.
NEUTRAL = {
    "user": "me", "metadata": {"a": "b"}, "top_k": -1, "service_tier": "default",
    "tool_choice": "auto", "parallel_tool_calls": False, "stop": "never there", "n": 1,
}  # fmt: skip
# Of values that are no number, no text and no truth value, those that are like each default.
OTHERS = {
    int: [True, "1", 1.5, [1]], float: [True, "1", [1]], bool: [1, 0, "true"], str: [3, ["a"]],
    dict: [3, ["a"], {"a": 1}], list: [3, {"a": "b"}, ["a", 3], ["a", ""], ["a"] * 5],
}  # fmt: skip


def values_of_others(field):
    """Values of other types, and of a field that is not served all that are not its neutral one."""
    kinds = field.annotation, get_origin(field.annotation), *get_args(field.annotation)
    for kind in kinds:
        if kind in OTHERS:
            return OTHERS[kind]
    neutral = field.default
    if isinstance(neutral, bool):
        return [not neutral, int(neutral), str(neutral)]
    if isinstance(neutral, int):
        return [bool(neutral), str(neutral), neutral + 0.5]
    return ["odd", {"odd": 1}, ["odd"], 1]


def beyond_bounds(field):
    """(value, rule) just beyond each bound that a field declares."""
    for bound in field.metadata:
        if isinstance(bound, Ge):
            yield bound.ge - 1, f"at least {bound.ge}"
        elif isinstance(bound, Gt):
            yield bound.gt, f"above {bound.gt}"
        elif isinstance(bound, Le):
            yield bound.le + 1, f"at most {bound.le}"
        elif isinstance(bound, Lt):
            yield bound.lt, f"below {bound.lt}"


@pytest.mark.parametrize("path", BODIES)
def test_values_that_change_nothing_are_taken_and_others_are_refused(client, path):
    fields = {name: one for name, one in BODIES[path].model_fields.items() if name not in SPECIAL}
    expected = text_of(client, path, good(path))
    own = {"seed", "do_sample", "max_tokens", "max_new_tokens"}
    defaults = {name: one.default for name, one in fields.items() if name not in own}
    whole = {name: value for name, value in defaults.items() if fields[name].annotation is Any}
    numbers = {name: float(value) for name, value in whole.items() if type(value) is int}
    also = {} if path == GENERATE else {n: NEUTRAL[n] for n in fields if n in NEUTRAL}
    for neutral in (defaults, dict.fromkeys(defaults), defaults | numbers, defaults | also):
        assert text_of(client, path, good(path, **neutral)) == expected
    for name, field in fields.items():
        named = f"parameters.{name}" if path == GENERATE else name
        wrong = [(value, "") for value in values_of_others(field)] + list(beyond_bounds(field))
        assert len(wrong) > 1
        for value, rule in wrong:
            error = refused(client.post(path, json=good(path, **{name: value})))
            assert error["type"] == "invalid_request_error"
            place = error["param"].removeprefix(named)
            assert error["param"] == f"{named}{place}", (name, value, error)
            assert place in ("", ".a")
            assert error["message"].startswith(f"{error['param']} must "), error
            assert rule in error["message"], error
            assert ", got " in error["message"], error


USER = '{"messages": [{"role": "user", "content": "a"}]'
LONG = f"{GENERATE}_stream"
A = '{"prompt": "a", '
# ruff: noqa: E501
REFUSED = [  # path, body, the field, what the one line says
    # What float32, the sampling, the context or the server has no room for.
    (GENERATE, '{"inputs": "a", "parameters": {"temperature": 1e39}}', "temperature", "temperature must be fini"),
    (GENERATE, '{"inputs": "a", "parameters": {"top_p": 1e-46}}', "top_p", "top_p must be in (0, 1] in flo"),
    (GENERATE, '{"inputs": "a", "parameters": {"max_new_tokens": 300}}', "max_new_tokens", "must be at most 255"),
    (COMPLETE, A + '"max_tokens": 1' + 300 * "0" + "}", "max_tokens", "max_tokens"),
    (CHAT, USER + ', "max_completion_tokens": 999}', "max_completion_tokens", "at most 512, got 999"),
    (COMPLETE, A + '"n": 69}', "n", "n must make at most 68 texts, the places of the server, got 69"),
    (COMPLETE, '{"n": 2, "prompt": ["' + 34 * 'a", "' + 'a"]}', "n", "n must make at most 68 texts, the places of the server, got 70"),
    (COMPLETE, '{"prompt": ["' + 68 * 'a", "' + 'a"]}', "prompt", "prompt must make at most 68 texts"),
    # Prompts.
    (GENERATE, '{"inputs": ""}', "inputs", "inputs must have 1 to 156 tokens, the model's context of 256 less max_new_tokens, got 0"),
    (LONG, f'{{"inputs": "{"a" * 256}"}}', "inputs", "tokens, the model's context of 256 less max_new_tokens, got 256"),
    (COMPLETE, '{"prompt": ["a", 3]}', "prompt", "prompt must be a string"),
    (COMPLETE, '{"prompt": [3, 258]}', "prompt", "prompt[1] must be an integer in [0, 257], got 258"),
    (GENERATE, '{"inputs": "\\ud800"}', "inputs", "inputs cannot be encoded"),
    # Messages.
    (CHAT, '{"messages": []}', "messages", "messages must have a length of at least 1, got []"),
    (CHAT, '{"messages": [3]}', "messages.0", "messages.0 must be an object, got 3"),
    (CHAT, '{"messages": [' + ",".join(['{"role": "user", "content": "a"}'] * 2049) + "]}", "messages", "messages must have at most 2048 messages, got list of length 2049"),
    (CHAT, '{"messages": [{"role": "user", "content": "\\udfff"}]}', "messages", "messages cannot be"),
    (CHAT, '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages.0.content", "parts of type text"),
    (CHAT, '{"messages": [{"role": "x", "content": "a"}]}', "messages.0.role", "must be 'system', 'developer', 'user', 'assistant' or 'tool', got 'x'"),
    (CHAT, '{"messages": [{"role": "tool", "content": "a", "tool_call_id": "a"}]}', "messages.0.role", "messages.0.role must be a role that the chat template of the model names, got 'tool'"),
    (CHAT, '{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": "a"}]}]}', "messages.0.tool_calls.0.function", "messages.0.tool_calls.0.function must be given"),
    (CHAT, '{"messages": [{"role": "assistant", "tool_calls": []}]}', "messages.0.content", "messages.0.content must be given"),
    # Fields that do not go together, and what is not served.
    (COMPLETE, A + '"stream_options": {"include_usage": true}}', "stream_options", "stream_options must not be given without stream, got {'include_usage': True}"),
    (CHAT, USER + ', "top_logprobs": 2}', "top_logprobs", "top_logprobs must not be given without logprobs, got 2"),
    (CHAT, USER + ', "max_tokens": 2, "max_completion_tokens": 2}', "max_tokens", "max_tokens must not be given with max_completion_tokens, got 2"),
    (GENERATE, '{"inputs": "a", "parameters": {"truncate": 3}}', "parameters.truncate", "parameters.truncate must not be given, since it is not served, got 3"),
    (GENERATE, '{"inputs": "a", "parameters": {"top_k": "\\ud800"}}', "parameters.top_k", "parameters.top_k must be an integer, got '\\ud800'"),
    (COMPLETE, '{"max_tokens": 1}', "prompt", "prompt must be given"),
    (COMPLETE, A + '"metadata": {' + ",".join(f'"{n}": "a"' for n in range(17)) + "}}", "metadata", "metadata must have at most 16 pairs, got dict of length 17"),
    # What is no request.
    (GENERATE, '{"inputs": "a", "\\ud800": true}', None, "the body must "),
    *[(GENERATE, raw, None, "") for raw in (b"", b"{", b"\xff", b'{"inputs": "\xff"}', b"[" * 9999, b"1" * 5000)],
]  # fmt: skip


def test_a_wrong_request_is_refused_by_name_in_one_line(client):
    for path, raw, param, says in REFUSED:
        error = refused(client.post(path, content=raw, headers=JSON))
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), raw
        assert says in error["message"], raw
        long = error["code"] == "context_length_exceeded"
        assert long is error["message"].endswith("less max_new_tokens, got 256")
    error = refused(client.post(GENERATE, content=b'{"inputs": "a"}'))
    assert error["message"] == "the body must be JSON, with Content-Type application/json"


def test_what_is_not_there_is_refused_in_the_same_form(client):
    assert "/nowhere" in refused(client.get("/nowhere"), 404)["message"]
    refused(client.get(GENERATE), 405)
    asked = {"prompt": "a", "model": "another"}
    for answer in (client.post(COMPLETE, json=asked), client.get("/v1/models/another")):
        error = refused(answer, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "model must be tiny, which is served here, got 'another'" in error["message"]
    error = refused(client.post(GENERATE, json={"inputs": "a" * 2**20}), 413)
    assert "a body must be at most 1048576 bytes" in error["message"]


KNOWS_TOOLS = cli_models.TEMPLATE + "{# knows the role 'tool' #}"
NAMES = cli_models.TEMPLATE.replace("{{ m.role }}", "{{ m.role }} {{ m.name | default('?') }}")
ANSWERED = {"refusal": None, "tool_calls": [], "annotations": [], "name": "a"}
TURNS = [  # template, message, what the template makes of it
    (cli_models.TEMPLATE, chat("developer"), "system"),
    (cli_models.TEMPLATE, chat("assistant", **ANSWERED), "assistant"),
    (KNOWS_TOOLS, chat("tool", tool_call_id="a"), "tool"),
    (NAMES, chat("user", name="Ada"), "user Ada"), (NAMES, chat("user", name=None), "user ?"),
]  # fmt: skip


def test_a_template_reads_the_role_and_the_name_of_who_speaks():
    for template in dict.fromkeys(template for template, *_ in TURNS):
        with serving(tokenizer=cli_models.tokenizer(template)) as (client, _):
            for _, asked, named in (turn for turn in TURNS if turn[0] == template):
                prompt = f"<{named}>the cat</s><assistant>"
                expected = alone(prompt, max_new_tokens=5, seed=5)[0]
                assert text_of(client, CHAT, good(CHAT) | asked) == expected


def test_what_a_template_raises_is_one_line():
    with serving(tokenizer=cli_models.tokenizer("{{ raise_exception('a\nb') }}")) as (made, _):
        error = refused(made.post(CHAT, json=good(CHAT)))
        assert error["message"] == "messages cannot be encoded: a b"
