"""The settings of a local cluster, and the command line and environment of each of its processes.

Pure: `tandem.cluster` starts the processes. Every setting is passed as a flag, so that the environment in which the
cluster is started changes no process unnoticed. A cluster takes the settings of its services by the same names and
passes them on, except for those that it decides for each process itself (`OWN`).
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from engine.engine_args import EngineArgs
from gateway.args import GatewayArgs
from kv_transfer import TRANSPORTS
from router.args import RouterArgs
from router.policy import PolicyConfig
from rpc.entrypoint import ServiceArgs, with_flags
from rpc.flag_texts import check_choice
from rpc.server import split_address
from rpc.targets import target_of
from rpc.tls import SSL_FIELDS, SslArgs
from tandem.gpus import VISIBLE, Gpus, has_cuda_ipc
from tandem.process_run import ProcessSpec
from worker_service.args import WorkerArgs

ROUTER = "router"
GATEWAY = "gateway"
"""Name of a single router or gateway; several are "router-1", "router-2", …"""
REDIS = "redis"
MAX_WORKERS = 64
"""Workers of one role on one machine: each is a process that loads the model."""
MAX_FRONTS = 64
"""Routers, or gateways, on one machine."""
AUTO = "auto"
"""The transport is chosen by `transport_of`."""
SERVICES: tuple[type[SslArgs], ...] = (RouterArgs, WorkerArgs, GatewayArgs)
"""Services whose settings a cluster takes, beside those of an engine and of the router's policy."""
NO_TLS = dict.fromkeys(SSL_FIELDS, "")
"""On one machine, nobody stands between the processes. Passed as flags, so that TLS settings in the environment, which
are meant for other programs, have no effect."""
OWN = {
    **dict.fromkeys(NO_TLS, "on one machine there is nobody between the processes"),
    "listen": "the first router's is the cluster's; gateways have `http_port`; workers take free ports",
    "reuse_port": "where there are several gateways",
    "redis": "`redis_url`, or the cluster's own; in the environment, for it may have a password",
    "metrics_listen": "`metrics_port`, and the ports after it",
    "model": "the engine's, once it is a folder",
    "served_model_name": "the engine's",
    "router": "the cluster's",
    "api_key": "in the environment: command lines are for all to see",
    "router_api_key": "likewise: the first of them",
    "worker_id": "the worker's name",
    "advertise": "where it listens, unless the cluster is told what stands in between",
    "transport": "the cluster's, once the workers' GPUs are known",
    "failpoints": "for tests, which start workers by themselves",
}
"""Settings of services that are not passed on as they are, each with where its value comes from instead."""
WAITING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
"""Environment for compute threads. A step has about two hundred parallel regions, and a thread that sleeps between them
is late for each: in a virtual machine, this doubled the time of decoding. But a thread that spins for long keeps a core
from others, its own peers included. These spin for less than a tenth of a millisecond, which is enough
(docs/log.md)."""
LISTENING = r"^listening (?:grpc|http)=(\S+)$"
"""The line that every service prints once it accepts requests."""


@dataclass(frozen=True, kw_only=True)
class ClusterArgs:
    """What `tandem up` starts. Raises `ValueError` naming the flag."""

    engine: EngineArgs = field(default_factory=EngineArgs)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    num_prefill: int = 1
    num_decode: int = 1
    is_aggregated: bool = False
    """No prefill workers: every decode worker prefills its own prompts."""
    num_routers: int = 1
    num_gateways: int = 1
    listen: str = "127.0.0.1:50051"
    """The router's address; port 0 takes a free one. Further routers take the ports after it, or free ones."""
    http_port: int | None = None
    """Port of all gateways (OpenAI's HTTP API), on the router's host; 0 takes a free one. None: there is no gateway."""
    transport: str = AUTO
    redis_url: str = ""
    """Empty: the cluster starts its own Redis."""
    namespace: str = "tandem"
    log_level: str = "info"
    log_format: str = RouterArgs.log_format
    drain_grace_s: float = 30.0
    """How long running streams may go on after `stop`."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """If given, requests over HTTP and gRPC must bring one of these keys."""
    allowed_origins: str = "[]"
    """JSON list of the origins whose pages may call over HTTP from a browser."""
    chat_template: str = ""
    """File with a chat template. Empty: the model's own."""
    default_chat_template_kwargs: str = RouterArgs.default_chat_template_kwargs
    tool_call_parser: str = RouterArgs.tool_call_parser
    reasoning_parser: str = RouterArgs.reasoning_parser
    generation_config: str = RouterArgs.generation_config
    override_generation_config: str = RouterArgs.override_generation_config
    scheduling_policy: str = RouterArgs.scheduling_policy
    good_ttft_ms: float = RouterArgs.good_ttft_ms
    good_tpot_ms: float = RouterArgs.good_tpot_ms
    metrics_port: int | None = None
    """Port of the router's metrics, on its host; further routers, workers and, if there are several, gateways take the
    ports after it. 0: each takes a free one. None: no metrics ports. A single gateway serves its metrics on its own
    port."""
    otlp_traces_endpoint: str = ""
    """Where router and gateway send traces of requests. Empty: nowhere."""
    max_queue_tokens: int = RouterArgs.max_queue_tokens
    worker_wait_s: float = RouterArgs.worker_wait_s
    max_message_bytes: int = RouterArgs.max_message_bytes
    max_body_bytes: int = GatewayArgs.max_body_bytes
    sse_keep_alive_s: float = GatewayArgs.sse_keep_alive_s
    resume_s: float = GatewayArgs.resume_s
    lora_dir: str = WorkerArgs.lora_dir
    lease_ms: int = WorkerArgs.lease_ms
    engine_iteration_timeout_s: float = WorkerArgs.engine_iteration_timeout_s

    def __post_init__(self) -> None:
        if not 1 <= self.num_decode <= MAX_WORKERS:
            raise ValueError(f"--decode must be in [1, {MAX_WORKERS}], is {self.num_decode}")
        if self.num_prefill < 1 and not self.is_aggregated:
            raise ValueError(f"--prefill must be at least 1, is {self.num_prefill}; --aggregated starts without any")
        if self.num_prefill > MAX_WORKERS:
            raise ValueError(f"--prefill must be at most {MAX_WORKERS}, is {self.num_prefill}")
        check_choice("--transport", self.transport, (AUTO, *TRANSPORTS))
        for flag, number in (("--routers", self.num_routers), ("--gateways", self.num_gateways)):
            if not 1 <= number <= MAX_FRONTS:
                raise ValueError(f"{flag} must be in [1, {MAX_FRONTS}], is {number}")
        for flag, port, num in (
            ("--http-port", self.http_port, 1),
            ("--metrics-port", self.metrics_port, len(self._who_show_metrics)),
        ):
            if port is not None and not 0 <= port <= 65536 - num:
                raise ValueError(f"{flag} must be in [0, {65536 - num}], is {port}")
        redis: dict[str, Any] = {"redis": self.redis_url or ServiceArgs.redis}
        front: dict[str, Any] = {"listen": self.listen, "model": self.engine.model, "api_key": self.api_key}
        try:  # the checks that the processes will make; `listen` is the router's
            RouterArgs(**front, **redis, **self.settings_of(RouterArgs))
            WorkerArgs(**redis, **self.settings_of(WorkerArgs))
            GatewayArgs(api_key=self.api_key, **self.settings_of(GatewayArgs))
        except ValueError as error:
            raise ValueError(with_flags(str(error), self.field_names)) from error
        self._check_routers()
        if self.num_gateways > 1 and sys.platform != "linux":
            raise ValueError("--gateways must be 1 here: only Linux spreads connections over processes with one port")

    def _check_routers(self) -> None:
        port = split_address(self.listen)[1]
        if port and port + self.num_routers > 65536:
            raise ValueError(f"--listen: {self.num_routers} routers need {self.num_routers} ports, from {port} on")
        try:
            target_of([self.router_listen(name) for name in self.router_names])
        except ValueError as error:
            raise ValueError(f"--listen must have an IP address with several routers, is {self.listen!r}") from error

    @property
    def field_names(self) -> list[str]:
        """The names that errors may give to settings: those of flags."""
        return [entry.name for of in (EngineArgs, PolicyConfig, *SERVICES) for entry in fields(of)]

    def settings_of(self, service: type[SslArgs]) -> dict[str, Any]:
        """The fields of `service`, one of `SERVICES`, that are passed on."""
        return {entry.name: getattr(self, entry.name) for entry in fields(service) if entry.name not in OWN}

    @property
    def worker_names(self) -> list[str]:
        """ "prefill-1", "decode-1", …: the names in logs and tests."""
        num_prefill = 0 if self.is_aggregated else self.num_prefill
        return [
            *(f"prefill-{i}" for i in range(1, num_prefill + 1)),
            *(f"decode-{i}" for i in range(1, self.num_decode + 1)),
        ]

    @property
    def router_names(self) -> list[str]:
        """ "router", or "router-1", "router-2", …"""
        return _numbered(ROUTER, self.num_routers)

    @property
    def gateway_names(self) -> list[str]:
        """ "gateway", or "gateway-1", "gateway-2", …; empty without an HTTP port."""
        return [] if self.http_port is None else _numbered(GATEWAY, self.num_gateways)

    @property
    def _who_show_metrics(self) -> list[str]:
        """Names of the processes with a metrics port, in the order of the ports. A single gateway serves its metrics on
        its own port."""
        several_gateways = self.gateway_names if self.num_gateways > 1 else []
        return [*self.router_names, *self.worker_names, *several_gateways]

    def gpu_share(self, num_sharing: int) -> float:
        """Fraction of a GPU's memory for each of `num_sharing` workers that have it. The default fraction is meant for
        one engine and divided among the workers; a given one applies to each worker."""
        asked = self.engine.gpu_memory_utilization
        return asked if asked != EngineArgs.gpu_memory_utilization else asked / num_sharing

    @property
    def served_model_name(self) -> str:
        """The given name, or that of the given model, not of the cache folder that contains it."""
        return self.engine.served_model_name or Path(self.engine.model).name or Path(self.engine.model).resolve().name

    @property
    def a_key(self) -> str:
        """A key that the router accepts; empty: it requires none."""
        return next(iter(self.api_key), "")

    def metrics_listen(self, name: str) -> str:
        """Address of the metrics of the process `name`; empty: none."""
        if self.metrics_port is None or name not in self._who_show_metrics:
            return ""
        offset = self._who_show_metrics.index(name) if self.metrics_port else 0
        return f"{self._host}:{self.metrics_port + offset}"

    def router_listen(self, name: str) -> str:
        """The address on which the router `name` listens; port 0 takes a free one."""
        host, port = split_address(self.listen)
        return f"{host}:{port + self.router_names.index(name) if port else 0}"

    @property
    def http_listen(self) -> str:
        """The address on which all gateways listen."""
        return f"{self._host}:{self.http_port}"

    @property
    def _host(self) -> str:
        return split_address(self.listen)[0]

    def worker_id(self, name: str) -> str:
        """The id under which the worker `name` registers."""
        if not self.redis_url:
            return name
        # Workers of others may be registered in that Redis, so the name alone might not be unique.
        return f"{os.uname().nodename}-{os.getpid()}-{name}"


def _numbered(name: str, number: int) -> list[str]:
    return [name] if number == 1 else [f"{name}-{i}" for i in range(1, number + 1)]


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def router_spec(args: ClusterArgs, name: str, folder: Path, redis_url: str) -> ProcessSpec:
    """The router `name`, which serves the model in `folder`. Started again, it takes the port it had."""

    def command(announced: str) -> list[str]:
        own = {
            "listen": announced or args.router_listen(name),
            "model": folder,
            "served_model_name": args.served_model_name,
            "metrics_listen": args.metrics_listen(name),
        }
        return _command("router", own, args.settings_of(RouterArgs), vars(args.policy))

    env = {**python_env(), "REDIS_URL": redis_url, "TANDEM_API_KEY": " ".join(args.api_key)}
    return ProcessSpec(name=name, command=command, ready_pattern=LISTENING, env=env, must_start=True)


def gateway_spec(args: ClusterArgs, name: str, listen: str, router: str) -> ProcessSpec:
    """A gateway at `listen`, which asks the routers behind the target `router`. Started again, it takes the port it
    had. Several gateways share the port."""

    def command(announced: str) -> list[str]:
        own = {
            "listen": announced or listen,
            "reuse_port": args.num_gateways > 1,
            "router": router,
            "metrics_listen": args.metrics_listen(name),
        }
        return _command("gateway", own, args.settings_of(GatewayArgs))

    keys = {"TANDEM_API_KEY": " ".join(args.api_key), "TANDEM_ROUTER_API_KEY": args.a_key}
    env = {**python_env(), **keys}
    return ProcessSpec(name=name, command=command, ready_pattern=LISTENING, env=env, must_start=True)


def transport_of(args: ClusterArgs, gpus: Gpus | None) -> str:
    """The transport of a worker with these GPUs. With `auto`, workers of one GPU write into each other's memory on it,
    where `grpc` would take each block to the host and back."""
    if args.transport != AUTO:
        return args.transport
    have_one_gpu = gpus is not None and gpus.num_sharing == len(args.worker_names)
    return "ipc" if have_one_gpu and has_cuda_ipc() else WorkerArgs.transport


def worker_spec(
    args: ClusterArgs, name: str, folder: Path, redis_url: str, advertise: str = "", gpus: Gpus | None = None
) -> ProcessSpec:
    """The worker `name`; its role is the part of the name before the dash. `advertise`: the address at which others
    reach it, if that is not where it listens. `gpus`: the worker's; None: it takes the first ones that it sees, as all
    others do."""
    num_threads = args.engine.num_threads or max(1, num_cores() // len(args.worker_names))
    engine = replace(
        args.engine,
        model=str(folder),
        # A converted GGUF file is a folder of safetensors.
        load_format="auto" if args.engine.load_format == "gguf" else args.engine.load_format,
        served_model_name=args.served_model_name,
        num_threads=num_threads,
        gpu_memory_utilization=args.gpu_share(gpus.num_sharing if gpus else len(args.worker_names)),
    )
    module = "prefill_service" if name.startswith("prefill") else "decode_service"
    own = {
        "listen": "127.0.0.1:0",
        "worker_id": args.worker_id(name),
        "advertise": advertise,
        "transport": transport_of(args, gpus),
        "failpoints": "",
        "metrics_listen": args.metrics_listen(name),
    }
    command = _command(module, own, args.settings_of(WorkerArgs), vars(engine))
    env = {**python_env(), "REDIS_URL": redis_url, "OMP_NUM_THREADS": str(num_threads), **WAITING_THREADS}
    if gpus:
        env[VISIBLE] = gpus.visible
    return ProcessSpec(name=name, command=lambda _: command, ready_pattern=LISTENING, env=env)


def _command(module: str, *settings: Mapping[str, object]) -> list[str]:
    """The command line of a service, with all its `settings` as flags, so that the environment changes nothing."""
    flags = [part for some in (*settings, NO_TLS) for name, value in some.items() for part in _flag(name, value)]
    return [sys.executable, "-P", "-m", module, *flags]


def _flag(name: str, value: object) -> list[str]:
    words = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{words}" if value else f"--no-{words}"]
    return [f"--{words}", str(value)]


def python_env() -> dict[str, str]:
    """Environment of a child Python: it finds our packages where this process did, unless they are installed, and does
    not buffer its output.

    Children run with -P, so that a folder `router` in the current directory is not imported.
    """
    root = str(Path(__file__).resolve().parent.parent)
    env = {"PYTHONUNBUFFERED": "1"}
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return env
