"""Reads fields of a config.json, and names the one that does not fit."""

from __future__ import annotations

from typing import Any


def integer(hf_config: dict[str, Any], field: str, least: int = 1) -> int:
    """Raises `ValueError` where the field is missing, no integer, or below `least`."""
    value = hf_config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"config.json: {field} must be an integer of at least {least}, is {value!r}")
    return value


def number(hf_config: dict[str, Any], field: str, default: float | None = None) -> float:
    """The field, or `default` where it is absent or null. Raises `ValueError` where it is no number."""
    value = hf_config.get(field)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"config.json: {field} must be a number, is {value!r}")
    return float(value)


def one_of(hf_config: dict[str, Any], field: str, known: tuple[Any, ...]) -> Any:
    """The field, or the first of `known` where it is absent or null. Raises `ValueError` where it is another."""
    value = hf_config.get(field)
    if value is None:
        return known[0]
    if value not in known:
        names = ", ".join(str(each) for each in known)
        raise ValueError(f"config.json: {field} {value!r} is not supported; known: {names}")
    return value
