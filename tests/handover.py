"""Prefills in one engine and decodes in another of the same process. The KV goes over gRPC, under grants, checked by
digests."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np

import kv_transfer
from engine.llm_engine import LLMEngine
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from kv_transfer import Identity, KVPool, KVReceiver, KVTransferServicer
from protos import tandem_kv_transfer_pb2_grpc as pb_grpc
from rpc.channel import open_kv_channel
from worker_service.pool_memory import transfer_pool


def bytes_of(engine: LLMEngine) -> KVPool:
    return transfer_pool(engine.executor.kv_pool, engine.executor.kv_shape, engine.config.cache.kv_order)


async def transfer(
    source: KVPool,
    destination: KVPool,
    src_block_ids: list[int],
    dst_block_ids: list[int],
    num_tokens: int,
    transport: str = "grpc",
) -> None:
    """Transfer KV blocks as two workers do. Raises what the sender raises."""
    committed: list[int] = []

    async def on_commit(grant: object, first_token_id: int, num_prompt_tokens: int) -> bool:
        committed.append(num_prompt_tokens)
        return True

    identity = Identity(worker_id="decode", incarnation="d", compat_digest="same")
    endpoint = kv_transfer.create_endpoint(transport, pool=destination, identity=identity)
    receiver = KVReceiver(
        pool=destination, identity=identity, lease_s=5.0, endpoint=endpoint, on_commit=on_commit,
        on_freed=lambda grants: None,
    )  # fmt: skip
    server = grpc.aio.server()
    pb_grpc.add_KVTransferServicer_to_server(KVTransferServicer(receiver), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    sender = kv_transfer.create_sender(
        transport,
        pool=source,
        identity=Identity(worker_id="prefill", incarnation="p", compat_digest="same"),
        open_channel=open_kv_channel,
    )
    await server.start()
    await receiver.start(address)
    try:
        push = await sender.open(receiver.issue("router", dst_block_ids, 0))
        for layer in range(source.layout.num_layers):
            push.write(layer, 0, src_block_ids)
        await push.commit(num_tokens, 1, src_block_ids)
    finally:
        await sender.close()
        await server.stop(0)
        await receiver.close()
    assert committed == [num_tokens]


def handed_over(
    prefill: LLMEngine,
    decode: LLMEngine,
    prompt: list[int],
    params: SamplingParams,
    lora_name: str = "",
    *,
    pools: tuple[KVPool, KVPool] | None = None,
    transport: str = "grpc",
) -> list[int]:
    """Return the tokens of both engines. `pools`: both engines', if they are not just their tensors."""
    source, destination = pools or (bytes_of(prefill), bytes_of(decode))
    reservation = decode.reserve("r", prompt, params, lora_name=lora_name)
    assert reservation is not None
    assert prefill.add_prefill("r", prompt, params, lora_name=lora_name) == reservation.prompt_digest
    outputs: list[RequestOutput] = []
    while not outputs:  # with async scheduling the output comes one step later
        outputs = prefill.step()
    [output] = outputs
    first_token_id = output.token_ids[0]
    received = list(reservation.block_ids)
    sent = output.held_block_ids[: len(received)]
    asyncio.run(transfer(source, destination, sent, received, len(prompt), transport))
    np.testing.assert_array_equal(source.digests(sent), destination.digests(received))
    decode.commit("r", first_token_id, len(prompt))
    prefill.abort("r")
    return [first_token_id, *finish(decode)]


def finish(engine: LLMEngine) -> list[int]:
    """Step until nothing runs; return the tokens of the only request."""
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens.extend(output.token_ids)
    return tokens


def alone(
    engine: LLMEngine, prompt: list[int], params: SamplingParams, lora_name: str = "", lora_digest: str = ""
) -> list[int]:
    engine.add_request("r", prompt, params, lora_name=lora_name, lora_digest=lora_digest)
    return finish(engine)
