"""Makes the faults of a plan happen to a local cluster: to its processes by signals, to its connections by proxies, to
its adapters, and as bursts of requests. Keeps who was absent when, for the verdict."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

from tandem.chaos.args import SoakArgs
from tandem.chaos.exchanged import ExchangedAdapters
from tandem.chaos.faults import GRACE_S, Fault, FaultKind, plan_faults
from tandem.chaos.load import Load
from tandem.chaos.proxy import Direction, FaultyProxy
from tandem.chaos.verdict import Absence, Absences
from tandem.cluster import Cluster
from tandem.supervision import ProcessEvent, describe_exit

BURST_REQUESTS = 16
DAMAGED_PIECES = 3
SLOW_S = 0.05
LEAVES_S = GRACE_S + 15.0
"""Time within which a process that was told to leave must do so, even on a busy machine."""
_FROZEN = {
    FaultKind.PARTITION: tuple(Direction),
    FaultKind.MUTE: (Direction.DOWN,),
    FaultKind.DEAFEN: (Direction.UP,),
}
_LASTING = (FaultKind.STOP, FaultKind.SLOW, *_FROZEN)


class Harm:
    """What is done to one cluster."""

    def __init__(
        self,
        args: SoakArgs,
        cluster: Cluster,
        proxies: Mapping[str, FaultyProxy],
        load: Load,
        say: Callable[[str], None],
        exits: Exits,
        exchanged: ExchangedAdapters,
    ) -> None:
        self._args = args
        self._cluster = cluster
        self._proxies = proxies
        self._load = load
        self._exchanged = exchanged
        self._exits = exits
        self._say = say
        self._routers, self._gateways = cluster.args.router_names, cluster.args.gateway_names
        self._absences: dict[str, list[Absence]] = {name: [] for name in (*self._routers, *self._gateways)}
        self.num_faults: Counter[str] = Counter()
        self.wrong_exits: list[str] = []
        """A sentence about each process that did not leave properly when told to."""

    @property
    def absences(self) -> Absences:
        routers, gateways = ([self._absences[name] for name in names] for names in (self._routers, self._gateways))
        return Absences(routers, gateways)

    async def inflict_all(self) -> None:
        """Inflict all faults of the plan, each at its time; returns when the last one is over."""
        plan = plan_faults(
            self._args.seed,
            self._args.seconds,
            list(self._proxies),
            self._cluster.args.lease_ms / 1000,
            doors=[*self._routers, *self._gateways],
            can_damage=self._args.transport == "grpc",
            can_exchange=bool(self._exchanged.names),
        )
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(max(0.0, start_s + fault.at_s - time.monotonic()))
                group.create_task(self._inflict(fault, time.monotonic() - start_s))
            await asyncio.sleep(max(0.0, start_s + self._args.seconds - time.monotonic()))

    async def _inflict(self, fault: Fault, now_s: float) -> None:
        """Inflict one fault; returns when it is over. Ends the fault even if this is cancelled: a stopped process could
        not be told to leave."""
        self.num_faults[fault.kind.value] += 1
        lasts = f" for {fault.duration_s:.1f} s" if fault.kind in _LASTING else ""
        self._say(f"{now_s:5.1f} s  {fault.target}: {fault.kind.value}{lasts}")
        proxy = self._proxies.get(fault.target)
        match fault.kind:
            case FaultKind.BURST:
                await self._load.burst(BURST_REQUESTS)
            case FaultKind.EXCHANGE:
                name, whose = self._exchanged.exchange()
                self._say(f"        adapter {name} has the files of {whose} now")
            case FaultKind.KILL:
                now_s = time.monotonic()
                self._signal(fault.target, signal.SIGKILL)
                self._note_absence(fault.target, Absence(now_s, now_s))
            case FaultKind.LEAVE:
                await self._have_it_leave(fault.target)
            case FaultKind.STOP:
                pid = self._signal(fault.target, signal.SIGSTOP)
                try:
                    await asyncio.sleep(fault.duration_s)
                finally:
                    if pid == self._cluster.pids[fault.target]:
                        self._signal(fault.target, signal.SIGCONT)
            case FaultKind.PARTITION | FaultKind.MUTE | FaultKind.DEAFEN if proxy:
                proxy.freeze(*_FROZEN[fault.kind])
                try:
                    await asyncio.sleep(fault.duration_s)
                finally:
                    proxy.thaw()
            case FaultKind.SLOW if proxy:
                proxy.delay(SLOW_S)
                await asyncio.sleep(fault.duration_s)
                proxy.delay(0)
            case FaultKind.RESET if proxy:
                proxy.cut()
            case FaultKind.DAMAGE if proxy:
                proxy.damage(DAMAGED_PIECES)
            case _:
                raise AssertionError(fault)

    async def _have_it_leave(self, name: str) -> None:
        """Tell a process to leave, and wait until it has. If it does not, it is killed; this is a finding, and so is an
        exit code other than 0."""
        since_s = time.monotonic()
        exited = self._exits.next_of(name)
        if not self._signal(name, signal.SIGTERM):
            return
        await asyncio.wait([exited], timeout=LEAVES_S)
        if not exited.done():
            self.wrong_exits.append(f"{name} was told to leave, and had not after {LEAVES_S:g} s")
            self._signal(name, signal.SIGKILL)
        elif exited.result() != 0:
            self.wrong_exits.append(f"{name} was told to leave, and ended with {describe_exit(exited.result())}")
        self._note_absence(name, Absence(since_s, time.monotonic(), GRACE_S))

    def _note_absence(self, name: str, absence: Absence) -> None:
        if name in self._absences:
            self._absences[name].append(absence)

    def _signal(self, name: str, number: signal.Signals) -> int:
        """Send a signal. Returns the pid; 0 if the process is between two runs."""
        pid = self._cluster.pids[name]
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid


class Exits:
    """Lets callers wait for processes to end."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[int]] = {}

    def next_of(self, name: str) -> asyncio.Future[int]:
        """A future of the process' next exit code. Only one caller may wait for a process."""
        self._waiting[name] = asyncio.get_running_loop().create_future()
        return self._waiting[name]

    def note(self, event: ProcessEvent) -> None:
        if event.returncode is not None and (waiting := self._waiting.pop(event.name, None)):
            waiting.set_result(event.returncode)
