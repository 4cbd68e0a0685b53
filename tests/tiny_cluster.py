"""A real router and real workers in this process, with gRPC and Redis between them. The models are tiny and their
weights random, so that a worker starts within a tenth of a second."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import router.process
import worker_service.process
from decode_service.service import DecodeService
from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from prefill_service.service import PrefillService
from protos import tandem_worker_pb2 as pb
from router.args import RouterArgs
from router.policy import PolicyConfig
from router.process import Router, load_texts
from rpc.tracing import Untraced
from tandem.client import AsyncClient
from worker_service.args import WorkerArgs
from worker_service.process import WorkerProcess, run_worker
from worker_service.role import MakeService

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49_152, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip


def make_model(folder: Path, tokenizer: Path, **changes: Any) -> Path:
    folder.mkdir()
    shutil.copy(tokenizer, folder / "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@dataclass
class Cluster:
    """A router, and the decode workers that a test starts."""

    redis: str
    address: str
    """The router's address."""
    stack: AsyncExitStack
    client: AsyncClient

    async def start_decode_worker(
        self, name: str, model: Path, seed: int = 0, lora_dir: Path | None = None, **settings: Any
    ) -> WorkerProcess:
        """Start a decode worker. `settings`: changes to its `EngineArgs`."""
        engine_args = replace(_engine_args(model, seed), **settings)
        return await self._start(pb.Role.ROLE_DECODE, DecodeService, engine_args, name, lora_dir=str(lora_dir or ""))

    async def start_prefill_worker(self, name: str, model: Path, **settings: Any) -> WorkerProcess:
        """Likewise a prefill worker."""
        engine_args = replace(_engine_args(model, 0), **settings)
        return await self._start(pb.Role.ROLE_PREFILL, PrefillService, engine_args, name)

    async def _start(
        self, role: pb.Role, service: MakeService, engine_args: EngineArgs, name: str, **flags: Any
    ) -> WorkerProcess:
        config = await asyncio.to_thread(create_engine_config, engine_args)
        worker = await WorkerProcess.start(role, self._args(name, **flags), config, service)
        self.stack.push_async_callback(worker.close)
        return worker

    def run_decode_worker(self, name: str, model: Path) -> Coroutine[Any, Any, int]:
        """Run a whole decode worker, from its flags to its exit code."""
        return run_worker(pb.Role.ROLE_DECODE, self._args(name), _engine_args(model, 0), DecodeService, asyncio.Event())

    def _args(self, name: str, **flags: Any) -> WorkerArgs:
        return WorkerArgs(redis=self.redis, listen="127.0.0.1:0", worker_id=name, **flags)

    async def wait_for_workers(self, *names: str) -> None:
        async def have_joined() -> bool:
            status = await self.client.status()
            joined = {worker.record.worker_id for worker in status.workers} - set(status.not_connected)
            return joined == set(names)

        await wait_for(have_joined, f"{names} are there, and no others")


def _engine_args(model: Path, seed: int) -> EngineArgs:
    return EngineArgs(
        model=str(model), load_format="dummy", seed=seed, num_threads=1, num_kv_blocks=300, max_num_seqs=1,
        attention_backend="torch",
    )  # fmt: skip


@asynccontextmanager
async def run_tiny_cluster(
    redis_url: str, model: Path, monkeypatch: pytest.MonkeyPatch, **router_flags: Any
) -> AsyncIterator[Cluster]:
    """Run a router without workers."""
    addresses: list[str] = []
    for module in (worker_service.process, router.process):
        monkeypatch.setattr(module, "announce", addresses.append)
    async with AsyncExitStack() as stack:
        args = RouterArgs(redis=redis_url, listen="127.0.0.1:0", model=str(model), **router_flags)
        front = Router(args, PolicyConfig(), load_texts(args), Untraced())
        await front.start()
        stack.push_async_callback(front.close)
        client = await stack.enter_async_context(AsyncClient(addresses[-1]))
        yield Cluster(redis_url, addresses[-1], stack, client)


async def wait_for(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 20.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110 - asked over gRPC
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {what}") from None
