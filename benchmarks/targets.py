"""The servers under load, each started for a run and stopped after it: Tandem in some arrangement, or vLLM.

async with target() as backend: await run_load(workload, backend)
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import IO

import httpx2

from benchmarks.peers import existing
from engine.config import EngineArgs
from tandem.bench.backends import GrpcBackend, HttpServer, Sending, open_http
from tandem.bench.run import Backend
from tandem.client import AsyncClient
from tandem.cluster import Cluster
from tandem.cluster_args import ClusterArgs

VLLM_START_TIMEOUT_S = 300.0
Target = Callable[[], AbstractAsyncContextManager[Backend]]


def tandem(*, num_prefill: int, num_decode: int, transport: str = "grpc", dtype: str = "bfloat16") -> Target:
    """`num_prefill` = 0: aggregated. Raises `ValueError`."""
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


def vllm_files() -> tuple[Path, Path]:
    """Its program, and the model that it is given. Raises `PeerMissing`."""
    return existing("vllm/bin/vllm"), existing("smollm2")


@asynccontextmanager
async def vllm() -> AsyncIterator[Backend]:
    """`vllm serve` with the settings that its CPU build is documented with, over OpenAI's HTTP API."""
    program, model = vllm_files()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(program), "serve", str(model),
        "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64",
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smollm2",
    ]  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - before there is any load
            command, stdout=log, stderr=subprocess.STDOUT, env=kept | {"VLLM_CPU_KVCACHE_SPACE": "2"},
            start_new_session=True,
        )  # fmt: skip
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


async def _wait_healthy(client: httpx2.AsyncClient, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    async with asyncio.timeout(VLLM_START_TIMEOUT_S):
        while True:
            if process.poll() is not None:
                log.seek(0)
                last = log.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"vllm serve ended with {process.returncode} before it was ready: {last}")
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.5)  # it offers no news of its being ready
