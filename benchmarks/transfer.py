"""Measures the speed of KV transfers: GB/s for each transport and size, the cost of digests, and the latency of a small
push.

    python benchmarks/transfer.py                       # all transports that are installed
    python benchmarks/transfer.py --transport nixl --max-mib 1024 --repeats 9
    python benchmarks/transfer.py --device cuda --layers 32 --block-kib 64      # pools in the memory of one GPU

Sender and receiver are two processes, as in reality, and one for "local". A measured transfer consists of open, the
writes of every layer, and commit, so it includes the digests of both sides. "data" is the time from the first write
until all bytes have arrived, measured in separate transfers that wait for this before they commit. After the last
transfer of each size, the digests of both sides are compared once more, over another channel. The last line of output
is one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import grpc
import numpy as np
import torch

if __name__ == "__main__":
    # When run as a file, this folder comes first on the path, and its `engine.py` would hide the package `engine`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import kv_transfer
from benchmarks.local_transport import LocalTransport, create_endpoint
from engine.kv_cache import KV_ORDER
from engine.kv_shape import KVCacheShape
from kv_transfer import Identity, KVPool, KVReceiver, KVSender, KVTransferServicer, Push
from kv_transfer.pool import Digests
from protos import tandem_kv_transfer_pb2 as pb
from protos import tandem_kv_transfer_pb2_grpc as pb_grpc
from rpc.channel import open_kv_channel
from worker_service.pool_memory import PoolMemory

MIB = 1 << 20
NUM_LATENCY_PUSHES = 200
LEASE_S = 20.0
"""The transport reports a stalled push after this time, before anything that waits for the whole push gives up."""
TRANSPORTS = (*kv_transfer.TRANSPORTS, "local")

PoolArguments = tuple[str, int, int, int, str]
"""Transport, bytes, layers, KiB of a block, device."""


def make_pool(transport: str, num_bytes: int, num_layers: int, block_kib: int, device: str, seed: int) -> KVPool:
    """A pool of at least `num_bytes`, with blocks of `block_kib` KiB per layer, allocated like a worker's on
    `device`."""
    num_blocks = -(-num_bytes // (num_layers * block_kib * 1024))
    shape = KVCacheShape(
        num_layers=num_layers, num_blocks=num_blocks, block_size=16, num_kv_heads=1,
        head_dim=block_kib * 1024 // (2 * 16 * 2), dtype="bfloat16",
    )  # fmt: skip
    memory = PoolMemory(transport, is_received=True)
    tensor = memory.allocate(shape, device)
    generator = torch.Generator(device).manual_seed(seed)
    tensor.view(torch.uint8).random_(0, 256, generator=generator)
    return memory.as_pool(tensor, shape, KV_ORDER)


@dataclass(frozen=True)
class FarSide:
    """The requests to a receiver beyond the protocol."""

    grant: Callable[[list[int]], pb.Grant]
    """Grants these blocks."""
    digests: Callable[[list[int]], Digests]
    """Digests of these blocks, computed now."""


class BenchReceiver:
    """Grants blocks on demand and accepts every commit."""

    def __init__(self, transport: str, pool: KVPool) -> None:
        identity = Identity(worker_id="decode", incarnation="bench", compat_digest="bench")
        self.receiver = KVReceiver(
            pool=pool,
            identity=identity,
            lease_s=LEASE_S,
            endpoint=create_endpoint(transport, pool=pool, identity=identity),
            on_commit=self._on_commit,
            on_freed=lambda _: None,
        )

    async def _on_commit(self, *_: object) -> bool:
        return True

    def grant(self, block_ids: list[int]) -> pb.Grant:
        return self.receiver.issue("bench", block_ids, 0)


def serve(pipe: Connection, transport: str, pool_arguments: PoolArguments) -> None:
    """The receiving process: answers requests ("grant" or "digests", block ids) until None. An answer is bytes, or the
    text of an error, after which the process ends."""
    try:
        asyncio.run(_serve(pipe, transport, make_pool(*pool_arguments, seed=2)))
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(BrokenPipeError):  # the other side has gone, and reports its own error
            pipe.send(f"{type(error).__name__}: {error}")


async def _serve(pipe: Connection, transport: str, pool: KVPool) -> None:
    bench = BenchReceiver(transport, pool)
    server = grpc.aio.server()
    pb_grpc.add_KVTransferServicer_to_server(KVTransferServicer(bench.receiver), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await bench.receiver.start(address)
    pipe.send(b"ready")
    while asked := await asyncio.to_thread(pipe.recv):
        what, block_ids = asked
        if what == "grant":
            pipe.send(bench.grant(block_ids).SerializeToString())
        else:
            pipe.send(pool.digests(block_ids).tobytes())
    await server.stop(0)
    await bench.receiver.close()


@contextlib.asynccontextmanager
async def running(transport: str, pool_arguments: PoolArguments) -> AsyncIterator[tuple[KVSender, FarSide]]:
    """A sender, and a running receiver."""
    pool = make_pool(*pool_arguments, seed=1)
    identity = Identity(worker_id="prefill", incarnation="bench", compat_digest="bench")
    if transport == "local":
        far_pool = make_pool(*pool_arguments, seed=2)
        bench = BenchReceiver(transport, far_pool)
        address = "127.0.0.1:1"  # a name only: nobody listens there
        await bench.receiver.start(address)
        sender = KVSender(transport=LocalTransport(pool, {address: bench.receiver}), pool=pool, identity=identity)
        yield sender, FarSide(bench.grant, far_pool.digests)
        await sender.close()
        await bench.receiver.close()
        return
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, transport, pool_arguments)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
    process.start()
    theirs.close()  # so that recv raises EOFError here when the process ends

    def answer() -> bytes:
        try:
            found: bytes | str = ours.recv()
        except EOFError:
            process.join(10)
            raise RuntimeError(f"the receiving process ended with {process.exitcode}") from None
        if isinstance(found, str):
            raise RuntimeError(f"the receiving process failed: {found}")
        return found

    def grant(block_ids: list[int]) -> pb.Grant:
        ours.send(("grant", block_ids))
        return pb.Grant.FromString(answer())

    def digests(block_ids: list[int]) -> Digests:
        ours.send(("digests", block_ids))
        return np.frombuffer(answer(), dtype=np.uint64).reshape(-1, len(block_ids))

    assert answer() == b"ready"
    sender = kv_transfer.create_sender(transport, pool=pool, identity=identity, open_channel=open_kv_channel)
    yield sender, FarSide(grant, digests)
    await sender.close()
    ours.send(None)
    process.join(10)


async def commit(sender: KVSender, push: Push, src_block_ids: tuple[int, ...]) -> None:
    await push.commit(len(src_block_ids) * sender.pool.layout.block_size, 1, src_block_ids)


async def open_and_write(sender: KVSender, grant: pb.Grant, src_block_ids: tuple[int, ...]) -> tuple[Push, float]:
    """Push every layer of these blocks (a tuple, the same for all layers, as from an engine). Returns the push, and the
    time in seconds at which it was open."""
    push = await sender.open(grant)
    opened_s = time.perf_counter()
    for layer in range(sender.pool.layout.num_layers):
        push.write(layer, 0, src_block_ids)
    return push, opened_s


async def write_s(sender: KVSender, grant: pb.Grant, src_block_ids: tuple[int, ...]) -> float:
    """Seconds that the writes alone take, until the last byte has arrived."""
    push, opened_s = await open_and_write(sender, grant, src_block_ids)
    await push._writer.drain()
    taken_s = time.perf_counter() - opened_s
    await commit(sender, push, src_block_ids)
    return taken_s


async def transfer_s(sender: KVSender, grant: pb.Grant, src_block_ids: tuple[int, ...]) -> float:
    """Seconds of the whole transfer, as a prefill worker does it: digests are computed while the last bytes travel."""
    start_s = time.perf_counter()
    push, _ = await open_and_write(sender, grant, src_block_ids)
    await commit(sender, push, src_block_ids)
    return time.perf_counter() - start_s


def sizes_mib(smallest: int, largest: int) -> Iterator[int]:
    size = smallest
    while size <= largest:
        yield size
        size *= 4


async def measure(transport: str, options: dict[str, int], device: str = "cpu") -> list[dict[str, Any]]:
    """A row for each size, and one for pushes of a single block."""
    rows = []
    pool_arguments = (transport, options["max_mib"] * MIB, options["layers"], options["block_kib"], device)
    random = np.random.default_rng(5)
    async with running(transport, pool_arguments) as (sender, far):
        layout = sender.pool.layout
        print(f"{transport}: {layout.pool_bytes / MIB:.0f} MiB, blocks of {layout.block_bytes} bytes", file=sys.stderr)
        for size_mib in sizes_mib(options["min_mib"], options["max_mib"]):
            num_blocks = max(1, size_mib * MIB // (layout.num_layers * layout.block_bytes))
            num_bytes = num_blocks * layout.num_layers * layout.block_bytes
            timings = []
            for _ in range(options["repeats"] + 1):
                src, dst = (random.permutation(layout.num_blocks)[:num_blocks].tolist() for _ in range(2))
                timings.append(
                    (
                        await write_s(sender, far.grant(dst), tuple(src)),
                        await transfer_s(sender, far.grant(dst), tuple(src)),
                    )
                )
            pushed_s, total_s = (statistics.median(column) for column in zip(*timings[1:], strict=True))
            rows.append(
                {
                    "transport": transport,
                    "mib": round(num_bytes / MIB, 1),
                    "data_gb_s": round(num_bytes / pushed_s / 1e9, 2),
                    "total_gb_s": round(num_bytes / total_s / 1e9, 2),
                    "total_ms": round(total_s * 1000, 2),
                    "num_wrong_digests": int((far.digests(dst) != sender.pool.digests(src)).sum()),
                    "num_repaired_blocks": sender.num_repaired_blocks,
                }
            )
            print(f"  {size_mib} MiB: {rows[-1]['total_gb_s']} GB/s", file=sys.stderr)
        latencies = []
        for _ in range(NUM_LATENCY_PUSHES):
            issued = far.grant([int(random.integers(layout.num_blocks))])
            latencies.append(await transfer_s(sender, issued, (0,)) * 1000)
        rows.append(
            {
                "transport": transport,
                "one_block_p50_ms": round(statistics.median(latencies), 2),
                "one_block_p99_ms": round(statistics.quantiles(latencies, n=100)[98], 2),
            }
        )
    return rows


def measure_digests(options: dict[str, int], device: str) -> dict[str, Any]:
    pool = make_pool("local", 64 * MIB, options["layers"], options["block_kib"], device, seed=1)
    block_ids = list(range(pool.layout.num_blocks))
    pool.digests(block_ids)
    timings = []
    for _ in range(options["repeats"]):
        start_s = time.perf_counter()
        pool.digests(block_ids)
        timings.append(time.perf_counter() - start_s)
    return {"digest_gb_s": round(pool.layout.pool_bytes / statistics.median(timings) / 1e9, 2)}


def print_tables(rows: list[dict[str, Any]], digests: dict[str, Any]) -> None:
    print(f"{'transport':<10}{'MiB':>8}{'data GB/s':>12}{'with commit':>13}{'ms':>10}")
    for row in rows:
        if "mib" in row:
            print(
                f"{row['transport']:<10}{row['mib']:>8}{row['data_gb_s']:>12}{row['total_gb_s']:>13}{row['total_ms']:>10}"
            )
    print(f"\n{'transport':<10}{'one block p50 ms':>18}{'p99 ms':>10}")
    for row in rows:
        if "one_block_p50_ms" in row:
            print(f"{row['transport']:<10}{row['one_block_p50_ms']:>18}{row['one_block_p99_ms']:>10}")
    print(f"\ndigests (one side; of memory of a CPU: one thread): {digests['digest_gb_s']} GB/s\n")
    wrong = [row for row in rows if row.get("num_wrong_digests") or row.get("num_repaired_blocks")]
    if wrong:
        raise click.ClickException(f"blocks arrived otherwise than they were: {wrong}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--transport", "transports", multiple=True, type=click.Choice(TRANSPORTS),
              help="Transport to measure; may be given several times. Default: all that are installed.")  # fmt: skip
@click.option("--min-mib", default=1, show_default=True, type=click.IntRange(1), help="Smallest transfer, in MiB.")
@click.option("--max-mib", default=256, show_default=True, type=click.IntRange(1), help="Largest transfer, in MiB.")
@click.option("--layers", default=30, show_default=True, type=click.IntRange(1, 256), help="Layers of the pools.")
@click.option("--block-kib", default=12, show_default=True, type=click.IntRange(1, 8192),
              help="KiB of one block of one layer (12: SmolLM2-135M in bfloat16).")  # fmt: skip
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1),
              help="Transfers per size after one for warm-up; the median is reported.")  # fmt: skip
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]),
              help="Device whose memory has the pools.")  # fmt: skip
def main(transports: tuple[str, ...], device: str, **options: int) -> None:
    """Measure the speed of KV transfers, the cost of digests, and the latency of a small push."""
    if options["min_mib"] > options["max_mib"]:
        raise click.UsageError("--min-mib must not be above --max-mib")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device is cuda, but torch finds no CUDA device")
    has_nixl = importlib.util.find_spec("nixl") is not None
    chosen = transports or tuple(name for name in TRANSPORTS if name != "nixl" or has_nixl)
    rows = [row for name in chosen for row in asyncio.run(measure(name, options, device))]
    digests = measure_digests(options, device)
    print_tables(rows, digests)
    print(json.dumps({"device": device, "options": options, "rows": rows, **digests}))


if __name__ == "__main__":
    main()
