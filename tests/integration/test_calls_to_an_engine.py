"""Calls to the stepping thread from callers that stop waiting, and from the thread itself; and what needs no call."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_stepping_thread import args_of, make_engine

from engine.async_llm_engine import AsyncLLMEngine, EngineDeadError, StepNews
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams


async def start(folder: Path) -> AsyncLLMEngine:
    return await AsyncLLMEngine.start(
        lambda: make_engine(folder), on_step=lambda _: None, on_failure=lambda error: pytest.fail(str(error))
    )


@pytest.mark.parametrize("fails", [False, True])
async def test_who_no_longer_waits_for_a_call_is_not_told_of_its_end(fails: bool, tmp_path: Path) -> None:
    loop, errors = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    began, may_go_on = asyncio.Event(), threading.Event()

    def called(_: LLMEngine) -> None:
        loop.call_soon_threadsafe(began.set)
        assert may_go_on.wait(20)
        if fails:
            raise ValueError("nobody hears this")

    engine = await start(tmp_path)
    calling = asyncio.create_task(engine.call(called))
    await asyncio.wait_for(began.wait(), 20)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    may_go_on.set()
    assert await asyncio.wait_for(engine.call(lambda _: "the next"), 20) == "the next"
    await engine.close()
    assert errors == []


async def test_a_request_goes_on_once_its_blocks_have_come_from_the_host(tmp_path: Path) -> None:
    """Although nobody calls the engine meanwhile."""
    settings = replace(args_of(tmp_path), kv_offloading_size=0.01)
    ended: asyncio.Queue[str] = asyncio.Queue()

    def on_step(news: StepNews) -> None:
        for output in news.outputs:
            ended.put_nowait(output.request_id)

    engine = await AsyncLLMEngine.start(
        lambda: LLMEngine(create_engine_config(settings)),
        on_step=on_step,
        on_failure=lambda error: pytest.fail(str(error)),
    )
    params = SamplingParams(temperature=0, max_tokens=1)
    others = [(f"other {number}", [number] * 9) for number in range(2, 14)]
    for name, prompt in (("first", [1] * 24), *others, ("first again", [1] * 24)):
        while await engine.call(lambda inner: inner.is_copying):
            pass
        await engine.call(lambda inner, n=name, p=prompt: inner.add_request(n, p, params))  # type: ignore[misc]
        assert await asyncio.wait_for(ended.get(), 10) == name
    assert engine.stats.num_loaded_blocks > 0
    await engine.close()


def test_an_engine_that_is_dropped_ends_the_thread_that_copies(tmp_path: Path) -> None:
    settings = replace(args_of(tmp_path), kv_offloading_size=0.01)
    before = threading.enumerate()
    engine = LLMEngine(create_engine_config(settings))
    [thread] = [each for each in threading.enumerate() if each.name == "host-copies" and each not in before]
    del engine
    thread.join(10)
    assert not thread.is_alive()


async def test_an_engine_may_be_closed_by_its_own_thread(tmp_path: Path) -> None:
    """As by a garbage collection there."""
    engine = await start(tmp_path)
    await asyncio.wait_for(engine.call(lambda _: engine.close_blocking()), 20)
    await asyncio.wait_for(engine.close(), 20)
    with pytest.raises(EngineDeadError):
        await engine.call(LLMEngine.load)
