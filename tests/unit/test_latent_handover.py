"""Prefill in one engine, decode in another, with pools of latents: over gRPC, under grants, checked by digests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from deepseek_cases import GREEDY, PROMPT, V2, V3, alone, config_of, finish

import kv_transfer
from engine.kv_cache import LATENT_KV_ORDER
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from kv_transfer import Identity, IncompatiblePeer, KVPool, KVReceiver, KVTransferServicer
from prefix_hash.compat import compat_difference
from protos import tandem_kv_transfer_pb2_grpc as pb_grpc
from worker_service.pool_memory import transfer_pool

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 128, "dtype": "float32",
} | {name: V2[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}  # fmt: skip
"""Blocks of as many bytes as those of the latents."""


def bytes_of(engine: LLMEngine) -> KVPool:
    return transfer_pool(engine.executor.kv_pool, engine.executor.kv_shape, engine.config.cache.kv_order)


async def transfer(source: KVPool, destination: KVPool, src_block_ids: list[int], dst_block_ids: list[int]) -> None:
    """As two workers do it; raises what the sender hears."""
    committed: list[int] = []

    async def on_commit(grant: object, first_token_id: int, num_prompt_tokens: int) -> bool:
        committed.append(num_prompt_tokens)
        return True

    identity = Identity(worker_id="decode", incarnation="d", compat_digest="same")
    endpoint = kv_transfer.create_endpoint("grpc", pool=destination, identity=identity)
    receiver = KVReceiver(
        pool=destination, identity=identity, lease_s=5.0, endpoints=[endpoint], on_commit=on_commit,
        on_freed=lambda grants: None,
    )  # fmt: skip
    server = grpc.aio.server()
    pb_grpc.add_KVTransferServicer_to_server(KVTransferServicer(receiver), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    sender = kv_transfer.create_sender(
        "grpc", pool=source, identity=Identity(worker_id="prefill", incarnation="p", compat_digest="same"), receivers={}
    )
    await server.start()
    await receiver.start(address)
    try:
        push = await sender.open(receiver.issue("router", dst_block_ids, 0))
        for layer in range(source.layout.num_layers):
            push.write(layer, 0, src_block_ids)
        await push.commit(len(PROMPT), 1, src_block_ids)
    finally:
        await sender.close()
        await server.stop(0)
        await receiver.close()
    assert committed == [len(PROMPT)]


def handed_over(prefill: LLMEngine, decode: LLMEngine, params: SamplingParams) -> list[int]:
    """The tokens of both."""
    reservation = decode.reserve("r", PROMPT, params)
    assert reservation is not None
    prefill.add_prefill("r", PROMPT, params)
    [output] = prefill.step()
    first_token_id = output.outputs[0].token_ids[0]
    received = list(reservation.block_ids)
    sent = output.held_block_ids[: len(received)]
    asyncio.run(transfer(bytes_of(prefill), bytes_of(decode), sent, received))
    np.testing.assert_array_equal(bytes_of(prefill).digests(sent), bytes_of(decode).digests(received))
    decode.commit("r", first_token_id, len(PROMPT))
    prefill.release("r")
    return [first_token_id, *finish(decode)]


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_the_same_tokens_from_two_engines_as_from_one(tmp_path: Path, settings: dict[str, str]) -> None:
    one, prefill, decode = (LLMEngine(config_of(tmp_path, **settings)) for _ in range(3))
    drawn = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=5)
    for params in (GREEDY, drawn):
        tokens = handed_over(prefill, decode, params)
        assert len(tokens) == 12
        assert tokens == alone(one, params)
    for engine in (one, prefill, decode):
        ledger, problems = engine.audit()
        assert problems == []
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks


def test_pools_of_other_models_are_no_peers(tmp_path: Path) -> None:
    """Keys and values of as many bytes would not tell."""
    ours, theirs = LLMEngine(config_of(tmp_path)), LLMEngine(config_of(tmp_path, LLAMA))
    layout = bytes_of(ours).layout
    assert (layout.num_parts, layout.num_kv_heads, layout.head_dim, layout.order) == (1, 1, 32, LATENT_KV_ORDER)
    assert layout.block_bytes == bytes_of(theirs).layout.block_bytes
    with pytest.raises(IncompatiblePeer, match=r"head_dim.*num_parts: .*order"):
        asyncio.run(transfer(bytes_of(theirs), bytes_of(ours), [1], [2]))
    assert compat_difference(ours.config.compat_digest, theirs.config.compat_digest)


@pytest.mark.parametrize(
    "changes",
    [{"kv_lora_rank": 25}, {"qk_nope_head_dim": 14}, {"routed_scaling_factor": 1.0}, {"rope_interleave": False}],
)
def test_whoever_computes_otherwise_is_no_peer(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours, theirs = config_of(tmp_path), config_of(tmp_path, V3 | changes)
    assert "model" in compat_difference(ours.compat_digest, theirs.compat_digest)
