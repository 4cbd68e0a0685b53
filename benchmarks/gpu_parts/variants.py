"""Times a kernel of one size, alone or under several launch configurations: the one in use first, then each other one
that runs and computes the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import Setting
from benchmarks.gpu_parts.timing import cache_bytes, num_sets, seconds_of

MAX_DIFFERENCE = 0.02
"""Largest relative difference of a configuration's result from that of the one in use: bfloat16 rounds to 0.004."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A kernel of one size: its inputs, more than the cache holds, and the amount of its work."""

    what: str
    amount: float
    """GB or TFLOP of one launch."""
    unit: str
    limit: float | None
    target: float | None
    launches: Callable[[Any], tuple[list[Callable[[], object]], torch.Tensor]]
    """Maps a configuration to a launch for each set of inputs, and the result of the first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The launch configurations of a job."""

    job: Job
    in_use: Any
    variants: tuple[dict[str, int], ...] = ()
    """Changes that other configurations make to it."""


def launches_over_weights(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], size: tuple[int, int, int], dtype: torch.dtype,
    setting: Setting,
) -> tuple[list[Callable[[], object]], torch.Tensor]:  # fmt: skip
    """The result of `Job.launches` for products of x with each of several random weights. `size`: rows, outputs,
    inputs."""
    num_rows, num_outputs, num_inputs = size
    torch.manual_seed(1)
    x = torch.randn(num_rows, num_inputs, device=setting.device).to(dtype)
    weights = [
        torch.randn(num_outputs, num_inputs, device=setting.device).to(dtype)
        for _ in range(num_sets(num_outputs * num_inputs * dtype.itemsize, cache_bytes(setting.device)))
    ]
    return [partial(product, x, weight) for weight in weights], product(x, weights[0])


def rows_in_use(choices: Iterable[Choice], setting: Setting) -> Iterator[Row]:
    for choice in choices:
        yield timed_row(choice.job, choice.in_use, setting)[0]


def rows_of_variants(choices: Iterable[Choice], setting: Setting) -> Iterator[Row]:
    """Rows of all variants. Each configuration compiles a kernel of its own, and a broken one may take the device
    down."""
    for choice in choices:
        if choice.variants:
            yield from variant_rows(choice.job, choice.in_use, choice.variants, setting)


def timed_row(job: Job, config: Any, setting: Setting) -> tuple[Row, torch.Tensor]:
    works, result = job.launches(config)
    rate = job.amount / seconds_of(works, setting.device, num_rounds=3 if setting.is_tiny else 30)
    row = Row(what=job.what, value=rate, unit=job.unit, limit=job.limit, target=job.target, group=job.what)
    return row, result.float()


def variant_rows(job: Job, in_use: Any, variants: tuple[dict[str, int], ...], setting: Setting) -> Iterator[Row]:
    row, expected = timed_row(job, in_use, setting)
    yield row
    for changes in variants[: setting.sizes.num_variants]:
        what = f"{job.what}, " + ", ".join(f"{name}={value}" for name, value in changes.items())
        try:
            row, ours = timed_row(job, replace(in_use, **changes), setting)
        except Exception as error:  # from the compiler or the launch: this configuration does not work
            yield Row(what=what, value=None, unit=job.unit, note=f"does not run: {short(error)}")
            continue
        difference = float((ours - expected).norm() / expected.norm())
        if not difference <= MAX_DIFFERENCE:
            yield Row(what=what, value=None, unit=job.unit, note=f"wrong: differs by {difference:.2g}")
        else:
            yield replace(row, what=what, target=None)


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
