"""Two routers and two gateways of one `tandem up`: when one of them dies, the other takes over at once."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from click.testing import CliRunner
from clusters import RunningCluster, wait_until
from ports import lasting_port
from prometheus_client.parser import text_string_to_metric_families
from standstill import hold_up

from rpc.targets import addresses_of
from tandem.cli import main
from tandem.client import Client

NUM_STREAMS = 4
NUM_TOKENS = 120
"""Long enough for a router to die meanwhile, although a step takes almost no time."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49_152, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 1024,
    "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(
    start_cluster: Callable[..., RunningCluster], model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunningCluster:
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(model_folder / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return start_cluster(
        "--model", str(folder), "--load-format", "dummy", "--aggregated", "--kv-cache-gib", "0.05",
        "--num-threads", "1", "--routers", "2", "--gateways", "2", "--http-port", "0", "--metrics-port", "0",
    )  # fmt: skip


def url(cluster: RunningCluster, path: str) -> str:
    return f"http://{cluster.http_address}{path}"


def pid_of(cluster: RunningCluster, name: str) -> int:
    """Return the process' pid in its last run that became ready."""
    return int(re.findall(rf"tandem: {name} is up \(pid (\d+)", cluster.log.read_text())[-1])


def num_runs(cluster: RunningCluster, name: str) -> int:
    """Count the process' runs that became ready."""
    return cluster.log.read_text().count(f"tandem: {name} is up")


def counted(cluster: RunningCluster, name: str, metric: str) -> float:
    """Return the sum of `metric` over all labels, from the metrics endpoint of the process `name`."""
    shown = re.findall(rf"^{name} +\| .*?(http://\S+/metrics)", cluster.log.read_text(), re.MULTILINE)
    families = text_string_to_metric_families(httpx.get(shown[-1].strip('"')).text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == metric)


def ask(cluster: RunningCluster) -> None:
    """Send a small request over a new connection."""
    assert httpx.get(url(cluster, "/v1/models"), timeout=10).status_code == 200


class Answer(threading.Thread):
    """A thread that reads a stream over HTTP."""

    def __init__(self, cluster: RunningCluster, index: int) -> None:
        super().__init__(daemon=True)
        self._url = url(cluster, "/v1/completions")
        self._prompt = [1000 + index] * 8
        self.token_ids: list[int] = []
        self.end: Any = None
        self.start()

    def run(self) -> None:
        body = {
            "prompt": self._prompt, "max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 7, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        with httpx.stream("POST", self._url, json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    choice = event["choices"][0] if event.get("choices") else event
                    self.token_ids += choice.get("token_ids") or []
                    self.end = choice.get("finish_reason") or event.get("error") or self.end


def answers(cluster: RunningCluster, while_running: Callable[[list[Answer]], None] = lambda _: None) -> list[list[int]]:
    streams = [Answer(cluster, index) for index in range(NUM_STREAMS)]
    while_running(streams)
    for stream in streams:
        stream.join(60)
        assert (stream.end, len(stream.token_ids)) == ("length", NUM_TOKENS)
    return [stream.token_ids for stream in streams]


@contextmanager
def holding(address: str) -> Iterator[None]:
    """Occupy the port, so that its previous owner cannot come back."""
    host, _, port = address.rpartition(":")
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def is_taken() -> bool:
            try:
                held.bind((host, int(port)))
                held.listen()
            except OSError:
                return False
            return True

        wait_until(is_taken, 5, f"{address} is free")
        yield


def test_streams_of_a_router_that_dies_go_on_at_the_other_before_it_is_back(cluster: RunningCluster) -> None:
    expected = answers(cluster)
    addresses = addresses_of(cluster.address)
    assert len(addresses) == 2
    num_before = counted(cluster, "router-2", "tandem:resumptions_total")
    with Client(addresses[0]) as first, ExitStack() as until_then:

        def kill(streams: list[Answer]) -> None:
            wait_until(lambda: all(len(stream.token_ids) > 5 for stream in streams), 20, "all have begun")
            assert 0 < first.status().num_running_requests < NUM_STREAMS, "the gateways ask both in turn"
            os.kill(pid_of(cluster, "router-1"), signal.SIGKILL)
            until_then.enter_context(holding(addresses[0]))

        assert answers(cluster, kill) == expected
        assert num_runs(cluster, "router-1") == 1
    assert counted(cluster, "router-2", "tandem:resumptions_total") > num_before

    with Client(cluster.address) as client:  # given both addresses: the router that is there answers
        assert len(client.generate("a", max_tokens=2).token_ids) == 2
    said = CliRunner().invoke(main, ["status", "--router", cluster.address])
    assert said.exit_code == 0, said.output
    assert re.search(rf"^router \S+ at {addresses[1]}: 0 running", said.output, re.MULTILINE)

    wait_until(lambda: num_runs(cluster, "router-1") == 2, 30, "the first is back where it was")
    assert addresses_of(cluster.address) == addresses


def test_status_top_and_audit_ask_every_router(cluster: RunningCluster) -> None:
    wait_until(lambda: num_runs(cluster, "router-1") >= 1, 30, "both are there")
    first, second = addresses_of(cluster.address)
    for command in (["status"], ["top", "--count", "1"]):
        said = CliRunner().invoke(main, [*command, "--router", cluster.address])
        assert said.exit_code == 0, said.output
        for address in (first, second):
            assert len(re.findall(rf"^router \S+ at {re.escape(address)}: \d+ running", said.output, re.MULTILINE)) == 1
        assert len(re.findall("^decode-1", said.output, re.MULTILINE)) == 1, "a worker is one, whoever is asked"
    told = json.loads(CliRunner().invoke(main, ["status", "--router", cluster.address, "--json"]).stdout)
    assert [each["address"] for each in told["routers"]] == [first, second]
    assert len({each["router_id"] for each in told["routers"]}) == 2
    wait_until(lambda: CliRunner().invoke(main, ["audit", "--router", cluster.address]).exit_code == 0, 20, "at rest")
    nobody = f"127.0.0.1:{lasting_port()}"
    half = CliRunner().invoke(main, ["audit", "--router", f"ipv4:{first},{nobody}"])
    assert half.exit_code == 1
    assert f"router at {nobody} does not answer" in half.stderr
    assert "decode-1" in half.stdout


def test_both_gateways_serve_one_port_and_each_counts_by_itself(cluster: RunningCluster) -> None:
    def both_have_answered() -> bool:
        ask(cluster)
        return all(counted(cluster, name, "tandem:gateway_requests_total") for name in ("gateway-1", "gateway-2"))

    wait_until(both_have_answered, 20, "each has had a request")
    for path in ("/metrics", "/load"):
        refused = httpx.get(url(cluster, path))
        assert refused.status_code == 404
        assert "--metrics-port" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_new_connections_are_the_other_gateways_while_one_is_gone(cluster: RunningCluster) -> None:
    num_before, gateway = num_runs(cluster, "gateway-1"), pid_of(cluster, "gateway-1")
    hold_up(cluster.pid)  # else it starts the gateway again
    try:
        os.kill(gateway, signal.SIGKILL)
        wait_until(lambda: " Z " in Path(f"/proc/{gateway}/stat").read_text(), 10, "it is gone")
        for _ in range(12):
            ask(cluster)
    finally:
        os.kill(cluster.pid, signal.SIGCONT)
    wait_until(lambda: num_runs(cluster, "gateway-1") > num_before, 30, "it was started again")
    wait_until(lambda: _has_answered(cluster, "gateway-1"), 20, "and serves at the same port")


def _has_answered(cluster: RunningCluster, name: str) -> bool:
    ask(cluster)
    return counted(cluster, name, "tandem:gateway_requests_total") > 0
