"""Flags of benchmarks, and what is wrong with them: a sentence and exit code 2, as `tandem`'s commands have it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from benchmarks.peers import PeerMissing

COUNT = click.IntRange(1)


class Positive(click.FloatRange):
    """A number above 0. NaN, which is neither below nor above it, is none."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("nan is not a number", param, ctx)
        return number


class Numbers(click.ParamType):
    """Numbers of type `of` with commas between them, each above 0, as a tuple."""

    name = "numbers"

    def __init__(self, of: type[int] | type[float] = int) -> None:
        self._of = of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(self._of(part) for part in value.split(","))
        except ValueError:
            self.fail(f"must be numbers with commas between them, is {value!r}", param, ctx)
        if not all(number > 0 for number in numbers):  # NaN, too
            self.fail(f"must be more than 0, is {value!r}", param, ctx)
        return numbers


@contextmanager
def wrong_usage(flag: str = "") -> Iterator[None]:
    """Around what raises where it is asked for what cannot be, or is not there: one sentence, of `flag` if given."""
    try:
        yield
    except (ValueError, OSError, PeerMissing) as error:
        raise click.UsageError(f"{flag}: {error}" if flag else str(error)) from error
