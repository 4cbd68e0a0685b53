"""Bounds of the numbers among a process' flags: declared with their help texts, and checked for all flags.

    retry_s: float = number(5.0, "Wait so long. 0: never.", least=0.1, zero="never")    a dataclass' field
    check_numbers(args)                                                                 ValueError: retry_s must be 0
                                                                                        (never), or at least 0.1 …

NaN and infinity are always mistakes, and a tiny number would turn a wait into a busy loop.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Bounds:
    least: float
    most: float = math.inf
    zero: str = ""
    """What 0 means, if it is allowed although it is below `least`."""

    def has(self, value: float) -> bool:
        """Whether `value` is within the bounds; NaN is not."""
        return (bool(self.zero) and value == 0) or (self.least <= value <= self.most and value < math.inf)

    def said(self, is_float: bool) -> str:
        """The bounds as text, to follow "must be"."""
        zero = f"0 ({self.zero}), or " if self.zero else ""
        if self.most < math.inf:
            return f"{zero}in [{self.least}, {self.most}]"
        return f"{zero}at least {self.least}{' and finite' if is_float else ''}"


def number(default: float, help: str, *, least: float, most: float = math.inf, zero: str = "") -> Any:
    """A dataclass field for an int or float flag."""
    return field(default=default, metadata={"help": help, "bounds": Bounds(least=least, most=most, zero=zero)})


def check_numbers(args: Any) -> None:
    """Raise `ValueError` naming the first field of the dataclass `args` that is out of its bounds."""
    for each in fields(args):
        value = getattr(args, each.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            bounds = _bounds_of(each)
            if not bounds.has(value):
                raise ValueError(f"{each.name} must be {bounds.said(isinstance(value, float))}, is {value}")


def _bounds_of(each: Field[Any]) -> Bounds:
    assert "bounds" in each.metadata, f"{each.name}: a flag's number is made by `number`, with its bounds"
    bounds: Bounds = each.metadata["bounds"]
    return bounds
