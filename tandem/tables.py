"""A cluster's state, and an answer's tokens, as tables. Pure, except for `print_table`: messages in, rows out."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from protos.tandem_inference_pb2 import Logprob, Mode, Timings, TokenLogprobs
from protos.tandem_worker_pb2 import (
    BlockLedger,
    ClusterAudit,
    ClusterStatus,
    Role,
    WorkerProfile,
    WorkerRecord,
    WorkerStatus,
)  # fmt: skip
from tandem.answer import short_name


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns whose header starts with ">" contain numbers and are aligned to the right."""

    headers: tuple[str, ...]
    rows: list[tuple[str, ...]]


def router_line(status: ClusterStatus, address: str) -> str:
    """The router and its queue in one line."""
    registry = "" if status.is_registry_reachable else "; Redis is not reachable: serving with the last known workers"
    return (
        f"router {status.router_id} at {address}: {status.num_running_requests} running, "
        f"{status.num_queued_requests} queued ({status.num_queued_tokens} tokens){registry}"
    )


def mode_text(timings: Timings) -> str:
    """The workers that served the request."""
    if timings.mode == Mode.MODE_DISAGGREGATED:
        return f"{timings.prefill_worker} -> {timings.decode_worker}"
    name = "local" if timings.mode == Mode.MODE_LOCAL else "stay"
    return f"{name}: {timings.decode_worker} alone"


def seen_by_all(statuses: Sequence[ClusterStatus]) -> ClusterStatus:
    """Merges what several routers know about the workers: each worker once, with the remarks of all routers. The
    routers' own queues are not merged (`router_line`)."""
    first, *others = statuses
    seen = ClusterStatus()
    seen.CopyFrom(first)
    for other in others:
        known = {worker.record.worker_id for worker in seen.workers}
        seen.workers.extend(worker for worker in other.workers if worker.record.worker_id not in known)
        for name in ("unreachable", "unused", "ejected", "of_another_kind", "not_connected", "apart"):
            remarks = getattr(seen, name)
            remarks.extend([remark for remark in getattr(other, name) if remark not in remarks])
    return seen


def version_line(statuses: Sequence[ClusterStatus]) -> str:
    """The version that most processes have, and which processes have others. Empty if none says its version."""
    versions = {f"router {status.router_id}": status.version for status in statuses}
    versions |= {worker.record.worker_id: worker.record.version for worker in seen_by_all(statuses).workers}
    known = Counter(filter(None, versions.values()))
    if not known:
        return ""
    ((usual, _),) = known.most_common(1)
    others = [f"{name} ({version or 'older'})" for name, version in versions.items() if version != usual]
    return f"tandem {usual}" + (f"; others: {', '.join(others)}" if others else "")


def adapter_lines(status: ClusterStatus) -> list[str]:
    """Which workers have each adapter. Different adapters of the same name are listed separately."""
    records = [worker.record for worker in status.workers]
    lines = []
    for name in sorted({name for record in records for name in record.model.lora_names}):
        having: dict[str, list[str]] = {}
        for record in records:
            if name in record.model.lora_names:
                having.setdefault(record.lora_digests.get(name, ""), []).append(record.worker_id)
        each = [", ".join(sorted(worker_ids)) for worker_ids in having.values()]
        has_all = len(each) == 1 and len(next(iter(having.values()))) == len(records)
        where = "every worker" if has_all else "; another of its name: ".join(sorted(each))
        lines.append(f"adapter {name}: {where}")
    return lines


def status_table(status: ClusterStatus) -> Table:
    """One row per worker, prefill workers first."""
    workers = sorted(status.workers, key=lambda w: (w.record.role, w.record.worker_id))
    is_offloading = any(worker.record.load.HasField("host_blocks") for worker in workers)
    headers = (
        "id",
        "role",
        "address",
        ">pid",
        ">running",
        ">waiting",
        ">free/cached/used of blocks",
        *((">kept on the host",) if is_offloading else ()),
        ">prefix hits",
        "",
    )
    rows = [_status_row(worker, status, is_offloading=is_offloading) for worker in workers]
    return Table(headers=headers, rows=rows)


def _status_row(worker: WorkerStatus, status: ClusterStatus, *, is_offloading: bool) -> tuple[str, ...]:
    record, load = worker.record, worker.record.load
    host = f"{load.host_blocks.num_kept} of {load.host_blocks.num_blocks}" if load.HasField("host_blocks") else "-"
    return (
        record.worker_id,
        short_name(Role.DESCRIPTOR, record.role),
        record.address,
        str(record.pid),
        str(load.num_running),
        str(load.num_waiting),
        pool_text(load.blocks),
        *((host,) if is_offloading else ()),
        hit_rate_text(worker.num_prefix_hits_tokens, worker.num_prefix_queries_tokens),
        ", ".join(why_set_back(record, status)),
    )


def why_set_back(record: WorkerRecord, status: ClusterStatus) -> list[str]:
    """The reasons why a worker gets no requests, or not all, in a few words each; also a worker with the same id."""
    remarks = {
        "draining": record.is_draining,
        "stalled": record.load.is_stalled,
        "ejected": record.worker_id in status.ejected,
        "not connected": record.worker_id in status.not_connected,
        "of another kind: no new requests": record.worker_id in status.of_another_kind,
    }
    if record.rival_address:
        remarks[f"its id is used at {record.rival_address}, too: drain one, or give it another --worker-id"] = True
    for pair in status.apart:
        remarks[f"no transfers to {pair.decode_worker}"] = record.worker_id == pair.prefill_worker
    return [remark for remark, applies in remarks.items() if applies]


def pool_text(blocks: BlockLedger) -> str:
    """ "free/cached/used of total"."""
    return f"{blocks.num_free}/{blocks.num_cached}/{num_used_blocks(blocks)} of {blocks.num_blocks}"


def num_used_blocks(blocks: BlockLedger) -> int:
    """Blocks that are neither free nor cached."""
    return blocks.num_sequence + blocks.num_grant + blocks.num_held


def hit_rate_text(num_hits: int, num_queries: int) -> str:
    """Share of prompt tokens found in the prefix cache; "-" before the first prompt."""
    return f"{100 * num_hits / num_queries:.0f} %" if num_queries else "-"


def audit_table(audit: ClusterAudit) -> Table:
    """One row per worker: its blocks by owner, their sum and the pool's size."""
    headers = ("id", "role", ">free", ">cached", ">sequence", ">grant", ">held", ">sum", ">total", "")
    rows = []
    for worker in sorted(audit.workers, key=lambda w: (w.role, w.worker_id)):
        owned = owned_blocks(worker.blocks)
        is_ok = sum(owned) == worker.blocks.num_blocks and not worker.problems
        rows.append(
            (
                worker.worker_id,
                short_name(Role.DESCRIPTOR, worker.role),
                *(str(count) for count in owned),
                str(sum(owned)),
                str(worker.blocks.num_blocks),
                "ok" if is_ok else "WRONG",
            )
        )
    return Table(headers=headers, rows=rows)


def owned_blocks(blocks: BlockLedger) -> tuple[int, int, int, int, int]:
    """The numbers of free, cached, sequence, grant and held blocks."""
    return blocks.num_free, blocks.num_cached, blocks.num_sequence, blocks.num_grant, blocks.num_held


def audit_problems(audit: ClusterAudit) -> list[str]:
    """Everything that an audit found wrong, each as a sentence; empty if all books balance."""
    problems = []
    for worker in audit.workers:
        num_owned = sum(owned_blocks(worker.blocks))
        if num_owned != worker.blocks.num_blocks:
            problems.append(
                f"{worker.worker_id}: {num_owned} blocks have an owner, the pool has {worker.blocks.num_blocks}"
            )
        problems += [f"{worker.worker_id}: {problem}" for problem in worker.problems]
    problems += [f"{audit.router_id}: {problem}" for problem in audit.problems]
    problems += [f"unreachable: {line}" for line in audit.unreachable]
    if not audit.workers and not audit.unreachable:
        problems.append("the router knows no worker")
    return problems


def not_at_rest(audit: ClusterAudit) -> list[str]:
    """What an audit found wrong, and workers with blocks that are neither free nor cached though nothing runs."""
    problems = audit_problems(audit)
    for worker in audit.workers:
        blocks = worker.blocks
        if blocks.num_free + blocks.num_cached != blocks.num_blocks:
            problems.append(
                f"{worker.worker_id}: {blocks.num_sequence} blocks of sequences, {blocks.num_grant} granted, "
                f"{blocks.num_held} held"
            )
    return problems


def logprobs_table(logprobs: Sequence[TokenLogprobs], heading: str = "token") -> Table:
    """One row per token of an answer, or of a prompt: how likely it was, and what else was likely."""
    num_top = max(len(each.top) for each in logprobs)
    headers = (heading, ">probability", ">rank", *("likeliest" if n == 0 else "" for n in range(num_top)))
    rows = []
    for each in logprobs:
        top = (f"{_token_text(one)} {_percent(one)}" for one in each.top)
        # A prompt's first token has no probability: nothing precedes it.
        numbers = (_percent(each.sampled), str(each.sampled.rank)) if each.sampled.rank else ("", "")
        told = (_token_text(each.sampled), *numbers, *top)
        rows.append(told + ("",) * (len(headers) - len(told)))
    return Table(headers=headers, rows=rows)


def _token_text(logprob: Logprob) -> str:
    try:
        return repr(logprob.token.decode())
    except UnicodeDecodeError:  # a part of a character
        return repr(logprob.token)


def _percent(logprob: Logprob) -> str:
    percent = 100 * math.exp(logprob.logprob)
    return f"{percent:.1f} %" if percent >= 0.05 else "< 0.1 %"


def format_table(table: Table) -> str:
    """Aligned plain text: two spaces between columns, no trailing spaces."""
    is_number = [header.startswith(">") for header in table.headers]
    lines = [tuple(header.removeprefix(">") for header in table.headers), *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.headers))]
    return "\n".join(_format_line(line, widths, is_number) for line in lines)


def _format_line(cells: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, is_number, strict=True)
    )
    return "  ".join(padded).rstrip()


def profile_line(profile: WorkerProfile) -> str:
    if not profile.num_steps:
        return f"{profile.worker_id}: no steps in this time; send requests to it meanwhile"
    each_ms = profile.step_ms / profile.num_steps
    share = sum(op.host_ms for op in profile.ops) / profile.step_ms
    steps = "1 step" if profile.num_steps == 1 else f"{profile.num_steps} steps"
    return f"{profile.worker_id}: {steps} of {each_ms:.2f} ms, of which the operations below take {share:.0%}"


def profile_table(profile: WorkerProfile, num_rows: int) -> Table:
    """The time of each operation per step, without the operations that it calls itself."""
    has_device = any(op.device_ms for op in profile.ops)
    headers = ("operation", ">calls", ">host ms", ">of a step", *((">device ms",) if has_device else ()))
    num_steps = profile.num_steps
    rows: list[tuple[str, ...]] = []
    for op in profile.ops[:num_rows]:
        times = f"{op.host_ms / num_steps:.3f}", f"{op.host_ms / profile.step_ms:.1%}"
        on_device = (f"{op.device_ms / num_steps:.3f}",) if has_device else ()
        rows.append((op.name[:60], f"{op.num_calls / num_steps:.1f}", *times, *on_device))
    return Table(headers=headers, rows=rows)


def print_table(table: Table) -> None:
    """Print to stdout: drawn with rich on a terminal, otherwise plain."""
    if not (sys.stdout and sys.stdout.isatty()):  # stdout is None if it was closed before the program began
        print(format_table(table), flush=True)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    drawn = RichTable(box=box.SIMPLE_HEAD)
    for header in table.headers:
        drawn.add_column(header.removeprefix(">"), justify="right" if header.startswith(">") else "left", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row)
    Console().print(drawn)
