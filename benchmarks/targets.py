"""The servers under load, each started for a run and stopped after it: Tandem in some arrangement, or vLLM.

async with target() as send: await load.run(workload, send, ...)
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

import httpx2

from benchmarks.load import Send
from benchmarks.peers import existing
from engine.config import EngineArgs
from tandem.client import AsyncClient
from tandem.cluster import Cluster
from tandem.cluster_args import ClusterArgs

VLLM_START_TIMEOUT_S = 300.0
Target = Callable[[], AbstractAsyncContextManager[Send]]


def tandem(*, num_prefill: int, num_decode: int, transport: str = "grpc", dtype: str = "bfloat16") -> Target:
    """`num_prefill` = 0: aggregated."""

    @asynccontextmanager
    async def target() -> AsyncIterator[Send]:
        args = ClusterArgs(
            engine=EngineArgs(dtype=dtype, max_model_len=4096, max_num_seqs=64),
            num_prefill=num_prefill or 1,
            num_decode=num_decode,
            is_aggregated=num_prefill == 0,
            transport=transport,
            listen="127.0.0.1:0",
            log_level="warning",
        )
        async with (
            Cluster(args, on_line=lambda *_: None, on_event=lambda _: None) as cluster,
            AsyncClient(cluster.router_address) as client,
        ):

            async def send(prompt: list[int], output_tokens: int) -> AsyncIterator[int]:
                stream = client.stream(prompt, max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
                async with aclosing(stream) as messages:
                    async for message in messages:
                        if message.token_ids:
                            yield len(message.token_ids)

            yield send

    return target


@asynccontextmanager
async def vllm() -> AsyncIterator[Send]:
    """`vllm serve` with the settings that its CPU build is documented with, over OpenAI's HTTP API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(existing("vllm/bin/vllm")), "serve", str(existing("smollm2")),
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
            limits = httpx2.Limits(max_connections=None)
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits) as client:
                await _wait_healthy(client, process)

                async def send(prompt: list[int], output_tokens: int) -> AsyncIterator[int]:
                    body = {
                        "model": "smollm2", "prompt": prompt, "max_tokens": output_tokens, "temperature": 0,
                        "ignore_eos": True, "stream": True,
                        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                    }  # fmt: skip
                    num_before = 0
                    async with client.stream("POST", "/v1/completions", json=body) as response:
                        response.raise_for_status()
                        async for line in response.aiter_lines():
                            if not line.startswith("data: {"):
                                continue
                            num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                            if num_tokens > num_before:
                                yield num_tokens - num_before
                                num_before = num_tokens

                yield send
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, 30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _wait_healthy(client: httpx2.AsyncClient, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(VLLM_START_TIMEOUT_S):
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"vllm serve ended with {process.returncode} before it was ready")
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.5)  # it offers no news of its being ready
