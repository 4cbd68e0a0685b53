"""Texts in bodies, their roles, and lists of parts that may replace a text: what all routes share. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from gateway.asked import Listed
from gateway.wording import kind_of

_Kind = TypeVar("_Kind")


class Part(BaseModel, Generic[_Kind]):
    """A part of a text. Further fields, which answers contain, are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: _Kind
    text: str


def text_or_parts(kind: Any) -> Any:
    """The type of a text, or of a list of parts of that `kind`, a Literal. Errors are made here, where it is known
    which of the two was meant: they name what is wrong with the value or with one part."""
    types = get_args(kind)
    names = " or ".join(f"'{each}'" for each in types)

    def check(value: Any) -> Any:
        if isinstance(value, list) and all(isinstance(part, dict) for part in value):
            if others := [part.get("type") for part in value if part.get("type") not in types]:
                raise ValueError(f"may only have parts of type {names}, has one of type {others[0]!r:.60}")
        elif not isinstance(value, str):
            raise ValueError(f"must be a text, or a list of parts of type {names}, is {kind_of(value)}")
        return value

    return _text_or(Listed[Part[kind]], check)


def text_or_objects(
    one: str,
    kinds: Mapping[str, Any],
    *,
    untyped: str = "",
    instead: Mapping[str, str] = MappingProxyType({}),
    min_length: int | None = None,
    max_length: int | None = None,
) -> Any:
    """The type of a text, or of a list of objects, each of one of the `kinds`, chosen by its `type`. `one`: the name of
    such an object in errors. `untyped`: the kind of an object that has a role but no type. `instead`: what a
    client can do instead of giving an object of a certain other type."""

    def tag_of(value: Any) -> str:
        kind = None
        if isinstance(value, dict):
            kind = value.get("type") or (untyped if "role" in value else None)
        return f"[{kind}]" if isinstance(kind, str) and kind in kinds else "[other]"

    def refuse(value: Any) -> Any:
        told = f"of type {json.dumps(value.get('type')):.60}" if isinstance(value, dict) else f"{json.dumps(value):.60}"
        kind = value.get("type") if isinstance(value, dict) else None
        told += f"; {instead[kind]}" if isinstance(kind, str) and kind in instead else ""
        raise ValueError(f"must be {one} of one of the types {', '.join(kinds)}, is {told}")

    def check(value: Any) -> Any:
        if not isinstance(value, str | list):
            raise ValueError(f"must be a text, or a list of {one.split()[-1]}s, is {json.dumps(value):.40}")
        return value

    other: Any = Annotated[Any, BeforeValidator(refuse), WithJsonSchema({"not": {}}), Tag("[other]")]
    tagged = [Annotated[kind, Tag(f"[{name}]")] for name, kind in kinds.items()]
    union = Annotated[reduce(or_, [*tagged, other]), Discriminator(tag_of)]  # type: ignore[valid-type]
    return _text_or(Annotated[Listed[union], Field(min_length=min_length, max_length=max_length)], check)  # type: ignore[valid-type]


def _text_or(many: Any, check: Callable[[Any], Any]) -> Any:
    """The type of a text, or of a list, which `many` is. `check`: raises `ValueError` for what is neither."""
    return Annotated[
        Annotated[str, Tag("str")] | Annotated[many, Tag("[many]")],
        Discriminator(lambda value: "str" if isinstance(value, str) else "[many]"),
        BeforeValidator(check),
    ]


def text_of(content: str | Sequence[Part[Any]]) -> str:
    return "".join(texts_of(content))


def texts_of(content: str | Sequence[Part[Any]]) -> list[str]:
    """The parts of a content, which the router joins as the chat template does."""
    return [content] if isinstance(content, str) else [part.text for part in content]


def content_of(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """A message's content, as `AsyncClient` takes it."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def role_of(*roles: str) -> Any:
    """The type of a role that must be one of `roles`."""

    def check(value: str) -> str:
        if value not in roles:
            raise ValueError(f"must be one of {', '.join(roles)}, is {value[:40]!r}")
        return value

    return Annotated[str, AfterValidator(check)]
