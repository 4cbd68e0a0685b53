"""Measures the CPU time of the router, the gateway and the worker for each token on its way to the client.

    python benchmarks/streams.py                      # 64 streams over gRPC, then over HTTP
    python benchmarks/streams.py --streams 256 --stream-interval 8
    python benchmarks/streams.py --routers 2 --gateways 2      # how they share it

The model is tiny and has random weights, but the vocabulary and tokenizer of the default model: what remains is the
cost of any model's tokens in these processes, on a GPU as well. Measures CPU time as the kernel accounts it, not wall
time, from the start of all streams to the last one's end. The client runs on the same cores and is not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import httpx2

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.flags import COUNT, wrong_usage
from benchmarks.machine import machine
from engine.engine_args import EngineArgs
from engine.model_loader import resolve_model
from tandem.client import AsyncClient
from tandem.cluster import Cluster
from tandem.cluster_args import ClusterArgs
from tandem.tables import Table, print_table

TINY = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1}
PROMPT_TOKENS = 16


def tiny_model(folder: Path) -> Path:
    """Create a model with the default model's tokenizer, and a config whose steps take almost no time."""
    for file in resolve_model("smollm2-135m-instruct").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | TINY | {"num_key_value_heads": 1, "head_dim": 64}))
    return folder


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Streams:
    """`num_streams` answers at once, over gRPC or HTTP."""

    def __init__(self, cluster: Cluster, client: AsyncClient, num_streams: int) -> None:
        self._cluster = cluster
        self._client = client
        self._num_streams = num_streams

    async def measure(self, way: str, num_tokens: int) -> dict[str, Any]:
        ask = {"grpc": self._over_grpc, "http": self._over_http}[way]
        await ask(2)  # connections, prompts
        before = {name: cpu_seconds(pid) for name, pid in self._cluster.pids.items()}
        start_s = time.monotonic()
        num_messages = await ask(num_tokens)
        seconds = time.monotonic() - start_s
        spent = {name: cpu_seconds(pid) - before[name] for name, pid in self._cluster.pids.items()}
        total = self._num_streams * num_tokens
        return {
            "way": way,
            "tokens_per_s": round(total / seconds),
            "tokens_per_message": round(total / num_messages, 2),
            "us_per_token": {name: round(1e6 * each / total, 1) for name, each in spent.items() if name != "redis"},
        }

    async def _over_grpc(self, num_tokens: int) -> int:
        async def read(index: int) -> int:
            stream = self._client.stream(self._prompt(index), max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            lengths = [len(message.token_ids) async for message in stream]
            assert sum(lengths) == num_tokens, f"{sum(lengths)} tokens of {num_tokens}"
            return len(lengths) - 1  # the last has none

        return sum(await asyncio.gather(*map(read, range(self._num_streams))))

    async def _over_http(self, num_tokens: int) -> int:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(limits=limits, timeout=None) as client:

            async def read(index: int) -> int:
                url = f"http://{self._cluster.http_address}/v1/completions"
                body = {"prompt": self._prompt(index), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
                async with client.stream("POST", url, json=body | {"stream": True}) as response:
                    assert response.status_code == 200, await response.aread()
                    pieces = [piece.count(b"data: ") async for piece in response.aiter_raw()]
                return sum(pieces) - 2  # the finish reason, and [DONE]

            return sum(await asyncio.gather(*map(read, range(self._num_streams))))

    def _prompt(self, index: int) -> list[int]:
        return [1000 + index] * PROMPT_TOKENS


async def measure(
    num_streams: int, num_tokens: int, stream_interval: int, num_routers: int, num_gateways: int
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        num_blocks = num_streams * (PROMPT_TOKENS + num_tokens) // 16 + 2 * num_streams
        engine = EngineArgs(
            model=str(tiny_model(Path(folder))),
            load_format="dummy",
            num_kv_blocks=max(512, num_blocks),
            max_num_seqs=max(256, num_streams),
            num_threads=1,
            stream_interval=stream_interval,
        )
        args = ClusterArgs(
            engine=engine, is_aggregated=True, listen="127.0.0.1:0", http_port=0, log_level="warning",
            num_routers=num_routers, num_gateways=num_gateways,
        )  # fmt: skip
        async with (
            Cluster(args, on_line=lambda *_: None, on_event=lambda _: None) as cluster,
            AsyncClient(cluster.router_address) as client,
        ):
            streams = Streams(cluster, client, num_streams)
            return [await streams.measure(way, num_tokens) for way in ("grpc", "http")]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--streams", type=COUNT, default=64, show_default=True, help="Number of streams at once.")
@click.option(
    "--tokens", type=click.IntRange(2), default=400, show_default=True, help="Length of each answer, in tokens."
)
@click.option("--stream-interval", type=COUNT, default=1, show_default=True, help="Tokens sent at a time.")
@click.option("--routers", type=COUNT, default=1, show_default=True, help="Number of routers.")
@click.option("--gateways", type=COUNT, default=1, show_default=True, help="Number of gateways.")
@click.option("--json", "only_json", is_flag=True, help="Print only the JSON line.")
def main(streams: int, tokens: int, stream_interval: int, routers: int, gateways: int, only_json: bool) -> None:
    """Measure the CPU time that a token costs the processes that it passes through."""
    with wrong_usage():
        found = asyncio.run(measure(streams, tokens, stream_interval, routers, gateways))
    if not only_json:
        names = tuple(found[0]["us_per_token"])
        headers = ("way", ">tokens/s", ">tokens/message", *(f">{name}, us/token" for name in names))
        rows = [
            (
                each["way"],
                f"{each['tokens_per_s']:,}",
                str(each["tokens_per_message"]),
                *(str(each["us_per_token"][name]) for name in names),
            )
            for each in found
        ]
        print_table(Table(headers=headers, rows=rows))
    asked = {
        "streams": streams, "tokens": tokens, "stream_interval": stream_interval, "routers": routers,
        "gateways": gateways,
    }  # fmt: skip
    print(json.dumps({"benchmark": "streams", **asked, "found": found, **machine()}))


if __name__ == "__main__":
    main()
