"""Keeps one child process running: starts it, watches it, starts it again when it dies, and stops it in the end.

Owns the process and the decision when to start it again. Does not own what the process is (`ProcessSpec`), the pipes of
a run (`tandem.process_run`), nor the use of its output (`on_line`, `on_event`).

    STARTING ──ready──> RUNNING ──dies──> WAITING ──delay──> STARTING
       │                   │                 ^ │
       ├──dies─────────────│─────────────────┘ └──too many quick deaths──> FAILED
       ├──dies, never was ready, and: exit code 2, or it must start ─────> FAILED
       └──────stop─────────┴──(SIGTERM; after the grace SIGKILL)─────────> STOPPED
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from tandem.process_run import ProcessRun, ProcessSpec

USAGE_EXIT_CODE = 2
"""Exit code of our commands for a wrong flag or setting: starting them again cannot help."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a process that died is started again. A death is quick if it came before, or soon after, being ready."""

    quick_death_s: float = 10.0
    first_delay_s: float = 0.5
    max_delay_s: float = 15.0
    max_quick_deaths: int = 6
    """After this many quick deaths in a row, the process is given up."""

    def delay_s(self, num_quick_deaths: int) -> float:
        """Seconds to wait after this many quick deaths in a row. A process that ran well is started at once."""
        if num_quick_deaths == 0:
            return 0.0
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** (num_quick_deaths - 1))


class ProcessState(Enum):
    STARTING = auto()
    RUNNING = auto()
    WAITING = auto()
    STOPPED = auto()
    FAILED = auto()


@dataclass(frozen=True, kw_only=True)
class ProcessEvent:
    """Something that happened to a process: `what` is a clause about the process `name`, `tail` its last lines if it
    died."""

    name: str
    what: str
    tail: tuple[str, ...] = ()
    is_bad: bool = False
    returncode: int | None = None
    """If a run has ended: its exit code; negative: the signal that ended it."""


class ProcessError(Exception):
    """A process was given up. The message says why and shows its last lines."""


def describe_exit(returncode: int) -> str:
    """ "exit code 1", or "SIGKILL" if a signal ended the process."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


class SupervisedProcess:
    """Keeps one process running from `start` to `stop`.

    `on_line(name, line)` gets every line of its output, `on_event` what happens to it. Both are called on the event
    loop, whose exception handler reports what they raise.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        on_line: Callable[[str, str], None],
        on_event: Callable[[ProcessEvent], None],
        policy: RestartPolicy | None = None,
    ) -> None:
        self.spec = spec
        self.state = ProcessState.STOPPED
        self.announced = ""
        """What the last run that was ready announced."""
        self.pid = 0
        """Pid of the current run; 0 between runs."""
        self._policy = policy or RestartPolicy()
        self._on_line = _told_by_loop(on_line, f"on_line of {spec.name}")
        self._on_event = _told_by_loop(on_event, f"on_event of {spec.name}")
        self._changed = asyncio.Condition()
        self._stop_requested = asyncio.Event()
        self._kill_requested = asyncio.Event()
        self._grace_s = 0.0
        self._failure = ""
        self._was_ready = False
        self._exit_problem = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process. Returns at once; `wait_running` waits."""
        assert self._task is None
        self.state = ProcessState.STARTING
        self._task = asyncio.create_task(self._keep_running(), name=f"supervise {self.spec.name}")

    async def wait_running(self, *, unlike_pid: int = 0) -> int:
        """Wait until the process is ready, in a run other than that of `unlike_pid`. Returns its pid. Raises
        `ProcessError` if it is given up or stopped."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self.state in (ProcessState.FAILED, ProcessState.STOPPED)
                    or (self.state is ProcessState.RUNNING and self.pid != unlike_pid)
                )
            )
        if self.state is not ProcessState.RUNNING:
            raise ProcessError(self._failure or f"{self.spec.name} was stopped")
        return self.pid

    async def wait_failed(self) -> None:
        """Wait until the process is given up, and raise `ProcessError`. Returns only if it is stopped."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.state in (ProcessState.FAILED, ProcessState.STOPPED))
        if self.state is ProcessState.FAILED:
            raise ProcessError(self._failure)

    async def stop(self, grace_s: float) -> str:
        """Send SIGTERM, and SIGKILL after `grace_s` seconds. Returns a sentence if it did not end properly, else
        ""."""
        if self._task is None:
            return ""
        self._grace_s = grace_s
        self._stop_requested.set()
        await self._task
        return self._exit_problem

    def kill(self) -> None:
        """End the grace period of a `stop`, under way or later: kill the process."""
        self._kill_requested.set()

    # -- the loop -----------------------------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        try:
            await self._run_again_and_again()
        except OSError as error:  # it cannot be started: no memory, or no open files left
            self._failure = f"{self.spec.name} cannot be started: {error}"
            await self._set(ProcessState.FAILED)
        except Exception as error:
            self._failure = f"{self.spec.name} cannot be supervised: {error!r}"
            await self._set(ProcessState.FAILED)
            raise

    async def _run_again_and_again(self) -> None:
        num_quick_deaths = 0
        while not self._stop_requested.is_set():
            run = await ProcessRun.start(self.spec, self.announced, self._on_line)
            await self._set(ProcessState.STARTING, pid=run.pid)
            await self._follow(run)
            await self._set(ProcessState.WAITING)
            if self._stop_requested.is_set():
                break
            num_quick_deaths = num_quick_deaths + 1 if self._was_quick(run) else 0
            delay_s = self._policy.delay_s(num_quick_deaths)
            if reason := self._why_give_up(run, num_quick_deaths):
                await self._fail(run, reason)
                return
            again = f"in {delay_s:.1f} s" if delay_s else "at once"
            tail = tuple(run.tail) if run.returncode else ()  # exit code 0: it was drained, nothing to explain
            last = ". Its last lines:" if tail else ""
            what = f"ended with {describe_exit(run.returncode)}; starting it again {again}{last}"
            self._tell(what, tail=tail, is_bad=True, returncode=run.returncode)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stop_requested.wait()
        await self._set(ProcessState.STOPPED)

    async def _follow(self, run: ProcessRun) -> None:
        """Follow a run from its start to its exit."""
        exited = asyncio.create_task(run.wait_exited())
        ready = asyncio.create_task(self._wait_ready(run))
        stop = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({exited, ready, stop}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and not exited.done():
                await self._set_ready(run, ready.exception())
            await asyncio.wait({exited, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                await self._end(run, exited)
            exited.result()
        finally:
            ready.cancel()
            stop.cancel()
            if not exited.done():  # this task is being cancelled: the process must not survive
                run.send(signal.SIGKILL)
            await asyncio.gather(exited, ready, stop, return_exceptions=True)

    async def _wait_ready(self, run: ProcessRun) -> None:
        run.announced = await run.ready_line
        if self.spec.confirm is not None:
            await self.spec.confirm()

    async def _set_ready(self, run: ProcessRun, error: BaseException | None) -> None:
        if error is not None:
            self._tell(f"says that it is ready, but does not answer: {error}", is_bad=True)
            run.send(signal.SIGKILL)  # handled like any other death
            return
        run.ready_at_s = time.monotonic()
        self.announced = run.announced
        self._tell(f"is up (pid {run.pid}, after {run.ready_at_s - run.started_at_s:.1f} s)")
        self._was_ready = True
        await self._set(ProcessState.RUNNING, pid=run.pid)

    async def _end(self, run: ProcessRun, exited: asyncio.Task[None]) -> None:
        """Send SIGTERM, wait for the grace period, send SIGKILL."""
        run.send(signal.SIGTERM)
        kill = asyncio.create_task(self._kill_requested.wait())
        await asyncio.wait({exited, kill}, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        kill.cancel()
        if not exited.done():
            run.send(signal.SIGKILL)
            self._exit_problem = f"{self.spec.name} was killed: " + (
                "it did not get time to finish"
                if self._kill_requested.is_set()
                else f"it had not exited after {self._grace_s:g} s"
            )
            await exited
        elif run.returncode != 0 and not (run.returncode == -signal.SIGTERM and run.ready_at_s is None):
            # Before it is ready, it may not handle SIGTERM yet, so being ended by it is a clean end.
            self._exit_problem = f"{self.spec.name} ended with {describe_exit(run.returncode)} when told to stop"

    # -- decisions ----------------------------------------------------------------------------------------------

    def _was_quick(self, run: ProcessRun) -> bool:
        return run.ready_at_s is None or time.monotonic() - run.ready_at_s < self._policy.quick_death_s

    def _why_give_up(self, run: ProcessRun, num_quick_deaths: int) -> str:
        if run.returncode == USAGE_EXIT_CODE and not self._was_ready:
            return f"{self.spec.name} rejects its settings"
        if self.spec.must_start and not self._was_ready:
            return f"{self.spec.name} did not start ({describe_exit(run.returncode)})"
        if num_quick_deaths >= self._policy.max_quick_deaths:
            return (
                f"{self.spec.name} died {num_quick_deaths} times in a row soon after its start, "
                f"the last time with {describe_exit(run.returncode)}"
            )
        return ""

    async def _fail(self, run: ProcessRun, reason: str) -> None:
        tail = "".join(f"\n    {line}" for line in run.tail if line)
        self._failure = f"{reason}. Its last lines:{tail}" if tail else reason
        await self._set(ProcessState.FAILED)

    # -- events -------------------------------------------------------------------------------------------------

    def _tell(self, what: str, **details: Any) -> None:
        """Report an event. `details`: further fields of `ProcessEvent`."""
        self._on_event(ProcessEvent(name=self.spec.name, what=what, **details))

    async def _set(self, state: ProcessState, *, pid: int = 0) -> None:
        async with self._changed:
            self.state = state
            self.pid = pid
            self._changed.notify_all()


def _told_by_loop(listener: Callable[..., None], name: str) -> Callable[..., None]:
    """`listener`, with its errors reported instead of raised: they must not end the reading of a pipe, since a process
    stops when nobody reads what it writes."""

    def listen(*args: object) -> None:
        try:
            listener(*args)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler({"message": f"{name} failed", "exception": error})

    return listen
