"""Answers that call a tool, which the request forces, and chats that go on behind one."""

import copy
import functools
import json

import pytest
from support import cli_models, text_server
from support.text_server import serving

pytest.importorskip("llguidance", reason="needs the extra [grammar]")
openai = pytest.importorskip("openai", reason="its client asks the server")

from specdec_serve.tool_calls import GrowingCall, schema_of_call  # noqa: E402

pytestmark = pytest.mark.server

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}</s>{% endfor %}"
    "{% if messages[-1].role == 'tool' %}!{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLACE = {"type": "string", "enum": ["Rome", "Oslo"]}
WEATHER = {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/place"}}, "required": ["city"],
    "additionalProperties": False, "$defs": {"place": PLACE},
}  # fmt: skip
CLOCK = {"type": "object", "properties": {"zone": {"type": "integer", "minimum": 0, "maximum": 9}},
         "required": ["zone"], "additionalProperties": False}  # fmt: skip
FUNCTIONS = [("weather", WEATHER), ("clock", CLOCK)]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}
    for name, parameters in FUNCTIONS
]
NAMED = {"type": "function", "function": {"name": "weather"}}
ASKED = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 60, "tools": TOOLS}


@pytest.fixture(scope="module")
def client():
    tokenizer = cli_models.tokenizer(TEMPLATE)
    model = copy.deepcopy(text_server.MODEL)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with serving(model=model, tokenizer=tokenizer) as (client, queue):
        client.queue = queue
        yield client


def called(choice):
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert choice["message"]["content"] is None
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def is_right(name, arguments):
    if name == "weather":
        return arguments in ({"city": "Rome"}, {"city": "Oslo"})
    return name == "clock" and arguments.keys() == {"zone"} and 0 <= arguments["zone"] <= 9


def test_a_forced_call_is_one_of_the_tools(client):
    asked = {**ASKED, "seed": 1, "n": 8, "temperature": 1.5}
    named = client.post(CHAT, json={**asked, "tool_choice": NAMED}).json()["choices"]
    assert all(is_right(*called(one)) and called(one)[0] == "weather" for one in named)
    assert {one["finish_reason"] for one in named} == {"stop"}
    free = client.post(CHAT, json={**asked, "tool_choice": "required"}).json()["choices"]
    assert all(is_right(*called(one)) for one in free)
    assert {called(one)[0] for one in free} == {"weather", "clock"}
    assert {one["finish_reason"] for one in free} == {"tool_calls"}
    plain = client.post(CHAT, json={**asked, "n": 1, "tool_choice": "none", "max_tokens": 3})
    assert "tool_calls" not in plain.json()["choices"][0]["message"]
    for choice in (NAMED, "required"):  # cut before a name is known, the answer has no call
        cut = client.post(CHAT, json={**ASKED, "tool_choice": choice, "max_tokens": 3}).json()
        assert cut["choices"][0]["finish_reason"] == "length"
        assert ("tool_calls" in cut["choices"][0]["message"]) == (choice == NAMED)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_the_client_of_openai_reads_a_stream_of_it(client, choice):
    base = f"{client.base_url}/v1"
    asked = {**ASKED, "model": text_server.NAME, "tool_choice": choice, "seed": 3, "n": 2}
    with openai.OpenAI(base_url=base, api_key="none") as user:
        whole = user.chat.completions.create(**asked)
        found = {}
        for chunk in user.chat.completions.create(**asked, stream=True):
            for part in chunk.choices:
                for call in part.delta.tool_calls or []:
                    made = found.setdefault(part.index, ["", "", ""])
                    for n, more in enumerate((call.id, call.function.name)):
                        made[n] += more or ""
                    made[2] += call.function.arguments
    for one in whole.choices:
        function = one.message.tool_calls[0].function
        assert found[one.index][1:] == [function.name, function.arguments]
        assert is_right(function.name, json.loads(function.arguments))
        assert len(found[one.index][0]) == len("call_") + 24


def test_a_chat_goes_on_behind_a_call(client):
    call = {"id": "call_1", "type": "function"}
    call["function"] = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "warm"},
    ]
    given = {**ASKED, "messages": messages, "tool_choice": "none", "max_tokens": 2}
    assert client.post(CHAT, json=given).status_code == 200
    ids = client.queue.submitted[-1].input_ids
    assert cli_models.tokenizer(TEMPLATE).decode(ids) == (
        "[weather clock ]<user>a</s><assistant>weatherRome</s><tool>warm</s>!<assistant>"
    )


def one(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


DEEP = functools.reduce(lambda inner, _: {"properties": {"a": inner}}, range(99), {})
WRONG = [
    ({}, "tool_choice", "must be none, required or a function beside tools"),
    ({"tool_choice": "any"}, "tool_choice", "must be none, auto, required, or an object"),
    ({"tool_choice": "required", "tools": None}, "tool_choice", "must not be given without tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice",
     "must name one of tools, got 'x'"),
    ({"tool_choice": "required", "tools": [*TOOLS, *TOOLS]}, "tools", "must have different names"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format",
     "must not be given with a tool_choice that forces a call"),
    ({"tool_choice": "required", "stop": "a"}, "stop", "must not be given with a tool_choice that"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "min_tokens": 2},
     "min_tokens", "must not be given with a format or grammar"),
    ({"tool_choice": "required", "tools": one(parameters={"type": "string"})},
     "tools.0.function.parameters", "must be the schema of an object"),
    ({"tool_choice": "required", "tools": one(parameters=DEEP)},
     "tools.0.function.parameters", "must have at most 64 levels"),
    ({"tools": None, "messages": [{"role": "assistant", "tool_calls": [
        {"id": "a", "function": {"name": "f", "arguments": '{"a":' * 10**5}}]}]},
     "messages.0.tool_calls.0.function.arguments", "must be a JSON object as a string"),
    ({"tool_choice": "required", "tools": one(name="a b")}, "tools.0.function.name", "pattern"),
    ({"tool_choice": "required", "tools": one(parameters={"properties": {"a": {"type": "no"}}})},
     "tools", "must be followed by some text: the grammar does not compile"),
    ({"tools": None, "messages": [{"role": "assistant", "tool_calls": [
        {"id": "a", "function": {"name": "f", "arguments": "[]"}}]}]},
     "messages.0.tool_calls.0.function.arguments", "must be a JSON object as a string"),
    ({"tools": None, "messages": [{"role": "assistant"}]}, "messages.0.content", "must be given"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "field", "words"), WRONG, ids=str)
def test_what_cannot_be_called_is_refused_by_name(client, more, field, words):
    answer = client.post(CHAT, json={**ASKED, **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error
    assert words in error["message"]


def test_a_template_without_tools_is_no_place_for_them():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with serving() as (client, _):
        for more, field in (
            ({"tool_choice": "required"}, "tools"),
            ({"tools": None, "messages": [{"role": "assistant", "tool_calls": [call]}]},
             "messages.0.tool_calls"),
        ):  # fmt: skip
            error = client.post(CHAT, json={**ASKED, **more}).json()["error"]
            assert error["param"] == field
            assert "since the chat template of the model" in error["message"]


@pytest.mark.parametrize("size", range(1, 9))
def test_a_call_is_read_however_it_is_cut(size):
    arguments = '{"a": {"b": "}", "c": {}}}'
    for chosen, text in (
        ("f", arguments), ("", f'{{"name": "f", "arguments": {arguments}}}'),
    ):  # fmt: skip
        growing = GrowingCall(chosen)
        ends = [(n, n + size >= len(text)) for n in range(0, len(text), size)]
        parts = [growing.add(text[n : n + size], is_last=last) for n, last in ends]
        assert (growing.name, "".join(parts)) == ("f", arguments)
        cut = GrowingCall(chosen)
        begin = text.index("}}") + 2
        assert cut.add(text[:begin], is_last=True) == text[text.index('{"a"') : begin]
    assert schema_of_call(FUNCTIONS, "clock") == CLOCK
