"""Measures layers that keep a state, alone: the convolution and what comes after it, of one layer of Qwen3-Next-80B-A3B
(gated delta rules) and one of Nemotron-Nano-9B-v2 (Mamba-2).

A decoding step reads and writes each sequence's matrices, so a copy of as many bytes is its limit. A prompt is computed
in spans of tokens, one after the other: no limit of the device says how long that takes. Beside it, its tokens one
after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu_parts.deepseek import rate_of_bytes, timed
from benchmarks.gpu_parts.gpt_oss import dtype_of
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.timing import cache_bytes, num_sets
from engine.kernels.gpu import why_no_triton
from engine.models.recurrent_ops import Convolution, RecurrentOps
from engine.models.recurrent_reference import TORCH_OPS
from engine.models.recurrent_shape import DeltaLayer, Mamba2Layer, recurrent_bytes
from engine.models.recurrent_states import RecurrentStates

Layer = DeltaLayer | Mamba2Layer
MAX_ERROR = 1e-2
"""Relative error against plain torch, from rounding to bfloat16 between the two and at the end."""


def measure(setting: Setting) -> Iterator[Row]:
    why_not = why_no_triton(setting.device)
    if why_not:
        raise NotRun(why_not)
    from engine.kernels.gpu.delta import delta_rule
    from engine.kernels.gpu.parts import TRITON_RECURRENT_OPS
    from engine.kernels.gpu.scan import scan

    sizes, ops = setting.sizes.states, TRITON_RECURRENT_OPS
    for name, layer in (("delta rules", sizes.delta), ("Mamba-2", sizes.mamba_2)):
        yield error_row(setting, name, layer, ops)
        for num_seqs in sizes.nums_seqs:
            yield decode_row(setting, name, layer, num_seqs, ops)
        token_by_token = replace(ops, delta_rule=delta_rule, scan=scan)
        for how, each in (("in spans", ops), ("token by token", token_by_token)):
            bench = Bench(layer, [sizes.prompt_tokens], each, setting)
            milliseconds = 1e3 * timed([bench.compute], setting)
            yield Row(what=f"{name}, prompt of {sizes.prompt_tokens} {how}", value=milliseconds, unit="ms")


class Bench:
    """One step of a layer, with sequences of these lengths, each of which goes on from a state."""

    def __init__(self, layer: Layer, lengths: list[int], ops: RecurrentOps, setting: Setting) -> None:
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
        weight, bias = randn(layer.num_channels, layer.num_taps).to(dtype), randn(layer.num_channels).to(dtype)
        has_bias = isinstance(layer, Mamba2Layer)
        self._convolution = Convolution(weight, bias if has_bias else None, has_silu=True)
        num_heads = layer.matrices_shape[0]
        self._decay, self._beta = randn(2, num_tokens, num_heads).sigmoid()
        self._skip = randn(num_heads)
        self._layer, self._ops = layer, ops

    def compute(self) -> torch.Tensor:
        """[T, heads, value dim]"""
        states, ops = self.states, self._ops
        matrices, step = states.matrices[0], states.step
        x = ops.convolve(self._x, self._convolution, states.inputs[0], step)
        if isinstance(self._layer, DeltaLayer):
            return ops.delta_rule(x, self._decay, self._beta, matrices, step)
        return ops.scan(x, self._decay, self._beta, self._skip, matrices, step)


def error_row(setting: Setting, name: str, layer: Layer, ops: RecurrentOps) -> Row:
    lengths = [1, 5, 150, 16, 1]
    found, expected = (Bench(layer, lengths, each, setting).compute().double() for each in (ops, TORCH_OPS))
    error = float(((found - expected).square().sum() / expected.square().sum()).sqrt())
    return Row(what=f"error of {name}", value=error, unit="error", at_most=MAX_ERROR, is_check=True)


def decode_row(setting: Setting, name: str, layer: Layer, num_seqs: int, ops: RecurrentOps) -> Row:
    num_bytes = 2 * num_seqs * layer.matrices_bytes  # read and written
    benches = [
        Bench(layer, [1] * num_seqs, ops, setting) for _ in range(num_sets(num_bytes, cache_bytes(setting.device)))
    ]
    seconds = timed([bench.compute for bench in benches], setting)
    return rate_of_bytes(f"{name}, decode {num_seqs}", num_bytes, seconds, setting)
