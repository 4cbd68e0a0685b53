"""Runs a local cluster under load and faults, and checks the results.

    start cluster, each worker behind a proxy ──> load + faults for so many seconds ──> heal, requests end
      ──> every block free or cached? ──> every answer again, without faults ──> Report

    clients ─> (gateway ─>) router ─> [FaultyProxy] ─> worker     prefill worker ─KV─> [FaultyProxy] ─> decode worker

It uses the real services, the real model and real bytes. Owns the cluster, the proxies and the load; all are gone when
`run_soak` returns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from engine.engine_args import EngineArgs
from rpc.errors import TandemError
from tandem.chaos.args import SoakArgs
from tandem.chaos.asked import Asked, Heard
from tandem.chaos.exchanged import KNOWN_S, ExchangedAdapters
from tandem.chaos.faults import GRACE_S
from tandem.chaos.harm import Exits, Harm
from tandem.chaos.load import Load, again
from tandem.chaos.proxy import FaultyProxy
from tandem.chaos.verdict import Verdict, judge, needs_check
from tandem.client import AsyncClient
from tandem.cluster import Cluster, ClusterError
from tandem.cluster_args import ClusterArgs
from tandem.model_folder import has_states, resolve_model
from tandem.supervision import ProcessEvent, RestartPolicy
from tandem.tables import not_at_rest

LEASE_MS = 2000
MAX_QUEUE_TOKENS = 2000
NUM_CLIENTS = 4
REST_TIMEOUT_S = LEASE_MS / 1000 + 10.0
CHECKS_AT_ONCE = 16
NUM_TOLD_APART = 8
"""For each adapter, this many of its requests are also sent to the model itself."""
_Adapters: TypeAlias = dict[str, dict[str, str]]
"""By worker: the digests of its adapters by name. By router: the kinds of workers that serve each adapter, by name."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The faults of a soak, and its results."""

    args: SoakArgs
    num_faults: Mapping[str, int]
    verdict: Verdict
    rest_s: float
    """Seconds from the end of the last request until every block was free or cached."""
    num_loaded_tokens: int = 0
    """Prompt tokens that workers found in host memory; counts only processes that were there at the end."""
    leaks: list[str] = field(default_factory=list)
    """What an audit still found after `REST_TIMEOUT_S`."""
    wrong_exits: Sequence[str] = ()
    """A sentence about each process that did not leave properly when told to."""

    @property
    def findings(self) -> list[str]:
        """The findings of the verdict and of exits; also if no answer could be compared, such as when all requests were
        refused."""
        is_empty = not self.verdict.num_tokens_checked
        nothing = ["no answer came that could be compared"] if is_empty else []
        return [*self.verdict.findings, *self.wrong_exits, *nothing]

    @property
    def has_passed(self) -> bool:
        return not self.findings and not self.leaks

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.args.seconds,
            "seed": self.args.seed,
            "transport": self.args.transport,
            "faults": dict(self.num_faults),
            **self.verdict.to_dict(),
            "findings": self.findings,
            "leaks": self.leaks,
            "rest_s": round(self.rest_s, 2),
            "num_loaded_tokens": self.num_loaded_tokens,
            "passed": self.has_passed,
        }


async def run_soak(args: SoakArgs, *, say: Callable[[str], None], on_line: Callable[[str, str], None]) -> Report:
    """Run a whole soak. `say` gets a line for people whenever something happens, `on_line` the processes' log lines.

    Raises `ClusterError` if the cluster cannot be started, or if a process dies again and again.
    """
    engine = await _engine_of(args, say)
    adapters = args.adapters_to_exchange()
    links = TemporaryDirectory(prefix="tandem-chaos-adapters-")
    exchanged = ExchangedAdapters(adapters, links.name)
    cluster_args = ClusterArgs(
        engine=replace(engine, max_loras=args.max_loras),
        lora_dir=links.name if adapters else "",
        policy=args.policy,
        num_prefill=args.num_prefill,
        num_decode=args.num_decode,
        num_routers=args.num_routers,
        num_gateways=args.num_gateways,
        listen="127.0.0.1:0",
        http_port=0,
        transport=args.transport,
        lease_ms=LEASE_MS,
        max_queue_tokens=MAX_QUEUE_TOKENS,
        drain_grace_s=GRACE_S,
    )
    cluster: Cluster

    def address_of(name: str) -> str:
        return cluster.address_of(name) if name in cluster.pids else ""

    proxies: dict[str, FaultyProxy] = {}
    exits = Exits()

    def on_event(event: ProcessEvent) -> None:
        say(f"{event.name} {event.what}")
        exits.note(event)

    try:
        for number, name in enumerate(cluster_args.worker_names):
            proxies[name] = FaultyProxy(partial(address_of, name), args.seed + number)
        cluster = Cluster(
            cluster_args,
            on_line=on_line,
            on_event=on_event,
            # Deaths are deliberate here, even if they follow each other quickly.
            restart_policy=RestartPolicy(quick_death_s=0.5),
            advertise={name: proxy.address for name, proxy in proxies.items()},
        )
        async with cluster:
            async with AsyncClient(cluster.router_address) as client:
                info = await client.model_info()
            if unserved := sorted(set(adapters) - set(info.lora_names)):
                raise ClusterError(f"adapter {unserved[0]!r} is not served: the workers' log says why")
            load = Load(cluster.router_address, cluster.http_address, args.seed, info, args.deadline_s)
            harm = Harm(args, cluster, proxies, load, say, exits, exchanged)
            return await _Soak(args, cluster, proxies, load, say, exchanged, harm).run()
    finally:
        links.cleanup()
        for proxy in proxies.values():
            proxy.close()


async def _engine_of(args: SoakArgs, say: Callable[[str], None]) -> EngineArgs:
    """The workers' engine, without KV offloading by default if the model cannot have it."""
    engine = args.engine
    if args.is_offloading_given or not engine.kv_offloading_size:
        return engine
    try:
        folder = await resolve_model(engine.model, lambda _: None)  # the cluster says where it is
    except ValueError as error:
        raise ClusterError(str(error)) from error
    if not await has_states(engine, folder):
        return engine
    say("--kv-offloading-size is 0: the model has layers that keep a state, which is not copied to host memory")
    return replace(engine, kv_offloading_size=0.0)


class _Soak:
    def __init__(
        self,
        args: SoakArgs,
        cluster: Cluster,
        proxies: dict[str, FaultyProxy],
        load: Load,
        say: Callable[[str], None],
        exchanged: ExchangedAdapters,
        harm: Harm,
    ) -> None:
        """`load`: `run` closes it."""
        self._args = args
        self._cluster = cluster
        self._proxies = proxies
        self._say = say
        self._routers = cluster.args.router_names
        self._load = load
        self._exchanged = exchanged
        self._harm = harm

    async def run(self) -> Report:
        try:
            at_first = await self._adapters()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._load.run(NUM_CLIENTS))
                await self._harm.inflict_all()
                self._load.end()
            now = self._exchanged.exchange_all()
            rested_s, leaks = await self._wait_until_at_rest()
            leaks += await self._wait_for_adapters(
                {who: {name: each[now.get(name, name)] for name in each} for who, each in at_first.items()}
            )
            self._say(f"{len(self._load.history)} requests have ended; now each of them again, without faults")
            expected, of_others = await self._answers_again({whose: name for name, whose in now.items()})
            of_model = await self._run_again((asked, "") for asked in self._told_apart())
            async with AsyncClient(self._cluster.router_address) as client:
                num_loaded_tokens = sum(worker.num_loaded_tokens for worker in (await client.status()).workers)
        finally:
            await self._load.close()
        return Report(
            args=self._args,
            num_faults=self._harm.num_faults,
            verdict=judge(self._load.history, expected, self._harm.absences, of_model, of_others),
            wrong_exits=self._harm.wrong_exits,
            rest_s=rested_s,
            num_loaded_tokens=num_loaded_tokens,
            leaks=leaks,
        )

    # -- checks after the faults --------------------------------------------------------------------------------

    async def _wait_until_at_rest(self) -> tuple[float, list[str]]:
        """End all faults. Returns the seconds until every block of every worker was free or cached, and what was not
        after `REST_TIMEOUT_S`."""
        for proxy in self._proxies.values():
            proxy.heal()
        start_s = time.monotonic()
        async with AsyncExitStack() as stack:
            # Each router knows only its own requests.
            routers = [
                await stack.enter_async_context(AsyncClient(self._cluster.address_of(name))) for name in self._routers
            ]
            while True:
                leaks = [leak for router in routers for leak in await _what_is_not_at_rest(router, len(self._proxies))]
                waited_s = time.monotonic() - start_s
                if not leaks or waited_s > REST_TIMEOUT_S:
                    return waited_s, leaks
                await asyncio.sleep(0.1)  # audits must be polled: nothing notifies

    async def _wait_for_adapters(self, there: _Adapters) -> list[str]:
        """Wait until workers and routers have these adapters. Returns a sentence for each that has not in time."""
        end_s = time.monotonic() + KNOWN_S
        while (now := await self._adapters()) != there:
            if time.monotonic() > end_s:
                return [f"{who} has other adapters than its folder" for who in there if now.get(who) != there[who]]
            await asyncio.sleep(0.1)  # their state must be polled: nothing notifies
        return []

    async def _adapters(self) -> _Adapters:
        adapters: _Adapters = {}
        for router in self._routers:
            async with AsyncClient(self._cluster.address_of(router)) as client:
                try:
                    workers = (await client.status()).workers
                except TandemError:  # this router is not back yet, so it is missing in the result
                    continue
                adapters |= {worker.record.worker_id: dict(worker.record.lora_digests) for worker in workers}
                adapters[router] = {name: await _kind_of(name, client) for name in self._exchanged.names}
        return adapters

    async def _answers_again(
        self, name_of: Mapping[str, str]
    ) -> tuple[dict[int, list[Heard]], dict[int, list[list[Heard]]]]:
        """By request number: the answers without faults to each request that had any; and the answers of other adapters
        that may have answered it, since files were exchanged. `name_of`: the name that each adapter has now."""
        needing = [asked for asked in self._load.history if needs_check(asked)]
        whose = {
            asked.number: [name_of.get(each, each) for each in self._exchanged.those_of(asked)] for asked in needing
        }
        expected = await self._run_again((asked, whose[asked.number][0]) for asked in needing)
        of_others: dict[int, list[list[Heard]]] = {}
        for turn in range(1, len(self._exchanged.names)):
            answers = await self._run_again(
                (asked, whose[asked.number][turn]) for asked in needing if turn < len(whose[asked.number])
            )
            for number, heard in answers.items():
                of_others.setdefault(number, []).append(heard)
        return expected, of_others

    async def _run_again(self, requests: Iterable[tuple[Asked, str]]) -> dict[int, list[Heard]]:
        """By request number: the answers of the given model or adapter now."""
        turns = asyncio.Semaphore(CHECKS_AT_ONCE)
        # A new client: the channel of one whose router has just been restarted may wait before it connects again.
        async with AsyncClient(self._cluster.router_address) as client:

            async def ask(asked: Asked, model: str) -> tuple[int, list[Heard]]:
                async with turns:
                    return asked.number, await again(client, asked, model)

            return dict(await asyncio.gather(*(ask(asked, model) for asked, model in requests)))

    def _told_apart(self) -> list[Asked]:
        """Some requests with answers for each adapter."""
        chosen: dict[str, list[Asked]] = {}
        for asked in self._load.history:
            if asked.model and needs_check(asked):
                chosen.setdefault(asked.model, []).append(asked)
        return [asked for each in chosen.values() for asked in each[:NUM_TOLD_APART]]


async def _kind_of(adapter: str, client: AsyncClient) -> str:
    """The kind of the workers that new requests for the adapter go to. Empty: no worker has it, such as while it waits
    for room."""
    try:
        async with aclosing(client.stream([1], model=adapter, max_tokens=1)) as messages:
            return (await anext(messages)).worker_kind
    except TandemError:
        return ""


async def _what_is_not_at_rest(client: AsyncClient, num_workers: int) -> list[str]:
    try:
        audit = await client.audit()
    except TandemError as error:  # the last fault may have killed the router
        return [f"the router does not answer: {error!r}"]
    problems = not_at_rest(audit)
    if len(audit.workers) < num_workers:
        problems.append(f"{len(audit.workers)} of {num_workers} workers are there")
    return problems
