"""Prefill in one engine and decode in another, with pools of latents: over gRPC, under grants, checked by digests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from deepseek_cases import FOR_CPU_KERNELS, GREEDY, ON_CPU_KERNELS, PROMPT, V2, V3, alone, config_of
from handover import bytes_of, handed_over, transfer

from engine.kv_cache import LATENT_KV_ORDER, PAIRED_LATENT_KV_ORDER
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from kv_transfer import IncompatiblePeer
from prefix_hash.compat import compat_difference

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 128, "dtype": "float32",
} | {name: V2[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}  # fmt: skip
"""Its blocks have as many bytes as blocks of latents."""


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, ON_CPU_KERNELS], ids=str)
def test_the_same_tokens_from_two_engines_as_from_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    one, prefill, decode = (LLMEngine(config_of(tmp_path, V3 | FOR_CPU_KERNELS, **settings)) for _ in range(3))
    drawn = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=5)
    for params in (GREEDY, drawn):
        tokens = handed_over(prefill, decode, PROMPT, params)
        assert len(tokens) == 12
        assert tokens == alone(one, params)
    for engine in (one, prefill, decode):
        ledger, problems = engine.audit()
        assert problems == []
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks


def test_pools_of_other_models_are_no_peers(tmp_path: Path) -> None:
    """Sizes in bytes would not tell them apart: these keys and values have as many."""
    ours, theirs = LLMEngine(config_of(tmp_path)), LLMEngine(config_of(tmp_path, LLAMA))
    layout = bytes_of(ours).layout
    assert (layout.num_parts, layout.num_kv_heads, layout.head_dim, layout.order) == (1, 1, 32, LATENT_KV_ORDER)
    assert layout.block_bytes == bytes_of(theirs).layout.block_bytes
    with pytest.raises(IncompatiblePeer, match=r"head_dim.*num_parts: .*order"):
        asyncio.run(transfer(bytes_of(theirs), bytes_of(ours), [1], [2], 1))
    assert compat_difference(ours.config.compat_digest, theirs.config.compat_digest)


def test_latents_in_another_order_are_no_peers(tmp_path: Path) -> None:
    """Those of the CPU kernels, and those of all other backends."""
    config = V3 | FOR_CPU_KERNELS
    ours = LLMEngine(config_of(tmp_path, config, **ON_CPU_KERNELS))
    theirs = LLMEngine(config_of(tmp_path, config, **ON_CPU_KERNELS | {"attention_backend": "torch"}))
    assert bytes_of(ours).layout.order == PAIRED_LATENT_KV_ORDER
    with pytest.raises(IncompatiblePeer, match="order"):
        asyncio.run(transfer(bytes_of(theirs), bytes_of(ours), [1], [2], 1))
    assert compat_difference(ours.config.compat_digest, theirs.config.compat_digest)


@pytest.mark.parametrize(
    "changes",
    [{"kv_lora_rank": 25}, {"qk_nope_head_dim": 14}, {"routed_scaling_factor": 1.0}, {"rope_interleave": False}],
)
def test_whoever_computes_otherwise_is_no_peer(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours, theirs = config_of(tmp_path), config_of(tmp_path, V3 | changes)
    assert "model" in compat_difference(ours.compat_digest, theirs.compat_digest)
