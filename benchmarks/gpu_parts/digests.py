"""Checks and measures digests of blocks alone: compares them with the library on the host, and measures their speed for
the blocks of a commit and for many."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import xxhash

from benchmarks.gpu_parts import floors
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.timing import waiting_seconds_of
from engine.kernels.gpu import why_no_triton

BLOCK_BYTES = 64 * 1024
"""16 tokens of one layer of Llama-3.1-8B."""
NUM_CHECKED = 8


def measure(setting: Setting) -> Iterator[Row]:
    why_not = why_no_triton(setting.device)
    if why_not:
        raise NotRun(why_not)
    from engine.kernels.gpu.digest import block_digests

    num_layers = 2 if setting.is_tiny else 32
    block_bytes = 512 if setting.is_tiny else BLOCK_BYTES
    num_blocks = setting.sizes.digest_blocks
    pool = torch.randint(0, 256, (num_layers, num_blocks, block_bytes), dtype=torch.uint8, device=setting.device)

    scattered = torch.randperm(num_blocks)[:NUM_CHECKED].tolist()
    expected = [
        [xxhash.xxh3_64_intdigest(pool[layer, block].cpu().numpy().tobytes()) for block in scattered]
        for layer in range(num_layers)
    ]
    num_wrong = int((block_digests(pool, scattered) != np.array(expected, dtype=np.uint64)).sum())
    yield Row(what="digests unlike xxhash's", value=num_wrong, unit="of them", at_most=0, is_check=True)

    limit = setting.known.get(floors.COPY)
    for count in sorted({min(64, num_blocks), num_blocks}):
        block_ids = torch.randperm(num_blocks)[:count].tolist()
        seconds = waiting_seconds_of(lambda ids=block_ids: block_digests(pool, ids), setting.device)
        gb_s = num_layers * count * block_bytes / seconds / 1e9
        what = f"digests of {count} blocks, {num_layers} layers"
        yield Row(what=what, value=gb_s, unit="GB/s", limit=limit, note=f"{1e3 * seconds:.2f} ms, launch to result")
