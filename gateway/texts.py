"""Texts in bodies, and whose they are: what all routes share. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Tag

from gateway.asked import Listed

_Kind = TypeVar("_Kind")


class Part(BaseModel, Generic[_Kind]):
    """Of a text, with what answers have beside it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: _Kind
    text: str


def text_or_parts(kind: Any) -> Any:
    """The type of a text, or of a list of parts of that `kind`, a Literal. It is said here, where it is known which of
    the two was meant, what is wrong with it, and of a part, what is wrong with that part."""
    types = get_args(kind)
    names = " or ".join(f"'{each}'" for each in types)

    def check(value: Any) -> Any:
        if isinstance(value, list) and all(isinstance(part, dict) for part in value):
            if others := [part.get("type") for part in value if part.get("type") not in types]:
                raise ValueError(f"may have parts of type {names} alone, has one of type {others[0]!r:.60}")
        elif not isinstance(value, str):
            raise ValueError(f"must be a text, or a list of parts of type {names}")
        return value

    return Annotated[
        Annotated[str, Tag("str")] | Annotated[Listed[Part[kind]], Tag("[parts]")],
        Discriminator(lambda value: "str" if isinstance(value, str) else "[parts]"),
        BeforeValidator(check),
    ]


def text_of(content: str | Sequence[Part[Any]]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def role_of(*roles: str) -> Any:
    """The type of a role: one of these."""

    def check(value: str) -> str:
        if value not in roles:
            raise ValueError(f"must be one of {', '.join(roles)}, is {value[:40]!r}")
        return value

    return Annotated[str, AfterValidator(check)]
