"""Replays real traffic from traces in the two published formats. Pure, except for `read_trace`.

    Mooncake (JSON lines)  timestamp (ms), input_length, output_length, hash_ids: one for each 512 prompt tokens
    Azure (CSV)            TIMESTAMP, ContextTokens, GeneratedTokens

Traces do not contain the text. Mooncake's hash ids tell which prompts begin alike: every id stands for the same tokens
wherever it occurs, so that the shared prefixes are real. Without ids, prompts share nothing.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from pathlib import Path

import numpy as np

from tandem.bench.workload import Request, Tokens, TokenSource, Workload

HASHED_TOKENS = 512
"""Prompt tokens behind one hash id of Mooncake's."""
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A file is not a trace of a known format (the message names the line), or has nothing to replay."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request of a trace, unscaled."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(
    path: Path, *, skip: int = 0, limit: int | None = None, length_factor: float = 1.0, max_total_len: int = 0
) -> list[Record]:
    """The records after the first `skip`, until `limit` of them fit `max_total_len`, sorted by time; the first one is
    at 0 s.

    Includes the records in between that do not fit: `trace_workload` leaves them out and counts them. Raises
    `TraceError`, `OSError`.
    """
    records: list[Record] = []
    num_fit = 0
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            for record in islice(parse_trace(file), skip, None):
                records.append(record)
                num_fit += fits(record, length_factor, max_total_len)
                if limit is not None and num_fit >= limit:
                    break
        except UnicodeDecodeError as error:
            raise TraceError(f"{path.name} is not a text: {error.reason}") from error
        except TraceError as error:
            raise TraceError(f"{path.name}, {error}") from error
    if not records:
        raise TraceError(f"{path.name} has no records" + (f" after the first {skip}" if skip else ""))
    start_s = min(record.at_s for record in records)
    moved = [Record(r.at_s - start_s, r.input_tokens, r.output_tokens, r.hash_ids) for r in records]
    return sorted(moved, key=lambda record: record.at_s)


def parse_trace(lines: Iterable[str]) -> Iterator[Record]:
    """Parse either format, which the first line tells. Raises `TraceError` naming the line."""
    lines = iter(lines)
    first = next(lines, "")
    is_mooncake = first.lstrip().startswith("{")
    parse = _mooncake_record if is_mooncake else _azure_parser(first)
    for number, line in enumerate(chain([first], lines), 1):
        if not line.strip() or (number == 1 and not is_mooncake):
            continue
        try:
            record = parse(line)
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError, csv.Error) as error:
            raise TraceError(f"line {number}: {type(error).__name__}: {error}") from error
        if not math.isfinite(record.at_s):
            raise TraceError(f"line {number}: its time is {record.at_s}")
        if record.input_tokens < 1 or record.output_tokens < 0:
            raise TraceError(f"line {number}: a prompt of {record.input_tokens} and an answer of "
                             f"{record.output_tokens} tokens")  # fmt: skip
        yield record


def _mooncake_record(line: str) -> Record:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("is not a JSON object")
    ids = tuple(int(hash_id) for hash_id in fields.get("hash_ids", ()))
    if any(hash_id < 0 for hash_id in ids):
        raise ValueError("hash_ids must not be negative")
    return Record(float(fields["timestamp"]) / 1000, int(fields["input_length"]), int(fields["output_length"]), ids)


def _azure_parser(header: str) -> Callable[[str], Record]:
    names = next(csv.reader([header]), [])
    missing = [name for name in AZURE_COLUMNS if name not in names]
    if missing:
        raise TraceError(
            f"line 1: neither Mooncake's form (JSON lines) nor Azure's (CSV with {', '.join(AZURE_COLUMNS)})"
        )
    at, context, generated = (names.index(name) for name in AZURE_COLUMNS)

    def parse(line: str) -> Record:
        cells = next(csv.reader([line]))
        return Record(datetime.fromisoformat(cells[at]).timestamp(), int(cells[context]), int(cells[generated]))

    return parse


def block_prompt(record: Record, length_factor: float, source: TokenSource, number: int) -> Tokens:
    """The prompt of `record`, which is the `number`-th: each hash id gives a block, the rest is this prompt's own.

    When scaled, block i begins at position round(i * 512 * factor), so that prompts share the same fraction of their
    prefixes as before.
    """
    length = scaled(record.input_tokens, length_factor)
    blocks, end = [], 0
    for index, hash_id in enumerate(record.hash_ids):
        start, end = end, min(length, round((index + 1) * HASHED_TOKENS * length_factor))
        blocks.append(source.tokens("block", hash_id, end - start))
    blocks.append(source.tokens("prompt", number, length - end))
    return np.concatenate(blocks)


def scaled(tokens: int, factor: float) -> int:
    """The scaled number of tokens, at least 1: a request needs a prompt and an answer."""
    return max(1, round(tokens * factor))


def fits(record: Record, length_factor: float, max_total_len: int) -> bool:
    """Whether prompt and answer together, scaled, are within `max_total_len`; 0: no bound."""
    total = scaled(record.input_tokens, length_factor) + scaled(record.output_tokens, length_factor)
    return not max_total_len or total <= max_total_len


def mean_rate(records: list[Record]) -> float:
    """Requests per second of a trace; infinite if all come at once."""
    span_s = records[-1].at_s - records[0].at_s
    return (len(records) - 1) / span_s if span_s else float("inf")


def _time_factor(natural_rate: float, rate: float, num_records: int) -> float:
    """The time factor that turns a trace's own rate into `rate`."""
    if rate == float("inf"):
        return 0.0
    if natural_rate == float("inf"):
        raise TraceError(
            f"all records chosen ({num_records}) come at the same time and cannot be stretched to {rate:g} requests "
            "per second: choose more (--num-prompts), or send all at once (--request-rate inf)"
        )
    return natural_rate / rate


def trace_workload(
    records: list[Record],
    source: TokenSource,
    *,
    length_factor: float = 1.0,
    time_factor: float = 1.0,
    rate: float | None = None,
    max_total_len: int = 0,
) -> Workload:
    """A workload of `records` with lengths and times multiplied. `rate`, in requests per second on average, overrides
    `time_factor`.

    Records whose prompt and answer together exceed `max_total_len` (0: no bound) are left out and counted. Raises
    `TraceError` if none is left, or if all that are left come at one moment, so that their rate cannot be changed.
    """
    kept = [record for record in records if fits(record, length_factor, max_total_len)]
    if not kept:
        raise TraceError(f"none of {len(records)} records has at most {max_total_len} tokens (--trace-max-total-len)")
    natural_rate = mean_rate(kept)
    if rate is not None:
        time_factor = _time_factor(natural_rate, rate, len(kept))
    requests = [
        Request(
            at_s=(record.at_s - kept[0].at_s) * time_factor,
            prompt=block_prompt(record, length_factor, source, number),
            output_tokens=scaled(record.output_tokens, length_factor),
        )
        for number, record in enumerate(kept)
    ]
    about = {
        "dataset": "trace",
        "length_factor": length_factor,
        "time_factor": time_factor,
        "shares_prefixes": any(record.hash_ids for record in kept),
        "left_out": len(records) - len(kept),
        "max_total_len": max_total_len,
    }
    offered = natural_rate / time_factor if time_factor else float("inf")
    return Workload(requests=requests, request_rate=offered, about=about)
