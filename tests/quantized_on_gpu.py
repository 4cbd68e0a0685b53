"""Engines of checkpoints in 8 bits on the pretended GPU: what they multiply with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepseek_cases import GREEDY
from handover import alone, handed_over
from many_endings import CONFIG, prompt_of
from pretend_gpu.engines import make_engine
from quantized_checkpoints import FORMS, llama_tensors, quantized, save_checkpoint

WIDE = CONFIG | {"hidden_size": 64}
"""As products in 8 bits want it."""


def check_checkpoint(folder: Path, form: str, *, is_kept: bool, **settings: Any) -> None:
    """What is multiplied with is what is stored, q, k and v below each other, or is widened where it cannot be; a
    product that was left plain is. One engine prefills and another decodes."""
    stored, plain = quantized(llama_tensors(WIDE, torch.bfloat16), FORMS[form])
    name = "model.layers.0.self_attn.o_proj.weight"
    stored[name] = plain[name] = llama_tensors(WIDE, torch.bfloat16)[name]
    stored = {each: tensor for each, tensor in stored.items() if not each.startswith(f"{name}_")}
    config = WIDE | {"quantization_config": FORMS[form].quantization_config}
    save_checkpoint(folder, config, stored)
    settings |= {"load_format": "auto", "dtype": "bfloat16"}
    one, prefill, decode = (make_engine(folder, config, **settings) for _ in range(3))
    assert one.config.model.quantization == ("stored" if is_kept else "none")
    attention = [layer.attention for layer in one.executor._worker._runner._model._layers._layers]  # type: ignore[attr-defined]
    qkv: Any = attention[1].qkv
    held = qkv.weight_NK if hasattr(qkv, "weight_NK") else qkv.weight.weight if is_kept else qkv._weight
    tensors = stored if is_kept else plain
    expected = torch.cat([tensors[f"model.layers.1.self_attn.{name}_proj.weight"].float() for name in "qkv"])
    assert held.dtype == (FORMS[form].dtype if is_kept else torch.bfloat16)
    assert torch.equal(held.cpu().float(), expected.to(held.dtype).float())
    assert torch.equal(attention[0].output._weight.cpu(), plain[name])
    prompt = prompt_of(16)
    assert handed_over(prefill, decode, prompt, GREEDY) == alone(one, prompt, GREEDY)
