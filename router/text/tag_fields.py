"""The fields of a structural tag's JSON, checked. Errors name a field by its place in the JSON, `at`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.calls.text_values import no_number

MAX_SHOWN_CHARS = 80


def read_tag(text: str) -> tuple[bool, Any]:
    """Whether the tag has the old form, and its format."""
    try:
        asked = json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(asked, dict):
        raise ValueError(f"must be an object, is {shown(asked)}")
    if asked.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"type must be structural_tag, is {shown(asked['type'])}")
    is_old = "structures" in asked
    check_names(asked, "", ("structures", "triggers") if is_old else ("format",))
    if is_old:
        return True, {**asked, "type": "triggered_tags"}
    if "format" not in asked:
        raise ValueError("must have format, or (older form) structures and triggers")
    return False, asked["format"]


def within(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def shown(value: Any) -> str:
    return _sent(json.dumps(value, ensure_ascii=False)[:MAX_SHOWN_CHARS])


def _sent(text: str) -> str:
    """`text` with half characters escaped: JSON may contain them, but no message can carry them."""
    return text.encode(errors="backslashreplace").decode()


def check_names(asked: Mapping[str, Any], at: str, names: Sequence[str]) -> None:
    for name in asked:
        if name not in (*names, "type"):
            known = ", ".join(("type", *names))
            raise ValueError(f"{within(at, _sent(name[:MAX_SHOWN_CHARS]))} is not known; known are {known}")


def object_of(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{at} must be an object, is {shown(value)}")
    return value


def list_of(value: Any, at: str, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{at} must be a list, is {shown(value)}")
    if not 1 <= len(value) <= most:
        raise ValueError(f"{at} must have 1 to {most} entries, has {len(value)}")
    return value


def flag_of(asked: Mapping[str, Any], at: str, name: str) -> bool:
    value = asked.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{within(at, name)} must be true or false, is {shown(value)}")
    return value


def text_of(value: Any, at: str, most: int, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{at} must be a text, is {shown(value)}")
    if not value and not may_be_empty:
        raise ValueError(f"{at} must not be empty")
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{at} must be valid Unicode, has half of a surrogate pair") from error
    if num_bytes > most:
        raise ValueError(f"{at} must have at most {most} bytes, has {num_bytes}")
    return value
