"""A cluster that requires an API key: its clients, the gateway and the commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from clusters import RunningCluster

from rpc.errors import Unauthenticated
from tandem.client import AsyncClient, Client

KEY = "k-7Hq"
ASKED = {"prompt": "The capital of France is", "max_tokens": 3}


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., RunningCluster], few_layers: Path) -> RunningCluster:
    sizes = ("--max-model-len", "256", "--kv-cache-gib", "0.05", "--aggregated", "--decode", "1")
    keys = ("--api-key", "older", "--api-key", KEY)
    return start_cluster("--model", str(few_layers), "--http-port", "0", *sizes, *keys)


def run(
    cluster: RunningCluster, *words: str, key: str = "", in_environment: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "tandem",
        *words,
        "--router",
        cluster.address,
        *(["--api-key", key] if key else []),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"TANDEM_API_KEY": in_environment}
    )


def test_clients(cluster: RunningCluster) -> None:
    with Client(cluster.address, api_key=KEY) as client:
        assert len(client.generate("a", max_tokens=3, ignore_eos=True).token_ids) == 3
        assert client.tokenize("a b").token_ids
        assert client.status().workers
        assert client.audit().workers
    for wrong in ("", "old"):
        with Client(cluster.address, api_key=wrong) as client:
            assert client.is_serving(), "health is for load balancers, which have no key"
            for ask in (
                lambda client=client: client.generate("a", max_tokens=3),
                lambda client=client: client.tokenize("a"),
                client.status,
                client.audit,
                client.model_info,
                lambda client=client: client.profile("decode-1"),
                lambda client=client: client.abort("r"),
            ):
                with pytest.raises(Unauthenticated):
                    ask()


async def test_async_clients(cluster: RunningCluster) -> None:
    for is_spread in (False, True):
        async with AsyncClient(cluster.address, api_key=KEY, is_spread=is_spread) as client:
            assert len((await client.generate("a", max_tokens=3, ignore_eos=True)).token_ids) == 3
        async with AsyncClient(cluster.address, is_spread=is_spread) as client:
            with pytest.raises(Unauthenticated):
                await client.generate("a", max_tokens=3)


def test_over_http(cluster: RunningCluster) -> None:
    """Clients need a key; the gateway itself has one for the router."""
    with httpx2.Client(base_url=f"http://{cluster.http_address}", trust_env=False, timeout=30) as http:
        assert http.post("/v1/completions", json=ASKED).status_code == 401
        for key in ("older", KEY):
            answer = http.post("/v1/completions", json=ASKED, headers={"authorization": f"Bearer {key}"})
            assert answer.json()["usage"]["completion_tokens"] == 3
        assert http.get("/health").status_code == 200


@pytest.mark.slow
def test_commands(cluster: RunningCluster) -> None:
    commands = (
        ("status",), ("audit",), ("generate", "a", "--max-tokens", "2"), ("top", "--count", "1"),
        ("bench", "--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "2", "--num-warmups", "0"),
    )  # fmt: skip
    for words in commands:
        refused = run(cluster, *words)
        assert refused.returncode != 0, words
        assert (
            f"the router at {cluster.address} requires an API key, and got none or a wrong one: give it with --api"
            in refused.stderr
        )
        assert "Traceback" not in refused.stderr
        taken = run(cluster, *words, key=KEY)
        assert taken.returncode == 0, taken.stderr
        assert KEY not in taken.stdout + taken.stderr
    # TANDEM_API_KEY as it is set for servers: several keys with spaces between.
    of_servers = run(cluster, "status", "--json", in_environment=f"{KEY} another")
    assert [worker["record"]["worker_id"] for worker in json.loads(of_servers.stdout)["workers"]] == ["decode-1"]


def test_nobody_reads_it_in_the_log_or_the_process_list(cluster: RunningCluster) -> None:
    """Except in the entry of `tandem up`, which was given the key as a flag."""
    assert KEY not in cluster.log.read_text()
    children = subprocess.run(
        ["ps", "-o", "args=", "--ppid", str(cluster.pid)], capture_output=True, text=True, check=True
    )
    assert "gateway" in children.stdout
    assert KEY not in children.stdout
