"""Finds what transformers silently omits from a GGUF file: biases that it has no name for, and the scaling of rotary
positions. Without these, the model would differ from the file's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

ROPE_FREQS = "rope_freqs.weight"
"""Divisors of each pair's frequency, in Llama 3.1 and later."""
LLAMA3_POSITIONS, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0
"""The same for all models with such factors: their original number of positions, and the numbers of turns within these
between which the factors change."""

ROPE_FIELDS = ("type", "factor", "original_context_length", "finetuned")


def tensor_names(reader: Any, num_layers: int) -> Any:
    """`gguf.TensorNameMap` from Hugging Face names to the file's; None if the gguf package does not know the model."""
    import gguf

    architecture = _contents(reader, "general.architecture")
    archs = [arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture]
    return gguf.get_tensor_name_map(archs[0], num_layers) if archs else None


def check_biases_taken(reader: Any, taken: Iterable[str], num_layers: int) -> None:
    """Raise `ValueError` if the file has a bias that is not in `taken` (Hugging Face names)."""
    names = tensor_names(reader, num_layers)
    if names is None:
        return
    stems = {names.get_name(name.removesuffix(".bias")) for name in taken if name.endswith(".bias")}
    biases = (tensor.name for tensor in reader.tensors if tensor.name.endswith(".bias"))
    left = [name for name in biases if name.removesuffix(".bias") not in stems]
    if left:
        raise ValueError(f"transformers does not read its tensors {', '.join(left[:5])}; give a Hugging Face folder")


def rope_scaling(reader: Any, theta: float) -> dict[str, Any]:
    """Return what config.json's `rope_parameters` lack; empty if positions are not scaled.

    Raises `ValueError` if positions are scaled in an unknown way.
    """
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == ROPE_FREQS), None)
    if factors is not None:
        return _of_factors(np.asarray(factors, np.float32).reshape(-1), theta)
    at = f"{_contents(reader, 'general.architecture')}.rope.scaling"
    rope_type, factor = _contents(reader, f"{at}.type") or "none", _contents(reader, f"{at}.factor") or 1.0
    if rope_type == "none" or (rope_type == "linear" and factor == 1):
        return {}
    if rope_type not in ("linear", "yarn"):
        raise ValueError(f"{at}.type {rope_type!r} cannot be converted; give a Hugging Face folder")
    fields = [field for field in reader.fields if field.startswith(f"{at}.")]
    others = [field for field in fields if field.removeprefix(f"{at}.") not in ROPE_FIELDS]
    if others:
        raise ValueError(f"{', '.join(others)} cannot be converted; give a Hugging Face folder")
    scaling = {"rope_type": rope_type, "factor": factor}
    original = _contents(reader, f"{at}.original_context_length")
    return scaling if original is None else scaling | {"original_max_position_embeddings": original}


def _of_factors(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """The `rope_parameters` of the factors in `ROPE_FREQS`."""
    if np.all(factors == 1):
        return {}
    factor = float(f"{factors.max():.6g}")  # undoes float32's rounding
    frequencies = theta ** (-np.arange(len(factors)) / len(factors))
    turns = LLAMA3_POSITIONS * frequencies / (2 * math.pi)
    kept = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clip(0, 1)
    if not np.allclose(factors, 1 / ((1 - kept) / factor + kept), rtol=1e-3):
        raise ValueError(f"its {ROPE_FREQS} scales positions otherwise than Llama 3; give a Hugging Face folder")
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": LLAMA3_LOW, "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_POSITIONS,
    }  # fmt: skip


def _contents(reader: Any, field: str) -> Any:
    found = reader.get_field(field)
    return None if found is None else found.contents()
