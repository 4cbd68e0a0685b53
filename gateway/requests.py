"""What clients may ask, in OpenAI's words and vLLM's further ones. Pure: a body in, prompts and sampling out.

A field that we know and cannot serve (best_of, audio …) is refused unless it says "no"; one that nobody knows is
refused, too: whoever asks for something and does not get it must hear of it. An optional field that is null is absent.
Bounds of the values are the router's.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from gateway.names import name_in_body, named, renamed
from gateway.tools import Call, ChosenTool, ToolParam, tool_choice_of
from rpc.errors import InvalidRequest
from tandem.messages import Prompt, Sampling
from tandem.structured_outputs import StructuredOutputsParams

MAX_PROMPTS = 256
"""In one request."""
MAX_N = 128
MAX_CHOICES = 256
"""In one request: of all prompts together."""
MAX_FAIRNESS_ID_BYTES = 256
"""Of the name of whoever asks."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, for /v1/completions. A chat's answer may fill the context."""


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def only(*neutral: Any, instead: str = "") -> Any:
    """The type of a field that may be given, but ask for nothing that is not done anyway. `instead`: what to do."""

    def check(value: Any) -> Any:
        # 0 and False are equal, and ask for different things.
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            may_be = f"; it may be {json.dumps(neutral[0])}" if neutral else ""
            raise ValueError("is not supported" + may_be + (f"; {instead}" if instead else ""))
        return value

    return Annotated[Any, AfterValidator(check)]


def _prompts(value: Any) -> list[Prompt]:
    """Of a text, token ids, or a list of either."""
    wanted = "must be a text, token ids, or a list of either"
    if not isinstance(value, str | list):
        raise ValueError(f"{wanted}, is {json.dumps(value):.40}")
    many = value if isinstance(value, list) and not _is_token_ids(value) else [value]
    if not 1 <= len(many) <= MAX_PROMPTS:
        raise ValueError(f"must be 1 to {MAX_PROMPTS} prompts, has {len(many)}")
    for position, prompt in enumerate(many):
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and _is_token_ids(prompt))):
            raise ValueError(f"{wanted}; number {position} is none of them, is {json.dumps(prompt):.40}")
    return many


def _is_token_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int and 0 <= item < 1 << 32 for item in value)


def _structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """vLLM's words for the form of an answer."""
    return None if value is None else StructuredOutputsParams.of(value)


def _response_format(value: Any) -> StructuredOutputsParams | None:
    """OpenAI's words for it. A schema is kept to, strict or not."""
    if value is None:
        return None
    asked = ResponseFormat.model_validate(value)
    if asked.json_schema is not None and asked.type == "json_schema":
        return StructuredOutputsParams(json=asked.json_schema.schema_)
    if asked.type == "json_schema" or asked.json_schema is not None:
        raise ValueError("json_schema goes with type 'json_schema', and with no other")
    return StructuredOutputsParams(json_object=True) if asked.type == "json_object" else None


def check_fairness_id(value: str) -> str:
    """Raises `ValueError` for a name that no router takes."""
    num_bytes = len(value.encode())
    if num_bytes > MAX_FAIRNESS_ID_BYTES:
        raise ValueError(f"must have at most {MAX_FAIRNESS_ID_BYTES} bytes, has {num_bytes}")
    return value


FairnessId = Annotated[str, AfterValidator(check_fairness_id)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
NumAlternatives = Annotated[int, Field(strict=True, ge=0, le=20)]
NumAlternativesOrNo = Annotated[
    NumAlternatives | None, BeforeValidator(lambda value: None if value is False else value)
]
"""How many of the likeliest tokens come with each one of the answer."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_obfuscation: bool | None = None
    """OpenAI's padding against those who watch lengths: there is none."""
    include_usage: bool | None = None
    """A last event without choices and with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every event."""


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Body(BaseModel):
    """Of a request, in JSON."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Raises `ValidationError`. A field that nobody knows and that is null asks for nothing."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            unknown = [each for each in error.errors() if each["type"] == "extra_forbidden" and each["input"] is None]
            absent = {each["loc"][0] for each in unknown if len(each["loc"]) == 1}
            if not absent:
                raise
        return cls.model_validate_json(json.dumps({k: v for k, v in json.loads(body).items() if k not in absent}))


class Asked(Body, ABC):
    """What all kinds of request for an answer share."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: str | list[str] | None = None

    # vLLM's
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    top_k: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{0,100}$")] | None = None
    structured_outputs: Annotated[Any, AfterValidator(_structured_outputs)] = None

    # whose request it is: OpenAI's word of today, and the one before
    safety_identifier: FairnessId | None = None
    user: FairnessId | None = None

    # vLLM's that are known, and refused unless they ask for what is done anyway
    allowed_token_ids: only() = None  # type: ignore[valid-type]
    bad_words: only([]) = None  # type: ignore[valid-type]
    detokenize: only(True) = None  # type: ignore[valid-type]
    length_penalty: only(1.0, 1) = None  # type: ignore[valid-type]
    logits_processors: only([]) = None  # type: ignore[valid-type]
    return_token_ids: only(False) = None  # type: ignore[valid-type]
    return_tokens_as_token_ids: only(False) = None  # type: ignore[valid-type]
    spaces_between_special_tokens: only(True) = None  # type: ignore[valid-type]
    truncate_prompt_tokens: only() = None  # type: ignore[valid-type]
    use_beam_search: only(False) = None  # type: ignore[valid-type]

    # of no effect here, whatever they say
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None

    DIRECT: ClassVar[tuple[str, ...]] = (
        "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed",
        "skip_special_tokens", "logit_bias", "priority", "cache_salt", "structured_outputs",
    )  # fmt: skip

    def sampling(self) -> Sampling:
        """By the names of the wire; what was not given takes the model's default."""
        given = {name: getattr(self, name) for name in self.DIRECT}
        return cast(Sampling, {name: value for name, value in given.items() if value is not None})

    @property
    def fairness_id(self) -> str:
        """Whose request it is; empty: it does not say."""
        return self.safety_identifier or self.user or ""

    @abstractmethod
    def prompts(self) -> list[Prompt]:
        """Each of which `num_answers` answer."""

    @abstractmethod
    def in_its_words(self, error: InvalidRequest) -> InvalidRequest:
        """What a router says of this request, by the names that its fields have in this body."""

    @property
    def num_answers(self) -> int:
        """To each prompt."""
        return 1


class AskedForChoices(Asked):
    """What completions and chats share."""

    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    """Choices to each prompt."""
    prompt_logprobs: NumAlternatives | None = None
    # After structured_outputs: the form of the answer in OpenAI's words, of which there is no second one.
    response_format: Annotated[Any, AfterValidator(_response_format)] = None
    # known, and refused unless it asks for nothing
    best_of: only(1) = None  # type: ignore[valid-type]

    def sampling(self) -> Sampling:
        sampling = super().sampling()
        if self.max_tokens is not None:
            sampling["max_tokens"] = self.max_tokens
        if self.response_format is not None:
            sampling["structured_outputs"] = self.response_format
        if self.prompt_logprobs is not None:
            sampling["prompt_logprobs"] = self.prompt_logprobs
        return sampling

    def in_its_words(self, error: InvalidRequest) -> InvalidRequest:
        """Who gave a response_format has not heard of structured_outputs."""
        error = named(error, name_in_body)
        if self.response_format is not None:
            error = renamed(error, "structured_outputs", "response_format")
        return error

    @property
    def num_answers(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_usage_always(self) -> bool:
        asked = self.stream_options
        return self.includes_usage and asked is not None and bool(asked.continuous_usage_stats)

    @field_validator("response_format")
    @classmethod
    def _check_response_format(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("structured_outputs") is not None:
            raise ValueError("cannot be had with structured_outputs, which says the same in other words")
        return value

    @field_validator("prompt_logprobs")
    @classmethod
    def _check_prompt_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("stream"):
            raise ValueError("cannot be had with stream: true, whose events have no place for them")
        return value


class CompletionRequest(AskedForChoices):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts, json_schema_input_type=str | list[Any])]
    logprobs: NumAlternativesOrNo = None
    echo: bool | None = None
    """The prompt stands before each choice, in its text and in its logprobs."""
    suffix: only("") = None  # type: ignore[valid-type]
    add_special_tokens: only(True) = None  # type: ignore[valid-type]
    prompt_embeds: only() = None  # type: ignore[valid-type]

    def prompts(self) -> list[Prompt]:
        return self.prompt

    def sampling(self) -> Sampling:
        sampling: Sampling = {"max_tokens": max(DEFAULT_COMPLETION_TOKENS, self.min_tokens or 0), **super().sampling()}
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
        # What token ids stand for comes with their numbers; a text is known.
        if self.echo and (self.logprobs is not None or not all(isinstance(prompt, str) for prompt in self.prompt)):
            sampling["prompt_logprobs"] = max(self.prompt_logprobs or 0, self.logprobs or 0)
        if self.is_echo_alone:
            sampling |= {"max_tokens": 1, "min_tokens": 0}
        return sampling

    def in_its_words(self, error: InvalidRequest) -> InvalidRequest:
        error = super().in_its_words(error)
        return error if self.prompt_logprobs is not None else renamed(error, "prompt_logprobs", "logprobs")

    @property
    def is_echo_alone(self) -> bool:
        """No answer is asked for. One token is computed, as of any prompt, and left out."""
        return bool(self.echo) and self.max_tokens == 0


class TextPart(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


def _content(value: Any) -> Any:
    """Said here, where it is known which of the two was meant."""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        if others := [part.get("type") for part in value if part.get("type") != "text"]:
            raise ValueError(f"may have parts of type 'text' alone, has one of type {others[0]!r}")
    elif value is not None and not isinstance(value, str):
        raise ValueError("must be a text, or a list of parts of type 'text'")
    return value


_PARTS = "list[TextPart]"
Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[list[TextPart], Tag(_PARTS)],
    Discriminator(lambda value: "str" if isinstance(value, str) else _PARTS),
]
"""One of the two, so that what is wrong with a part is said of that part."""


def _role(value: str) -> str:
    if value not in ROLES:
        raise ValueError(f"must be one of {', '.join(ROLES)}, is {value[:40]!r}")
    return value


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Annotated[str, AfterValidator(_role)]
    content: Annotated[Content | None, BeforeValidator(_content), Field(validate_default=True)] = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    # an assistant's: what it thought before, where that is a text
    reasoning: Any = None
    reasoning_content: Any = None
    function_call: only() = None  # type: ignore[valid-type]
    audio: only() = None  # type: ignore[valid-type]
    # what answers have beside, and clients send back with them
    refusal: Any = None
    annotations: Any = None
    parsed: Any = None
    reasoning_details: Any = None
    provider_specific_fields: Any = None
    thinking_blocks: Any = None
    id: Any = None
    status: Any = None
    is_error: Any = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, value: Any, info: ValidationInfo) -> Any:
        role = info.data.get("role")
        # An assistant may have called tools, and said nothing; what they return may be nothing.
        if value is None and role in ("system", "developer", "user"):
            raise ValueError(f"must be given with role {role!r}: a text, or a list of parts of type 'text'")
        return value

    def to_prompt(self) -> Mapping[str, Any]:
        parts = self.content if isinstance(self.content, list) else [TextPart(type="text", text=self.content or "")]
        calls = [call.model_dump(exclude_none=True) for call in self.tool_calls or ()]
        said = {"name": self.name, "tool_calls": calls, "tool_call_id": self.tool_call_id}
        said |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning_content}
        return {"role": self.role, "content": "".join(part.text for part in parts), **said}


IN_TEMPLATE = 'give it to the model\'s chat template, as chat_template_kwargs: {"reasoning_effort": ...}'
AT_START = "the router is given one by its flag --chat-template"


class ChatRequest(AskedForChoices):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumAlternatives | None = None
    tools: list[ToolParam] | None = None
    tool_choice: Annotated[Any, BeforeValidator(tool_choice_of)] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: only(instead=IN_TEMPLATE) = None  # type: ignore[valid-type]
    functions: only([]) = None  # type: ignore[valid-type]
    function_call: only("none", "auto") = None  # type: ignore[valid-type]
    modalities: only(["text"]) = None  # type: ignore[valid-type]
    audio: only() = None  # type: ignore[valid-type]
    prediction: only() = None  # type: ignore[valid-type]
    web_search_options: only() = None  # type: ignore[valid-type]
    verbosity: only() = None  # type: ignore[valid-type]
    # vLLM's: the template writes all that is special
    add_generation_prompt: only(True) = None  # type: ignore[valid-type]
    add_special_tokens: only(False) = None  # type: ignore[valid-type]
    chat_template: only(instead=AT_START) = None  # type: ignore[valid-type]
    continue_final_message: only(False) = None  # type: ignore[valid-type]
    documents: only([]) = None  # type: ignore[valid-type]
    echo: only(False) = None  # type: ignore[valid-type]
    include_reasoning: only(True) = None  # type: ignore[valid-type]
    mm_processor_kwargs: only() = None  # type: ignore[valid-type]

    def prompts(self) -> list[Prompt]:
        return [[message.to_prompt() for message in self.messages]]

    def sampling(self) -> Sampling:
        sampling = super().sampling()
        if self.max_completion_tokens is not None:
            sampling["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        if self.tools:
            chosen = self.tool_choice
            sampling["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
            sampling["tool_choice"] = chosen.model_dump() if isinstance(chosen, ChosenTool) else chosen
            sampling["parallel_tool_calls"] = self.parallel_tool_calls
        if self.chat_template_kwargs:
            sampling["chat_template_kwargs"] = self.chat_template_kwargs
        return sampling

    def in_its_words(self, error: InvalidRequest) -> InvalidRequest:
        error = super().in_its_words(error)
        return error if self.max_completion_tokens is None else renamed(error, "max_tokens", "max_completion_tokens")

    @property
    def names_tool(self) -> bool:
        """The one that is to be called."""
        return isinstance(self.tool_choice, ChosenTool)

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(cls, value: Any, info: ValidationInfo) -> Any:
        if value not in (None, "none", "auto") and not info.data.get("tools"):
            raise ValueError("is of no use without tools")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("is of no use without logprobs: true")
        return value
