"""Measures layers of gated delta rules alone: the convolution and the rule of one layer of Qwen3-Next-80B-A3B.

A decoding step reads and writes each sequence's matrices, so a copy of as many bytes is its limit. A prompt's tokens
are computed one after the other, with a part of a matrix in registers: no limit of the device says how long that takes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu_parts.deepseek import rate_of_bytes, timed
from benchmarks.gpu_parts.gpt_oss import dtype_of
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.shapes import DeltaSizes
from benchmarks.gpu_parts.timing import cache_bytes, num_sets
from engine.kernels.gpu import why_no_triton
from engine.models.recurrent_ops import Convolution, RecurrentOps
from engine.models.recurrent_reference import TORCH_OPS
from engine.models.recurrent_shape import DeltaLayer, recurrent_bytes
from engine.models.recurrent_states import RecurrentStates

MAX_ERROR = 1e-2
"""Relative error against plain torch, from rounding to bfloat16 between the two and at the end."""


def measure(setting: Setting) -> Iterator[Row]:
    why_not = why_no_triton(setting.device)
    if why_not:
        raise NotRun(why_not)
    from engine.kernels.gpu.parts import TRITON_RECURRENT_OPS

    sizes = setting.sizes.delta
    yield error_row(setting, sizes)
    for num_seqs in sizes.nums_seqs:
        yield decode_row(setting, sizes.layer, num_seqs, TRITON_RECURRENT_OPS)
    bench = Bench(sizes.layer, [sizes.prompt_tokens], TRITON_RECURRENT_OPS, setting)
    milliseconds = 1e3 * timed([bench.compute], setting)
    yield Row(what=f"delta rules, prompt of {sizes.prompt_tokens}", value=milliseconds, unit="ms")


class Bench:
    """One step of a layer, with sequences of these lengths, each of which goes on from a state."""

    def __init__(self, layer: DeltaLayer, lengths: list[int], ops: RecurrentOps, setting: Setting) -> None:
        dtype, device, num_tokens = dtype_of(setting), setting.device, sum(lengths)
        generator = torch.Generator(device).manual_seed(1)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        self.states = RecurrentStates((layer,), len(lengths), recurrent_bytes((layer,), dtype.itemsize), dtype, device)
        self.states.matrices[0].copy_(randn(*self.states.matrices[0].shape) / 8)
        self.states.inputs[0].copy_(randn(*self.states.inputs[0].shape))
        counts = np.array(lengths)
        self.states.assign(counts, counts + 1, np.arange(len(lengths)))
        self._x = randn(num_tokens, layer.num_channels).to(dtype)
        self._weight = randn(layer.num_channels, layer.num_taps).to(dtype)
        self._decay, self._beta = randn(2, num_tokens, layer.num_value_heads).sigmoid()
        self._ops = ops

    def compute(self) -> torch.Tensor:
        """[T, heads, value dim]"""
        states, ops = self.states, self._ops
        qkv = ops.convolve(self._x, Convolution(self._weight, has_silu=True), states.inputs[0], states.step)
        return ops.delta_rule(qkv, self._decay, self._beta, states.matrices[0], states.step)


def error_row(setting: Setting, sizes: DeltaSizes) -> Row:
    from engine.kernels.gpu.parts import TRITON_RECURRENT_OPS

    lengths = [1, 5, 70, 1]
    found, expected = (
        Bench(sizes.layer, lengths, ops, setting).compute().double() for ops in (TRITON_RECURRENT_OPS, TORCH_OPS)
    )
    error = float(((found - expected).square().sum() / expected.square().sum()).sqrt())
    return Row(what="error of delta rules", value=error, unit="error", at_most=MAX_ERROR, is_check=True)


def decode_row(setting: Setting, layer: DeltaLayer, num_seqs: int, ops: RecurrentOps) -> Row:
    num_bytes = 2 * num_seqs * layer.matrices_bytes  # read and written
    benches = [
        Bench(layer, [1] * num_seqs, ops, setting) for _ in range(num_sets(num_bytes, cache_bytes(setting.device)))
    ]
    seconds = timed([bench.compute for bench in benches], setting)
    return rate_of_bytes(f"delta rules, decode {num_seqs}", num_bytes, seconds, setting)
