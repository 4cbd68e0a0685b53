"""What callers of the Python API give, checked: texts, numbers, names. Errors say what was wanted and what came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any


def check_text(name: str, text: object) -> None:
    """Raises `ValueError` where it is none, or has a half of a pair of surrogates."""
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
    """Whether it is an integer, of numpy or not. True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    """Whether it can be read from its beginning more than once, and is no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def without_array(value: Any) -> Any:
    """A list instead of an array or tensor, a number instead of one of its elements; all else as it is."""
    if isinstance(value, memoryview | type) or not hasattr(value, "tolist"):
        return value
    return value.tolist()


def check_names(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raises `TypeError`, as Python does for a name that a function has not, and says which there are."""
    for name in given:
        if name not in known:
            close = get_close_matches(name, known)
            there = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
            raise TypeError(f"{what} has no {name}; {there}")
