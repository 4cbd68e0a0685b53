"""A cluster over TLS: requests work as without TLS, strangers are refused, and the gateway serves HTTPS."""

from __future__ import annotations

import json
import signal
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from certificates import Certificate, Signer
from click.testing import CliRunner
from clusters import wait_until
from fragile_cluster import FragileCluster, Service, ask, fresh_prompts

from protos import tandem_inference_pb2 as pb
from protos import tandem_worker_pb2 as worker_pb
from protos.tandem_worker_pb2_grpc import WorkerStub
from rpc.errors import Unreachable
from rpc.tls import ClientTLS
from tandem.cli import main
from tandem.client import Client


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Signer(tmp_path_factory.mktemp("ca")).sign("ours")


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Any, few_layers: Path, tls: Certificate
) -> Iterator[FragileCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    cluster = FragileCluster.start(folder, redis_url=redis_server.url, model=few_layers, num_decode=2, tls=tls, seed=2)
    yield cluster
    cluster.close()


def test_prompts_are_handed_over_and_streams_go_on_when_a_worker_dies(cluster: FragileCluster) -> None:
    prompts = fresh_prompts(4)
    expected = ask(cluster, prompts)
    with cluster.client() as client:
        stream = client.stream(prompts[0], max_tokens=120, temperature=0, ignore_eos=True)
        received = [token_id for _ in range(10) for token_id in next(stream).token_ids]
        serving = next(w.record for w in client.status().workers if w.record.load.num_running)
        cluster.services[serving.worker_id].signal(signal.SIGKILL)
        *rest, last = stream
        received += [token_id for chunk in rest for token_id in chunk.token_ids]
        assert received == client.generate(prompts[0], max_tokens=120, temperature=0, ignore_eos=True).token_ids
        assert last.timings.attempts == 2
        again = client.generate(fresh_prompts(1)[0], max_tokens=4, ignore_eos=True)
    assert again.timings.mode == pb.MODE_DISAGGREGATED
    assert again.timings.kv_transfer.num_bytes > 0
    cluster.services[serving.worker_id].restart()
    cluster.wait_for_workers(1)
    assert ask(cluster, prompts) == expected


def test_strangers_hear_nothing(cluster: FragileCluster, tls: Certificate, tmp_path: Path) -> None:
    """Clients without TLS, or that trust another CA, cannot call the router. Workers also refuse those without one of
    our certificates."""
    router, worker = cluster.services["router-1"].address, cluster.services["decode-1"].address
    another = Signer(tmp_path / "another").sign("another")
    for stranger in (None, another.trusting):
        with Client(router, tls=stranger) as client, pytest.raises(Unreachable):
            client.model_info()
    with Client(router, tls=tls.trusting) as client:
        assert client.model_info().model

    def status(channel: grpc.Channel) -> str:
        with channel:
            asked = worker_pb.GetWorkerStatusRequest()
            return str(WorkerStub(channel).GetStatus(asked, timeout=5).record.worker_id)

    assert status(grpc.secure_channel(worker, tls.client.credentials())) == "decode-1"
    for stranger in (tls.trusting, ClientTLS.of_files(ca=tls.ca, cert=another.cert, key=another.key)):
        with pytest.raises(grpc.RpcError) as refused:
            status(grpc.secure_channel(worker, stranger.credentials()))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.RpcError):
        status(grpc.insecure_channel(worker))


def bench(backend: str, tls: Certificate, *server: str) -> dict[str, Any]:
    flags = ["--num-prompts", "2", "--num-warmups", "0", "--random-output-len", "4", "--json"]
    done = CliRunner().invoke(main, ["bench", "--backend", backend, *server, "--ssl-ca-certs", str(tls.ca), *flags])
    assert done.exit_code == 0, done.output
    (result,) = json.loads(done.stdout)["results"]
    return dict(result)


def test_a_gateway_serves_https(cluster: FragileCluster, tls: Certificate, tmp_path: Path) -> None:
    router = cluster.services["router-1"].address
    command = [sys.executable, "-P", "-m", "gateway", "--listen", "127.0.0.1:0", "--router", router]
    gateway = Service([*command, *tls.flags], tmp_path / "gateway.log", listens="http")
    gateway.start()
    try:
        trusted = ssl.create_default_context(cafile=str(tls.ca))
        with httpx.Client(base_url=f"https://{gateway.address}", verify=trusted, trust_env=False) as client:
            body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
            choice = client.post("/v1/completions", json=body, timeout=30).json()["choices"][0]
            with cluster.client() as grpc_client:
                expected = grpc_client.generate("The capital of France is", max_tokens=4, temperature=0)
            assert choice["text"] == expected.text
            assert bench("openai", tls, "--base-url", f"https://{gateway.address}")["completed"] == 2
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"http://{gateway.address}/health", trust_env=False)
            # A client that keeps its connection open without closing it does not delay the shutdown.
            began_s = time.monotonic()
            gateway.close()
            assert time.monotonic() - began_s < 10
    finally:
        gateway.close()


def test_a_file_that_goes_away_changes_nothing(
    cluster: FragileCluster, tls: Certificate, tmp_path: Path, redis_server: Any, few_layers: Path
) -> None:
    """A router goes on with the certificate that it has read: while an operator replaces the files, workers can still
    join."""
    own = Certificate(*(tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")))
    for source, copy in zip((tls.ca, tls.cert, tls.key), (own.ca, own.cert, own.key), strict=True):
        copy.write_bytes(source.read_bytes())
    command = ["router", "--redis", redis_server.url, "--model", str(few_layers), "--listen", "127.0.0.1:0"]
    router = Service([sys.executable, "-P", "-m", *command, *own.flags], tmp_path / "router.log")
    router.start()
    try:
        for file in (own.ca, own.cert, own.key):
            file.unlink()
        cluster.services["decode-1"].signal(signal.SIGKILL)
        cluster.services["decode-1"].restart()
        with Client(router.address, tls=tls.client) as client:
            wait_until(lambda: sum(w.num_sessions > 1 for w in client.status().workers) == 3, 30, "all joined both")
    finally:
        router.close()
    cluster.wait_for_workers(1)


def test_commands_take_who_to_trust(cluster: FragileCluster, tls: Certificate) -> None:
    router = cluster.services["router-1"].address
    done = CliRunner().invoke(main, ["audit", "--router", router, "--ssl-ca-certs", str(tls.ca)])
    assert done.exit_code == 0, done.output
    assert "decode-1" in done.output
    assert CliRunner().invoke(main, ["audit", "--router", router]).exit_code == 1
    assert bench("grpc", tls, "--router", router)["completed"] == 2


def test_only_who_has_a_certificate_may_drain_a_worker(cluster: FragileCluster, tls: Certificate) -> None:
    # The last test of this file: no later test needs that worker.
    asked = ["drain", "decode-1", "--router", cluster.services["router-1"].address, "--ssl-ca-certs", str(tls.ca)]
    refused = CliRunner().invoke(main, asked)
    assert refused.exit_code == 1
    assert "decode-1 does not answer at" in refused.output
    done = CliRunner().invoke(main, [*asked, "--wait", "--ssl-certfile", str(tls.cert), "--ssl-keyfile", str(tls.key)])
    assert done.output.splitlines()[-1:] == ["decode-1: has left"]
