"""The report of a bench: as JSON, CSV, and a table for a terminal. Pure: runs in, texts out; `save` writes them."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tandem
from tandem.bench.args import BenchArgs
from tandem.bench.outcome import BROKEN_STREAM, Outcome
from tandem.bench.summary import Summary, is_good, max_good_rate
from tandem.tables import Table

NO_PLOTS = "no plots: they need matplotlib (pip install 'tandem-llm[bench]', or pip install matplotlib)"
SECRET_FLAGS = ("api_key",)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run at one rate."""

    summary: Summary
    outcomes: list[Outcome]
    about: dict[str, Any] = field(default_factory=dict)
    """Facts about the workload."""
    num_unfinished: int = 0
    """Requests without an outcome: the bench was interrupted before they ended."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The runs at all rates of a bench."""

    args: BenchArgs
    model: str
    runs: list[Run]
    at_s: float = field(default_factory=time.time)
    """When it ended."""

    @property
    def summaries(self) -> list[Summary]:
        return [run.summary for run in self.runs]

    @property
    def good_rate(self) -> float | None:
        """The highest rate at which nearly all answers were good; interrupted runs do not count."""
        return max_good_rate([run.summary for run in self.runs if not run.num_unfinished])

    @property
    def target(self) -> str:
        return self.args.address if self.args.backend == "grpc" else self.args.base_url

    @property
    def name(self) -> str:
        """Name of its files, without the suffix."""
        given = self.args.result_filename.removesuffix(".json")
        return given or f"bench-{self.args.backend}-{time.strftime('%Y-%m-%d-%H%M%S', time.localtime(self.at_s))}"

    @property
    def problem(self) -> str:
        """Why the numbers cannot be trusted, in one line; empty if they can."""
        if not any(summary.completed for summary in self.summaries):
            return f"no request was answered: {first_error(self.runs)}"
        num_broken = sum(summary.errors.get(BROKEN_STREAM, 0) for summary in self.summaries)
        if num_broken:
            return f"{num_broken} answers were not exact: {first_error(self.runs, BROKEN_STREAM)}"
        for run in self.runs:
            if run.num_unfinished:
                total = len(run.outcomes) + run.num_unfinished
                rate = rate_text(run.summary.request_rate)
                return f"interrupted (requests/s: {rate}): {len(run.outcomes)} of {total} had ended, only these count"
        return ""


def first_error(runs: Sequence[Run], code: str = "") -> str:
    """The first error with `code`, or with any code."""
    outcomes = (outcome for run in runs for outcome in run.outcomes if outcome.code)
    return next((f"{o.code}: {o.message}".rstrip(": ") for o in outcomes if code in ("", o.code)), "nothing was sent")


def to_dict(report: Report) -> dict[str, Any]:
    """The report as plain values for JSON."""
    flags = {name: value for name, value in vars(report.args).items() if name not in SECRET_FLAGS}
    return {
        "benchmark": "tandem bench",
        "tandem_version": tandem.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(report.at_s)),
        "label": report.args.label,
        "backend": report.args.backend,
        "target": report.target,
        "model": report.model,
        "goodput_objectives_ms": report.args.objectives,
        "goodput_rate": report.good_rate,
        "args": flags,
        "results": [
            {**run.summary.to_dict(), "unfinished": run.num_unfinished, "workload": run.about} for run in report.runs
        ],
    }


def summary_csv(report: Report) -> str:
    """One line for each rate."""
    rows = [
        run.summary.to_dict() | {"errors": json.dumps(run.summary.errors), "unfinished": run.num_unfinished}
        for run in report.runs
    ]
    return _csv(rows)


def requests_csv(report: Report) -> str:
    """One line for each request, in milliseconds and tokens."""
    rows = [
        {"request_rate": f"{run.summary.request_rate:g}", **_request_row(outcome, report.args.objectives)}
        for run in report.runs
        for outcome in run.outcomes
    ]
    return _csv(rows)


def _request_row(outcome: Outcome, objectives: dict[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "due_s": round(outcome.due_s, 6),
        "sent_s": round(outcome.sent_s, 6),
        "ended_s": round(outcome.ended_s, 6),
        "status": "answered" if outcome.is_answered else "refused" if outcome.is_refused else "failed",
        "code": outcome.code,
        "prompt_tokens": "", "cached_tokens": "", "output_tokens": "",
        "ttft_ms": "", "tpot_ms": "", "max_itl_ms": "", "e2el_ms": "", "is_good": "",
        "message": outcome.message,
    }  # fmt: skip
    if outcome.usage:
        row |= {
            "prompt_tokens": outcome.usage.prompt_tokens,
            "cached_tokens": "" if outcome.usage.cached_tokens is None else outcome.usage.cached_tokens,
            "output_tokens": outcome.usage.completion_tokens,
        }
    if outcome.is_answered:
        row |= {f"{name}_ms": round(getattr(outcome, f"{name}_ms"), 3) for name in ("ttft", "e2el")}
        if outcome.num_tokens > 1:  # one token has no time per further token
            row["tpot_ms"] = round(outcome.tpot_ms, 3)
        if outcome.itl_ms:
            row["max_itl_ms"] = round(max(outcome.itl_ms), 3)
        row["is_good"] = int(is_good(outcome, objectives)) if objectives else ""
    return row


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV, with the columns of all rows: a rate without answers has no latencies."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def table(runs: Sequence[Run]) -> Table:
    """The table for people: one column for each rate."""
    summaries = [run.summary for run in runs]
    rows = [
        _row("answered", "{}", (s.completed for s in summaries)),
        _row("refused", "{}", (s.refused for s in summaries)),
        _row("failed", "{}", (s.failed for s in summaries)),
    ]
    for code in dict.fromkeys(code for s in summaries for code in s.errors):
        rows.append(_row(f"  {code}", "{}", (s.errors.get(code, 0) for s in summaries)))
    if any(run.num_unfinished for run in runs):
        rows.append(_row("unfinished", "{}", (run.num_unfinished for run in runs)))
    rows += [
        _row("answers/s", "{:.2f}", (s.request_throughput for s in summaries)),
        _row("output tokens/s", "{:.1f}", (s.output_throughput for s in summaries)),
        _row("all tokens/s", "{:.1f}", (s.total_token_throughput for s in summaries)),
        _row("prefix hits", "{:.1f} %", (_percent(s.prefix_hit_rate) for s in summaries)),
    ]
    if any(s.good_share is not None for s in summaries):
        rows += [
            _row("good answers/s", "{:.2f}", (s.request_goodput for s in summaries)),
            _row("good, of all", "{:.1f} %", (_percent(s.good_share) for s in summaries)),
        ]
    rows += _latency_rows(summaries)
    rows.append(_row("late sending, ms", "{:.1f}", (s.max_send_lag_ms for s in summaries)))
    return Table(headers=("requests/s", *(f">{rate_text(s.request_rate)}" for s in summaries)), rows=rows)


def _latency_rows(summaries: Sequence[Summary]) -> Iterator[tuple[str, ...]]:
    """One row for each percentile of each metric; a rate without answers has no numbers."""
    for metric in dict.fromkeys(metric for s in summaries for metric in s.spreads):
        percentiles_of_each = [s.spreads[metric].percentiles if metric in s.spreads else {} for s in summaries]
        for percent in next(filter(None, percentiles_of_each), {}):
            values = (percentiles.get(percent) for percentiles in percentiles_of_each)
            yield _row(f"p{percent:g} {metric.upper()}, ms", "{:.1f}", values)


def _row(name: str, form: str, values: Iterable[float | None]) -> tuple[str, ...]:
    """One row; a missing number is a dash."""
    return name, *("-" if value is None else form.format(value) for value in values)


def rate_text(rate: float) -> str:
    return "all at once" if rate == float("inf") else f"{rate:.4g}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
