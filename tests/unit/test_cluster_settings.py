"""The settings of `tandem up` reach the processes that it starts. Settings in their environment do not."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import tandem.cli.up
from decode_service.__main__ import main as decode
from engine.engine_args import EngineArgs
from gateway.__main__ import main as gateway
from gateway.args import GatewayArgs
from prefill_service.__main__ import main as prefill
from router.__main__ import main as router
from router.args import RouterArgs
from router.policy import PolicyConfig
from rpc.entrypoint import build
from rpc.tls import SSL_FIELDS, SslArgs
from tandem.cli.up import up
from tandem.cluster_args import OWN, SERVICES, ClusterArgs, gateway_spec, router_spec, worker_spec
from tandem.gpus import VISIBLE, Gpus
from tandem.process_run import ProcessSpec
from worker_service.args import WorkerArgs

FOLDER = Path("model")
REDIS = "redis://:secret@r"
TEXTS = {
    "allowed_origins": '["https://chat.example"]',
    "chat_template": __file__,
    "default_chat_template_kwargs": '{"enable_thinking": false}',
    "generation_config": "vllm",
    "log_format": "json",
    "log_level": "debug",
    "lora_dir": "adapters",
    "namespace": "other",
    "otlp_traces_endpoint": "http://127.0.0.1:4317",
    "override_generation_config": '{"temperature": 0.5}',
    "reasoning_parser": "none",
    "scheduling_policy": "fcfs",
    "tool_call_parser": "hermes",
}
"""Differs from the default."""


def specs(args: ClusterArgs) -> list[tuple[ProcessSpec, click.Command, Sequence[type[Any]]]]:
    """Each process, with the command that reads its flags, and the argument classes that it builds from them."""
    return [
        (router_spec(args, "router", FOLDER, REDIS), router, (RouterArgs, PolicyConfig)),
        (gateway_spec(args, "gateway", "127.0.0.1:0", "127.0.0.1:1"), gateway, (GatewayArgs,)),
        (worker_spec(args, "prefill-1", FOLDER, REDIS), prefill, (WorkerArgs, EngineArgs)),
        (worker_spec(args, "decode-1", FOLDER, REDIS), decode, (WorkerArgs, EngineArgs)),
    ]


def read(spec: ProcessSpec, command: click.Command) -> click.Context:
    """Read the command line as the process would."""
    words = spec.command("")
    assert words[1:3] == ["-P", "-m"]
    return command.make_context(words[3], words[4:])


def unlike_default(service: type[SslArgs], name: str) -> Any:
    default = getattr(service, name)
    return TEXTS[name] if isinstance(default, str) else default + 1


def handed_on(service: type[SslArgs]) -> list[str]:
    return [entry.name for entry in fields(service) if entry.name not in OWN]


def test_every_flag_of_every_process_is_given() -> None:
    """A process would read a missing flag from the environment in which the cluster is started."""
    for spec, command, _ in specs(ClusterArgs(http_port=0)):
        context = read(spec, command)
        sources = {option.name: context.get_parameter_source(str(option.name)) for option in command.params}
        by_environment = {"router": {"redis", "api_key"}, "gateway": {"api_key", "router_api_key"}}
        missing = {name for name, source in sources.items() if source is not click.core.ParameterSource.COMMANDLINE}
        assert missing == by_environment.get(spec.name, {"redis"}), spec.name


def test_no_password_is_on_a_command_line() -> None:
    """All users of the machine can see command lines."""
    for spec, _, _ in specs(ClusterArgs(http_port=0, api_key=("secret-key",))):
        assert "secret" not in " ".join(spec.command(""))
        assert any("secret" in value for value in spec.env.values())


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_of_a_service_can_be_given_to_the_cluster(service: type[SslArgs]) -> None:
    """A new flag of a service fails here until it is a setting of the cluster, or is listed in `OWN` with a reason."""
    given = {name: unlike_default(service, name) for name in handed_on(service)}
    started = [(spec, command) for spec, command, kinds in specs(ClusterArgs(http_port=0, **given)) if service in kinds]
    assert started
    for spec, command in started:
        read_there = read(spec, command).params
        assert {name: read_there[name] for name in given} == given, spec.name


def test_every_setting_of_a_service_is_a_flag_of_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: unlike_default(service, name) for service in SERVICES for name in handed_on(service)}
    seen: list[ClusterArgs] = []

    async def serve(args: ClusterArgs) -> list[str]:
        seen.append(args)
        return []

    monkeypatch.setattr(tandem.cli.up, "_serve", serve)
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    result = CliRunner().invoke(up, words)
    assert result.exit_code == 0, result.output
    (args,) = seen
    assert {name: getattr(args, name) for name in given} == given


def test_what_a_cluster_says_by_itself_is_a_setting_of_some_service() -> None:
    assert set(OWN) <= {entry.name for service in SERVICES for entry in fields(service)}
    assert all(OWN.values())


def test_certificates_in_the_environment_are_not_for_a_local_cluster() -> None:
    """They may be set for `tandem status` of another cluster. The processes of a local cluster do not use TLS."""
    for spec, command, _ in specs(ClusterArgs()):
        read_there = read(spec, command).params
        assert [read_there[name] for name in SSL_FIELDS] == ["", "", ""], spec.name


def test_keys_reach_router_and_gateway_where_nobody_else_reads_them() -> None:
    args = ClusterArgs(api_key=("older", "newer"))
    specs = [router_spec(args, "router", FOLDER, ""), gateway_spec(args, "gateway", "127.0.0.1:0", "127.0.0.1:1")]
    for spec in specs:
        assert spec.env is not None
        assert spec.env["TANDEM_API_KEY"] == "older newer"
        assert "older" not in " ".join(spec.command(""))
    assert specs[1].env is not None
    assert specs[1].env["TANDEM_ROUTER_API_KEY"] == "older"


def test_keys_in_the_environment_are_not_for_a_local_cluster() -> None:
    for spec, _, _ in specs(ClusterArgs()):
        if spec.env is not None and "TANDEM_API_KEY" in spec.env:
            assert spec.env["TANDEM_API_KEY"] == spec.env.get("TANDEM_ROUTER_API_KEY", "") == ""


def test_every_engine_setting_reaches_the_worker() -> None:
    given = EngineArgs(
        model=str(FOLDER), served_model_name="s", dtype="float32", load_format="dummy", seed=1, max_model_len=2,
        block_size=4, tensor_parallel_size=2,
        lora_modules="sql=/adapters/sql", max_loras=3, max_lora_rank=24,
        num_kv_blocks=5, kv_cache_gib=0.5, kv_offloading_size=0.5, gpu_memory_utilization=0.5,
        enable_prefix_caching=False, max_num_seqs=6, max_num_batched_tokens=7, prefill_chunk_tokens=8,
        prefill_batch_tokens=6, max_itl_ms=3.0, stream_interval=2,
        async_scheduling=False, device="cpu", num_threads=9, attention_backend="torch", enforce_eager=True,
        max_seq_len_to_capture=77, batch_invariant=True,
        quantization="int8", kv_cache_dtype="fp8", model_impl="tandem",
        speculative_config='{"num_speculative_tokens": 4}',
    )  # fmt: skip
    default = EngineArgs()
    unlike = [name for name in vars(given) if getattr(given, name) == getattr(default, name)]
    assert unlike == [], "each must differ from its default to prove that it travels"
    for spec, command, kinds in specs(ClusterArgs(engine=given)):
        if EngineArgs in kinds:
            assert build(EngineArgs, read(spec, command).params) == given, spec.name


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 0.45),
        ({"num_decode": 2}, 0.3),
        ({"is_aggregated": True}, 0.9),
        ({"engine": EngineArgs(gpu_memory_utilization=0.4)}, 0.4),
    ],
)
def test_workers_share_a_gpu(settings: dict[str, Any], share: float) -> None:
    """If each worker took nine tenths of it, nothing would be left for the second."""
    spec = worker_spec(ClusterArgs(**settings), "decode-1", FOLDER, REDIS)
    assert share_of(spec) == pytest.approx(share)
    assert VISIBLE not in spec.env


@pytest.mark.parametrize(("asked", "num_sharing", "share"), [(0.9, 1, 0.9), (0.9, 2, 0.45), (0.4, 2, 0.4)])
def test_a_worker_sees_its_own_gpus(asked: float, num_sharing: int, share: float) -> None:
    args = ClusterArgs(num_decode=3, engine=EngineArgs(gpu_memory_utilization=asked))
    spec = worker_spec(args, "decode-1", FOLDER, REDIS, gpus=Gpus(("2", "3"), ("0", "1"), num_sharing))
    assert spec.env[VISIBLE] == "2,3,0,1"
    assert share_of(spec) == pytest.approx(share)


@pytest.mark.parametrize(
    ("asked", "num_sharing", "has_cuda_ipc", "expected"),
    [
        ("auto", 4, True, "ipc"), ("auto", 4, False, "grpc"), ("auto", 2, True, "grpc"), ("auto", 0, True, "grpc"),
        ("grpc", 4, True, "grpc"), ("nixl", 2, True, "nixl"), ("ipc", 0, False, "ipc"),
    ],
)  # fmt: skip
def test_workers_of_one_gpu_write_into_each_others_memory(
    monkeypatch: pytest.MonkeyPatch, asked: str, num_sharing: int, has_cuda_ipc: bool, expected: str
) -> None:
    """`num_sharing`, of four workers; 0: there is no GPU."""
    monkeypatch.setattr("tandem.cluster_args.has_cuda_ipc", lambda: has_cuda_ipc)
    args = ClusterArgs(num_prefill=2, num_decode=2, transport=asked)
    gpus = Gpus(("0",), (), num_sharing) if num_sharing else None
    command = worker_spec(args, "decode-1", FOLDER, REDIS, gpus=gpus).command("")
    assert command[command.index("--transport") + 1] == expected


def share_of(spec: ProcessSpec) -> float:
    command = spec.command("")
    return float(command[command.index("--gpu-memory-utilization") + 1])


def test_every_setting_of_the_policy_reaches_the_router() -> None:
    given = PolicyConfig(local_max_uncached_tokens=1, learn_costs=False, rebalance=False, max_prefill_backlog_tokens=2)
    assert not [name for name in vars(given) if getattr(given, name) == getattr(PolicyConfig(), name)]
    for policy in (given, PolicyConfig()):
        spec, command, _ = specs(ClusterArgs(policy=policy))[0]
        assert build(PolicyConfig, read(spec, command).params) == policy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_decode": 0}, "--decode must be in [1, 64], is 0"),
        ({"num_prefill": 0}, "--prefill must be at least 1"),
        ({"transport": "tcp"}, "--transport must be one of auto, grpc, ipc, nixl"),
        ({"listen": "nowhere"}, "--listen: must be HOST:PORT"),
        ({"redis_url": "localhost"}, "--redis must be a redis://"),
        ({"namespace": "a b"}, "--namespace must be"),
        ({"drain_grace_s": -1}, "--drain-grace-s must be at least 0"),
        ({"lease_ms": 1}, "--lease-ms must be in"),
        ({"max_queue_tokens": 0}, "--max-queue-tokens must be at least 1"),
        ({"allowed_origins": '["https://a/"]'}, "--allowed-origins must be a JSON list of origins"),
        ({"num_routers": 0}, "--routers must be in [1, 64], is 0"),
        ({"num_gateways": 65}, "--gateways must be in [1, 64], is 65"),
        ({"num_routers": 3, "listen": "127.0.0.1:65534"}, "--listen: 3 routers need 3 ports, from 65534 on"),
        ({"num_routers": 2, "listen": "localhost:0"}, "--listen must have an IP address with several routers"),
        ({"num_routers": 2, "metrics_port": 65533}, "--metrics-port must be in [0, 65532], is 65533"),
    ],
)
def test_a_wrong_setting_names_its_flag(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        ClusterArgs(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize("command", [up, router, prefill])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "a name must not be empty; for the (model's own|folder's) name, leave it out"),
        ("a,,b", "Error: --served-model-name must be NAME or NAME,NAME, is 'a,,b'"),
        (" ", "Error: --served-model-name must be NAME or NAME,NAME, is ' '"),
    ],
)
def test_a_model_has_no_empty_name(command: click.Command, name: str, message: str) -> None:
    result = CliRunner().invoke(command, ["--model", str(FOLDER), "--served-model-name", name])
    assert result.exit_code == 2
    assert re.search(message, result.stderr)


def test_the_current_folder_is_a_model_with_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert ClusterArgs(engine=EngineArgs(model=".")).served_model_name == tmp_path.name


def test_workers_have_names_and_ids_of_their_own() -> None:
    assert ClusterArgs(num_prefill=2, num_decode=1).worker_names == ["prefill-1", "prefill-2", "decode-1"]
    assert ClusterArgs(num_prefill=2, num_decode=2, is_aggregated=True).worker_names == ["decode-1", "decode-2"]
    assert ClusterArgs().worker_id("decode-1") == "decode-1"
    shared = ClusterArgs(redis_url="redis://somewhere").worker_id("decode-1")
    assert str(os.getpid()) in shared, "several clusters may share that Redis"


@pytest.mark.parametrize("listen", ["0.0.0.0:50051", "[::]:0", "0.0.0.0:0"])
def test_all_may_connect_to_routers_and_gateways(listen: str) -> None:
    """Workers stay at the loopback address: only the fronts are for others."""
    args = ClusterArgs(listen=listen, http_port=8000)
    assert flag_of(router_spec(args, "router", FOLDER, REDIS), "--listen") == listen
    assert args.http_listen == f"{listen.rpartition(':')[0]}:8000"
    worker = worker_spec(args, "decode-1", FOLDER, REDIS)
    assert flag_of(worker, "--listen") == "127.0.0.1:0"


@pytest.mark.parametrize("name", ["listen", "metrics_listen"])
def test_a_gateway_refuses_what_is_no_address(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: must be HOST:PORT"):
        GatewayArgs(**{name: "here"})  # type: ignore[arg-type]


def flag_of(spec: ProcessSpec, flag: str, announced: str = "") -> str:
    command = spec.command(announced)
    return command[command.index(flag) + 1]


def test_several_routers_take_ports_that_follow_one_another() -> None:
    several = ClusterArgs(num_routers=2, listen="127.0.0.1:700", metrics_port=900, num_gateways=2, http_port=0)
    assert several.router_names == ["router-1", "router-2"]
    routers = [router_spec(several, name, FOLDER, REDIS) for name in several.router_names]
    assert [spec.name for spec in routers] == several.router_names
    assert [flag_of(spec, "--listen") for spec in routers] == ["127.0.0.1:700", "127.0.0.1:701"]
    assert flag_of(routers[1], "--listen", announced="127.0.0.1:701") == "127.0.0.1:701", "where it was"
    shown = [several.metrics_listen(name) for name in ("router-1", "router-2", "prefill-1", "decode-1", "gateway-1")]
    assert shown == [f"127.0.0.1:{port}" for port in range(900, 905)]
    anywhere = ClusterArgs(num_routers=2, listen="127.0.0.1:0")
    assert [flag_of(router_spec(anywhere, name, FOLDER, REDIS), "--listen") for name in anywhere.router_names] == [
        "127.0.0.1:0", "127.0.0.1:0",
    ]  # fmt: skip


def test_one_router_and_one_gateway_are_as_ever() -> None:
    """Their names and ports, and the ports of all metrics, are the same as before there could be several."""
    args = ClusterArgs(http_port=800, metrics_port=900)
    assert (args.router_names, args.gateway_names) == (["router"], ["gateway"])
    assert [args.metrics_listen(name) for name in ("router", "prefill-1", "decode-1")] == [
        "127.0.0.1:900", "127.0.0.1:901", "127.0.0.1:902",
    ]  # fmt: skip
    (name,) = args.gateway_names
    spec = gateway_spec(args, name, args.http_listen, "127.0.0.1:1")
    assert (flag_of(spec, "--listen"), flag_of(spec, "--metrics-listen")) == ("127.0.0.1:800", "")
    assert "--no-reuse-port" in spec.command("")
    assert ClusterArgs().gateway_names == [], "there is none without a port"


def test_several_gateways_share_one_port_and_show_metrics_elsewhere() -> None:
    args = ClusterArgs(http_port=800, num_gateways=2, metrics_port=900)
    routers = "ipv4:127.0.0.1:1,127.0.0.1:2"
    specs = [gateway_spec(args, name, args.http_listen, routers) for name in args.gateway_names]
    for spec, port in zip(specs, (903, 904), strict=True):
        assert "--reuse-port" in spec.command("")
        assert flag_of(spec, "--listen") == "127.0.0.1:800"
        assert flag_of(spec, "--metrics-listen") == f"127.0.0.1:{port}"
        assert flag_of(spec, "--router") == "ipv4:127.0.0.1:1,127.0.0.1:2"
