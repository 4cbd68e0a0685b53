"""Prompts so long, and models with so many layers, that the digests alone exceed the usual limit of a message."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kv_harness import Receiving, make_pool
from lora_folders import CONFIG, write_model

import kv_transfer
from engine.async_llm_engine import AsyncLLMEngine
from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from kv_transfer import Identity, PeerUnreachable
from protos import tandem_worker_pb2 as pb
from rpc.channel import DEFAULT_MAX_MESSAGE_BYTES, channel_options, open_kv_channel
from rpc.server import CannotListen
from worker_service import process
from worker_service.args import WorkerArgs

SMALLEST: dict[str, Any] = {
    "num_layers": 4096, "block_size": 1, "num_kv_heads": 1, "head_dim": 1, "num_parts": 1, "dtype": "float8_e4m3fn",
}  # fmt: skip
NUM_BLOCKS = 520
"""The digests of so many blocks, 8 bytes per layer, exceed the limit by a quarter of a megabyte."""


async def commit(max_message_bytes: int) -> int:
    """Commits a prompt between two peers whose connections take messages of this size; returns how many prompts have
    arrived."""
    options = channel_options(max_message_bytes)
    # Two million digests keep the event loop busy for seconds, so its heartbeats are late: hence the long lease.
    receiving = Receiving("ipc", num_blocks=NUM_BLOCKS, options=options, lease_s=60.0, **SMALLEST)
    await receiving.start()
    source = make_pool(NUM_BLOCKS, seed=3, **SMALLEST)
    sender = kv_transfer.create_sender(
        "ipc",
        pool=source,
        identity=Identity(worker_id="prefill", incarnation="p-1", compat_digest="same"),
        open_channel=partial(open_kv_channel, max_message_bytes=max_message_bytes),
    )
    blocks = list(range(NUM_BLOCKS))
    push = await sender.open(receiving.receiver.issue("owner", blocks, 0))
    try:
        for layer in range(source.layout.num_layers):
            push.write(layer, 0, blocks)
        await push.commit(NUM_BLOCKS, 1, blocks)
        return len(receiving.committed)
    finally:
        await push.abandon()
        await sender.close()
        await receiving.close()


async def test_their_digests_are_one_message() -> None:
    digest_bytes = make_pool(1, seed=None, **SMALLEST).layout.digest_bytes(NUM_BLOCKS)
    assert digest_bytes > DEFAULT_MAX_MESSAGE_BYTES
    assert await commit(DEFAULT_MAX_MESSAGE_BYTES + digest_bytes) == 1
    with pytest.raises(PeerUnreachable, match="RESOURCE_EXHAUSTED"):
        await commit(DEFAULT_MAX_MESSAGE_BYTES)


@pytest.mark.parametrize("role", [pb.Role.ROLE_PREFILL, pb.Role.ROLE_DECODE])
async def test_workers_take_as_much_as_their_longest_prompt_needs(
    role: pb.Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    engines: list[AsyncLLMEngine] = []
    start = AsyncLLMEngine.start

    async def start_and_note(*arguments: Any, **settings: Any) -> AsyncLLMEngine:
        engines.append(await start(*arguments, **settings))
        return engines[-1]

    def refuse(*_: object, max_message_bytes: int, **__: object) -> None:
        asked.append(max_message_bytes)
        raise CannotListen("that is all we want to see")

    monkeypatch.setattr(process, "Server", refuse)
    monkeypatch.setattr(AsyncLLMEngine, "start", start_and_note)
    write_model(tmp_path, CONFIG | {"max_position_embeddings": 1 << 14, "num_hidden_layers": 3})
    config = create_engine_config(
        EngineArgs(model=str(tmp_path), load_format="dummy", device="cpu", block_size=16, num_kv_blocks=1024)
    )
    make_service: Any = None
    with pytest.raises(CannotListen):
        await process.WorkerProcess.start(role, WorkerArgs(), config, make_service)
    await engines[0].close()
    assert asked == [DEFAULT_MAX_MESSAGE_BYTES + 8 * 3 * 1024]
