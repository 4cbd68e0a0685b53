"""The stepping thread: an `LLMEngine` that asyncio code can talk to.

Owns one thread, and the engine, which is created on it, so that what a device's libraries set up per thread is there
for its steps. Everything that touches the engine runs on that thread, between two steps; everything that leaves it
arrives on the event loop, once per step.

    event loop                              stepping thread
    start(make_engine) ──────────────────>  make_engine(): seconds
                   <─call_soon_threadsafe─  made, or why not
    call(function) ──commands queue──────>  function(engine)
                   <─call_soon_threadsafe─  its result
                                            step(), watched while somebody profiles
    on_step(news)  <─call_soon_threadsafe─  outputs, cache events, load

With nothing to compute, the thread blocks on its queue; nothing polls. While a grammar is being compiled there is
nothing to compute, too: commands run, and one wakes the thread when the grammar is ready, as another does when blocks
have been copied from or to host memory. If a step raises, the engine is lost: `on_failure` is called, and every call
from then on raises `EngineDeadError`. A step or a copy that never ends raises nothing: the owner of the process watches
`progress`.
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
from engine.kv_cache import KVCacheShape
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
    """The stepping thread has ended; its engine cannot be used any more."""


class ProfilingError(RuntimeError):
    """Somebody else is profiling."""


@dataclass(frozen=True, slots=True)
class _Command:
    function: Callable[[LLMEngine], Any]
    future: asyncio.Future[Any] | None
    """Where the result goes; None if nobody waits for it."""


@dataclass(frozen=True, slots=True)
class StepNews:
    """What happened on the stepping thread since the last news."""

    outputs: list[RequestOutput]
    cache_events: list[CacheEvent]
    load: EngineLoad


class AsyncLLMEngine:
    """Runs an engine on a thread of its own. Started and closed on the event loop; or made anywhere, and bound to the
    event loop that it is to talk to before it is given anything to do."""

    def __init__(
        self, make_engine: Callable[[], LLMEngine], *, before_report: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to make the engine; see `start`."""
        self._make_engine = make_engine
        self._engine: LLMEngine
        self.first_load: EngineLoad
        """Before any step."""
        self._loop: asyncio.AbstractEventLoop
        self._on_step: Callable[[StepNews], None]
        self._on_failure: Callable[[BaseException], None]
        self._is_made: Future[None] = Future()
        self._before_report = before_report
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._is_dead = False
        self._num_begun = 0
        """Steps and commands, ever."""
        self._is_waiting = True
        self._profiler: StepProfiler | None = None
        """The stepping thread's."""
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
        """Make the engine, on its thread. Raises what `make_engine` raises; the thread has ended then.

        `on_step` and `on_failure` are called on the event loop; `before_report` on the stepping thread, when a step
        is done and nobody has heard of it.
        """
        self = cls(make_engine, before_report=before_report)
        self.bind(on_step=on_step, on_failure=on_failure)
        try:
            await asyncio.shield(asyncio.wrap_future(self._is_made))
        except asyncio.CancelledError:
            self._end()  # when the engine is made: nobody waits for that here
            raise
        except BaseException:
            self._thread.join()  # it has nothing left to do
            raise
        return self

    def bind(self, *, on_step: Callable[[StepNews], None], on_failure: Callable[[BaseException], None]) -> None:
        """To the running event loop, on which these are called. Before that nothing may be asked of the engine."""
        self._loop = asyncio.get_running_loop()
        if not self._is_dead:  # or else nobody lets go of these any more
            self._on_step, self._on_failure = on_step, on_failure

    def wait_until_made(self) -> None:
        """Blocks. Raises what `make_engine` raises; the thread has ended then. Interrupted, it ends soon."""
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
        """See `Executor.kv_pool`. The stepping thread's to write, but for blocks that were granted."""
        return self._engine.executor.kv_pool

    @property
    def kv_shape(self) -> KVCacheShape:
        return self._engine.executor.kv_shape

    @property
    def rank_pids(self) -> list[int]:
        """See `Executor.rank_pids`."""
        return self._engine.executor.rank_pids

    @property
    def adapters(self) -> tuple[LoRAModule, ...]:
        """That requests may ask for now."""
        return self._engine.loras.served

    @property
    def leaving_adapters(self) -> tuple[LoRAModule, ...]:
        """That only those get who mean them: what leaves `adapters` is here before."""
        return self._engine.loras.leaving_modules

    async def find_lora(self, name: str, path: Path) -> LoRAModule:
        """See `LLMEngine.find_lora`. On a thread of its own, beside steps."""
        return await asyncio.to_thread(self._engine.find_lora, name, path)

    async def read_lora(self, module: LoRAModule) -> ReadAdapter:
        """See `LLMEngine.read_lora`. As `find_lora`. Raises `EngineDeadError` where a rank has ended."""
        with _ended_with_a_rank():
            return await asyncio.to_thread(self._engine.read_lora, module)

    @property
    def stats(self) -> SchedulerStats:
        """Counted by the stepping thread; to be read."""
        return self._engine.stats

    @property
    def progress(self) -> int | None:
        """A number that is another with each step and command, and when blocks were copied. None while there is nothing
        to do."""
        return None if self._is_waiting else self._num_begun

    async def call(self, function: Callable[[LLMEngine], _T]) -> _T:
        """Run `function` on the stepping thread between two steps, and return its result or raise its error.

        It runs even if the caller is cancelled meanwhile. Raises `EngineDeadError` if the thread has ended, or a rank.
        """
        future: asyncio.Future[_T] = self._loop.create_future()
        self._commands.put(_Command(function, future))
        if self._is_dead or not self._thread.is_alive():  # a fork has none of its parent's threads
            raise EngineDeadError("the engine's stepping thread has ended")
        with _ended_with_a_rank():
            return await future

    def post(self, function: Callable[[LLMEngine], object]) -> None:
        """Run `function` on the stepping thread between two steps, without waiting. It must not raise."""
        self._commands.put(_Command(function, None))

    async def profile(self, num_steps: int, *, timeout_s: float, with_trace: bool) -> StepProfile:
        """What the next `num_steps` steps take, or as many as there are within `timeout_s`: 0, if nobody asks for
        anything.

        Steps are slower meanwhile. Raises `ProfilingError` where that is being done, `ValueError` for a number out of
        bounds, `EngineDeadError`.
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
        await self.call(lambda engine: None)  # what ends it has come before
        return await asyncio.to_thread(profiler.profile, with_trace=with_trace)

    async def close(self) -> None:
        """End the thread after the running step. Requests that are not finished are dropped."""
        self._end()
        await asyncio.to_thread(self._thread.join)

    def close_blocking(self) -> None:
        """As `close`, for who need not be on the event loop. On the engine's own thread, where garbage may be
        collected, it does not wait."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _end(self) -> None:
        self._is_dead = True
        self._commands.put(None)

    def _give_up_making(self) -> None:
        """The thread ends at its next line of Python; where that goes unheard, when the engine is made."""
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
                # Work that gets no memory waits for a command that frees some; what waits for a grammar is woken.
                is_blocked = self._engine.is_idle
        except BaseException as error:
            _log.exception("the engine failed")
            self._tell(self._on_failure, error)
        finally:
            self._is_dead = True
            self._refuse_commands()
            self._engine.close()  # may wait for a copy that never ends: that is no idleness
            self._is_waiting = True
            # Who hears of the engine may hold on to this. Not even garbage collection frees what was there when a model
            # was loaded (`gc.freeze`), unless it is in no circle.
            self._on_step = self._on_failure = _nothing

    def _run_commands(self, is_blocked: bool) -> bool:
        """Run what is queued, waiting for something if there is nothing else to do. False: the end."""
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
        """Nobody may wait for a thread that is gone."""
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command.future is not None:
                error = EngineDeadError("the engine's stepping thread has ended")
                self._tell(_fail, command.future, error)

    def _report(self, outputs: list[RequestOutput]) -> None:
        news = StepNews(outputs, self._engine.take_cache_events(), self._engine.load())
        self._tell(self._on_step, news)

    def _tell(self, function: Callable[..., object], *arguments: object) -> None:
        """On the event loop. Once that is closed, there is nobody to hear it."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


@contextmanager
def _ended_with_a_rank() -> Iterator[None]:
    """Around what is asked of the engine: a rank's end is its own."""
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
