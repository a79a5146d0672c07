"""The bodies of requests. Fields that are not served are refused by name; null is no value."""

# Pydantic reads the annotations of these classes when it makes them.
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, model_validator

from specdec_hf.arguments import is_integer

MAX_STOPS = 4
MAX_CHOICES = 128

Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[int, Field(ge=1, le=1)]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_integer, value))


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """Prompts of any form as a list of texts or of lists of token ids."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
    if value and (texts or (isinstance(value, list) and all(map(_is_ids, value)))):
        return list(value)
    raise ValueError("must be a string, a list of strings, token ids, or a list of lists of them")


def _stops(value: Any) -> list[str]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) > MAX_STOPS:
        raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(one, str) and one for one in listed):
        raise ValueError("must hold strings of at least one character")
    return listed


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _content(value: Any) -> Any:
    """The text of a message, which may come in parts."""
    if isinstance(value, list):
        if not all(map(_is_text_part, value)):
            raise ValueError("must be a string or parts of type text, each with a string as text")
        return "".join(part["text"] for part in value)
    return value


class Body(BaseModel, extra="forbid"):
    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        if isinstance(given, dict):
            return {name: value for name, value in given.items() if value is not None}
        return given


class Sampling(Body):
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0  # 0 is greedy
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None

    def sampling(self) -> dict[str, Any]:
        """The arguments of `BatchQueue.submit`."""
        return {name: getattr(self, name) for name in Sampling.model_fields}


class GenerateParameters(Sampling):
    max_new_tokens: Annotated[int | None, Field(ge=1)] = None


class GenerateRequest(Body):
    """A request in the manner of text-generation-inference."""

    inputs: str
    parameters: GenerateParameters = GenerateParameters()


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # there is no padding to leave out


class OpenAIRequest(Sampling):
    """The fields that both routes of OpenAI's API share."""

    model: str = ""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    stop: Annotated[list[str], PlainValidator(_stops)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""
    presence_penalty: Zero = 0
    frequency_penalty: Zero = 0

    @model_validator(mode="after")
    def _options_belong_to_a_stream(self) -> "OpenAIRequest":
        if self.stream_options.include_usage and not self.stream:
            raise ValueError("stream_options must not be given without stream")
        return self


class CompletionRequest(OpenAIRequest):
    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompts)]
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    best_of: One = 1
    echo: Literal[False] = False


class Message(Body):
    role: str
    content: Annotated[str, BeforeValidator(_content)]


class ChatRequest(OpenAIRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens must not be given with max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs must not be given without logprobs")
        return self
