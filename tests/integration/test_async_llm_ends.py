"""`tandem.AsyncLLM`: how its requests, its engine and its event loop end."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from async_llms import LONG, SEEDED, ask, engine_threads, is_at_rest, running, until, write_settings
from clusters import wait_until

from tandem import AsyncLLM, EngineDeadError, RequestOutput
from tandem.offline_answer import OfflineAnswer


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return write_settings(tmp_path)


@pytest.fixture
def llm(settings: dict[str, Any]) -> Iterator[AsyncLLM]:
    with running(settings) as llm:
        yield llm


async def at_rest_before_another_step(llm: AsyncLLM, leave: Callable[[], Awaitable[object]]) -> bool:
    """Whether all blocks are free once `leave` is done. The engine is blocked meanwhile and computes no step."""
    may_go_on = threading.Event()
    llm.engine.post(lambda _: may_go_on.wait(20))
    leaving = asyncio.ensure_future(leave())
    try:
        await until(lambda: not llm._requests._requests)
        asking = asyncio.ensure_future(llm.engine.call(is_at_rest))
        await asyncio.sleep(0)
    finally:
        may_go_on.set()
    await leaving
    return await asking


@pytest.mark.parametrize("way", ["break", "cancel", "abort"])
async def test_who_leaves_frees_the_blocks_before_another_step(llm: AsyncLLM, way: str) -> None:
    may_leave, seen = asyncio.Event(), list[RequestOutput]()

    async def read() -> None:
        async for output in llm.generate("abc", replace(LONG, n=2), "r"):
            seen.append(output)
            if way == "break":
                await may_leave.wait()
                break

    async def leave() -> None:
        may_leave.set()
        if way == "cancel":
            reading.cancel()
        if way == "abort":
            await llm.abort("r")
        await asyncio.wait([reading])

    reading = asyncio.create_task(read())
    await until(lambda: seen)
    assert await at_rest_before_another_step(llm, leave)
    assert reading.cancelled() == (way == "cancel")
    if way == "abort":
        assert seen[-1].finished
        assert [answer.finish_reason for answer in seen[-1].outputs] == ["abort", "abort"]
    assert await ask(llm, "abc", SEEDED), "its id is free"


async def test_several_are_aborted_and_others_stay(llm: AsyncLLM) -> None:
    asked = {"a": LONG, "b": replace(LONG, n=2), "c": SEEDED}
    reading = [asyncio.create_task(ask(llm, "abc", params, name=name)) for name, params in asked.items()]
    await until(lambda: len(llm._requests._requests) == 3)
    await llm.abort(["a", "b", "unknown"])  # while their prompts are being read
    async with asyncio.timeout(20):
        ended, also, whole = [(await task)[-1].outputs[0] for task in reading]
    assert (ended.finish_reason, also.finish_reason, whole.finish_reason) == ("abort", "abort", "length")
    assert llm.engine.stats.num_generation_tokens == len(whole.token_ids) == 24
    assert await llm.engine.call(is_at_rest)


async def test_an_answer_that_cannot_be_read_fails_its_reader_alone(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(self: OfflineAnswer, output: Any) -> None:
        assert self.prompt.text != "bad", "no text for this"
        read(self, output)

    read = OfflineAnswer.take
    monkeypatch.setattr(OfflineAnswer, "take", take)
    async with asyncio.timeout(20):
        whole, error = await asyncio.gather(
            ask(llm, "abc", SEEDED), ask(llm, "bad", LONG, name="bad"), return_exceptions=True
        )
        assert isinstance(whole, list)
        assert whole[-1].finished
        assert "no text for this" in str(error)
        assert await llm.engine.call(is_at_rest)


async def test_all_hear_of_an_engine_that_fails(llm: AsyncLLM) -> None:
    reading = [asyncio.create_task(ask(llm, "abc", LONG, name=name)) for name in "ab"]
    await until(lambda: llm.engine.stats.num_generation_tokens > 5)
    await llm.check_health()
    llm.engine.post(lambda _: 1 // 0)
    async with asyncio.timeout(20):
        errors = await asyncio.gather(*reading, ask(llm, "abc", LONG), return_exceptions=True)
    assert {type(error) for error in errors} == {EngineDeadError}
    why = "the engine has failed: ZeroDivisionError: integer division or modulo by zero"
    assert str(errors[0]) == str(errors[1]) == str(llm.dead_error) == why
    assert (llm.is_running, llm.is_stopped, llm.errored) == (False, True, True)
    for use in (llm.check_health(), ask(llm, "abc", LONG)):
        with pytest.raises(EngineDeadError, match="the engine has failed: ZeroDivisionError"):
            await use
    await llm.abort("a")


@pytest.mark.parametrize("way", ["here", "another thread", "async with"])
async def test_shutdown_ends_what_is_under_way(llm: AsyncLLM, way: str) -> None:
    async with llm:
        reading = [asyncio.create_task(ask(llm, "abc", LONG, name="a"))]
        await until(lambda: llm.engine.stats.num_generation_tokens > 5)
        reading.append(asyncio.create_task(ask(llm, "abc", LONG, name="b")))
        await asyncio.sleep(0)  # its prompt is being read
        if way == "here":
            llm.shutdown()
        elif way == "another thread":
            await asyncio.to_thread(llm.shutdown)
    assert not engine_threads()
    async with asyncio.timeout(20):
        errors = await asyncio.gather(*reading, ask(llm, "abc", LONG), return_exceptions=True)
    assert [(type(error), str(error)) for error in errors] == [(EngineDeadError, "this AsyncLLM was shut down")] * 3
    with pytest.raises(EngineDeadError):
        await llm.reset_prefix_cache()
    assert llm.errored


async def until_it_stands(llm: AsyncLLM, may_go_on: threading.Event) -> None:
    """Wait until the engine is blocked in the middle of an answer and the reader has all tokens so far."""
    await until(lambda: llm.engine.stats.num_generation_tokens > 5)
    stands = threading.Event()
    llm.engine.post(lambda _: (stands.set(), may_go_on.wait(20)))
    await until(stands.is_set)
    for _ in range(10):
        await asyncio.sleep(0)


def test_shutdown_ends_the_thread_though_a_reader_waits_on_a_loop_that_was_closed(llm: AsyncLLM) -> None:
    loop, may_go_on = asyncio.new_event_loop(), threading.Event()
    reading = loop.create_task(ask(llm, "abc", LONG))
    loop.run_until_complete(until_it_stands(llm, may_go_on))
    loop.close()
    may_go_on.set()
    llm.shutdown()
    assert not engine_threads()
    assert not reading.done()


def test_whoever_shuts_it_down_waits_for_its_thread(llm: AsyncLLM) -> None:
    """Also a second caller that comes while the first one waits."""
    may_end = threading.Event()
    llm.engine.post(lambda _: may_end.wait(20))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(llm.shutdown)
        wait_until(lambda: llm.errored, 20, "it is being shut down")
        second = threads.submit(llm.shutdown)
        done, _ = wait([first, second], 0.2)
        may_end.set()
    assert not done


def test_a_fork_hears_that_it_has_no_engine(llm: AsyncLLM) -> None:
    """It fails instead of waiting forever: a server's workers may be forks of the process that loaded the model."""

    def use() -> None:
        with pytest.raises(EngineDeadError):
            asyncio.run(ask(llm, [5, 6, 7], SEEDED))

    child = multiprocessing.get_context("fork").Process(target=use)
    child.start()
    child.join(20)
    child.kill()
    assert child.exitcode == 0
    assert asyncio.run(ask(llm, [5, 6, 7], SEEDED))


INTERRUPTED = """
import json, os, signal, sys, threading, time
import torch
from tandem import async_llm

def load(config):
    while True:
        torch.ones(300, 300) @ torch.ones(300, 300)

def is_waited_for():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code.co_name != "wait_until_made":
        frame = frame.f_back
    return frame is not None

def interrupt():
    num_looks = 0
    while num_looks < 30:  # in a row: right before it blocks, a signal would not wake it
        num_looks = num_looks + 1 if is_waited_for() else 0
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

async_llm.LLMEngine = load
threading.Thread(target=interrupt, daemon=True).start()
async_llm.AsyncLLM(**json.loads(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_program_that_is_interrupted_while_it_loads_a_model_ends_well(settings: dict[str, Any]) -> None:
    """It ends at once, as Python does after Ctrl-C; the loading thread, which is inside torch, does not crash it."""
    command = [sys.executable, "-c", INTERRUPTED, json.dumps(settings, default=str)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert ended.returncode == -signal.SIGINT


def test_it_belongs_to_the_loop_of_its_first_use(llm: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    """It can be made without a running loop. Output that the engine produces after that loop has closed causes no
    error."""
    may_go_on = threading.Event()

    async def begin() -> None:
        await anext(llm.generate("abc", LONG, "r"))
        llm.engine.post(lambda _: may_go_on.wait(20))  # afterwards it has output to deliver

    asyncio.run(begin())
    may_go_on.set()
    wait_until(lambda: llm.engine.progress is None, 20, "it has nothing to do")
    for use in (ask(llm, "abc", SEEDED), llm.abort("r"), llm.reset_prefix_cache(), llm.__aenter__()):
        with pytest.raises(RuntimeError, match="this AsyncLLM was first used on another event loop"):
            asyncio.run(use)  # type: ignore[arg-type]
    llm.shutdown()
    assert not caplog.records


@pytest.mark.parametrize("way", ["let go", "shutdown", "shutdown before its first use", "failure"])
def test_its_thread_and_its_memory_go_with_it(
    settings: dict[str, Any], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    # a log record that is kept would keep the failed engine alive
    caplog.set_level("CRITICAL", "engine.async_llm_engine")

    async def use(llm: AsyncLLM) -> None:
        assert await ask(llm, "abc", SEEDED)
        if way == "failure":
            llm.engine.post(lambda _: 1 // 0)
            with pytest.raises(EngineDeadError):
                await ask(llm, "abc", LONG)

    llm = AsyncLLM(**settings)
    model = weakref.ref(llm.engine._engine)
    if way == "shutdown before its first use":
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            asyncio.run(use(llm))
    else:
        asyncio.run(use(llm))
    if way == "shutdown":
        llm.shutdown()
    del llm
    gc.collect()
    assert not engine_threads()
    assert model() is None
