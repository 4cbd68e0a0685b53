"""`tandem run-batch` against a real cluster whose gateway and router are killed meanwhile: each request gets one line,
with the tokens of a run without faults."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clusters import RunningCluster, run_cluster, wait_until

from tandem.client import Client

NUM_REQUESTS = 24
BODY = {"max_tokens": 60, "seed": 7, "temperature": 0.9, "ignore_eos": True, "return_token_ids": True}


def requests() -> list[dict[str, Any]]:
    prompts = [[100 + number] * 40 for number in range(NUM_REQUESTS)]
    return [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": {**BODY, "prompt": prompt}}
        for number, prompt in enumerate(prompts)
    ]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill(cluster: RunningCluster, name: str) -> None:
    before = cluster.services()[name]
    before.kill()
    wait_until(lambda: (now := cluster.services().get(name)) is not None and now.pid != before.pid, 30, "it is back")


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as tried:
        return tried.connect_ex((host, int(port))) == 0


@pytest.mark.slow
def test_one_line_for_each_whatever_dies(few_layers: Path, tmp_path: Path) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(request) + "\n" for request in requests()))
    flags = ("--model", str(few_layers), "--max-model-len", "2048", "--num-threads", "1", "--http-port", "0")
    little_room = ("--kv-cache-gib", "0.05", "--max-queue-tokens", "200")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "OPENAI_"))}
    with run_cluster(tmp_path / "log", *flags, *little_room) as cluster:
        command = [
            sys.executable, "-m", "tandem", "run-batch", "-i", str(given), "-o", str(out), "--json",
            "--base-url", f"http://{cluster.http_address}", "--max-concurrency", "12",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as first:
            wait_until(lambda: num_lines(out) > 2, 60, "some are answered")
            kill(cluster, "gateway")
            wait_until(lambda: num_lines(out) > 6, 60, "it goes on")
            first.kill()
        num_before = num_lines(out)
        assert 6 < num_before < NUM_REQUESTS
        # A run that starts while no gateway listens would fail at once.
        wait_until(lambda: listens(cluster.http_address), 30, "the gateway is back")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as second:
            wait_until(lambda: num_lines(out) > num_before + 2, 60, "the rest is asked")
            kill(cluster, "router")
            said, _ = second.communicate(timeout=120)
        assert second.returncode == 0
        summary = json.loads(said)
        assert (summary["num_before"], summary["num_answered"]) == (num_before, NUM_REQUESTS - num_before)
        read = [json.loads(line) for line in out.read_text().splitlines()]
        answers = {line["custom_id"]: line["response"]["body"]["choices"][0] for line in read}
        assert len(answers) == len(read) == NUM_REQUESTS
        wait_until(lambda: listens(cluster.address), 30, "the router is back")
        with Client(cluster.address) as client:
            for request in requests():
                body = {name: value for name, value in request["body"].items() if name != "return_token_ids"}
                expected = client.generate(body.pop("prompt"), **body)
                answer = answers[request["custom_id"]]
                assert answer["token_ids"] == list(expected.token_ids)
                assert answer["text"] == expected.text
        cluster.wait_until_at_rest()
