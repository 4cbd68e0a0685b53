"""Tools in a chat's body, in OpenAI's format: those that may be called, and earlier calls. Pure.

The router checks their bounds.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo

from gateway.asked import Known


class CalledFunction(BaseModel):
    """Further fields are ignored: some clients send back what they parsed from the arguments."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    arguments: str | dict[str, Any] | None = None
    """A JSON object, as text or as an object."""


class Call(BaseModel):
    """A tool call in an assistant's message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Function(Known):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Only for the chat template: if calls are required, the schema of their arguments is enforced in any case."""


class ToolParam(Known):
    type: Literal["function"]
    function: Function


class ChosenFunction(Known):
    name: str


class ChosenTool(Known):
    type: Literal["function"] | None = None
    function: ChosenFunction


def tool_choice_of(chosen: type[BaseModel], shape: str) -> Any:
    """The type of a tool choice: a word, or a `chosen` tool, which has the given `shape` in errors. Errors are made
    here, where it is known which of the two was meant. The field must be declared after `tools`."""
    wanted = f'must be "none", "auto", "required" or {shape}'

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            try:
                return chosen.model_validate(value)
            except ValidationError as error:
                raise ValueError(f"{wanted}, is {json.dumps(value):.80}") from error
        if value not in (None, "none", "auto", "required"):
            raise ValueError(f"{wanted}, is {json.dumps(value):.80}")
        return value

    def check(value: Any, info: ValidationInfo) -> Any:
        if value not in (None, "none", "auto") and not info.data.get("tools"):
            raise ValueError("needs tools")
        return value

    return Annotated[Any, BeforeValidator(read), AfterValidator(check)]
