"""A whole Tandem cluster on this machine: Redis, routers, workers and gateways, each a process of its own.

Owns the processes (through `tandem.supervision`), and knows when requests can be served. Does not own their settings
(`tandem.cluster_args`), nor requests: `tandem.client` talks to `router_address`.

    Cluster(args) ── start() ──> model resolved, settings checked ─> Redis answers ─> routers and workers start together
                                  ─> each router is SERVING and has every worker, gateways listen ─> ready
                  ── stop() ───> gateways drain ─> routers drain (streams finish) ─> workers drain ─> Redis ends

A process that dies is started again: a router or gateway on the port it had, Redis on its socket. A worker keeps its id
and gets a new incarnation, so that nobody relies on what its predecessor reported.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.model_loader.settings import (
    DRAFT_HAS_STATES,
    check_draft_model,
    check_settings,
    load_format_of_draft,
    naming_what_guesses,
)
from engine.scheduling.speculation import SpeculativeConfig
from protos import tandem_worker_pb2, tandem_worker_pb2_grpc
from registry.connection import REDIS_FAILURES, open_redis
from router.generation_defaults import GenerationDefaults
from router.text.chat_template import ChatTemplate
from rpc.channel import open_channel
from rpc.entrypoint import with_flags
from rpc.keys import keyed
from rpc.listener import hold_port
from rpc.server import CannotListen, is_any_host, split_address
from rpc.targets import addresses_of, target_of
from tandem.client_base import INFERENCE_SERVICE
from tandem.cluster_args import (
    AUTO,
    REDIS,
    ClusterArgs,
    gateway_spec,
    router_spec,
    worker_spec,
)
from tandem.gpus import IPC_IS_FASTER, in_words, share_out, visible_gpus
from tandem.local_redis import LocalRedis, LocalRedisError
from tandem.model_folder import check_observed, has_states, resolve_model
from tandem.process_run import ProcessSpec
from tandem.stderr import tell
from tandem.supervision import ProcessError, ProcessEvent, RestartPolicy, SupervisedProcess
from worker_service.args import check_lora_dir

T = TypeVar("T")

STATUS_INTERVAL_S = 0.1
"""Time between two looks at the router's list of workers, during the start."""
KILL_MARGIN_S = 5.0
"""The time that a process may take to end, beyond the grace period of its streams."""
WORKER_GRACE_S = 20.0
"""For workers if all routers belong to the cluster: once these have ended, no requests run on the workers."""
REDIS_GRACE_S = 5.0
REDIS_TIMEOUT_S = 5.0
"""Within this time, a Redis named by the user must answer at the start."""


class ClusterError(Exception):
    """The cluster cannot start or go on. The message says what to do."""


def print_log_line(name: str, line: str) -> None:
    """Print a child's line to stderr, behind its name; a JSON object has it as "process" instead."""
    tell(f'{{"process": "{name}", {line[1:]}' if line.startswith('{"') else f"{name:<10} | {line}")


def print_progress(event: ProcessEvent) -> None:
    """Print what happened to a child to stderr, with its last lines if it died."""
    lines = [f"tandem: {event.name} {event.what}", *(f"tandem:     {line}" for line in event.tail)]
    tell("\n".join(lines))


class Cluster:
    """An async context manager: the cluster is ready when entered, and gone when left.

    `on_line(name, line)` gets the log lines of the processes, `on_event` what happens to them; by default, both print
    to stderr. `start` and `wait_failed` raise `ClusterError`.
    """

    def __init__(
        self,
        args: ClusterArgs | None = None,
        *,
        on_line: Callable[[str, str], None] = print_log_line,
        on_event: Callable[[ProcessEvent], None] = print_progress,
        restart_policy: RestartPolicy | None = None,
        advertise: Mapping[str, str] | None = None,
    ) -> None:
        """`advertise`: by worker name, the address under which others reach the worker, if a proxy stands in
        between."""
        self.args = args or ClusterArgs()
        self._on_line = on_line
        self._on_event = on_event
        self._restart_policy = restart_policy
        self._advertise = advertise or {}
        self._redis: LocalRedis | None = None
        self._processes: dict[str, SupervisedProcess] = {}
        self._http_port: socket.socket | None = None
        """Holds the port that several gateways share."""
        self._is_hurried = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        problems = await self.stop()
        if problems and error is None:
            raise ClusterError("; ".join(problems))

    # -- addresses and processes --------------------------------------------------------------------------------

    @property
    def router_address(self) -> str:
        """ "host:port" as the router printed it; with several routers, gRPC's target for all of them."""
        return target_of([self._processes[name].announced for name in self.args.router_names])

    @property
    def http_address(self) -> str:
        """ "host:port" of OpenAI's HTTP API; empty without a gateway."""
        return next((gateway.announced for gateway in self._of_names(*self.args.gateway_names)), "")

    @property
    def pids(self) -> dict[str, int]:
        """The pid of every process by name: "redis", "router", "prefill-1", …; 0 for one that is between two runs."""
        return {name: process.pid for name, process in self._processes.items()}

    def address_of(self, name: str) -> str:
        """ "host:port" of a worker or the router."""
        return self._processes[name].announced

    @property
    def redis_url(self) -> str:
        return self._redis.url if self._redis else self.args.redis_url

    # -- start and stop -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything, and wait until every worker can serve requests. Raises `ClusterError`; then nothing is left
        running."""
        try:
            await self._start()
        except BaseException:
            self.hurry()
            await self.stop()
            raise

    async def _start(self) -> None:
        if self.args.redis_url:
            await _check_redis(self.args.redis_url)
        try:
            folder = await resolve_model(self.args.engine.model, self._on_event)
            draft_folder = await self._resolve_draft_model()
        except ValueError as error:
            raise ClusterError(with_flags(str(error), self.args.field_names)) from error
        await asyncio.to_thread(self._check_settings, folder, draft_folder)
        await self._check_observed(folder)
        if not self.args.redis_url:
            try:
                self._redis = LocalRedis()
            except LocalRedisError as error:
                raise ClusterError(str(error)) from error
            await self._or_failure(self._supervise(self._redis.spec(REDIS)).wait_running())
        for name in self.args.router_names:
            self._supervise(router_spec(self.args, name, folder, self.redis_url))
        self._start_workers(folder)
        if self.args.gateway_names:
            for name in self.args.router_names:
                await self._or_failure(self._processes[name].wait_running())
            self._start_gateways()
        await self._or_failure(self._wait_ready())

    def _start_workers(self, folder: Path) -> None:
        args, names = self.args, self.args.worker_names
        gpus = visible_gpus() if args.engine.device != "cpu" else ()
        shares = share_out(gpus, names, args.engine.tensor_parallel_size)
        if len(gpus) > 1 and shares:
            self._on_line("tandem", in_words(shares))
            is_apart = args.transport == AUTO and any(each.num_sharing < len(names) for each in shares.values())
            if is_apart and not args.is_aggregated:
                self._on_line("tandem", IPC_IS_FASTER)
        for name in names:
            advertise = self._advertise.get(name, "")
            self._supervise(worker_spec(args, name, folder, self.redis_url, advertise, shares.get(name)))

    def _start_gateways(self) -> None:
        """Start the gateways. Several share one port, which this process holds from now on."""
        listen = self.args.http_listen
        if self.args.num_gateways > 1:
            try:
                self._http_port, listen = hold_port(listen, "--http-port")
            except CannotListen as error:
                raise ClusterError(str(error)) from error
        for name in self.args.gateway_names:
            self._supervise(gateway_spec(self.args, name, listen, target_of(self._reached_at)))

    async def stop(self) -> list[str]:
        """Drain and end everything. Returns a sentence for each process that did not end properly."""
        streams_s = self.args.drain_grace_s + KILL_MARGIN_S
        # Gateways first: what they have taken, they still have to ask of a router, and one that drains takes nothing.
        problems = await self._stop(self._of_names(*self.args.gateway_names), streams_s)
        problems += await self._stop(self._of_names(*self.args.router_names), streams_s)
        may_have_streams = bool(self.args.redis_url)  # other routers may use our workers through this Redis
        workers_s = max(WORKER_GRACE_S, streams_s) if may_have_streams else WORKER_GRACE_S
        problems += await self._stop(self._of_names(*self.args.worker_names), workers_s)
        problems += await self._stop(self._of_names(REDIS), REDIS_GRACE_S)
        self._processes.clear()
        if self._http_port is not None:
            self._http_port.close()
            self._http_port = None
        if self._redis is not None:
            self._redis.remove()
            self._redis = None
        return problems

    def hurry(self) -> None:
        """Kill the processes: do not wait for them to end by themselves."""
        self._is_hurried = True
        for process in self._processes.values():
            process.kill()

    async def wait_failed(self) -> None:
        """Wait until a process is given up, and raise `ClusterError`. Returns when the cluster is stopped."""
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(_failure_of(process)) for process in self._processes.values()]
            done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in pending:
                wait.cancel()
        for wait in done:
            if failure := wait.result():
                raise ClusterError(failure)

    # -- the processes ------------------------------------------------------------------------------------------

    def _of_names(self, *names: str) -> list[SupervisedProcess]:
        return [self._processes[name] for name in names if name in self._processes]

    async def _stop(self, processes: Iterable[SupervisedProcess], grace_s: float) -> list[str]:
        grace_s = 0.0 if self._is_hurried else grace_s
        problems = await asyncio.gather(*(process.stop(grace_s) for process in processes))
        return [problem for problem in problems if problem]

    def _supervise(self, spec: ProcessSpec) -> SupervisedProcess:
        process = SupervisedProcess(spec, on_line=self._on_line, on_event=self._on_event, policy=self._restart_policy)
        self._processes[spec.name] = process
        process.start()
        return process

    # -- waiting ------------------------------------------------------------------------------------------------

    async def _or_failure(self, wait: Coroutine[Any, Any, T]) -> T:
        """The result of `wait`. Raises `ClusterError` if a process is given up first."""
        task = asyncio.create_task(wait)
        failure = asyncio.create_task(self.wait_failed())
        try:
            await asyncio.wait({task, failure}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                failure.result()
            return await task
        except ProcessError as error:
            raise ClusterError(str(error)) from error
        finally:
            task.cancel()
            failure.cancel()
            await asyncio.gather(task, failure, return_exceptions=True)

    async def _wait_ready(self) -> None:
        await asyncio.gather(*(process.wait_running() for process in self._processes.values()))
        await asyncio.gather(*map(self._wait_has_workers, self._reached_at))

    @property
    def _reached_at(self) -> list[str]:
        """The routers' addresses as reached from this machine."""
        return [connect_address(address) for address in addresses_of(self.router_address)]

    async def _wait_has_workers(self, router: str) -> None:
        """Wait until the router at this address serves, with every worker."""
        async with open_channel(router) as channel:
            await _wait_serving(channel)
            stub = tandem_worker_pb2_grpc.ClusterStub(keyed(channel, self.args.a_key))
            wanted = {self.args.worker_id(name) for name in self.args.worker_names}
            # The router offers a list of workers, but no stream of its changes.
            while wanted - await _connected_workers(stub):  # noqa: ASYNC110
                await asyncio.sleep(STATUS_INTERVAL_S)

    def _check_settings(self, folder: Path, draft_folder: Path | None) -> None:
        """Raise `ClusterError`, naming the flag, if workers or routers would refuse their settings for the model in
        `folder`."""
        args = self.args
        try:
            check_lora_dir(args.lora_dir, args.engine.max_loras)
            check_settings(args.engine, folder)
            if draft_folder is not None:
                check_draft_model(args.engine, folder, draft_folder)
            GenerationDefaults.of(folder, args.generation_config, args.override_generation_config)
            if args.chat_template:
                ChatTemplate.from_file(args.chat_template, folder)
        except ValueError as error:
            raise ClusterError(with_flags(str(error), args.field_names)) from error

    async def _resolve_draft_model(self) -> Path | None:
        """The folder of the draft model or head; None: there is none. Raises `ValueError` if it cannot be one."""
        engine = self.args.engine
        speculation = SpeculativeConfig.parse(engine.speculative_config)
        if speculation is None or not speculation.model:
            return None  # or the model's checkpoint has it
        with naming_what_guesses(speculation):
            folder = await resolve_model(speculation.model, self._on_event)
            if speculation.method == "eagle3":
                return folder
            if await has_states(replace(engine, load_format=load_format_of_draft(engine)), folder):
                raise ValueError(DRAFT_HAS_STATES)
        return folder

    async def _check_observed(self, folder: Path) -> None:
        """Raise `ClusterError`, naming the flag, for what transformers' code tells of the model in `folder`."""
        try:
            await check_observed(self.args.engine, folder)
        except ValueError as error:
            raise ClusterError(with_flags(str(error), self.args.field_names)) from error


async def _check_redis(url: str) -> None:
    """Raise `ClusterError` if no Redis answers. Services wait for their Redis as long as it takes, but a person who has
    just typed its URL wants to know at once."""
    redis = open_redis(url, timeout_s=REDIS_TIMEOUT_S)
    try:
        await redis.ping()
    except REDIS_FAILURES as error:
        where = re.sub("//[^/]*@", "//", url)  # without the password
        why = str(error).rstrip(".") or type(error).__name__
        raise ClusterError(
            f"no Redis answers at {where}: {why}. Start one there, or leave out --redis to have one started"
        ) from error
    finally:
        await redis.aclose()


def connect_address(listen: str) -> str:
    """The address at which this machine reaches a server that listens on `listen`."""
    host, port = split_address(listen)
    return f"127.0.0.1:{port}" if is_any_host(host) else listen


async def _failure_of(process: SupervisedProcess) -> str:
    try:
        await process.wait_failed()
    except ProcessError as error:
        return str(error)
    return ""


async def _wait_serving(channel: grpc.aio.Channel) -> None:
    """Wait until the router's readiness is SERVING."""
    request = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
    while True:
        try:
            async for news in health_pb2_grpc.HealthStub(channel).Watch(request):
                if news.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await channel.channel_ready()  # the router died and is being started again on the same port


async def _connected_workers(stub: tandem_worker_pb2_grpc.ClusterStub) -> set[str]:
    """Ids of the workers that get requests. Being known to the router is not enough: the first requests would leave out
    a worker without a session."""
    try:
        status = await stub.GetStatus(tandem_worker_pb2.GetClusterStatusRequest(), wait_for_ready=True, timeout=10)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return set()
        raise
    return {worker.record.worker_id for worker in status.workers} - set(status.not_connected)
