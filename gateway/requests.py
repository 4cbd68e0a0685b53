"""Request bodies of completions and chats, with OpenAI's fields and vLLM's further ones. Pure: a body in, prompts and
sampling parameters out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
)

from gateway.asked import (
    AT_START,
    MAX_MESSAGES,
    MAX_TOOLS,
    Asked,
    Known,
    Listed,
    NumAlternatives,
    NumTokens,
    check_is_one_form,
    only,
)
from gateway.effort import Budget, Effort, effort_variables
from gateway.names import name_in_body
from gateway.texts import content_of, role_of, text_or_parts, texts_of
from gateway.tools import Call, ChosenTool, ToolParam, tool_choice_of
from tandem.requests import Prompt, Sampling
from tandem.structured_outputs import StructuredOutputsParams
from tandem.tools import MESSAGE_ROLES

MAX_PROMPTS = 256
"""Prompts in one request."""
MAX_N = 128
MAX_CHOICES = 256
"""Choices in one request, for all prompts together."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions. A chat's answer may fill the context."""


def _prompts(value: Any) -> list[Prompt]:
    """The prompts in a text, token ids, or a list of either."""
    wanted = "must be a text, token ids, or a list of either"
    if not isinstance(value, str | list):
        raise ValueError(f"{wanted}, is {json.dumps(value):.40}")
    many = value if isinstance(value, list) and not _is_token_ids(value) else [value]
    if not 1 <= len(many) <= MAX_PROMPTS:
        raise ValueError(f"must be 1 to {MAX_PROMPTS} prompts, has {len(many)}")
    if any(type(each) is int for each in many):
        raise ValueError(f"{wanted}; token ids are whole numbers from 0 on, and cannot be mixed with anything else")
    for position, prompt in enumerate(many):
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and _is_token_ids(prompt))):
            raise ValueError(f"{wanted}; entry {position} is neither: {json.dumps(prompt):.40}")
    return many


def _is_token_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int and 0 <= item < 1 << 32 for item in value)


def _response_format(value: Any) -> StructuredOutputsParams | None:
    """OpenAI's response_format, with vLLM's further type "structural_tag". A schema is enforced, whatever `strict`
    says."""
    if value is None:
        return None
    if isinstance(value, dict) and value.get("type") == "structural_tag":
        return StructuredOutputsParams(structural_tag={name: said for name, said in value.items() if said is not None})
    asked = ResponseFormat.model_validate(value)
    if asked.json_schema is not None and asked.type == "json_schema":
        return StructuredOutputsParams(json=asked.json_schema.schema_)
    if asked.type == "json_schema":
        raise ValueError("json_schema must be given with type 'json_schema'")
    if asked.json_schema is not None:
        raise ValueError("json_schema may only be given with type 'json_schema'")
    return StructuredOutputsParams(json_object=True) if asked.type == "json_object" else None


NumAlternativesOrNo = Annotated[
    NumAlternatives | None,
    BeforeValidator(
        lambda value: None if value is False else value,
        json_schema_input_type=NumAlternatives | Literal[False] | None,
    ),
]


class StreamOptions(Known):
    include_obfuscation: bool | None = None
    """OpenAI's padding against observers of lengths. It has no effect here."""
    include_usage: bool | None = None
    """Send a last event with the usage of the whole request and without choices."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far in every event."""


class JsonSchema(Known):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]


class ResponseFormat(Known):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None


class AskedForChoices(Asked):
    """What completions and chats share."""

    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    """Choices per prompt."""
    prompt_logprobs: NumAlternatives | None = None
    thinking_token_budget: Budget | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in logprobs as token_id:NUMBER."""
    # OpenAI's form of structured_outputs; declared after it, so that its validator can refuse both together.
    response_format: Annotated[Any, AfterValidator(_response_format)] = None
    # known fields that are refused unless they ask for nothing special
    best_of: Any = None
    """Older clients give it with n, since OpenAI's server required it."""
    ec_transfer_params: only() = None  # type: ignore[valid-type]
    kv_transfer_params: only() = None  # type: ignore[valid-type]
    prompt_cache_options: only() = None  # type: ignore[valid-type]
    prompt_cache_retention: only("in_memory") = None  # type: ignore[valid-type]
    logprob_token_ids: only([]) = None  # type: ignore[valid-type]
    repetition_detection: only() = None  # type: ignore[valid-type]
    return_token_offsets: only(False) = None  # type: ignore[valid-type]
    routed_experts_prompt_start: only(0) = None  # type: ignore[valid-type]
    stream_interval: only(1, instead="use the workers' flag --stream-interval") = None  # type: ignore[valid-type]
    truncation_side: only("left") = None  # type: ignore[valid-type]
    vllm_xargs: only({}) = None  # type: ignore[valid-type]
    watermarking: only(False) = None  # type: ignore[valid-type]
    # no effect here: the prefix cache finds prefixes by their content
    session_id: Any = None

    @field_validator("best_of")
    @classmethod
    def _check_best_of(cls, value: Any, info: ValidationInfo) -> Any:
        n = info.data.get("n") or 1
        if value is not None and (type(value) is not int or value not in (1, n)):
            raise ValueError(f"is not supported; only n, {n}, is allowed")
        return value

    def sampling(self) -> Sampling:
        sampling = super().sampling()
        sampling["is_max_tokens_target"] = True
        if self.max_tokens is not None:
            sampling["max_tokens"] = self.max_tokens
        if self.response_format is not None:
            sampling["structured_outputs"] = self.response_format
        if self.prompt_logprobs is not None:
            sampling["prompt_logprobs"] = self.prompt_logprobs
        if self.thinking_token_budget is not None:
            sampling["thinking_token_budget"] = self.thinking_token_budget
        sampling["truncate_prompt_tokens"] = self.truncate_prompt_tokens
        sampling["with_prompt_token_ids"] = bool(self.return_token_ids)
        return sampling

    def _name_of(self, field: str) -> str:
        return name_in_body(field)

    @property
    def _words(self) -> dict[str, str]:
        """A client that gave a response_format does not know about structured_outputs."""
        return {} if self.response_format is None else {"structured_outputs": "response_format"}

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
        if value is not None:
            check_is_one_form(info)
        return value

    @field_validator("stream_options")
    @classmethod
    def _check_stream_options(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and value.model_fields_set and not info.data.get("stream"):
            raise ValueError("needs stream: true")
        return value

    @field_validator("prompt_logprobs")
    @classmethod
    def _check_prompt_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("stream"):
            raise ValueError("cannot be combined with stream: true")
        return value


class CompletionRequest(AskedForChoices):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts, json_schema_input_type=str | list[Any])]
    logprobs: NumAlternativesOrNo = None
    echo: bool | None = None
    """Put the prompt before each choice, in its text and in its logprobs."""
    suffix: only("") = None  # type: ignore[valid-type]
    add_special_tokens: bool | None = None
    prompt_embeds: only() = None  # type: ignore[valid-type]

    def prompts(self) -> list[Prompt]:
        return self.prompt

    def sampling(self) -> Sampling:
        sampling: Sampling = {"max_tokens": max(DEFAULT_COMPLETION_TOKENS, self.min_tokens or 0), **super().sampling()}
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
        sampling["add_special_tokens"] = self.add_special_tokens
        # The text of prompts that are token ids comes with their logprobs; the text of others is known.
        if self.echo and (self.logprobs is not None or not self.knows_its_texts):
            sampling["prompt_logprobs"] = max(self.prompt_logprobs or 0, self.logprobs or 0)
        if self.is_echo_alone:
            sampling |= {"max_tokens": 1, "min_tokens": 0}
        return sampling

    @property
    def _words(self) -> dict[str, str]:
        return super()._words | ({} if self.prompt_logprobs is not None else {"prompt_logprobs": "logprobs"})

    @property
    def knows_its_texts(self) -> bool:
        """Whether the text of all prompts is known here: they are texts, and the router does not cut them."""
        return self.truncate_prompt_tokens is None and all(isinstance(prompt, str) for prompt in self.prompt)

    @property
    def is_echo_alone(self) -> bool:
        """Whether only the prompt is requested, without an answer. One token is computed all the same and left out."""
        return bool(self.echo) and self.max_tokens == 0


class Message(Known):
    model_config = ConfigDict(strict=False)

    role: role_of(*MESSAGE_ROLES)  # type: ignore[valid-type]
    content: Annotated[text_or_parts(Literal["text"]) | None, Field(validate_default=True)] = None  # type: ignore[valid-type]
    name: str | None = None
    tool_calls: Listed[Call] | None = None
    tool_call_id: str | None = None
    # an assistant's thoughts before its content, if they are a text
    reasoning: Any = None
    reasoning_content: Any = None
    function_call: only() = None  # type: ignore[valid-type]
    audio: only() = None  # type: ignore[valid-type]
    # further fields of answers that clients send back
    refusal: Any = None
    annotations: Any = None
    parsed: Any = None
    reasoning_details: Any = None
    provider_specific_fields: Any = None
    thinking_blocks: Any = None
    id: Any = None
    status: Any = None
    is_error: Any = None
    # a hint for other servers: prefixes are cached anyway
    cache_control: Any = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, value: Any, info: ValidationInfo) -> Any:
        role = info.data.get("role")
        # An assistant may have called tools without content, and a tool may return nothing.
        if value is None and role in ("system", "developer", "user"):
            raise ValueError(f"must be given with role {role!r}: a text, or a list of parts of type 'text'")
        return value

    def to_prompt(self) -> Mapping[str, Any]:
        calls = [call.model_dump(exclude_none=True) for call in self.tool_calls or ()]
        said = {"name": self.name, "tool_calls": calls, "tool_call_id": self.tool_call_id}
        said |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning_content}
        return {"role": self.role, "content": content_of(texts_of(self.content or "")), **said}


Messages = Annotated[Listed[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[Listed[ToolParam], Field(max_length=MAX_TOOLS)]


class ChatRequest(AskedForChoices):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumAlternatives | None = None
    tools: Tools | None = None
    tool_choice: tool_choice_of(ChosenTool, '{"type": "function", "function": {"name": …}}') = None  # type: ignore[valid-type]
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    """False: leave thoughts out of the answer."""
    functions: only([]) = None  # type: ignore[valid-type]
    function_call: only("none", "auto") = None  # type: ignore[valid-type]
    modalities: only(["text"]) = None  # type: ignore[valid-type]
    audio: only() = None  # type: ignore[valid-type]
    prediction: only() = None  # type: ignore[valid-type]
    web_search_options: only() = None  # type: ignore[valid-type]
    verbosity: only("medium") = None  # type: ignore[valid-type]
    # vLLM's: the template writes all special tokens
    add_special_tokens: only(False) = None  # type: ignore[valid-type]
    chat_template: only(instead=AT_START) = None  # type: ignore[valid-type]
    documents: only([]) = None  # type: ignore[valid-type]
    echo: only(False) = None  # type: ignore[valid-type]
    media_io_kwargs: only() = None  # type: ignore[valid-type]
    mm_processor_kwargs: only() = None  # type: ignore[valid-type]
    return_prompt_text: only(False) = None  # type: ignore[valid-type]

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
        if variables := effort_variables(self.reasoning_effort) | (self.chat_template_kwargs or {}):
            sampling["chat_template_kwargs"] = variables
        sampling["add_generation_prompt"] = self.add_generation_prompt
        sampling["continue_final_message"] = self.continue_final_message
        return sampling

    @property
    def role(self) -> str:
        """The role of the answer: assistant, or that of the last message if the answer begins no new one."""
        begins = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return "assistant" if begins else str(self.messages[-1].role)

    @property
    def _words(self) -> dict[str, str]:
        return super()._words | ({} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"})

    @property
    def names_tool(self) -> bool:
        """Whether the request names the tool that must be called."""
        return isinstance(self.tool_choice, ChosenTool)

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value
