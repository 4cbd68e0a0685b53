"""Configuration of rotary positions, read from a Hugging Face config.json. No torch.

Reads both spellings: `rope_theta` + `rope_scaling` of transformers 4 and `rope_parameters` of transformers 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.models.hf_fields import flag, integer, number, one_of, positive, section

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
    """For "yarn": waves with more than `beta_fast` turns within `original_max_positions` are kept, those with fewer
    than `beta_slow` turns are stretched."""
    is_ramp_whole: bool = True
    """For "yarn": the ramp between the two begins and ends at whole dimensions."""
    attention_factor: float = 1.0
    """Factor of cosines and sines."""
    mscale_all_dim: float = 0.0
    """For "yarn" with latent attention: increases the softmax scale; 0: does not."""

    @staticmethod
    def from_hf(hf_config: dict[str, Any], max_positions: int) -> RopeConfig:
        parameters = _parameters(hf_config)
        rope_type = one_of(parameters, "rope_type" if "rope_type" in parameters else "type", ROPE_TYPES)
        theta = positive({"rope_theta": hf_config.get("rope_theta")} | parameters, "rope_theta", default=10000.0)
        original = integer(parameters, "original_max_position_embeddings", default=max_positions)
        if rope_type == "yarn":
            return _yarn(parameters, theta, original, max_positions)
        needed = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
        _check_has(parameters, rope_type, needed[rope_type])
        fields: dict[str, Any] = {name: positive(parameters, name) for name in needed[rope_type]}
        if rope_type == "llama3" and fields["high_freq_factor"] <= fields["low_freq_factor"]:
            raise ValueError(
                f"config.json: high_freq_factor must be above low_freq_factor={fields['low_freq_factor']:g}, "
                f"is {fields['high_freq_factor']:g}"
            )
        return RopeConfig(theta=theta, rope_type=rope_type, original_max_positions=original, **fields)


def rotated_part(hf_config: dict[str, Any], default: float) -> float:
    """Which part of a head is rotated: its first numbers. `default`: the architecture's; if it is 1, no other part is
    supported."""
    fields = {"partial_rotary_factor": hf_config.get("partial_rotary_factor")} | _parameters(hf_config)
    if default == 1.0:
        return float(one_of(fields, "partial_rotary_factor", (1.0,)))
    part = positive(fields, "partial_rotary_factor", default=default)
    if part > 1:
        raise ValueError(f"config.json: partial_rotary_factor must be at most 1, is {part:g}")
    return part


def _parameters(hf_config: dict[str, Any]) -> dict[str, Any]:
    """As in transformers, `rope_scaling` counts if there are both."""
    return section(hf_config, "rope_scaling") or section(hf_config, "rope_parameters")


def _check_has(parameters: dict[str, Any], rope_type: str, names: tuple[str, ...]) -> None:
    for name in names:
        if name not in parameters:
            raise ValueError(f"config.json: rope type {rope_type!r} needs the field {name}")


def yarn_scale(factor: float, mscale: float) -> float:
    """B. Peng et al., "YaRN", 2023, section 3.4, with DeepSeek's `mscale`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(parameters: dict[str, Any], theta: float, original: int, max_positions: int) -> RopeConfig:
    _check_has(parameters, "yarn", ("factor",))
    factor = number(parameters, "factor", least=1, default=max_positions / original)
    mscale, mscale_all_dim = (number(parameters, name, default=0.0) for name in ("mscale", "mscale_all_dim"))
    attention_factor = yarn_scale(factor, 1.0)
    if mscale and mscale_all_dim:
        attention_factor = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return RopeConfig(
        theta=theta,
        rope_type="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=number(parameters, "beta_fast", default=32.0) or 32.0,
        beta_slow=number(parameters, "beta_slow", default=1.0) or 1.0,
        is_ramp_whole=flag(parameters, "truncate", default=True),
        attention_factor=positive(parameters, "attention_factor", default=attention_factor),
        mscale_all_dim=mscale_all_dim,
    )
