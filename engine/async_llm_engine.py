"""The stepping thread: an `LLMEngine` that asyncio code can talk to.

Owns one thread and the engine. The engine is created on that thread, because a device's libraries keep per-thread
state. Everything that touches the engine runs on that thread, between two steps; results arrive on the event loop, once
per step.

    event loop                              stepping thread
    start(make_engine) ──────────────────>  make_engine(): seconds
                   <─call_soon_threadsafe─  made, or why not
    call(function) ──commands queue──────>  function(engine)
                   <─call_soon_threadsafe─  its result
                                            step(), watched while somebody profiles
    on_step(news)  <─call_soon_threadsafe─  outputs, cache events, load

When there is nothing to compute, the thread blocks on its command queue; nothing polls. It also blocks there while all
work waits for a grammar to be compiled, or for blocks to be copied from or to host memory: an empty command wakes it
when the grammar or the copy is ready. If a step raises, the engine is lost: `on_failure` is called, and every later
call raises `EngineDeadError`. A step or a copy that hangs raises nothing: the owner of the process watches `progress`.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.config import EngineConfig
from engine.kv_shape import KVCacheShape
from engine.llm_engine import EngineLoad, LLMEngine
from engine.lora.adapters import ReadAdapter
from engine.lora.modules import LoRAModule
from engine.outputs import RequestOutput
from engine.running.executor import RankLost
from engine.scheduling.block_ledger import CacheEvent
from engine.scheduling.stats import SchedulerStats
from engine.step_profiler import StepProfile, StepProfiler

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class EngineDeadError(RuntimeError):
    """The stepping thread has ended; the engine can no longer be used."""


class ProfilingError(RuntimeError):
    """Another profile is being taken."""


@dataclass(frozen=True, slots=True)
class _Command:
    function: Callable[[LLMEngine], Any]
    future: asyncio.Future[Any] | None
    """Receives the result; None if nobody waits for it."""


@dataclass(frozen=True, slots=True)
class StepNews:
    """What happened on the stepping thread since the last `StepNews`."""

    outputs: list[RequestOutput]
    cache_events: list[CacheEvent]
    load: EngineLoad


class AsyncLLMEngine:
    """Runs an engine on a thread of its own. Either `start` it on the event loop, or construct it anywhere and `bind`
    it to its event loop before the first call."""

    def __init__(
        self, make_engine: Callable[[], LLMEngine], *, before_report: Callable[[], None] = lambda: None
    ) -> None:
        """Start the thread, which makes the engine; see `start`."""
        self._make_engine = make_engine
        self._engine: LLMEngine
        self.first_load: EngineLoad
        """The engine's load before the first step."""
        self._loop: asyncio.AbstractEventLoop
        self._on_step: Callable[[StepNews], None]
        self._on_failure: Callable[[BaseException], None]
        self._is_made: Future[None] = Future()
        self._before_report = before_report
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._is_dead = False
        self._num_begun = 0
        """Steps and commands begun since the start."""
        self._is_waiting = True
        self._profiler: StepProfiler | None = None
        """Used by the stepping thread only."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    async def start(
        cls,
        make_engine: Callable[[], LLMEngine],
        *,
        on_step: Callable[[StepNews], None],
        on_failure: Callable[[BaseException], None],
        before_report: Callable[[], None] = lambda: None,
    ) -> AsyncLLMEngine:
        """Make the engine on its thread. Raises what `make_engine` raises; by then the thread has ended.

        `on_step` and `on_failure` are called on the event loop. `before_report` is called on the stepping thread after
        each step, before the step's results are reported.
        """
        self = cls(make_engine, before_report=before_report)
        self.bind(on_step=on_step, on_failure=on_failure)
        try:
            await asyncio.shield(asyncio.wrap_future(self._is_made))
        except asyncio.CancelledError:
            self._end()  # the thread ends once the engine is made; nobody waits for that here
            raise
        except BaseException:
            self._thread.join()  # it has nothing left to do
            raise
        return self

    def bind(self, *, on_step: Callable[[StepNews], None], on_failure: Callable[[BaseException], None]) -> None:
        """Bind the engine to the running event loop, on which `on_step` and `on_failure` are called. Must come before
        the first call to the engine."""
        self._loop = asyncio.get_running_loop()
        if not self._is_dead:  # a dead thread would never drop these references
            self._on_step, self._on_failure = on_step, on_failure

    def wait_until_made(self) -> None:
        """Block until the engine is made. Raises what `make_engine` raises; by then the thread has ended. If
        interrupted (Ctrl-C), the thread ends soon."""
        try:
            self._is_made.result()
        except Exception:
            self._thread.join()
            raise
        except BaseException:  # Ctrl-C: nobody waits for the engine
            self._give_up_making()
            raise

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def kv_pool(self) -> torch.Tensor:
        """See `Executor.kv_pool`. Only the stepping thread may write to it, except to granted blocks."""
        return self._engine.executor.kv_pool

    @property
    def kv_shape(self) -> KVCacheShape:
        return self._engine.executor.kv_shape

    @property
    def num_state_blocks(self) -> int:
        """Blocks that carry a prompt's recurrent state to another engine; 0 for models without such states."""
        return self._engine.block_manager.num_state_blocks

    @property
    def rank_pids(self) -> list[int]:
        """See `Executor.rank_pids`."""
        return self._engine.executor.rank_pids

    @property
    def adapters(self) -> tuple[LoRAModule, ...]:
        """Adapters that requests may ask for now."""
        return self._engine.loras.served

    @property
    def leaving_adapters(self) -> tuple[LoRAModule, ...]:
        """Adapters that are leaving: a request gets one only by naming its digest. An adapter appears here before it
        disappears from `adapters`."""
        return self._engine.loras.leaving_modules

    async def find_lora(self, name: str, path: Path) -> LoRAModule:
        """See `LLMEngine.find_lora`. Runs on a thread of its own, in parallel to steps."""
        return await asyncio.to_thread(self._engine.find_lora, name, path)

    async def read_lora(self, module: LoRAModule) -> ReadAdapter:
        """See `LLMEngine.read_lora`. Runs as `find_lora` does. Raises `EngineDeadError` if a rank has ended."""
        with _ended_with_a_rank():
            return await asyncio.to_thread(self._engine.read_lora, module)

    @property
    def stats(self) -> SchedulerStats:
        """Written by the stepping thread; callers only read it."""
        return self._engine.stats

    @property
    def progress(self) -> int | None:
        """A number that changes with each step and command, and when a block copy is done. None while there is nothing
        to do."""
        return None if self._is_waiting else self._num_begun

    async def call(self, function: Callable[[LLMEngine], _T]) -> _T:
        """Run `function` on the stepping thread between two steps, and return its result or raise its error.

        `function` runs even if the caller is cancelled meanwhile. Raises `EngineDeadError` if the thread or a rank has
        ended.
        """
        future: asyncio.Future[_T] = self._loop.create_future()
        self._commands.put(_Command(function, future))
        if self._is_dead or not self._thread.is_alive():  # a forked process has none of its parent's threads
            raise EngineDeadError("the engine's stepping thread has ended")
        with _ended_with_a_rank():
            return await future

    def post(self, function: Callable[[LLMEngine], object]) -> None:
        """Run `function` on the stepping thread between two steps, without waiting for it. It must not raise."""
        self._commands.put(_Command(function, None))

    async def profile(self, num_steps: int, *, timeout_s: float, with_trace: bool) -> StepProfile:
        """Profile the next `num_steps` steps, or as many as run within `timeout_s`: none, if the engine stays idle.

        Steps are slower meanwhile. Raises `ProfilingError` if another profile is being taken, `ValueError` if
        `num_steps` is out of bounds, and `EngineDeadError`.
        """
        is_done = asyncio.Event()

        def on_done() -> None:
            self._loop.call_soon_threadsafe(is_done.set)

        profiler = StepProfiler(num_steps, on_done)

        def begin(engine: LLMEngine) -> None:
            if self._profiler is not None:
                raise ProfilingError("another profile is being taken")
            self._profiler = profiler

        def end(engine: LLMEngine) -> None:
            if self._profiler is profiler:
                profiler.stop()
                self._profiler = None

        try:
            await self.call(begin)
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await is_done.wait()
        finally:
            self.post(end)
        await self.call(lambda engine: None)  # commands run in order: `end` has run by now
        return await asyncio.to_thread(profiler.profile, with_trace=with_trace)

    async def close(self) -> None:
        """End the thread after the running step. Unfinished requests are dropped."""
        self._end()
        await asyncio.to_thread(self._thread.join)

    def close_blocking(self) -> None:
        """Like `close`, for callers outside the event loop. Called on the engine's own thread, as a garbage collection
        may do, it does not wait."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _end(self) -> None:
        self._is_dead = True
        self._commands.put(None)

    def _give_up_making(self) -> None:
        """Raise `SystemExit` in the thread at its next Python instruction. If something swallows the exception, the
        thread ends once the engine is made."""
        self._end()
        if not self._is_made.done():
            assert self._thread.ident is not None, "it was started"
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(SystemExit))

    # -- the stepping thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._engine = self._make_engine()
            commands = self._commands
            self._engine.wake_by(lambda: commands.put(_Command(_nothing, None)))
            self.first_load = self._engine.load()
        except BaseException as error:
            self._is_dead = True
            self._is_made.set_exception(error)
            return
        self._is_made.set_result(None)
        try:
            is_blocked = True
            while self._run_commands(is_blocked):
                self._num_begun += 1
                profiler = self._profiler
                outputs = self._engine.step() if profiler is None or profiler.is_done else profiler.step(self._engine)
                self._before_report()
                self._report(outputs)
                # Work without memory waits for a command that frees some; a grammar that is ready wakes the thread.
                is_blocked = self._engine.is_idle
        except BaseException as error:
            _log.exception("the engine failed")
            self._tell(self._on_failure, error)
        finally:
            self._is_dead = True
            self._refuse_commands()
            self._engine.close()  # may block on a copy that hangs, which must not look idle: see `progress`
            self._is_waiting = True
            # The callbacks' owners may refer back to this object. The garbage collector does not free cycles of objects
            # that existed when a model was loaded (`gc.freeze`), so this cycle is broken here.
            self._on_step = self._on_failure = _nothing

    def _run_commands(self, is_blocked: bool) -> bool:
        """Run the queued commands; block for the first one if `is_blocked`. Returns False when the thread must end."""
        while True:
            self._is_waiting = is_blocked and not self._engine.is_copying
            try:
                command = self._commands.get(block=is_blocked)
            except queue.Empty:
                return True
            self._is_waiting = False
            self._num_begun += 1
            if command is None:
                return False
            self._run_command(command)
            is_blocked = False

    def _run_command(self, command: _Command) -> None:
        if command.future is None:
            command.function(self._engine)
            return
        try:
            result = command.function(self._engine)
        except Exception as error:
            self._tell(_fail, command.future, error)
        else:
            self._tell(_succeed, command.future, result)

    def _refuse_commands(self) -> None:
        """Fail the queued commands, so that no caller waits for a thread that has ended."""
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command.future is not None:
                error = EngineDeadError("the engine's stepping thread has ended")
                self._tell(_fail, command.future, error)

    def _report(self, outputs: list[RequestOutput]) -> None:
        news = StepNews(outputs, self._engine.take_cache_events(), self._engine.load())
        self._tell(self._on_step, news)

    def _tell(self, function: Callable[..., object], *arguments: object) -> None:
        """Call `function` on the event loop; do nothing if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


@contextmanager
def _ended_with_a_rank() -> Iterator[None]:
    """Turn `RankLost` into `EngineDeadError`: without one of its ranks, the engine is dead."""
    try:
        yield
    except RankLost as error:
        raise EngineDeadError(str(error)) from error


def _nothing(_: object) -> None:
    pass


def _succeed(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[_T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
