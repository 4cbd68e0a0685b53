"""Tools in OpenAI's words: what a chat's body says of those that may be called, and of calls that were. Pure.

Their bounds are the router's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo

from gateway.asked import Known


class CalledFunction(BaseModel):
    """With what clients have beside, and send back: what they made of the arguments."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    arguments: str | dict[str, Any] | None = None
    """A JSON object, as text, or what it says."""


class Call(BaseModel):
    """Of a tool, in an assistant's message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Function(Known):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """For the chat template: arguments of calls that must be made are held to their schema, strict or not."""


class ToolParam(Known):
    type: Literal["function"]
    function: Function


class ChosenFunction(Known):
    name: str


class ChosenTool(Known):
    type: Literal["function"] | None = None
    function: ChosenFunction


def tool_choice_of(chosen: type[BaseModel], shape: str) -> Any:
    """The type of a word, or of which tool is `chosen`, as a body of `shape` says it. Refused here, where it is known
    which of the two was meant. It comes after `tools`."""
    wanted = f'must be "none", "auto", "required" or {shape}'

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            try:
                return chosen.model_validate(value)
            except ValidationError as error:
                raise ValueError(wanted) from error
        if value not in (None, "none", "auto", "required"):
            raise ValueError(wanted)
        return value

    def check(value: Any, info: ValidationInfo) -> Any:
        if value not in (None, "none", "auto") and not info.data.get("tools"):
            raise ValueError("needs tools")
        return value

    return Annotated[Any, BeforeValidator(read), AfterValidator(check)]
