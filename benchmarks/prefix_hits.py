"""Computes how much of real prompts a pool and host memory of given sizes would find cached, from a trace and with the
block manager alone.

    python benchmarks/prefix_hits.py --trace conversation_trace.jsonl
    python benchmarks/prefix_hits.py --trace conversation_trace.jsonl --kv-gib 55,220 --host-gib 64,256,1024
    python benchmarks/prefix_hits.py --trace conversation_trace.jsonl --token-kib 69     # DeepSeek-V3's latents

Needs no model and no tokens. Requests of a trace in Mooncake's format come one after the other; each prefix is looked
up, computed and released as by an engine, and copies complete at once. The result is for one worker with all of this
traffic; several workers share it, and the router sends each prompt to the worker that has most of it cached. An hour of
traffic takes some ten seconds for each pair of sizes. The last line is one JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

if __name__ == "__main__":
    # When run as a file, this folder comes first on the path, and its `engine.py` would hide the package `engine`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.flags import Numbers, Positive, wrong_usage
from benchmarks.machine import machine
from benchmarks.report import save
from engine.sampling_params import SamplingParams
from engine.scheduling.block_ledger import BlockOwner
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.sequence import Sequence
from tandem.bench.traces import HASHED_TOKENS, Record, read_trace

GIB, KIB = 1 << 30, 1 << 10


@dataclass(frozen=True)
class Row:
    kv_gib: float
    host_gib: float
    share_found: float
    """Share of the prompts' tokens found in either memory."""
    share_loaded: float
    """Share of the prompts' tokens found in host memory."""


def hits(records: Seq[Record], num_blocks: int, num_host_blocks: int) -> tuple[float, float]:
    """Shares of all prompts' blocks: those found, and those found in host memory. A block is what one id of the trace
    stands for.

    Prompts that do not fit into the pool are skipped, as an engine would refuse them.
    """
    manager = BlockManager(
        num_blocks=num_blocks, block_size=1, prefix_key=bytes(32), enable_prefix_caching=True,
        num_host_blocks=num_host_blocks,
    )  # fmt: skip
    num_asked = num_found = num_loaded = 0
    for number, record in enumerate(records):
        seq = Sequence(number, str(number), list(record.hash_ids), len(record.hash_ids), SamplingParams())
        if not manager.allocate(
            seq, BlockOwner.SEQUENCE, num_reusable_tokens=seq.num_reusable_tokens, num_spare_blocks=0
        ):
            continue
        num_asked += len(seq)
        num_found += seq.num_computed_tokens
        num_loaded += seq.num_loading_blocks
        copy_all(manager)
        manager.register_computed(seq, len(seq))
        manager.free(seq)
        copy_all(manager)
    return num_found / max(1, num_asked), num_loaded / max(1, num_asked)


def copy_all(manager: BlockManager) -> None:
    while copies := manager.take_copies():
        for copy in copies:
            manager.end_copy(copy)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--trace",
    "trace_path",
    required=True,
    type=click.Path(path_type=Path),
    help="Trace of real traffic, with hash ids.",
)
@click.option(
    "--kv-gib",
    default=(55.0,),
    type=Numbers(float),
    show_default="55",
    help="Sizes of the KV pool, in GiB. 55: beside an 8B model on an 80 GiB GPU.",
)
@click.option("--host-gib", default=(64.0, 256.0, 1024.0), type=Numbers(float), show_default="64,256,1024",
              help="Sizes of host memory to try with each pool, in GiB, besides none.")  # fmt: skip
@click.option(
    "--token-kib", default=128.0, type=Positive(), show_default=True, help="KV per token, in KiB. 128: Llama-3.1-8B."
)
@click.option("--json", "as_json", is_flag=True, help="Print only the last line, JSON.")
def main(
    trace_path: Path, kv_gib: tuple[float, ...], host_gib: tuple[float, ...], token_kib: float, as_json: bool
) -> None:
    """Compute how much of real prompts would be cached in KV pools and host memories of several sizes."""
    with wrong_usage("--trace"):
        records = [record for record in read_trace(trace_path) if record.hash_ids]
        if not records:
            raise ValueError(f"{trace_path.name} has no hash ids: nothing says which prompts begin alike")
    block_bytes = HASHED_TOKENS * token_kib * KIB
    rows: list[Row] = []
    if not as_json:
        print(f"{'pool, GiB':>10}{'host, GiB':>11}{'found':>9}{'on the host':>13}     (of all prompt tokens)")
    for pool in kv_gib:
        for host in (0.0, *host_gib):
            found, loaded = hits(records, max(1, int(pool * GIB / block_bytes)), int(host * GIB / block_bytes))
            rows.append(Row(pool, host, found, loaded))
            if not as_json:
                print(f"{pool:10g}{host:11g}{found:9.1%}{loaded:13.1%}", flush=True)
    summary = machine() | {"trace": trace_path.name, "num_requests": len(records), "token_kib": token_kib}
    summary["rows"] = [asdict(row) for row in rows]
    save("prefix-hits", summary, lambda figure: draw(figure.subplots(), rows))


def draw(axes: Any, rows: list[Row]) -> None:
    for pool in sorted({row.kv_gib for row in rows}):
        of_pool = [row for row in rows if row.kv_gib == pool]
        axes.plot(
            [row.host_gib for row in of_pool],
            [100 * row.share_found for row in of_pool],
            "o-",
            label=f"pool of {pool:g} GiB",
        )
    axes.set_xscale("symlog", linthresh=16)
    axes.set_xlabel("host memory, GiB")
    axes.set_ylabel("% of prompt tokens found")
    axes.set_ylim(bottom=0)
    axes.legend()


if __name__ == "__main__":
    main()
