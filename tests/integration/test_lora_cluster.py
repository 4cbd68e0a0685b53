"""A cluster's adapters, which requests name as their model: over gRPC, over HTTP, and when a worker dies."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from clusters import RunningCluster, wait_until
from handover import alone
from lora_folders import CONFIG, write_adapter, write_model
from prometheus_client.parser import text_string_to_metric_families

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams
from protos import tandem_inference_pb2 as pb
from protos import tandem_worker_pb2 as worker_pb
from rpc.errors import InvalidRequest
from tandem.client import Client

PROMPT = [(11 * i) % 290 + 5 for i in range(70)]
NAMES = ["", "a", "b"]
NUM_TOKENS = 80
NUM_LONG_TOKENS = 400
"""Length of an answer during which a worker dies."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_model(folder / "base", CONFIG | {"vocab_size": 49152, "max_position_embeddings": 512})
    shutil.copy(model_folder / "tokenizer.json", folder / "base")
    write_adapter(folder / "a", seed=1)
    write_adapter(folder / "dir" / "b", seed=2)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """The answers of one engine."""
    args = EngineArgs(
        model=str(folder / "base"), load_format="dummy", dtype="float32", num_kv_blocks=64, num_threads=1, device="cpu",
        lora_modules=f"a={folder / 'a'},b={folder / 'dir' / 'b'}",
    )  # fmt: skip
    engine = LLMEngine(create_engine_config(args))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = {name: alone(engine, PROMPT, params, lora_name=name) for name in NAMES[:2]}
    answers["b"] = alone(engine, PROMPT, replace(params, max_tokens=NUM_LONG_TOKENS), lora_name="b")
    assert len({tuple(tokens) for tokens in answers.values()}) == len(NAMES)
    return answers


@pytest.fixture(scope="module")
def cluster(folder: Path, start_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    return start_cluster(
        "--model", str(folder / "base"), "--load-format", "dummy", "--dtype", "float32", "--kv-cache-gib", "0.05",
        "--lora-modules", f"a={folder / 'a'}", "--lora-dir", str(folder / "dir"), "--max-loras", "2",
        "--num-threads", "1", "--decode", "2",
        "--http-port", "0", "--metrics-port", "0",
    )  # fmt: skip


def ask(client: Client, name: str, **asked: Any) -> pb.GenerateResponse | Any:
    return client.generate(PROMPT, model=name, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **asked)


def test_each_adapter_answers_as_itself(cluster: RunningCluster, expected: dict[str, list[int]]) -> None:
    """Requests are prefilled by one worker and decoded by another, then use caches, which adapters do not share."""
    with Client(cluster.address) as client:
        for name in NAMES:
            first, second = ask(client, name), ask(client, name)
            assert first.token_ids == second.token_ids == expected[name][:NUM_TOKENS]
            assert first.timings.mode == pb.MODE_DISAGGREGATED
            assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 64)
        assert ask(client, "base").token_ids == expected[""]
        assert list(client.model_info().lora_names) == ["a", "b"]
        with pytest.raises(
            InvalidRequest, match="model: must be 'base', one of its adapters \\('a', 'b'\\) or empty, is 'c'"
        ):
            ask(client, "c")


def test_a_stream_goes_on_with_its_adapter(cluster: RunningCluster, expected: dict[str, list[int]]) -> None:
    with Client(cluster.address) as client:
        for number in range(20):  # so small a model may finish before we know its worker
            stream = client.stream(
                PROMPT,
                request_id=f"moved-{number}",
                model="b",
                temperature=0,
                max_tokens=NUM_LONG_TOKENS,
                ignore_eos=True,
            )
            tokens = list(next(stream).token_ids)
            workers = [each.record for each in cluster.workers() if each.record.role == worker_pb.ROLE_DECODE]
            running = [worker.pid for worker in workers if worker.load.num_running]
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            chunks = list(stream)
            tokens += [token for chunk in chunks for token in chunk.token_ids]
            assert tokens == expected["b"]
            if chunks[-1].timings.attempts > 1:
                break
            wait_until(lambda: len(cluster.workers()) == 3, 30.0, "whom it killed for nothing is there again")
    assert chunks[-1].timings.attempts > 1, "it went on elsewhere"
    line = f"request_id=moved-{number} lora_name=b"  # arrives with a delay, through `tandem up`
    wait_until(lambda: line in cluster.log.read_text(), 15.0, "the router's one line of it")
    wait_until(lambda: len(cluster.workers()) == 3, 30.0, "the worker is started again")
    cluster.wait_until_at_rest()


def test_over_http(cluster: RunningCluster, expected: dict[str, list[int]]) -> None:
    with httpx.Client(base_url=f"http://{cluster.http_address}") as http:
        models = http.get("/v1/models").json()["data"]
        assert [(model["id"], model["parent"]) for model in models] == [("base", None), ("a", "base"), ("b", "base")]
        assert http.get("/v1/models/b").json() == models[2]
        unknown = http.get("/v1/models/c")
        assert unknown.status_code == 404
        assert "the model 'c' does not exist; available: 'base', 'a', 'b'" in unknown.json()["error"]["message"]
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "model": "a"}
        answer = http.post("/v1/completions", json=body).json()
        assert answer["model"] == "a"
        with Client(cluster.address) as client:
            assert answer["choices"][0]["text"] == ask(client, "a").text
        refused = http.post("/v1/completions", json=body | {"model": "c"})
        assert refused.status_code == 404
        assert "'a', 'b'" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_one_that_is_put_into_the_folder_and_taken_away(
    cluster: RunningCluster, folder: Path, expected: dict[str, list[int]]
) -> None:
    """The router serves the adapter as soon as one decode worker has it. Requests are prefilled by one worker and
    decoded by another as soon as both have it."""
    shutil.copytree(folder / "a", folder / "dir" / ".c")
    (folder / "dir" / ".c").rename(folder / "dir" / "c")
    with Client(cluster.address) as client:
        wait_until(lambda: "c" in client.model_info().lora_names, 30, "one worker has it")
        modes = []

        def is_handed_over() -> bool:
            answer = ask(client, "c", cache_salt=str(len(modes)))  # cached nowhere, else the decode worker prefills
            assert answer.token_ids == expected["a"][:NUM_TOKENS]
            modes.append(answer.timings.mode)
            return modes[-1] == pb.MODE_DISAGGREGATED

        wait_until(is_handed_over, 30, "the prefill worker has it, too", lambda: modes)
        shutil.rmtree(folder / "dir" / "c")
        wait_until(lambda: "c" not in client.model_info().lora_names, 30, "nobody has it")
        with pytest.raises(InvalidRequest, match="is 'c'"):
            ask(client, "c")
        assert ask(client, "b").token_ids == expected["b"][:NUM_TOKENS]


def test_metrics_name_the_adapters_that_are_asked_for(cluster: RunningCluster) -> None:
    """As in vLLM, a metric names them. Requests for an adapter are counted under the model's name."""
    url = re.search(r"^router +\| .* metrics url=(\S+)$", cluster.log.read_text(), re.MULTILINE)
    assert url is not None

    def shown() -> tuple[list[dict[str, str]], float]:
        families = {each.name: each for each in text_string_to_metric_families(httpx.get(url[1]).text)}
        answered = sum(sample.value for sample in families["tandem:request_success"].samples)
        return [sample.labels for sample in families["tandem:lora_requests_info"].samples], answered

    idle = {"model_name": "base", "max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    wait_until(lambda: shown()[0] == [idle], 15, "nobody asks for an adapter", shown)
    num_before = shown()[1]
    with Client(cluster.address) as client:

        def is_seen() -> bool:  # so small a model may finish before we look
            stream = client.stream(PROMPT, model="b", max_tokens=NUM_TOKENS, ignore_eos=True)
            next(stream)
            asked.append(shown()[0])
            assert [*stream]
            return asked[-1] == [idle | {"running_lora_adapters": "b"}]

        asked: list[list[dict[str, str]]] = []
        wait_until(is_seen, 30, "a request for an adapter runs", lambda: asked)
    wait_until(lambda: shown() == ([idle], num_before + len(asked)), 15, "all were counted", shown)


def test_from_the_command_line(cluster: RunningCluster) -> None:
    command = [sys.executable, "-m", "tandem", "generate", "Once", "--router", cluster.address, "--max-tokens", "3"]
    subprocess.run([*command, "--model", "a", "--ignore-eos"], check=True, capture_output=True, timeout=60)
    refused = subprocess.run([*command, "--model", "c"], check=False, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert "model: must be 'base', one of its adapters ('a', 'b') or empty, is 'c'" in refused.stderr
