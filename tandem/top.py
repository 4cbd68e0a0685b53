"""What `tandem top` shows: a cluster's state, and its rates between two looks. Pure: makes no calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protos.tandem_worker_pb2 import ClusterStatus, Role, WorkerStatus
from tandem.answer import short_name
from tandem.tables import num_used_blocks, why_set_back

BAR_WIDTH = 16


@dataclass(frozen=True, slots=True)
class Look:
    """The cluster at one moment."""

    status: ClusterStatus
    at_s: float
    """On the caller's monotonic clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates of one worker between two looks."""

    prompt_tokens_per_s: float
    """Tokens that were computed, without those found in a cache."""
    generation_tokens_per_s: float
    hit_rate: float | None
    """Share of prompt tokens found in the prefix cache; None without prompts."""


def rates_of(before: Look | None, now: Look) -> dict[str, Rates]:
    """Rates by worker id. A worker that is new, or was restarted in between, has none yet."""
    if before is None or now.at_s <= before.at_s:
        return {}
    seconds = now.at_s - before.at_s
    earlier = {_process(worker): worker for worker in before.status.workers}
    rates: dict[str, Rates] = {}
    for worker in now.status.workers:
        last = earlier.get(_process(worker))
        if last is None:
            continue
        num_queries = worker.num_prefix_queries_tokens - last.num_prefix_queries_tokens
        num_hits = worker.num_prefix_hits_tokens - last.num_prefix_hits_tokens
        rates[worker.record.worker_id] = Rates(
            prompt_tokens_per_s=(worker.num_prompt_tokens - last.num_prompt_tokens) / seconds,
            generation_tokens_per_s=(worker.num_generation_tokens - last.num_generation_tokens) / seconds,
            hit_rate=num_hits / num_queries if num_queries else None,
        )
    return rates


def _process(worker: WorkerStatus) -> tuple[str, str]:
    return worker.record.worker_id, worker.record.incarnation


def view(before: Look | None, now: Look, heads: Sequence[str]) -> RenderableType:
    """The whole screen. `heads`: one line for each router."""
    status, rates = now.status, rates_of(before, now)
    total_prompt = _number([rate.prompt_tokens_per_s for rate in rates.values()])
    total_generated = _number([rate.generation_tokens_per_s for rate in rates.values()])
    lines: list[RenderableType] = [
        *map(Text, heads),
        Text(f"prompt {total_prompt} tokens/s computed, generated {total_generated} tokens/s", style="bold"),
        Text(""),
        _workers(status, rates),
    ]
    lines += [Text(f"unreachable: {line}", style="red") for line in status.unreachable]
    lines += [Text(f"not used: {line}", style="red") for line in status.unused]
    return Group(*lines)


def _workers(status: ClusterStatus, rates: dict[str, Rates]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header, justify in (
        ("worker", "left"), ("role", "left"), ("runs", "right"), ("waits", "right"), ("prompt t/s", "right"),
        ("gen t/s", "right"), ("hits", "right"), ("KV in use", "left"), ("", "left"),
    ):  # fmt: skip
        table.add_column(header, justify=justify, no_wrap=header == "worker")  # type: ignore[arg-type]
    for worker in sorted(status.workers, key=lambda worker: (worker.record.role, worker.record.worker_id)):
        record, load = worker.record, worker.record.load
        rate = rates.get(record.worker_id)
        table.add_row(
            record.worker_id,
            short_name(Role.DESCRIPTOR, record.role),
            str(load.num_running),
            f"{load.num_waiting} ({load.num_waiting_tokens} t)" if load.num_waiting else "0",
            _number([] if rate is None else [rate.prompt_tokens_per_s]),
            _number([] if rate is None else [rate.generation_tokens_per_s]),
            "-" if rate is None or rate.hit_rate is None else f"{100 * rate.hit_rate:.0f} %",
            _pool(worker),
            Text(_remarks(worker, status), style="yellow"),
        )
    return table


def _number(rates: list[float]) -> str:
    """The sum of `rates`. Without any, nothing is known: that is not 0."""
    return f"{sum(rates):,.0f}" if rates else "-"


def _pool(worker: WorkerStatus) -> RenderableType:
    blocks = worker.record.load.blocks
    num_used = num_used_blocks(blocks)
    bar = ProgressBar(total=max(1, blocks.num_blocks), completed=num_used, width=BAR_WIDTH)
    row = Table.grid(padding=(0, 1))
    row.add_row(bar, Text(f"{100 * num_used / max(1, blocks.num_blocks):.0f} %"))
    return row


def _remarks(worker: WorkerStatus, status: ClusterStatus) -> str:
    counts = {
        f"{worker.num_preemptions} preempted": worker.num_preemptions,
        f"{worker.num_repairs} blocks repaired": worker.num_repairs,
        f"{worker.num_late_writes} late writes dropped": worker.num_late_writes,
    }
    return ", ".join(why_set_back(worker.record, status) + [remark for remark, count in counts.items() if count])
