"""What layers that keep a state compute between their products, by the CPU kernels (source/recurrent.h, delta.h,
scan.h), in bfloat16. Call `load_cpu_kernels` first."""

from __future__ import annotations

import torch

from engine.models.recurrent_ops import Convolution, Limits, RecurrentOps
from engine.models.recurrent_states import RecurrentStep


def convolve(x_TC: torch.Tensor, of: Convolution, inputs: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
    y_TC: torch.Tensor = torch.ops.tandem_cpu.convolve(x_TC, of.weight, of.bias, inputs, *_sequences(step), of.has_silu)
    return y_TC


def gates(
    a_TN: torch.Tensor, b_TN: torch.Tensor, rate_N: torch.Tensor, bias_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    decay_TN, beta_TN = torch.ops.tandem_cpu.delta_gates(a_TN.contiguous(), b_TN.contiguous(), rate_N, bias_N)
    return decay_TN, beta_TN


def delta_rule(
    qkv_TC: torch.Tensor, decay_TN: torch.Tensor, beta_TN: torch.Tensor, matrices: torch.Tensor, step: RecurrentStep
) -> torch.Tensor:
    y_TNV: torch.Tensor = torch.ops.tandem_cpu.delta_rule(qkv_TC, decay_TN, beta_TN, matrices, *_sequences(step))
    return y_TNV


def steps(
    dt_TN: torch.Tensor, rate_N: torch.Tensor, bias_N: torch.Tensor, limits: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    decay_TN, dt_TN = torch.ops.tandem_cpu.scan_steps(dt_TN.contiguous(), rate_N, bias_N, *limits)
    return decay_TN, dt_TN


def scan(
    x_TC: torch.Tensor,
    decay_TN: torch.Tensor,
    dt_TN: torch.Tensor,
    skip_N: torch.Tensor,
    matrices: torch.Tensor,
    step: RecurrentStep,
) -> torch.Tensor:
    y_TNV: torch.Tensor = torch.ops.tandem_cpu.scan(x_TC, decay_TN, dt_TN, skip_N, matrices, *_sequences(step))
    return y_TNV


def _sequences(step: RecurrentStep) -> tuple[torch.Tensor, ...]:
    return step.firsts, step.lengths, step.slots, step.is_new


CPU_OPS = RecurrentOps(
    convolve,
    delta_rule,
    gates,
    scan,
    steps,
    delta_limits=Limits(key_grain=16, value_grain=32, most_key_dim=256),
    scan_limits=Limits(key_grain=16, value_grain=16, most_key_dim=256),
    channel_grain=16,
    most_taps=8,
)
