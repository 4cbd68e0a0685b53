"""Request bodies of /v1/messages, with Anthropic's fields and vLLM's further ones. Pure, as `gateway.requests`."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from gateway.asked import (
    AT_START,
    MAX_MESSAGES,
    MAX_TOOLS,
    Asked,
    FairnessId,
    Listed,
    NumTokens,
    WithoutNulls,
    check_is_one_form,
    only,
)
from gateway.effort import Effort, thinking_variables
from gateway.messages.input import MessageParam, System, messages_of
from gateway.placed import PlacedMessage, place_of
from tandem.requests import Prompt, Sampling
from tandem.structured_outputs import StructuredOutputsParams


class Tool(WithoutNulls):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """Only for the chat template: if calls are required, the schema of their arguments is enforced in any case."""
    cache_control: Any = None
    eager_input_streaming: Any = None
    """No effect: arguments are always streamed as they come."""
    defer_loading: only(False) = None  # type: ignore[valid-type]
    input_examples: only([]) = None  # type: ignore[valid-type]
    allowed_callers: only(["direct"]) = None  # type: ignore[valid-type]

    @field_validator("type")
    @classmethod
    def _check_type(cls, value: str | None) -> str | None:
        if value not in (None, "custom"):
            raise ValueError(f"must be 'custom', is {value[:60]!r}: this server does not run tools itself")
        return value

    def to_chat(self) -> dict[str, Any]:
        """The tool in the format of chats."""
        function = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class ToolChoice(WithoutNulls):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name must be given with type 'tool', and only then")
        return self

    def to_chat(self) -> Any:
        """The choice in the format of chats."""
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(WithoutNulls):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    """Anthropic requires it from clients, so it is only a target: enforced if possible."""
    display: only("summarized") = None  # type: ignore[valid-type]
    """Thoughts are returned as they are."""

    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template. "adaptive": none, so that the template decides."""
        return {} if self.type == "adaptive" else thinking_variables(self.type == "enabled")


class JsonFormat(WithoutNulls):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(WithoutNulls):
    format: JsonFormat | None = None
    effort: Effort | None = None
    """`thinking` decides whether the model thinks at all."""


class ContextEdit(WithoutNulls):
    """Only `keep: "all"` is accepted, which is the default: the model's template decides which thoughts it shows."""

    type: Literal["clear_thinking_20251015"]
    keep: only("all")  # type: ignore[valid-type]


class ContextManagement(WithoutNulls):
    edits: Listed[ContextEdit] | None = None


class Metadata(WithoutNulls):
    user_id: FairnessId | None = None


_STOP = re.compile(r"sampling_params\.stop((?:\[\d+\])?)")
_TOOL = re.compile(r"chat\.(tools\[\d+\])(?:\.(.*))?")


class AskedOfMessages(Asked):
    """What requests for an answer and for a token count share."""

    messages: Annotated[Listed[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: System | None = None
    stop_sequences: Listed[str] | None = None
    tools: Annotated[Listed[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    """Declared after structured_outputs, vLLM's field for the same, so that its validator can refuse both together."""
    output_format: JsonFormat | None = None
    """The former name of `output_config.format`, which some clients still use. Declared after it, too."""
    metadata: Metadata | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None

    # known fields that are refused unless they ask for nothing special
    service_tier: only("auto", "standard_only") = None  # type: ignore[valid-type]
    speed: only("standard") = None  # type: ignore[valid-type]
    container: only() = None  # type: ignore[valid-type]
    diagnostics: only() = None  # type: ignore[valid-type]
    inference_geo: only() = None  # type: ignore[valid-type]
    mcp_servers: only([]) = None  # type: ignore[valid-type]
    user_profile_id: only() = None  # type: ignore[valid-type]
    chat_template: only(instead=AT_START) = None  # type: ignore[valid-type]
    # fields of other routes
    n: only(1) = None  # type: ignore[valid-type]
    stop: only(instead="use stop_sequences") = None  # type: ignore[valid-type]
    response_format: only(instead="use output_config.format") = None  # type: ignore[valid-type]
    reasoning_effort: only(instead="use output_config.effort") = None  # type: ignore[valid-type]

    @cached_property
    def _placed(self) -> list[PlacedMessage]:
        return messages_of(self.system, self.messages)

    def prompts(self) -> list[Prompt]:
        return [[message.to_prompt() for message in self._placed]]

    def sampling(self) -> Sampling:
        sampling = super().sampling()
        if self.stop_sequences is not None:
            sampling["stop"] = self.stop_sequences
        if self._format is not None:
            sampling["structured_outputs"] = StructuredOutputsParams(json=self._format.schema_)
        if self.tools:
            sampling["tools"] = [tool.to_chat() for tool in self.tools]
            if (chosen := self.tool_choice) is not None:
                sampling["tool_choice"] = chosen.to_chat()
                sampling["parallel_tool_calls"] = not chosen.disable_parallel_tool_use
        if self.messages[-1].role == "assistant":
            sampling["continue_final_message"] = True
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables = self.thinking.template_kwargs()
            if self.thinking.type == "enabled" and self.thinking.budget_tokens is not None:
                sampling["thinking_token_budget"] = self.thinking.budget_tokens
                sampling["is_thinking_token_budget_target"] = True
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        if variables := variables | (self.chat_template_kwargs or {}):
            sampling["chat_template_kwargs"] = variables
        return sampling

    @property
    def fairness_id(self) -> str:
        return (self.metadata.user_id if self.metadata is not None else None) or super().fairness_id

    @property
    def _words(self) -> dict[str, str]:
        words = {"thinking_token_budget": "thinking.budget_tokens"}
        its_name = "output_format" if self.output_format is not None else "output_config.format"
        return words if self._format is None else {**words, "structured_outputs": its_name}

    def _name_of(self, field: str) -> str:
        if field in ("chat", "chat.messages"):
            return "messages"
        if field == "chat.tool_name":
            return "tool_choice.name"
        if field == "chat.continue_final_message":
            return f"messages[{len(self.messages) - 1}]"
        if (stop := _STOP.fullmatch(field)) is not None:
            return f"stop_sequences{stop[1]}"
        if (tool := _TOOL.fullmatch(field)) is not None:
            name = re.sub("^parameters", "input_schema", tool[2] or "")
            return f"{tool[1]}.{name}" if name else tool[1]
        return place_of(field, self._placed)

    @property
    def _format(self) -> JsonFormat | None:
        return self.output_format or (self.output_config.format if self.output_config is not None else None)

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(cls, value: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        if value is not None and value.type in ("any", "tool") and not info.data.get("tools"):
            raise ValueError("needs tools")
        return value

    @field_validator("output_config")
    @classmethod
    def _check_output_config(cls, value: OutputConfig | None, info: ValidationInfo) -> OutputConfig | None:
        if value is not None and value.format is not None:
            check_is_one_form(info, "format")
        return value

    @field_validator("output_format")
    @classmethod
    def _check_output_format(cls, value: JsonFormat | None, info: ValidationInfo) -> JsonFormat | None:
        if value is not None:
            check_is_one_form(info)
            if (config := info.data.get("output_config")) is not None and config.format is not None:
                raise ValueError("cannot be combined with output_config.format, its present name; give one of them")
        return value


class MessageRequest(AskedOfMessages):
    """POST /v1/messages."""

    max_tokens: NumTokens

    def sampling(self) -> Sampling:
        return {**super().sampling(), "max_tokens": self.max_tokens}
