"""Checks of what callers of the Python API give: texts, numbers, names. Errors say what was wanted and what was
given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any


def check_text(name: str, text: object) -> None:
    """Raise `ValueError` if `text` is not a text, or contains half of a surrogate pair."""
    if not isinstance(text, str):
        raise ValueError(f"{name}: must be a text, is {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: has an invalid character at {error.start}") from error


def check_salt(name: str, cache_salt: object) -> None:
    check_text(name, cache_salt)
    if not cache_salt:
        raise ValueError(f"{name}: must not be empty; without one, leave it out")


def is_whole(value: object) -> bool:
    """Whether `value` is an integer, Python's or numpy's. True and False do not count."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    """Whether `value` is a sequence other than a text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def without_array(value: Any) -> Any:
    """Turn an array or tensor into a list, and an element of one into a number; return anything else as it is."""
    if isinstance(value, memoryview | type) or not hasattr(value, "tolist"):
        return value
    return value.tolist()


def check_names(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise `TypeError` for an unknown name, as Python does for an unknown argument, and suggest known ones."""
    for name in given:
        if name not in known:
            close = get_close_matches(name, known)
            there = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)}"
            raise TypeError(f"{what} has no {name}; {there}")
