"""Quantization asked for by the name of the checkpoint's own method, as vLLM's users do: it means "auto". No torch."""

from __future__ import annotations

from typing import Any

from engine.models.stored_weights import method_of

METHODS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "auto-round", "mxfp4")
"""vLLM's names. With "_marlin", which names kernels, they mean the same checkpoints."""


def without_method(asked: str, hf_config: dict[str, Any]) -> str:
    """`asked`, or "auto" if it is the checkpoint's own method. Raises `ValueError` if it is that of other
    checkpoints."""
    if asked not in METHODS:
        return asked
    own = method_of(hf_config)
    if own != asked.removesuffix("_marlin"):
        has = f"whose quant_method is {own!r:.80}" if own else "whose weights are plain"
        raise ValueError(f"quantization {asked} is not that of this checkpoint, {has}; give auto")
    return "auto"
