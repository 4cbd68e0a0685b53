"""Measures KV pushes from one process' pool to another's on one card: 1 GiB of scattered blocks, verified by digests.

Sender and receiver work like workers (`benchmarks/transfer.py`): a pool each, as `DevicePool`s on a GPU, a grant, a
push of every layer, a commit. "ipc" and "nixl" write from device memory to device memory, "ipc" with one launch for
many blocks; "grpc" goes through pinned host memory and a socket. The result is the speed of the writes; what the commit
adds (the digests of both sides) is in the note.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

from benchmarks.gpu_parts import floors
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import Setting, require
from benchmarks.gpu_parts.variants import short

BLOCK_KIB = 64
"""16 tokens of one layer of Llama-3.1-8B."""
AIM_GB_S = 500.0
"""Target for pushes from device memory to device memory."""
IPC_PUSH = "push by ipc"
NIXL_PUSH = "push by nixl"
NIXL_LISTS = f"{NIXL_PUSH}, as lists"
LISTS_VARIABLE = "NIXL_UCX_SGL_ENABLE"
"""With this variable, NIXL passes all blocks of a request to UCX at once, and UCX passes them to CUDA in one call. By
default each block has its own copy and event: some microseconds for 64 KiB."""
GRPC_PUSH = "push by grpc"


def measure_ipc(setting: Setting) -> Iterator[Row]:
    if setting.device == "cuda":
        require("cuda.bindings")
    yield from pushed("ipc", IPC_PUSH, setting, repeats=9, limit=half_a_copy(setting), at_least=aim_of(setting))


def measure_nixl(setting: Setting) -> Iterator[Row]:
    require("nixl")
    limit = half_a_copy(setting)
    yield from pushed("nixl", NIXL_PUSH, setting, repeats=5, limit=limit, at_least=aim_of(setting))
    if setting.device == "cuda":
        yield from pushed_as_lists(setting, limit)


def half_a_copy(setting: Setting) -> float | None:
    """GB/s: a copy reads and writes each byte, and a push counts it only once."""
    copy_gb_s = setting.known.get(floors.COPY)
    return None if copy_gb_s is None else copy_gb_s / 2


def aim_of(setting: Setting) -> float | None:
    return AIM_GB_S if setting.device == "cuda" else None


def pushed_as_lists(setting: Setting, limit: float | None) -> Iterator[Row]:
    """Sets the variable for the processes of this part only, which runs in a process of its own."""
    os.environ[LISTS_VARIABLE] = "y"
    try:
        yield from pushed("nixl", NIXL_LISTS, setting, repeats=5, limit=limit, at_least=None)
    except Exception as error:  # a UCX without such a call
        yield Row(what=NIXL_LISTS, value=None, unit="GB/s", note=f"does not run: {short(error)}")
    finally:
        del os.environ[LISTS_VARIABLE]


def measure_grpc(setting: Setting) -> Iterator[Row]:
    ways = [setting.known[name] for name in (floors.TO_HOST, floors.TO_DEVICE) if name in setting.known]
    limit = min(ways) if ways else None
    yield from pushed("grpc", GRPC_PUSH, setting, repeats=2, limit=limit, at_least=None)


def pushed(
    transport: str, what: str, setting: Setting, *, repeats: int, limit: float | None, at_least: float | None
) -> Iterator[Row]:
    require("google.protobuf", "grpc")
    from benchmarks import transfer

    mib = setting.sizes.push_mib
    options = {
        "min_mib": mib, "max_mib": mib, "layers": setting.sizes.push_layers, "block_kib": BLOCK_KIB, "repeats": repeats,
    }  # fmt: skip
    large, small = asyncio.run(transfer.measure(transport, options, setting.device))
    yield Row(
        what=what, value=large["data_gb_s"], unit="GB/s", limit=limit, at_least=at_least,
        note=f"{large['mib']:g} MiB, with commit {large['total_gb_s']} GB/s, {large['total_ms']} ms",
    )  # fmt: skip
    yield Row(
        what=f"{what}, one block p50",
        value=small["one_block_p50_ms"],
        unit="ms",
        note=f"p99 {small['one_block_p99_ms']}",
    )
    yield Row(
        what=f"{what}, digests unlike", value=large["num_wrong_digests"], unit="of them", at_most=0, is_check=True
    )
    yield Row(
        what=f"{what}, blocks repaired", value=large["num_repaired_blocks"], unit="of them", at_most=0, is_check=True
    )
