"""Measures a decoding step's products alone, with Llama-3.1-8B's weights: bound by the bytes of the weight, which is
read once.

Measured are: torch (cuBLAS) in bfloat16, as engines use it, and with cuBLASLt; our kernel with the same weight, to see
whether it would be faster; our kernels with int8 and int4 weights, as engines use them, and possible launch
configurations; the same with fp8 and a scale for each group of inputs; torch in fp8; and products of one row by the
kernel that engines use for them, with possible launch configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.gpu_parts import floors
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.shapes import INT4_BYTES
from benchmarks.gpu_parts.timing import cache_bytes, num_sets, seconds_of
from benchmarks.gpu_parts.variants import Choice, Job, rows_in_use, rows_of_variants, short
from engine.float8 import why_no_float8
from engine.int4_weight import quantize_int4
from engine.kernels.gpu import why_no_triton
from engine.kernels.gpu.gpu_kind import gpu_kind
from engine.quantization import Float8Linear, quantize_int8

if TYPE_CHECKING:
    from engine.kernels.gpu.eight_bits import ProductConfig
    from engine.kernels.gpu.one_row import OneRowConfig

GROUP_SIZE = 128
"""Inputs that share a scale in checkpoints of DeepSeek-V3 and Qwen3. Each scale is a float32: 3 % more bytes than
counted."""
TARGET = 0.85
"""Target as a share of the copy: that of a whole step."""
INT8_VARIANTS: tuple[dict[str, int], ...] = (
    {"num_programs": 0}, {"num_programs": 1}, {"num_programs": 2}, {"num_programs": 3}, {"num_stages": 3},
    {"num_stages": 6}, {"num_warps": 4}, {"num_warps": 8}, {"block_n": 64, "num_warps": 4, "num_programs": 2},
    {"block_n": 128, "num_warps": 8, "num_programs": 1}, {"block_k": 64}, {"block_k": 256, "num_stages": 3},
)  # fmt: skip
"""Differences from the configuration in use; some are in use for other numbers of rows."""
ONE_ROW_VARIANTS: tuple[dict[str, int], ...] = (
    {"block_n": 2}, {"block_n": 8}, {"block_k": 512}, {"block_k": 2048}, {"num_warps": 4},
    {"block_k": 2048, "num_warps": 4},
)  # fmt: skip
"""The same for a product of one row."""


def measure(setting: Setting) -> Iterator[Row]:
    sizes = setting.sizes
    for name, num_outputs, num_inputs in sizes.model.products:
        for num_rows in sizes.product_rows:
            what = f"{name} {num_outputs} x {num_inputs}, {num_rows} rows"
            row = library_row(f"{what}, torch", num_rows, num_outputs, num_inputs, setting)
            yield replace(row, group=f"{what}, our kernel")  # which it is compared with
            if setting.device == "cuda":
                yield other_library_row(f"{what}, torch, cuBLASLt", num_rows, num_outputs, num_inputs, setting)
            if setting.device == "cuda" and name != "logits":
                yield float8_row(f"{what}, torch, fp8", num_rows, num_outputs, num_inputs, setting)
    yield from rows_in_use(choices(setting), setting)


def measure_variants(setting: Setting) -> Iterator[Row]:
    yield from rows_of_variants(choices(setting), setting)


def choices(setting: Setting) -> Iterator[Choice]:
    """Products by our kernels. Raises `NotRun` without Triton."""
    why_not = why_no_triton(setting.device)
    if why_not:
        raise NotRun(f"our kernels are not: {why_not}")
    from engine.kernels.gpu.eight_bits import ProductConfig
    from engine.kernels.gpu.int4 import int4_config
    from engine.kernels.gpu.one_row import OneRowConfig

    # Triton's interpreter does not compute bfloat16.
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    for name, num_outputs, num_inputs in setting.sizes.model.products:
        for num_rows in setting.sizes.product_rows:
            config = ProductConfig.of(num_rows, dtype.itemsize)
            size = num_rows, num_outputs, num_inputs
            what = f"{name} {num_outputs} x {num_inputs}, {num_rows} rows"
            yield Choice(kernel_job(f"{what}, our kernel", size, dtype, dtype, setting), config)
            if name == "logits":  # this weight is never in 8 bits
                continue
            yield Choice(kernel_job(f"{what}, int8", size, torch.int8, dtype, setting), config, INT8_VARIANTS)
            in_use = int4_config(gpu_kind(setting.device), num_rows, dtype.itemsize)
            yield Choice(int4_job(f"{what}, int4", size, dtype, setting), in_use, INT8_VARIANTS)
            if not _why_no_float8(setting):
                yield Choice(kernel_job(f"{what}, fp8", size, torch.float8_e4m3fn, dtype, setting), config)
            if num_inputs % GROUP_SIZE == 0 and not _why_no_float8(setting):
                job = kernel_job(f"{what}, fp8, groups", size, torch.float8_e4m3fn, dtype, setting, GROUP_SIZE)
                yield Choice(job, config)
    for name, n, k in setting.sizes.model.products:
        what = f"{name} {n} x {k}, 1 rows, row by row"
        kinds = {what: dtype, f"{what}, int8": torch.int8, f"{what}, fp8": torch.float8_e4m3fn}
        for label, weight_dtype in kinds.items():
            is_plain = weight_dtype == dtype
            if is_plain or (name != "logits" and (weight_dtype == torch.int8 or not _why_no_float8(setting))):
                job = one_row_job(label, n, k, weight_dtype, dtype, setting)
                yield Choice(job, OneRowConfig.of(weight_dtype.itemsize), ONE_ROW_VARIANTS)


def _why_no_float8(setting: Setting) -> str:
    return why_no_float8(torch.cuda.get_device_capability()) if setting.device == "cuda" else ""


def other_library_row(what: str, num_rows: int, num_outputs: int, num_inputs: int, setting: Setting) -> Row:
    """Like `library_row`, with cuBLASLt if torch has it."""
    before = torch.backends.cuda.preferred_blas_library()
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    except RuntimeError as error:
        return Row(what=what, value=None, unit="GB/s", note=f"not run: {error}")
    try:
        return library_row(what, num_rows, num_outputs, num_inputs, setting)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def kernel_job(
    what: str, size: tuple[int, int, int], weight_dtype: torch.dtype, dtype: torch.dtype, setting: Setting,
    group_size: int | None = None,
) -> Job:  # fmt: skip
    """`size`: rows, outputs, inputs. The kernel converts weights of any type; bfloat16 stays as it is."""
    from engine.kernels.gpu.eight_bits import scaled_product

    num_rows, num_outputs, num_inputs = size
    num_bytes = num_outputs * num_inputs * weight_dtype.itemsize

    def launches(config: ProductConfig) -> tuple[list[Callable[[], object]], torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(num_rows, num_inputs, device=setting.device).to(dtype)
        works: list[Callable[[], object]] = []
        result = torch.empty(0)
        for _ in range(num_sets(num_bytes, cache_bytes(setting.device))):
            weight, scale = random_weight(num_outputs, num_inputs, weight_dtype, dtype, setting, group_size)
            if not works:
                result = scaled_product(x, weight, scale, None, group_size, config)
            works.append(
                lambda weight=weight, scale=scale: scaled_product(x, weight, scale, None, group_size, config)  # type: ignore[misc]
            )
        return works, result

    return Job(
        what=what, amount=num_bytes / 1e9, unit="GB/s", limit=setting.known.get(floors.COPY), target=TARGET,
        launches=launches,
    )  # fmt: skip


def int4_job(what: str, size: tuple[int, int, int], dtype: torch.dtype, setting: Setting) -> Job:
    """`size`: rows, outputs, inputs."""
    from engine.kernels.gpu.int4 import ScaledInt4, int4_product

    num_rows, num_outputs, num_inputs = size
    num_bytes = INT4_BYTES * num_outputs * num_inputs

    def launches(config: ProductConfig) -> tuple[list[Callable[[], object]], torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(num_rows, num_inputs, device=setting.device).to(dtype)
        works: list[Callable[[], torch.Tensor]] = []
        for _ in range(num_sets(int(num_bytes), cache_bytes(setting.device))):
            weight = quantize_int4(torch.randn(num_outputs, num_inputs, device=setting.device).to(dtype))
            works.append(partial(int4_product, x, ScaledInt4.of(weight), None, config))
        return list(works), works[0]()

    limit = setting.known.get(floors.COPY)
    return Job(what=what, amount=num_bytes / 1e9, unit="GB/s", limit=limit, target=TARGET, launches=launches)


def one_row_job(
    what: str, num_outputs: int, num_inputs: int, weight_dtype: torch.dtype, dtype: torch.dtype, setting: Setting
) -> Job:
    """For plain weights, or 8-bit weights with a scale for each output."""
    from engine.kernels.gpu.one_row import one_row_product

    num_bytes = num_outputs * num_inputs * weight_dtype.itemsize

    def launches(config: OneRowConfig) -> tuple[list[Callable[[], object]], torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(1, num_inputs, device=setting.device).to(dtype)
        works: list[Callable[[], torch.Tensor]] = []
        for _ in range(num_sets(num_bytes, cache_bytes(setting.device))):
            weight, scale = random_weight(num_outputs, num_inputs, weight_dtype, dtype, setting)
            scale_or_none = None if weight_dtype == dtype else scale
            works.append(partial(one_row_product, x, weight, None, scale_or_none, config))
        return list(works), works[0]()

    limit = setting.known.get(floors.COPY)
    return Job(what=what, amount=num_bytes / 1e9, unit="GB/s", limit=limit, target=TARGET, launches=launches)


def random_weight(
    num_outputs: int, num_inputs: int, weight_dtype: torch.dtype, dtype: torch.dtype, setting: Setting,
    group_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A random weight and its scales: for each output, or for each group of its inputs."""
    weight = torch.randn(num_outputs, num_inputs, device=setting.device).to(dtype)
    if weight_dtype == torch.int8:
        return quantize_int8(weight)
    if weight_dtype == torch.float8_e4m3fn:
        scales = (num_outputs,) if group_size is None else (num_outputs, num_inputs // group_size)
        return weight.to(weight_dtype), torch.rand(scales, device=setting.device)
    return weight, torch.ones(num_outputs, device=setting.device, dtype=dtype)


def library_row(what: str, num_rows: int, num_outputs: int, num_inputs: int, setting: Setting) -> Row:
    num_bytes = 2 * num_outputs * num_inputs
    x = torch.randn(num_rows, num_inputs, device=setting.device).bfloat16()
    weights = [
        torch.randn(num_outputs, num_inputs, device=setting.device).bfloat16()
        for _ in range(num_sets(num_bytes, cache_bytes(setting.device)))
    ]
    return rate_row(what, num_bytes, [lambda weight=weight: F.linear(x, weight) for weight in weights], setting)  # type: ignore[misc]


def float8_row(what: str, num_rows: int, num_outputs: int, num_inputs: int, setting: Setting) -> Row:
    """Includes converting the rows to 8 bits, as an engine does for many rows."""
    num_bytes = num_outputs * num_inputs
    x = torch.randn(num_rows, num_inputs, device=setting.device).bfloat16()
    make = library_float8(setting)
    try:
        products = [
            make(torch.randn(num_outputs, num_inputs, device=setting.device).bfloat16())
            for _ in range(num_sets(num_bytes, cache_bytes(setting.device)))
        ]
        return rate_row(what, num_bytes, [partial(product, x) for product in products], setting)
    except Exception as error:  # from a library that does not support this size; other rows are not affected
        return Row(what=what, value=None, unit="GB/s", note=f"failed: {short(error)}")


def library_float8(setting: Setting) -> Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Returns a function that makes a product from a weight: with the library's product, and with our kernel to convert
    rows if there is one."""
    if setting.device != "cuda" or why_no_triton(setting.device):
        return Float8Linear
    from engine.kernels.gpu.parts import TritonFloat8Linear

    return lambda weight: partial(Float8Linear.__call__, TritonFloat8Linear(weight))


def rate_row(what: str, num_bytes: int, works: list[Callable[[], Any]], setting: Setting) -> Row:
    seconds = seconds_of(works, setting.device, num_rounds=3 if setting.is_tiny else 30)
    return Row(
        what=what, value=num_bytes / seconds / 1e9, unit="GB/s", limit=setting.known.get(floors.COPY), target=TARGET
    )
