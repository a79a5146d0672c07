"""The bodies of requests. Fields that are not served are refused by name; null is no value."""

# Pydantic reads the annotations of these classes when it makes them.
import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    PlainValidator,
    model_validator,
)
from specdec_hf.arguments import shown

from specdec_serve.tool_calls import schema_of_call

MAX_STOPS = 4
MAX_CHOICES = 128
MAX_MESSAGES = 2048
MAX_METADATA = 16
MAX_BIASES = 300
MAX_TOOLS = 128
MAX_LEVELS = 64


def _only(*neutral: Any) -> PlainValidator:
    """A field that is not served, and the values of it that change nothing."""
    written = [json.dumps(value) for value in neutral]

    def check(value: Any) -> Any:
        same = (
            value == one and isinstance(value, bool) is isinstance(one, bool) for one in neutral
        )
        if not any(same):
            raise ValueError(f"must be {' or '.join(written)}")
        return value

    return PlainValidator(check)


Zero = Annotated[Any, _only(0)]
One = Annotated[Any, _only(1)]
Off = Annotated[Any, _only(False)]
Empty = Annotated[Any, _only([])]
PROMPTS = "must be a string, a list of strings, token ids, or a list of lists of them"


def _at_most(
    maximum: int, kind: type[list[Any]] | type[dict[str, Any]], items: str
) -> BeforeValidator:
    """The bound of a container, which is counted before anything in it is read."""

    def check(value: Any) -> Any:
        if isinstance(value, kind) and len(value) > maximum:
            raise ValueError(f"must have at most {maximum} {items}")
        return value

    return BeforeValidator(check)


def is_ids(value: Any) -> TypeGuard[list[int]]:
    """Whether all of a list are integers, as JSON has them."""
    return set(map(type, value)) == {int}


def _prompts(value: Any) -> list[Any]:
    """Prompts of any form as a list of texts or of lists, which hold token ids where `is_ids`."""
    if isinstance(value, str) or (isinstance(value, list) and is_ids(value)):
        return [value]
    if isinstance(value, list) and set(map(type, value)) in ({str}, {list}):
        return value
    raise ValueError(PROMPTS)


def _stops(value: Any) -> list[str]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) > MAX_STOPS:
        raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(one, str) and one for one in listed):
        raise ValueError("must hold strings of at least one character")
    return listed


def _content(value: Any) -> Any:
    """The text of a message, which may come in parts."""
    if not isinstance(value, list):
        return value
    try:
        texts = [part["text"] for part in value if part["type"] == "text"]
    except (TypeError, KeyError):
        texts = []
    if len(texts) < len(value) or not set(map(type, texts)) <= {str}:
        raise ValueError("must be a string or parts of type text, each with a string as text")
    return "".join(texts)


Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Repetition = Annotated[float, Field(ge=0.01, le=2)]
FORMATS = ("text", "json_object", "json_schema", "regex")
# What a text must follow, and what describes that: a schema or an expression.
Constraint = tuple[str, Any]
FREE: Constraint = ("text", None)


def _biases(value: Any) -> dict[int, float]:
    """Of OpenAI's logit_bias, whose token ids are strings."""
    rule = f"must map at most {MAX_BIASES} token ids to numbers from -100 to 100"
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(rule)
    biases: dict[int, float] = {}
    for token, bias in value.items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        is_id = re.fullmatch(r"0|[1-9][0-9]{0,9}", str(token))
        if not is_id or not number or not -100 <= bias <= 100:
            raise ValueError(rule)
        biases[int(token)] = float(bias)
    return biases


def _response_format(value: Any) -> Constraint:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in FORMATS:
        raise ValueError(f"must be an object with a type, one of {', '.join(FORMATS)}")
    members = {"json_schema": "json_schema", "regex": "pattern"}
    given = {name for name, one in value.items() if name != "type" and one is not None}
    if given != ({members[kind]} if kind in members else set()):
        has = f"must have {members[kind]} alone" if kind in members else "must have nothing else"
        raise ValueError(f"{has} beside the type {kind}")
    if kind == "regex":
        return kind, _pattern(value["pattern"])
    return kind, _schema(value["json_schema"]) if kind == "json_schema" else None


def _schema(value: Any) -> Any:
    described = {"name", "description", "schema", "strict"}
    if not isinstance(value, dict) or not {*value} <= described:
        raise ValueError(f"json_schema must be an object of {', '.join(sorted(described))}")
    if not isinstance(value.get("schema"), dict):
        raise ValueError("json_schema must have a schema, which is an object")
    return _not_too_deep(value["schema"])


def _not_too_deep(schema: Any) -> Any:
    """A schema that programs which call themselves for each level can read."""
    level = [schema]
    for _ in range(MAX_LEVELS):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return schema
    raise ValueError(f"must have at most {MAX_LEVELS} levels of objects and lists in its schema")


def _pattern(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must have a regular expression of at least one character")
    return value


def _prediction(value: Any) -> str:
    if not isinstance(value, dict) or {*value} != {"type", "content"} or value["type"] != "content":
        raise ValueError("must be an object of the type content and its content")
    content = _content(value["content"])
    if not isinstance(content, str):
        raise ValueError("must have a string or parts of type text as content")
    return content


def _grammar(value: Any) -> Constraint:
    """Of text-generation-inference."""
    if not isinstance(value, dict) or {*value} != {"type", "value"}:
        raise ValueError("must be an object of type and value")
    if value["type"] == "regex":
        return "regex", _pattern(value["value"])
    if value["type"] != "json" or not isinstance(value["value"], dict):
        raise ValueError("must have type regex, or json with a schema as value")
    return "json_schema", _not_too_deep(value["value"])


class Body(BaseModel, extra="forbid", strict=True):
    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        """The fields with a value, and the first of those that are not served, for its fault."""
        if not isinstance(given, dict):
            return given
        values = {name: value for name, value in given.items() if value is not None}
        other = next((name for name in values if name not in cls.model_fields), None)
        return {name: values[name] for name in (*cls.model_fields, other) if name in values}


class PenaltyFields(Body):
    """What changes the logits of single tokens."""

    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Repetition = 1.0
    logit_bias: Annotated[dict[int, float], PlainValidator(_biases)] = {}
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    ignore_eos: bool = False

    @property
    def constraint(self) -> Constraint:
        """What the text must follow."""
        return FREE

    @property
    def is_constrained(self) -> bool:
        """Whether there is such a thing."""
        return self.constraint != FREE

    @property
    def constraint_field(self) -> str:
        """The field that says so."""
        return "response_format"

    @model_validator(mode="after")
    def _a_grammar_ends_its_texts(self) -> "PenaltyFields":
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name) and self.is_constrained:
                raise _disagreement(name, "with a format or grammar", getattr(self, name))
        return self


class SamplingFields(PenaltyFields):
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0  # 0 is greedy
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None

    def sampling(self) -> dict[str, Any]:
        """The arguments of `BatchQueue.submit`."""
        return {name: getattr(self, name) for name in SAMPLING}


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


class GenerateParameters(SamplingFields):
    """Without a parameter of sampling a text is greedy, as in text-generation-inference."""

    do_sample: bool = False
    max_new_tokens: Annotated[int | None, Field(ge=1)] = None
    details: bool = False
    return_full_text: bool = False
    grammar: Annotated[Constraint, PlainValidator(_grammar)] = FREE
    # What follows is not served.
    best_of: One = 1
    decoder_input_details: Off = False
    stop: Empty = []
    top_n_tokens: Zero = 0
    typical_p: One = 1
    watermark: Off = False

    @property
    def constraint(self) -> Constraint:
        return self.grammar

    @property
    def constraint_field(self) -> str:
        return "grammar"

    @property
    def samples(self) -> bool:
        """Whether anything says so."""
        neutral = SamplingFields().sampling() | {"seed": self.seed}
        return self.do_sample or super().sampling() != neutral

    def sampling(self) -> dict[str, Any]:
        return super().sampling() | ({} if self.samples else {"temperature": 0.0})


class GenerateRequest(Body):
    """A request in the manner of text-generation-inference."""

    inputs: str
    parameters: GenerateParameters = GenerateParameters()
    stream: bool = False


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # there is no padding to leave out


class OpenAIRequest(SamplingFields):
    """The fields that both routes of OpenAI's API share, those of vLLM included."""

    model: str = ""
    # -1 is vLLM's word for all tokens.
    top_k: Annotated[int, Field(ge=-1), AfterValidator(lambda k: max(k, 0))] = 0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    stop: Annotated[list[str], PlainValidator(_stops)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # What follows changes no text; clients send it by default.
    user: str = ""
    metadata: Annotated[dict[str, str], _at_most(MAX_METADATA, dict, "pairs")] = {}
    cache_salt: str = ""  # of vLLM
    response_format: Annotated[Constraint, PlainValidator(_response_format)] = FREE
    prediction: Annotated[str, PlainValidator(_prediction)] = ""
    store: Off = False
    service_tier: Annotated[Any, _only("auto", "default")] = "auto"

    @property
    def constraint(self) -> Constraint:
        return self.response_format

    @model_validator(mode="after")
    def _options_belong_to_a_stream(self) -> "OpenAIRequest":
        if self.stream_options.include_usage and not self.stream:
            given = self.stream_options.model_dump(exclude_unset=True)
            raise _disagreement("stream_options", "without stream", given)
        return self


class CompletionRequest(OpenAIRequest):
    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompts)]
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    best_of: One = 1
    echo: Off = False


def _role(value: str) -> str:
    return "system" if value == "developer" else value  # OpenAI's present name of it


def _is_object(arguments: str) -> str:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object as a string")
    return arguments


class CalledFunction(Body):
    name: str
    arguments: Annotated[str, AfterValidator(_is_object)]


class ToolCall(Body):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def turn(self) -> dict[str, Any]:
        """As chat templates read it, with the arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Body):
    """A turn of a chat; `turn` is what a chat template reads."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"], AfterValidator(_role)
    ]
    content: Annotated[str | None, BeforeValidator(_content)] = None  # beside calls alone
    name: str | None = None
    tool_call_id: str | None = None
    # No list, which would be copied for each message.
    tool_calls: Annotated[list[ToolCall] | None, _at_most(MAX_TOOLS, list, "calls")] = None
    annotations: Empty = None

    def turn(self) -> dict[str, Any]:
        """The fields that were given and are served."""
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        given: dict[str, Any] = {name: one for name, one in named.items() if one is not None}
        if self.tool_calls:
            given["tool_calls"] = [call.turn() for call in self.tool_calls]
        return {"role": self.role, "content": self.content or "", **given}


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError("must be the schema of an object")
    return {"type": "object", **_not_too_deep(schema)}


class ToolFunction(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_parameters)] = {
        "type": "object",
        "properties": {},
    }
    strict: bool = False


class Tool(Body):
    type: Literal["function"]
    function: ToolFunction


@dataclass(frozen=True)
class ToolChoice:
    """Whether an answer calls a tool: "none", "auto", "required", or "function" with its name."""

    kind: str
    name: str = ""

    @property
    def forces(self) -> bool:
        """Whether the answer is a call."""
        return self.kind in ("required", "function")


def _tool_choice(value: Any) -> ToolChoice:
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    try:
        kind, name = value["type"], value["function"]["name"]
        whole = value == {"type": kind, "function": {"name": name}}
    except (TypeError, KeyError):
        whole = False
    if not whole or kind != "function" or not isinstance(name, str):
        raise ValueError("must be none, auto, required, or an object of a function with its name")
    return ToolChoice(kind, name)


class ChatRequest(OpenAIRequest):
    messages: Annotated[
        list[Message], FailFast(), Field(min_length=1), _at_most(MAX_MESSAGES, list, "messages")
    ]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: Annotated[list[Tool], _at_most(MAX_TOOLS, list, "tools")] = []
    tool_choice: Annotated[ToolChoice, PlainValidator(_tool_choice)] = ToolChoice("auto")
    parallel_tool_calls: bool = True
    modalities: Annotated[Any, _only(["text"])] = ["text"]

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise _disagreement("max_tokens", "with max_completion_tokens", self.max_tokens)
        if self.top_logprobs is not None and not self.logprobs:
            raise _disagreement("top_logprobs", "without logprobs", self.top_logprobs)
        return self

    @model_validator(mode="after")
    def _messages_have_content(self) -> "ChatRequest":
        for n, message in enumerate(self.messages):
            if message.content is None and not message.tool_calls:
                raise ValueError(f"messages.{n}.content must be given")
        return self

    @model_validator(mode="after")
    def _tools_are_called_as_asked(self) -> "ChatRequest":
        choice, names = self.tool_choice, [tool.function.name for tool in self.tools]
        if len({*names}) < len(names):
            raise ValueError(f"tools must have different names, got {shown(names)}")
        if choice.forces and not names:
            raise _disagreement("tool_choice", "without tools", choice.name or choice.kind)
        if choice.kind == "auto" and names:
            raise ValueError(
                "tool_choice must be none, required or a function beside tools, since answers in "
                "the model's own form of calls are not read, got auto"
            )
        if choice.kind == "function" and choice.name not in names:
            raise ValueError(f"tool_choice must name one of tools, got {shown(choice.name)}")
        for name, given in (("response_format", self.response_format != FREE), ("stop", self.stop)):
            if choice.forces and given:
                raise _disagreement(
                    name, "with a tool_choice that forces a call", getattr(self, name)
                )
        return self

    @property
    def is_constrained(self) -> bool:
        return self.tool_choice.forces or self.response_format != FREE

    @property
    def constraint(self) -> Constraint:
        if not self.tool_choice.forces:
            return self.response_format
        functions = [(tool.function.name, tool.function.parameters) for tool in self.tools]
        return "json_schema", schema_of_call(functions, self.tool_choice.name)

    @property
    def constraint_field(self) -> str:
        return "tools" if self.tool_choice.forces else "response_format"


def _disagreement(name: str, rule: str, value: Any) -> ValueError:
    """A fault of fields that do not go together; the message begins with the name of one."""
    return ValueError(f"{name} must not be given {rule}, got {shown(value)}")
