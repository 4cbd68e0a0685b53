"""Flag types of benchmarks. A wrong flag ends a benchmark with one sentence and exit code 2, like `tandem`'s
commands."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from benchmarks.peers import PeerMissing

COUNT = click.IntRange(1)


class Positive(click.FloatRange):
    """A number above 0. Refuses NaN, which the range check accepts."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("nan is not a number", param, ctx)
        return number


class Numbers(click.ParamType):
    """Comma-separated numbers of type `of`, each above 0, as a tuple."""

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
    """Turn errors about impossible or missing things into a usage error of one sentence, about `flag` if given."""
    try:
        yield
    except (ValueError, OSError, PeerMissing) as error:
        raise click.UsageError(f"{flag}: {error}" if flag else str(error)) from error
