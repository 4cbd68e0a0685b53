"""Checks which weights engines multiply with on the pretended GPU, for checkpoints in 8 and in 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepseek_cases import GREEDY, V3
from engine_steps import logits_of
from handover import alone, handed_over
from int4_checkpoints import INT4_FORMS, in_int4
from many_endings import CONFIG, prompt_of
from pretend_gpu.engines import make_engine
from quantized_checkpoints import (
    FORMS,
    PRODUCTS,
    compressed,
    deepseek_tensors,
    llama_tensors,
    quantized,
    save_checkpoint,
)

from engine.llm_engine import LLMEngine
from engine.models.expert_products import PlainExperts, of_expert
from engine.running.model_runner import ModelRunner

WIDE = CONFIG | {"hidden_size": 64}
"""A hidden size that 8-bit products accept."""
EXPERTS = V3 | {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 60}


def check_checkpoint(folder: Path, form: str, *, is_kept: bool, **settings: Any) -> None:
    """Check that the engine multiplies with the stored weights (q, k and v joined), or with widened ones if not
    `is_kept`, that plain products stay plain, and that handing over between engines gives the same answer."""
    stored, plain = quantized(llama_tensors(WIDE, torch.bfloat16), FORMS[form])
    name = "model.layers.0.self_attn.o_proj.weight"
    stored[name] = plain[name] = llama_tensors(WIDE, torch.bfloat16)[name]
    stored = {each: tensor for each, tensor in stored.items() if not each.startswith(f"{name}_")}
    config = WIDE | {"quantization_config": FORMS[form].quantization_config}
    save_checkpoint(folder, config, stored)
    settings |= {"load_format": "auto", "dtype": "bfloat16"}
    one, prefill, decode = (make_engine(folder, config, **settings) for _ in range(3))
    assert one.config.model.quantization == ("stored" if is_kept else "none")
    attention = [layer.attention for layer in one.executor._worker.runner._model._layers._layers]  # type: ignore[attr-defined]
    qkv: Any = attention[1].qkv
    held = qkv.weight_NK if hasattr(qkv, "weight_NK") else qkv.weight.weight if is_kept else qkv._weight
    tensors = stored if is_kept else plain
    expected = torch.cat([tensors[f"model.layers.1.self_attn.{name}_proj.weight"].float() for name in "qkv"])
    assert held.dtype == (FORMS[form].dtype if is_kept else torch.bfloat16)
    assert torch.equal(held.cpu().float(), expected.to(held.dtype).float())
    assert torch.equal(attention[0].output._weight.cpu(), plain[name])
    prompt = prompt_of(16)
    assert handed_over(prefill, decode, prompt, GREEDY) == alone(one, prompt, GREEDY)


def check_int4_checkpoint(folder: Path, **settings: Any) -> None:
    """Check that the engine's products use exactly the values that the stored weights stand for, q, k and v joined."""
    stored, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in llama_tensors(WIDE, torch.bfloat16).items():
        if not name.endswith(PRODUCTS):
            stored[name] = tensor
            continue
        groups = tensor.float().view(len(tensor), -1, 32)
        scale = (groups.abs().amax(dim=2) / 7).bfloat16()
        integers = (groups / scale[:, :, None]).round().clamp(-8, 7).to(torch.int32)
        eight = (integers + 8).view(len(tensor), -1, 8) << torch.arange(0, 32, 4, dtype=torch.int32)
        stored[f"{name}_packed"], stored[f"{name}_scale"] = eight.sum(dim=2, dtype=torch.int32), scale
        plain[name] = (integers * scale.float()[:, :, None]).flatten(1).bfloat16()
    form = compressed("pack-quantized", "int", "group", num_bits=4, group_size=32, actorder=None)
    config = WIDE | {"quantization_config": form}
    save_checkpoint(folder, config, stored)
    settings |= {"load_format": "auto", "dtype": "bfloat16"}
    one, prefill, decode = (make_engine(folder, config, **settings) for _ in range(3))
    assert one.config.model.quantization == "stored"
    for layer, made in enumerate(runner_of(one)._model._layers._layers):  # type: ignore[attr-defined]
        expected = torch.cat([plain[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkv"])
        one_by_one = torch.eye(WIDE["hidden_size"], dtype=torch.bfloat16, device="cuda")
        assert torch.equal(made.attention.qkv(one_by_one).T.cpu(), expected)
    prompt = prompt_of(16)
    assert handed_over(prefill, decode, prompt, GREEDY) == alone(one, prompt, GREEDY)


def check_int4_experts(folder: Path, config: dict[str, Any], form: str, *, is_kept: bool) -> None:
    """Check that all experts of a layer are in 4 bits on the device, or widened where no kernel takes their groups (not
    `is_kept`); and that the logits of prompts and of recorded decode steps are close to those of widened weights."""
    tensors = deepseek_tensors(config, torch.bfloat16)
    of_experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    stored, _ = in_int4(of_experts, INT4_FORMS[form])
    config = config | {"quantization_config": INT4_FORMS[form].quantization_config}
    save_checkpoint(folder, config, {name: x for name, x in tensors.items() if name not in of_experts} | stored)
    settings: dict[str, Any] = {"load_format": "auto", "dtype": "bfloat16", "attention_backend": "triton"}
    settings |= {"max_num_batched_tokens": 32, "max_num_seqs": 4, "num_kv_blocks": 32}
    kept = make_engine(folder, config, **settings)
    assert kept.config.model.quantization == "stored"
    assert kept.config.device.uses_graphs
    experts = experts_of(kept)
    if is_kept:
        inner = config["n_routed_experts"] * config["moe_intermediate_size"]
        held = experts._gate_up.packed, experts._down.packed
        assert [(each.dtype, len(each)) for each in held] == [(torch.uint8, 2 * inner), (torch.uint8, inner)]
        assert {each.device.type for each in held} == {"cuda"}
    else:
        assert isinstance(experts, PlainExperts)
    widened = make_engine(folder, config, quantization="none", enforce_eager=True, **settings)
    for ours, theirs in zip(logits_of(runner_of(kept)), logits_of(runner_of(widened)), strict=True):
        expected = theirs.cpu().double()
        assert (ours.cpu().double() - expected).norm() < 0.02 * expected.norm()


def check_experts(folder: Path, config: dict[str, Any], form: str, dtype: str, *, error: float) -> None:
    """Check that all experts of a layer are kept in the file's bytes; and that the logits of prompts and of recorded
    decode steps differ from those of widened weights by less than `error` of their norm."""
    stored, _ = quantized(deepseek_tensors(config, torch.bfloat16), FORMS[form])
    config = config | {"quantization_config": FORMS[form].quantization_config}
    save_checkpoint(folder, config, stored)
    settings: dict[str, Any] = {"load_format": "auto", "dtype": dtype, "attention_backend": "triton"}
    settings |= {"max_num_batched_tokens": 32, "max_num_seqs": 4, "num_kv_blocks": 32}
    kept = make_engine(folder, config, **settings)
    assert kept.config.model.quantization == "stored"
    assert kept.config.device.uses_graphs
    experts = experts_of(kept)
    assert type(experts).__name__ == "TritonScaledExperts"  # importing it earlier would compile kernels for a real GPU
    num_experts = config["n_routed_experts"]
    for e in range(num_experts):
        gate, up, down = (
            stored[f"model.layers.2.mlp.experts.{e}.{kind}_proj.weight"].float() for kind in ("gate", "up", "down")
        )
        of_gate_up, of_down = (of_expert(stack, e, num_experts) for stack in (experts._gate_up, experts._down))
        assert torch.equal(of_gate_up.weight.cpu().float(), torch.cat((gate, up)))
        assert torch.equal(of_down.weight.cpu().float(), down)
    widened = make_engine(folder, config, quantization="none", enforce_eager=True, **settings)
    for ours, theirs in zip(logits_of(runner_of(kept)), logits_of(runner_of(widened)), strict=True):
        expected = theirs.cpu().double()
        assert 0 < (ours.cpu().double() - expected).norm() < error * expected.norm()


def experts_of(engine: LLMEngine) -> Any:
    """Return the experts' products of the third layer."""
    return runner_of(engine)._model._layers._layers[2].feed_forward.experts._products  # type: ignore[attr-defined]


def runner_of(engine: LLMEngine) -> ModelRunner:
    return engine.executor._worker.runner
