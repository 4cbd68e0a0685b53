"""Rotary positions, read from a Hugging Face config.json. No torch.

Both spellings are read: `rope_theta` + `rope_scaling` of transformers 4 and `rope_parameters` of transformers 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.models.hf_fields import number

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    theta: float
    rope_type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Of "yarn": waves that turn more often than the one within `original_max_positions` stay, less often than the
    other are stretched."""
    is_ramp_whole: bool = True
    """Of "yarn": the ramp between the two begins and ends at whole dimensions."""
    attention_factor: float = 1.0
    """What cosines and sines are multiplied with."""
    mscale_all_dim: float = 0.0
    """Of "yarn" with latent attention: grows the softmax' scale; 0: not."""

    @staticmethod
    def from_hf(hf_config: dict[str, Any], max_positions: int) -> RopeConfig:
        parameters: dict[str, Any] = dict(hf_config.get("rope_scaling") or {}) | dict(
            hf_config.get("rope_parameters") or {}
        )
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"config.json: rope type {rope_type!r} is not supported; known are {', '.join(ROPE_TYPES)}"
            )
        if parameters.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError("config.json: partial_rotary_factor other than 1 is not supported")
        theta = float(parameters.get("rope_theta", hf_config.get("rope_theta", 10000.0)))
        original = int(parameters.get("original_max_position_embeddings") or max_positions)
        if rope_type == "yarn":
            return _yarn(parameters, theta, original, max_positions)
        needed = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
        for name in needed[rope_type]:
            if name not in parameters:
                raise ValueError(f"config.json: rope type {rope_type!r} needs the field {name}")
        fields: dict[str, Any] = {name: float(parameters[name]) for name in needed[rope_type]}
        return RopeConfig(theta=theta, rope_type=rope_type, original_max_positions=original, **fields)


def yarn_scale(factor: float, mscale: float) -> float:
    """B. Peng et al., "YaRN", 2023, section 3.4, with DeepSeek's `mscale`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(parameters: dict[str, Any], theta: float, original: int, max_positions: int) -> RopeConfig:
    if "factor" not in parameters:
        raise ValueError("config.json: rope type 'yarn' needs the field factor")
    factor = number(parameters, "factor", max_positions / original)
    if factor < 1:
        raise ValueError(f"config.json: factor of rope type 'yarn' must be at least 1, is {factor}")
    mscale, mscale_all_dim = (number(parameters, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    attention_factor = yarn_scale(factor, 1.0)
    if mscale and mscale_all_dim:
        attention_factor = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return RopeConfig(
        theta=theta,
        rope_type="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=number(parameters, "beta_fast", 32.0) or 32.0,
        beta_slow=number(parameters, "beta_slow", 1.0) or 1.0,
        is_ramp_whole=bool(parameters.get("truncate", True)),
        attention_factor=number(parameters, "attention_factor", attention_factor),
        mscale_all_dim=mscale_all_dim,
    )
