"""A measured number with the device's limit and our target, and a table of such rows. Pure.

Two kinds of bounds: a *limit* is what the device can do, and `target` the share of it that we aim at; `at_most` and
`at_least` are bounds of the number itself. Missing a target is a result, missing the bound of a check is a failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

TIME_UNITS = ("ms",)
"""Units of which less is better."""


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    value: float | None
    """None: it could not be measured, and `note` says why."""
    unit: str
    limit: float | None = None
    """What the device could do, in the same unit."""
    target: float | None = None
    """The share of the limit that we aim at."""
    at_most: float | None = None
    at_least: float | None = None
    is_check: bool = False
    """A number outside its bounds means that the code is wrong, not slow."""
    group: str = ""
    """Rows with the same group are alternatives: the best one is marked."""
    note: str = ""

    @property
    def share(self) -> float | None:
        """Share of the limit. For times, the limit divided by the value."""
        if self.limit is None or not self.value:
            return None
        return self.limit / self.value if self.unit in TIME_UNITS else self.value / self.limit

    @property
    def is_met(self) -> bool | None:
        """Whether all bounds are kept; None without bounds. A NaN keeps none."""
        kept = []
        if self.target is not None and self.share is not None:
            kept.append(self.share >= self.target)
        if self.at_most is not None:
            kept.append(self.value is not None and self.value <= self.at_most)
        if self.at_least is not None:
            kept.append(self.value is not None and self.value >= self.at_least)
        return all(kept) if kept else None

    @property
    def is_wrong(self) -> bool:
        return self.is_check and self.is_met is False

    def to_dict(self) -> dict[str, Any]:
        found = {name: value for name, value in asdict(self).items() if value is not None and value != ""}
        return found | {"value": self.value, "share": self.share, "is_met": self.is_met}


def best_of_groups(rows: Iterable[Row]) -> set[str]:
    """The `what` of the best row of each group."""
    best: dict[str, Row] = {}
    for row in rows:
        if not row.group or row.value is None:
            continue
        other = best.get(row.group)
        if other is None or _is_better(row, other):
            best[row.group] = row
    return {row.what for row in best.values()}


def _is_better(row: Row, other: Row) -> bool:
    assert row.value is not None
    assert other.value is not None
    return row.value < other.value if row.unit in TIME_UNITS else row.value > other.value


def table(rows: Sequence[Row]) -> list[str]:
    """One aligned line for each row."""
    best = best_of_groups(rows)
    width = max((len(row.what) for row in rows), default=0)
    return [_line(row, width, row.what in best) for row in rows]


def _line(row: Row, width: int, is_best: bool) -> str:
    value = "-" if row.value is None else _number(row.value)
    parts = [f"{row.what:<{width}} {value:>12} {row.unit:<8}"]
    if row.share is not None:
        parts.append(f"limit {_number(row.limit or 0.0):>10}, {row.share:>4.0%} of it")
    bounds = []
    if row.target is not None and row.share is not None:
        bounds.append(f"aim {row.target:.0%}")
    if row.at_most is not None:
        bounds.append(f"{'must be' if row.is_check else 'aim'} <= {row.at_most:.3g}")
    if row.at_least is not None:
        bounds.append(f"{'must be' if row.is_check else 'aim'} >= {row.at_least:.3g}")
    if bounds:
        verdict = {True: "met", False: "WRONG" if row.is_check else "missed"}[bool(row.is_met)]
        parts.append(f"{', '.join(bounds)}: {verdict}")
    if is_best:
        parts.append("<- best")
    if row.note:
        parts.append(row.note)
    return "  ".join(parts).rstrip()


def _number(value: float) -> str:
    return f"{value:,.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2e}"
