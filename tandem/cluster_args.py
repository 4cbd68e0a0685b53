"""What a local cluster is made of: its settings, and the command line and environment of each process.

Pure: nothing is started here (`tandem.cluster` does). Every setting travels as a flag, so that the environment of
whoever starts the cluster changes no process behind its back. What a service takes, a cluster takes by the same name,
and hands on; but what it decides for each process by itself (`OWN`).
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from engine.config import EngineArgs
from gateway.args import GatewayArgs
from router.args import RouterArgs
from router.policy import PolicyConfig
from rpc.entrypoint import ServiceArgs
from rpc.server import split_address
from rpc.targets import target_of
from rpc.tls import SSL_FIELDS, SslArgs
from tandem.process_run import ProcessSpec
from worker_service.args import WorkerArgs

ROUTER = "router"
GATEWAY = "gateway"
"""What one is called; several are "router-1", "router-2", …"""
REDIS = "redis"
MAX_WORKERS = 64
"""Of a role, on one machine: each is a process that loads the model."""
MAX_FRONTS = 64
"""Routers, or gateways, on one machine."""
SERVICES: tuple[type[SslArgs], ...] = (RouterArgs, WorkerArgs, GatewayArgs)
"""Whose settings a cluster takes, beside those of an engine and of the router's policy."""
NO_TLS = dict.fromkeys(SSL_FIELDS, "")
"""On one machine there is nobody between the processes; and what the environment says is for others."""
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
    "failpoints": "for tests, which start workers by themselves",
}
"""Settings of services that are not handed on as they are, and what they are instead."""
WAITING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
"""Of compute threads. A step has some two hundred parallel regions, and a thread that sleeps between them is late for
each: in a virtual machine decoding took twice as long so. But one that spins for long keeps a core from whoever else
wants it, its own peer among them. They spin for less than a tenth of a millisecond, which is enough (docs/log.md)."""
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
    """No prefill workers: every decode worker prefills for itself."""
    num_routers: int = 1
    num_gateways: int = 1
    listen: str = "127.0.0.1:50051"
    """The router's address; port 0 takes a free one. Further routers take the ports after it, or free ones."""
    http_port: int | None = None
    """Of OpenAI's HTTP API, on the router's host, for all gateways; 0 takes a free one. None: there is no gateway."""
    transport: str = "grpc"
    redis_url: str = ""
    """Empty: a Redis of our own."""
    namespace: str = "tandem"
    log_level: str = "info"
    drain_grace_s: float = 30.0
    """How long running streams may go on after `stop`."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Keys, of which requests must bring one, over HTTP and gRPC, if there are any."""
    allowed_origins: str = "[]"
    """Whose pages may call over HTTP from a browser: a JSON list."""
    chat_template: str = ""
    """A file. Empty: the model's own."""
    tool_call_parser: str = RouterArgs.tool_call_parser
    reasoning_parser: str = RouterArgs.reasoning_parser
    generation_config: str = RouterArgs.generation_config
    override_generation_config: str = RouterArgs.override_generation_config
    scheduling_policy: str = RouterArgs.scheduling_policy
    good_ttft_ms: float = RouterArgs.good_ttft_ms
    good_tpot_ms: float = RouterArgs.good_tpot_ms
    metrics_port: int | None = None
    """Where the router shows its metrics, on its host; further routers, workers and, if there are several, gateways
    take the ports after it. 0: each a free one. None: nobody does. A single gateway's are on its own port."""
    otlp_traces_endpoint: str = ""
    """Where router and gateway tell of requests. Empty: nowhere."""
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
        for flag, number in (("--routers", self.num_routers), ("--gateways", self.num_gateways)):
            if not 1 <= number <= MAX_FRONTS:
                raise ValueError(f"{flag} must be in [1, {MAX_FRONTS}], is {number}")
        for flag, port, num in (
            ("--http-port", self.http_port, 1),
            ("--metrics-port", self.metrics_port, len(self._who_show_metrics)),
        ):
            if port is not None and not 0 <= port <= 65536 - num:
                raise ValueError(f"{flag} must be in [0, {65536 - num}], is {port}")
        own: dict[str, Any] = {"listen": self.listen, "redis": self.redis_url or ServiceArgs.redis}
        try:  # as the processes will
            RouterArgs(model=self.engine.model, api_key=self.api_key, **own, **self.settings_of(RouterArgs))
            WorkerArgs(**own, **self.settings_of(WorkerArgs))
            GatewayArgs(api_key=self.api_key, **self.settings_of(GatewayArgs))
        except ValueError as error:
            field_name, rest = re.split(r"(?=\W)", str(error), maxsplit=1)
            raise ValueError(f"--{field_name.replace('_', '-')}{rest}") from error
        self._check_routers()
        if self.num_gateways > 1 and sys.platform != "linux":
            raise ValueError("--gateways must be 1 here: only Linux shares the connections of a port out")

    def _check_routers(self) -> None:
        port = split_address(self.listen)[1]
        if port and port + self.num_routers > 65536:
            raise ValueError(f"--listen: {self.num_routers} routers need as many ports, from {port} on")
        try:
            target_of([self.router_listen(name) for name in self.router_names])
        except ValueError as error:
            raise ValueError(f"--listen: several routers are found by an IP address, not {self.listen!r}") from error

    def settings_of(self, service: type[SslArgs]) -> dict[str, Any]:
        """Fields of `service`, one of `SERVICES`, that are handed on."""
        return {entry.name: getattr(self, entry.name) for entry in fields(service) if entry.name not in OWN}

    @property
    def worker_names(self) -> list[str]:
        """ "prefill-1", "decode-1", …: what logs and tests call them."""
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
        """Likewise. None without a port for HTTP."""
        return [] if self.http_port is None else _numbered(GATEWAY, self.num_gateways)

    @property
    def _who_show_metrics(self) -> list[str]:
        """In the order of their ports. What a single gateway counts can be asked for at its own port."""
        several_gateways = self.gateway_names if self.num_gateways > 1 else []
        return [*self.router_names, *self.worker_names, *several_gateways]

    @property
    def gpu_share(self) -> float:
        """Of a GPU's memory, for each worker: they all use the machine's first one, or first ones. Its default is for
        one engine alone, and shared out; what was asked for is what each gets."""
        asked = self.engine.gpu_memory_utilization
        return asked if asked != EngineArgs.gpu_memory_utilization else asked / len(self.worker_names)

    @property
    def served_model_name(self) -> str:
        """What was asked for, not the cache folder that it is in."""
        return self.engine.served_model_name or Path(self.engine.model).name

    @property
    def a_key(self) -> str:
        """One that the router takes; empty: it asks for none."""
        return next(iter(self.api_key), "")

    def metrics_listen(self, name: str) -> str:
        """Where the process `name` shows its metrics; empty: nowhere."""
        if self.metrics_port is None or name not in self._who_show_metrics:
            return ""
        offset = self._who_show_metrics.index(name) if self.metrics_port else 0
        return f"{self._host}:{self.metrics_port + offset}"

    def router_listen(self, name: str) -> str:
        """The address of the router `name`, of which port 0 takes a free one."""
        host, port = split_address(self.listen)
        return f"{host}:{port + self.router_names.index(name) if port else 0}"

    @property
    def http_listen(self) -> str:
        """Of all gateways."""
        return f"{self._host}:{self.http_port}"

    @property
    def _host(self) -> str:
        return split_address(self.listen)[0]

    def worker_id(self, name: str) -> str:
        """The id under which the worker `name` registers."""
        if not self.redis_url:
            return name
        # Others may be registered in that Redis: the name alone would not be ours alone.
        return f"{os.uname().nodename}-{os.getpid()}-{name}"


def _numbered(name: str, number: int) -> list[str]:
    return [name] if number == 1 else [f"{name}-{i}" for i in range(1, number + 1)]


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def router_spec(args: ClusterArgs, name: str, folder: Path, redis_url: str) -> ProcessSpec:
    """The router `name`, which serves the model in `folder` and comes back on the port it had."""

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
    """OpenAI's HTTP API at `listen`, which asks the routers behind the target `router` and comes back on the port it
    had. Several share that."""

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


def worker_spec(args: ClusterArgs, name: str, folder: Path, redis_url: str, advertise: str = "") -> ProcessSpec:
    """The worker `name`; its role is the part of the name before the dash. `advertise`: where others reach it, if that
    is not where it listens."""
    num_threads = args.engine.num_threads or max(1, num_cores() // len(args.worker_names))
    engine = replace(
        args.engine,
        model=str(folder),
        # A converted GGUF file is a folder of safetensors.
        load_format="auto" if args.engine.load_format == "gguf" else args.engine.load_format,
        served_model_name=args.served_model_name,
        num_threads=num_threads,
        gpu_memory_utilization=args.gpu_share,
    )
    module = "prefill_service" if name.startswith("prefill") else "decode_service"
    own = {
        "listen": "127.0.0.1:0",
        "worker_id": args.worker_id(name),
        "advertise": advertise,
        "failpoints": "",
        "metrics_listen": args.metrics_listen(name),
    }
    command = _command(module, own, args.settings_of(WorkerArgs), vars(engine))
    env = {**python_env(), "REDIS_URL": redis_url, "OMP_NUM_THREADS": str(num_threads), **WAITING_THREADS}
    return ProcessSpec(name=name, command=lambda _: command, ready_pattern=LISTENING, env=env)


def _command(module: str, *settings: Mapping[str, object]) -> list[str]:
    """Of a service, with all its `settings` as flags: the environment then changes nothing."""
    flags = [part for some in (*settings, NO_TLS) for name, value in some.items() for part in _flag(name, value)]
    return [sys.executable, "-P", "-m", module, *flags]


def _flag(name: str, value: object) -> list[str]:
    words = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{words}" if value else f"--no-{words}"]
    return [f"--{words}", str(value)]


def python_env() -> dict[str, str]:
    """Environment of a child Python: our packages are found where we were, unless they are installed; no buffering.

    Children run with -P: a folder `router` in the current directory is not ours.
    """
    root = str(Path(__file__).resolve().parent.parent)
    env = {"PYTHONUNBUFFERED": "1"}
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return env
