"""Measures the limits of the device, with which everything else is compared: copies, matrix products, transfers to the
host and back.

Inputs are random, and larger than the cache. A copy's bytes are counted twice, as read and as written. The device's own
copy is not always the fastest: on an H100, a kernel that inverts the bits that it copies moves a fifth more (2,995
instead of 2,440 GB/s).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import Setting
from benchmarks.gpu_parts.timing import seconds_of, waiting_seconds_of

COPY = "copy in device memory"
PRODUCTS = "matrix products, bfloat16"
TO_HOST = "device to pinned host memory"
TO_DEVICE = "pinned host memory to device"


def measure(setting: Setting) -> Iterator[Row]:
    device, sizes = setting.device, setting.sizes
    source = torch.randint(0, 256, (sizes.copy_bytes,), dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    words, negated = source.view(torch.int64), destination.view(torch.int64)
    by_device = seconds_of([lambda: destination.copy_(source)], device)
    by_kernel = seconds_of([lambda: torch.bitwise_not(words, out=negated)], device)
    yield Row(
        what=COPY, value=2 * sizes.copy_bytes / min(by_device, by_kernel) / 1e9, unit="GB/s",
        note=f"by the device's own copy {2 * sizes.copy_bytes / by_device / 1e9:,.0f}",
    )  # fmt: skip

    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    seconds = seconds_of([lambda: torch.mm(a, b, out=out)], device)
    yield Row(what=PRODUCTS, value=2 * sizes.matrix**3 / seconds / 1e12, unit="TFLOP/s")

    if device == "cuda":
        host = torch.empty(sizes.host_bytes, dtype=torch.uint8, pin_memory=True)
        part = source[: sizes.host_bytes]
        seconds = waiting_seconds_of(lambda: host.copy_(part, non_blocking=True), device)
        yield Row(what=TO_HOST, value=sizes.host_bytes / seconds / 1e9, unit="GB/s")
        seconds = waiting_seconds_of(lambda: part.copy_(host, non_blocking=True), device)
        yield Row(what=TO_DEVICE, value=sizes.host_bytes / seconds / 1e9, unit="GB/s")
