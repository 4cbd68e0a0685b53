"""What the numbers among a process' flags may be: said beside their help, checked for all of them.

    retry_s: float = number(5.0, "Wait so long. 0: never.", least=0.1, zero="never")    a dataclass' field
    check_numbers(args)                                                                 ValueError: retry_s must be 0
                                                                                        (never), or at least 0.1 …

A number that is not a number, or has no end, is never meant; one that is next to nothing makes a loop of a wait.
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
    """What 0 means, if it is allowed though it is less."""

    def has(self, value: float) -> bool:
        """Not of NaN."""
        return (bool(self.zero) and value == 0) or (self.least <= value <= self.most and value < math.inf)

    def said(self, is_float: bool) -> str:
        """After "must be"."""
        zero = f"0 ({self.zero}), or " if self.zero else ""
        if self.most < math.inf:
            return f"{zero}in [{self.least}, {self.most}]"
        return f"{zero}at least {self.least}{' and finite' if is_float else ''}"


def number(default: float, help: str, *, least: float, most: float = math.inf, zero: str = "") -> Any:
    """A dataclass' field of an int or a float that becomes a flag."""
    return field(default=default, metadata={"help": help, "bounds": Bounds(least=least, most=most, zero=zero)})


def check_numbers(args: Any) -> None:
    """Raises `ValueError` naming the first field of the dataclass `args` that is out of its bounds."""
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
