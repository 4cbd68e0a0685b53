"""Calls to the stepping thread: from callers that stop waiting, and from the thread itself."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from test_stepping_thread import make_engine

from engine.async_llm_engine import AsyncLLMEngine, EngineDeadError
from engine.llm_engine import LLMEngine


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


async def test_an_engine_may_be_closed_by_its_own_thread(tmp_path: Path) -> None:
    """As by a garbage collection there."""
    engine = await start(tmp_path)
    await asyncio.wait_for(engine.call(lambda _: engine.close_blocking()), 20)
    await asyncio.wait_for(engine.close(), 20)
    with pytest.raises(EngineDeadError):
        await engine.call(LLMEngine.load)
