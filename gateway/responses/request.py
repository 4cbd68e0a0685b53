"""Request bodies of /v1/responses, with OpenAI's fields and vLLM's further ones. Pure, as `gateway.requests`."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gateway.asked import (
    AT_START,
    MAX_TOOLS,
    Asked,
    Known,
    Listed,
    Mapped,
    NumAlternatives,
    NumTokens,
    WithoutNulls,
    check_is_one_form,
    only,
)
from gateway.effort import Budget, Effort, effort_variables
from gateway.placed import PlacedMessage, place_of
from gateway.responses.input import SAY_AGAIN, Input, messages_of, says_something
from gateway.tools import tool_choice_of
from tandem.requests import Prompt, Sampling
from tandem.structured_outputs import StructuredOutputsParams

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""With the second, stateless clients of other servers carry thoughts along, encrypted. Here the answer's reasoning item
contains the whole thought, and is read from there if it is sent back."""
_NOTHING_KEPT = "this server stores no responses"


class FunctionTool(WithoutNulls):
    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Only for the chat template: if calls are required, the schema of their arguments is enforced in any case."""
    defer_loading: only(False) = None  # type: ignore[valid-type]

    @field_validator("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        if value != "function":
            raise ValueError(f"must be 'function', is {value[:60]!r}")
        return value

    def to_chat(self) -> dict[str, Any]:
        """The tool in the format of chats."""
        function = self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
        return {"type": "function", "function": function}

    def to_response(self) -> dict[str, Any]:
        """The tool as the answer repeats it."""
        return self.model_dump(include={"type", "name", "description", "parameters", "strict"})


class ChosenTool(Known):
    type: Literal["function"]
    name: str


class TextFormat(WithoutNulls):
    """The format of the answer. A schema is enforced, whatever `strict` says."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema must be given with type 'json_schema', and only then")
        return self

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """None: any text."""
        if self.schema_ is not None:
            return StructuredOutputsParams(json=self.schema_)
        return StructuredOutputsParams(json_object=True) if self.type == "json_object" else None


class TextConfig(WithoutNulls):
    format: TextFormat | None = None
    verbosity: only("medium") = None  # type: ignore[valid-type]


class StreamOptions(WithoutNulls):
    include_obfuscation: bool | None = None
    """OpenAI's padding against observers of lengths. It has no effect here."""


class Reasoning(WithoutNulls):
    effort: Effort | None = None
    summary: only("auto") = None  # type: ignore[valid-type]
    """Accepted without effect: thoughts are returned as they are, without a summary."""
    generate_summary: only("auto") = None  # type: ignore[valid-type]


def _include(values: list[str]) -> list[str]:
    if unknown := [each for each in values if each not in INCLUDABLE]:
        raise ValueError(f"may only have {' and '.join(INCLUDABLE)}, has {unknown[0][:80]!r}")
    return values


_TOOL = re.compile(r"chat\.(tools\[\d+\].*)")


class ResponseRequest(Asked):
    """POST /v1/responses."""

    input: Input
    instructions: str | None = None
    max_output_tokens: NumTokens | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    """Declared after structured_outputs, vLLM's field for the same, so that its validator can refuse both together."""
    tools: Annotated[Listed[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: tool_choice_of(ChosenTool, '{"type": "function", "name": …}') = None  # type: ignore[valid-type]
    parallel_tool_calls: bool | None = None
    include: Annotated[Listed[str], AfterValidator(_include)] | None = None
    top_logprobs: NumAlternatives | None = None
    metadata: Mapped[str, str] | None = None
    reasoning: Reasoning | None = None
    client_metadata: Any = None
    """What Codex tells OpenAI about itself. No effect here."""
    truncation: Literal["auto", "disabled"] | None = None
    """What happens to input that is too long for the context. "auto": only its end is kept, as in vLLM."""
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Budget | None = None

    # known fields that are refused unless they ask for nothing special
    store: only(False, instead=_NOTHING_KEPT) = None  # type: ignore[valid-type]
    previous_response_id: only(instead=SAY_AGAIN) = None  # type: ignore[valid-type]
    conversation: only(instead=SAY_AGAIN) = None  # type: ignore[valid-type]
    background: only(False, instead=_NOTHING_KEPT) = None  # type: ignore[valid-type]
    background_options: only() = None  # type: ignore[valid-type]
    prompt: only() = None  # type: ignore[valid-type]
    max_tool_calls: only() = None  # type: ignore[valid-type]
    context_management: only([]) = None  # type: ignore[valid-type]
    moderation: only() = None  # type: ignore[valid-type]
    image: only() = None  # type: ignore[valid-type]
    access_programs: only() = None  # type: ignore[valid-type]
    prompt_cache_options: only() = None  # type: ignore[valid-type]
    prompt_cache_retention: only("in_memory") = None  # type: ignore[valid-type]
    chat_template: only(instead=AT_START) = None  # type: ignore[valid-type]
    include_reasoning: only(True) = None  # type: ignore[valid-type]
    enable_response_messages: only(False) = None  # type: ignore[valid-type]
    previous_input_messages: only() = None  # type: ignore[valid-type]
    # fields of other routes
    n: only(1) = None  # type: ignore[valid-type]
    messages: only(instead="use input") = None  # type: ignore[valid-type]
    max_tokens: only(instead="use max_output_tokens") = None  # type: ignore[valid-type]
    max_completion_tokens: only(instead="use max_output_tokens") = None  # type: ignore[valid-type]
    response_format: only(instead="use text.format") = None  # type: ignore[valid-type]
    reasoning_effort: only(instead="use reasoning.effort") = None  # type: ignore[valid-type]
    prompt_logprobs: only() = None  # type: ignore[valid-type]
    return_token_ids: only(False) = None  # type: ignore[valid-type]
    return_tokens_as_token_ids: only(False) = None  # type: ignore[valid-type]
    truncate_prompt_tokens: only(instead='use truncation: "auto"') = None  # type: ignore[valid-type]

    @cached_property
    def _messages(self) -> list[PlacedMessage]:
        return messages_of(self.instructions, self.input)

    def prompts(self) -> list[Prompt]:
        return [[message.to_prompt() for message in self._messages]]

    def sampling(self) -> Sampling:
        sampling = super().sampling()
        if self.max_output_tokens is not None:
            sampling |= {"max_tokens": self.max_output_tokens, "is_max_tokens_target": True}
        if self._held_to is not None:
            sampling["structured_outputs"] = self._held_to
        if self.thinking_token_budget is not None:
            sampling["thinking_token_budget"] = self.thinking_token_budget
        if self.truncation == "auto":
            sampling["truncate_prompt_tokens"] = -1
        if self.wants_logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        if self.tools:
            chosen = self.tool_choice
            sampling["tools"] = [tool.to_chat() for tool in self.tools]
            if isinstance(chosen, ChosenTool):
                chosen = {"type": "function", "function": {"name": chosen.name}}
            sampling["tool_choice"] = chosen
            sampling["parallel_tool_calls"] = self.parallel_tool_calls
        effort = None if self.reasoning is None else self.reasoning.effort
        if variables := effort_variables(effort) | (self.chat_template_kwargs or {}):
            sampling["chat_template_kwargs"] = variables
        return sampling

    @property
    def _words(self) -> dict[str, str]:
        of_form = {} if self._held_to is None else {"structured_outputs": "text.format"}
        return {"max_tokens": "max_output_tokens", **of_form}

    def _name_of(self, field: str) -> str:
        """As `place_of`: a message's name is that of the item that it comes from."""
        if field in ("chat", "chat.messages"):
            return "input"
        if field == "sampling_params.logprobs":
            return "top_logprobs"
        if (tool := _TOOL.fullmatch(field)) is not None:
            return tool[1]
        return place_of(field, self._messages)

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def _held_to(self) -> StructuredOutputsParams | None:
        asked = self.text.format if self.text is not None else None
        return None if asked is None else asked.structured_outputs()

    @field_validator("input")
    @classmethod
    def _check_input(cls, value: Any) -> Any:
        if not says_something(value):
            raise ValueError("must have at least one item with content")
        return value

    @field_validator("text")
    @classmethod
    def _check_text(cls, value: TextConfig | None, info: ValidationInfo) -> TextConfig | None:
        if value is not None and value.format is not None and value.format.type != "text":
            check_is_one_form(info, "format")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and LOGPROBS not in (info.data.get("include") or ()):
            raise ValueError(f'needs include: ["{LOGPROBS}"]')
        return value
