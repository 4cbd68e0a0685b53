"""Reads fields of a config.json; errors name the field. A null field counts as absent: the default is used."""

from __future__ import annotations

import math
from typing import Any


def integer(
    hf_config: dict[str, Any], field: str, *, least: int = 1, most: int | None = None, default: int | None = None
) -> int:
    """Raises `ValueError` if the value is missing without a default, no integer, below `least` or above `most`."""
    value = _value(hf_config, field, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"config.json: {field} must be an integer of at least {least}, is {value!r}")
    if most is not None and value > most:
        raise ValueError(f"config.json: {field} must be at most {most}, is {value}")
    return value


def number(hf_config: dict[str, Any], field: str, *, least: float = -math.inf, default: float | None = None) -> float:
    """Raises `ValueError` if the value is missing without a default, no finite number, or below `least`."""
    value = _value(hf_config, field, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"config.json: {field} must be a number, is {value!r}")
    if value < least:
        raise ValueError(f"config.json: {field} must be at least {least:g}, is {value!r}")
    return float(value)


def positive(hf_config: dict[str, Any], field: str, *, default: float | None = None) -> float:
    """A `number` above 0. Raises `ValueError` likewise."""
    value = number(hf_config, field, default=default)
    if value <= 0:
        raise ValueError(f"config.json: {field} must be above 0, is {value:g}")
    return value


def flag(hf_config: dict[str, Any], field: str, *, default: bool = False) -> bool:
    """Raises `ValueError` if the field is neither true nor false."""
    value = _value(hf_config, field, default)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {field} must be true or false, is {value!r}")
    return value


def section(hf_config: dict[str, Any], field: str) -> dict[str, Any]:
    """The fields of an object; none if it is absent. Raises `ValueError` if it is not a JSON object."""
    value = _value(hf_config, field, {})
    if not isinstance(value, dict):
        raise ValueError(f"config.json: {field} must be an object of fields, is {value!r}")
    return value


def one_of(hf_config: dict[str, Any], field: str, known: tuple[Any, ...]) -> Any:
    """The field's value; by default the first of `known`. Raises `ValueError` if it is not in `known`."""
    value = _value(hf_config, field, known[0])
    if value not in known:
        names = ", ".join(str(each) for each in known)
        raise ValueError(f"config.json: {field} {value!r} is not supported; known: {names}")
    return value


def _value(hf_config: dict[str, Any], field: str, default: Any) -> Any:
    value = hf_config.get(field)
    return default if value is None else value
