"""The servers to measure under load, each started for a run and stopped after it: Tandem in some arrangement, vLLM, or
llama.cpp.

async with target() as backend: await run_load(workload, backend)
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx2

from benchmarks.peers import existing
from engine.engine_args import EngineArgs
from tandem.bench.backends import GrpcBackend, HttpServer, Sending, open_http
from tandem.bench.run import Backend
from tandem.client import AsyncClient
from tandem.cluster import Cluster
from tandem.cluster_args import ClusterArgs

START_TIMEOUT_S = 300.0
Target = Callable[[], AbstractAsyncContextManager[Backend]]


def tandem(*, num_prefill: int, num_decode: int, transport: str = "grpc", dtype: str = "bfloat16") -> Target:
    """A target of Tandem. `num_prefill` = 0: aggregated. Raises `ValueError`."""
    args = ClusterArgs(
        engine=EngineArgs(dtype=dtype, max_model_len=4096, max_num_seqs=64),
        num_prefill=num_prefill or 1,
        num_decode=num_decode,
        is_aggregated=num_prefill == 0,
        transport=transport,
        listen="127.0.0.1:0",
        log_level="warning",
    )

    @asynccontextmanager
    async def target() -> AsyncIterator[Backend]:
        async with (
            Cluster(args, on_line=lambda *_: None, on_event=lambda _: None) as cluster,
            AsyncClient(cluster.router_address) as client,
        ):
            yield GrpcBackend(client, Sending())

    return target


@dataclass(frozen=True)
class Peer:
    """Another project's server, used over OpenAI's HTTP API."""

    files: Callable[[], tuple[Path, Path]]
    """Paths of its program and of its model. Raises `PeerMissing`."""
    flags: tuple[str, ...]
    """Its flags; MODEL and PORT are replaced."""
    env: Mapping[str, str] = field(default_factory=dict)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Backend]:
        program, model = self.files()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        put = {"MODEL": str(model), "PORT": str(port)}
        command = [str(program), *(put.get(flag, flag) for flag in self.flags)]
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(  # noqa: ASYNC220 - before there is any load
                command, stdout=log, stderr=subprocess.STDOUT, env=kept | self.env, start_new_session=True
            )
            try:
                url = f"http://127.0.0.1:{port}"
                async with httpx2.AsyncClient(base_url=url) as client:
                    await _wait_healthy(client, process, log)
                async with open_http(HttpServer(base_url=url, model="smollm2"), Sending()) as (backend, _):
                    yield backend
            finally:
                process.terminate()
                try:
                    await asyncio.to_thread(process.wait, 30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


PEERS = {
    # With the settings that the documentation of its CPU build gives.
    "vllm": Peer(
        lambda: (existing("vllm/bin/vllm"), existing("smollm2")),
        (
            "serve", "MODEL", "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64",
            "--host", "127.0.0.1", "--port", "PORT", "--served-model-name", "smollm2",
        ),
        {"VLLM_CPU_KVCACHE_SPACE": "2"},
    ),
    # --ctx-size is that of all slots together.
    "llama": Peer(
        lambda: (existing("llama/vendor/llama.cpp/build/bin/llama-server"), existing("smollm2-bf16.gguf")),
        (
            "--model", "MODEL", "--ctx-size", str(64 * 4096), "--parallel", "64", "--batch-size", "2048",
            "--ubatch-size", "512", "--threads", "2", "--threads-batch", "2",
            "--host", "127.0.0.1", "--port", "PORT", "--alias", "smollm2",
        ),
    ),
}  # fmt: skip


async def _wait_healthy(client: httpx2.AsyncClient, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            if process.poll() is not None:
                log.seek(0)
                last = log.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"it ended with {process.returncode} before it was ready: {last}")
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.5)  # it cannot notify us when it is ready
