"""One worker process, from its flags to its exit code.

Owns the engine's thread, the gRPC server, the registration in Redis and the prefix report. The caller passes a function
that makes the service of the role (prefill or decode).

    flags ──> model loaded ──> serving, registered ──SIGTERM or Drain──> draining: NOT_SERVING, is_draining in the
                  │                    │                                 registry, running requests finish (bounded)
                  v                    v                                            │
              exit 1 or 2     engine failed, or hangs: exit 1                       v
              (bad flag,      (sessions end; routers go on elsewhere)            exit 0
              no model,
              busy port)
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import secrets
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from engine.async_llm_engine import AsyncLLMEngine, StepNews
from engine.config import EngineConfig
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.scheduling.sequence import BlockExport
from kv_transfer import Identity, KVPool, TransportMissing
from protos import tandem_worker_pb2 as pb
from protos.tandem_inference_pb2 import KVTransferStats
from protos.tandem_worker_pb2_grpc import add_WorkerServicer_to_server
from registry.model_traits import read_model_traits
from registry.prefix_index import PrefixReporter
from registry.workers import WorkerRegistration, role_name
from rpc.channel import DEFAULT_MAX_MESSAGE_BYTES, KV_PING_TIMEOUT_MS
from rpc.entrypoint import announce, with_flags
from rpc.http import HttpServer, show_metrics, tell_of_process
from rpc.server import CannotListen, Server
from rpc.session import PROTOCOL_VERSION
from rpc.version import tandem_version
from worker_service.args import WorkerArgs, check_lora_dir
from worker_service.device_pool import DeviceWatch
from worker_service.lora_folder import LoRAFolder
from worker_service.messages import load_message, model_message
from worker_service.metrics import WorkerMetrics
from worker_service.pool_memory import PoolMemory
from worker_service.rank_exits import RankExits
from worker_service.role import MakeService, RoleService, WorkerParts
from worker_service.servicer import WorkerServicer
from worker_service.sessions import SessionHost
from worker_service.watchdog import wait_until_stuck

_log = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.Worker"
SESSIONS_END_S = 2.0
"""How long a leaving worker waits until its routers have read its last messages."""
STEP_END_S = 5.0
"""How long a worker that has lost a rank waits for the running step. The step fails if the rank has ended, but never
ends if the rank hangs."""


class CannotLoad(Exception):  # noqa: N818 - named for what happened
    """The weights do not fit the model's config, or the device is too small. The message is one line with advice."""


async def run_worker(
    role: pb.Role, args: WorkerArgs, engine_args: EngineArgs, make_service: MakeService, stop: asyncio.Event
) -> int:
    """Serve until `stop` is set or the engine fails. Returns the exit code."""
    if role == pb.Role.ROLE_PREFILL:  # decodes little: recording steps would only cost start time and memory
        engine_args = replace(engine_args, enforce_eager=True)

    def refuse(error: Exception) -> int:
        click.echo(f"Error: {with_flags(str(error), [*vars(args), *vars(engine_args)])}", err=True)
        return 2

    try:
        await asyncio.to_thread(check_lora_dir, args.lora_dir, engine_args.max_loras)
        config = await asyncio.to_thread(create_engine_config, engine_args)
    except ValueError as error:
        return refuse(error)
    try:
        process = await WorkerProcess.start(role, args, config, make_service)
    except (CannotLoad, CannotListen, TransportMissing) as error:
        return refuse(error)
    await _first_of(process.failed.wait(), stop.wait(), process.drain_asked.wait())
    if not process.failed.is_set():
        await process.drain(args.drain_grace_s)
    await process.close()
    return 1 if process.failed.is_set() else 0


async def _first_of(*waits: Coroutine[Any, Any, object], timeout_s: float | None = None) -> bool:
    """Return when the first of `waits` returns, and cancel the others. Returns False on timeout."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    done, others = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    return bool(done)


class WorkerProcess:
    """See the module's docstring. `start` makes it, `close` ends it."""

    def __init__(self, role: pb.Role, args: WorkerArgs, config: EngineConfig) -> None:
        self._role = role
        self._args = args
        self._config = config
        self._loop = asyncio.get_running_loop()
        self.failed = asyncio.Event()
        self.drain_asked = asyncio.Event()
        self._is_draining = False
        self._address = ""
        self._load = pb.WorkerLoad()
        self._traits = pb.ModelTraits()
        self.identity = Identity(
            worker_id=args.worker_id or f"{role_name(role)}-{secrets.token_hex(3)}",
            incarnation=secrets.token_hex(8),
            compat_digest=config.compat_digest,
        )
        self.host = SessionHost(incarnation=self.identity.incarnation, lease_ms=args.lease_ms, load=lambda: self._load)
        self.service: RoleService
        self.engine: AsyncLLMEngine
        self._device_watch = DeviceWatch() if config.device.device != "cpu" else None
        self.server: Server
        self._registration = WorkerRegistration(
            args.redis,
            namespace=args.namespace,
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            record=self._record_to_tell,
        )
        self._has_told = False
        """Whether the worker has told Redis about itself, or tried to."""
        self._reporter = PrefixReporter(
            args.redis,
            namespace=args.namespace,
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            snapshot=self._prefix_snapshot,
        )
        self._watchdog: asyncio.Task[None] | None = None
        self._lora_folder: LoRAFolder | None = None
        self._ranks = RankExits(self._on_failure)
        self._metrics: WorkerMetrics | None = None
        self._metrics_server: HttpServer | None = None

    @classmethod
    async def start(
        cls, role: pb.Role, args: WorkerArgs, config: EngineConfig, make_service: MakeService
    ) -> WorkerProcess:
        """Load the model, listen, register. Raises `CannotLoad`, `CannotListen`, `TransportMissing`."""
        self = cls(role, args, config)
        pool = await self._load_model()
        self._make_services(pool, make_service)
        await self._follow_lora_dir()
        self._show_metrics()  # before others learn of this worker, since the port may be in use
        listening = await self.server.start()
        self._address = args.advertise or listening
        await self.service.start(self._address)
        self._reporter.start()
        self._registration.start()
        self._watchdog = asyncio.create_task(self._end_when_stuck())
        announce(listening)
        facts = {
            "worker": self.identity.worker_id,
            "address": self._address,
            "num_blocks": self.engine.kv_shape.num_blocks,
        }
        _log.info("serving %s", config.model.served_model_name, extra=facts)
        return self

    async def _load_model(self) -> KVPool:
        """Load the model and start the engine. Returns its pool, for transfers."""
        config = self._config
        self._traits = await asyncio.to_thread(read_model_traits, config.model.path)
        is_received = self._role == pb.Role.ROLE_DECODE
        memory = PoolMemory(self._args.transport, is_received=is_received, on_rank_lost=self._ranks.lose)
        try:
            self.engine = await AsyncLLMEngine.start(
                lambda: LLMEngine(config, self._on_layer_written, memory),
                on_step=self._on_step,
                on_failure=self._on_failure,
                before_report=self._catch_up,
            )
        except ValueError as error:
            raise CannotLoad(str(error)) from error
        self._ranks.watch(self.engine.rank_pids)
        self._load = load_message(self.engine.first_load)
        return memory.as_pool(self.engine.kv_pool, self.engine.kv_shape, config.cache.kv_order)

    async def _follow_lora_dir(self) -> None:
        if not self._args.lora_dir:
            return
        self._lora_folder = LoRAFolder(
            Path(self._args.lora_dir),
            self.engine,
            names_of_others=[self._config.model.served_model_name, *self._config.model.aliases],
            on_change=self._registration.beat_now,
        )
        await self._lora_folder.start()

    def _make_services(self, pool: KVPool, make_service: MakeService) -> None:
        """Make the role's services, and `Worker`."""
        args = self._args
        # With many layers and ranks, a long prompt's digests exceed the usual message size limit.
        digest_bytes = pool.layout.digest_bytes(self._config.model.max_model_len)
        max_bytes = min(DEFAULT_MAX_MESSAGE_BYTES + digest_bytes, 2**31 - 1)
        self.server = Server(
            args.listen,
            max_message_bytes=max_bytes,
            tls=args.server_tls(asks_callers=True),
            ping_timeout_ms=KV_PING_TIMEOUT_MS,
        )
        parts = WorkerParts(
            args, self.identity, self.engine, pool, self.host, self.server, max_bytes, self._on_handed_over
        )
        self.service = make_service(parts)
        servicer = WorkerServicer(
            record=self._record,
            engine=self.engine,
            host=self.host,
            service=self.service,
            begin_drain=self.drain_asked.set,
        )
        self.server.add(add_WorkerServicer_to_server, servicer, SERVICE_NAME)

    def _show_metrics(self) -> None:
        """Serve metrics if the flags ask for it. Raises `CannotListen`."""
        self._metrics = WorkerMetrics(
            labels=(self._config.model.served_model_name, self.identity.worker_id, role_name(self._role)),
            load=lambda: self._load,
            stats=self.engine.stats,
            block_bytes=self.engine.kv_shape.all_layers_bytes,
            counters=lambda: self.service.counters,
            num_sessions=lambda: self.host.num_sessions,
            cache_config=self._cache_config(),
        )
        tell_of_process(self._metrics.registry)
        self._metrics_server = show_metrics(
            self._metrics.registry, self._args.metrics_listen, lambda: self.server.is_serving(SERVICE_NAME)
        )

    def _cache_config(self) -> dict[str, str]:
        """The KV pool's settings, by vLLM's names."""
        cache = self._config.cache
        return {
            "block_size": str(cache.block_size),
            "cache_dtype": cache.kv_dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "num_gpu_blocks": str(self.engine.kv_shape.num_blocks),
        }

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, and wait at most `grace_s` seconds for running requests. Also ends when the engine fails."""
        _log.info("draining", extra={"grace_s": grace_s})
        self._is_draining = True
        self.server.enter_drain()
        self._tell_all(is_draining=True)
        if not await _first_of(self.host.drain(), self.failed.wait(), timeout_s=grace_s):
            _log.warning("grace period ended with requests still running", extra={"grace_s": grace_s})

    async def close(self) -> None:
        """End the sessions, leave the registry, release everything."""
        if self._lora_folder is not None:
            await self._lora_folder.close()
        await self.host.end_sessions(SESSIONS_END_S)
        await self._registration.close()
        await self._reporter.close()
        await self.server.drain(0)
        await self.host.finish_tasks()
        await self.service.close()
        if self._metrics_server is not None:
            await self._metrics_server.close()
        self._ranks.close()
        await self._close_engine()
        if self._device_watch is not None:
            await asyncio.to_thread(self._device_watch.close)
        if self._watchdog is not None:
            self._watchdog.cancel()

    async def _close_engine(self) -> None:
        """Wait for the running step. If it never ends, the watchdog ends the process; if a rank is lost, this does so
        sooner."""
        try:
            async with asyncio.timeout(STEP_END_S if self._ranks.has_lost_one else None):
                await self.engine.close()
        except TimeoutError:
            _log.critical("a step waits for a rank that has exited; exiting")
            os._exit(1)  # the stepping thread cannot be ended

    async def _end_when_stuck(self) -> None:
        """A stuck stepping thread cannot be ended, so the process cannot shut down orderly: it exits, and peers see it
        die."""
        timeout_s = self._args.engine_iteration_timeout_s
        await wait_until_stuck(
            self.engine, stall_s=self._args.lease_ms / 1000, timeout_s=timeout_s, on_stall=self._on_stall
        )
        _log.critical("the engine is stuck in a step; exiting", extra={"engine_iteration_timeout_s": timeout_s})
        faulthandler.dump_traceback()  # where each thread is: in which call the engine hangs
        os._exit(1)

    def _on_stall(self, is_stalled: bool) -> None:
        if is_stalled:
            _log.warning(
                "the engine is stuck in a step; routers move their requests to other workers",
                extra={"lease_ms": self._args.lease_ms},
            )
        else:
            _log.info("the engine has recovered")
        self._tell_all(is_stalled=is_stalled)

    def _tell_all(self, **states: bool) -> None:
        """Tell routers a state: at once over their sessions, and the others through the registry, independently."""
        load = pb.WorkerLoad()
        load.CopyFrom(self._load)
        for name, is_so in states.items():
            setattr(load, name, is_so)
        self._load = load
        self.host.announce_load()
        self._registration.beat_now()

    # -- reports of the engine, on the event loop ---------------------------------------------------------------

    def _on_step(self, news: StepNews) -> None:
        before = self._load
        self._load = load_message(news.load, is_draining=self._is_draining)
        self._reporter.report(news.cache_events)
        if self._metrics is not None:
            self._metrics.stepped()
        self.host.deliver(news.outputs)
        if before != self._load:
            self.host.announce_load()  # also to routers without tokens in this step: all can use freed memory

    def _on_failure(self, error: BaseException) -> None:
        _log.critical("the engine failed; exiting", extra={"error": repr(error)})
        self.failed.set()

    def _on_handed_over(self, stats: KVTransferStats) -> None:
        if self._metrics is not None:
            self._metrics.handed_over(stats)

    def _on_layer_written(self, layer: int, exports: list[BlockExport]) -> None:
        """Called on the stepping thread: pass the report to the event loop and continue computing."""
        tell = partial(self._loop.call_soon_threadsafe, self.service.on_layer_written, layer, exports)
        if self._device_watch is None:
            tell()
        else:
            self._device_watch.when_done(tell)

    def _catch_up(self) -> None:
        if self._device_watch is not None:
            self._device_watch.catch_up()

    async def _prefix_snapshot(self) -> Iterable[bytes]:
        # Cache events are only taken with steps: taken here, too, they could get out of order.
        return await self.engine.call(lambda engine: engine.cached_hashes())

    def _record_to_tell(self) -> pb.WorkerRecord:
        """The record for each heartbeat. By then it is known whether Redis took the previous one, and the worker
        becomes ready once Redis has taken one: a rolling update must not continue while routers cannot find the new
        worker."""
        if self._has_told and self._registration.is_reachable:
            self.server.set_serving(SERVICE_NAME, True)
        self._has_told = True
        return self._record()

    def _record(self) -> pb.WorkerRecord:
        adapters = self.engine.adapters
        return pb.WorkerRecord(
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            role=self._role,
            address=self._address,
            pid=os.getpid(),
            compat_digest=self.identity.compat_digest,
            prefix_key=self._config.prefix_key,
            is_draining=self._is_draining,
            load=self._load,
            model=model_message(self._config, adapters),
            protocol_version=PROTOCOL_VERSION,
            lease_ms=self._args.lease_ms,
            can_generate=True,
            keeps_no_prefixes=not self._config.cache.enable_prefix_caching or self._config.model.recurrent_bytes > 0,
            num_state_blocks=self.engine.num_state_blocks,
            takes_grammars=True,
            takes_cache_salts=True,
            takes_allowed_token_ids=True,
            takes_bad_words=True,
            takes_thinking_budgets=True,
            lora_digests={module.name: module.digest for module in adapters},
            leaving_loras=[
                pb.LeavingLoRA(lora_name=module.name, lora_digest=module.digest)
                for module in self.engine.leaving_adapters
            ],
            exchanged_lora_names=[] if self._lora_folder is None else self._lora_folder.exchanged,
            transport=self._args.transport,
            traits=self._traits,
            rival_address=self._registration.rival_address,
            version=tandem_version(),
        )
