"""Adapters that requests of an `AsyncLLM` load, while other requests run."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from async_llms import LONG, SEEDED, ask, is_at_rest, running, until, write_settings
from lora_folders import write_adapter

from engine.async_llm_engine import EngineDeadError
from engine.llm_engine import LLMEngine
from engine.lora.adapters import ReadAdapter
from engine.lora.modules import LoRAModule
from tandem import LLM, AsyncLLM, LoRARequest
from tandem.async_loras import AsyncLoRAs

NAMES = ("a", "b", "c")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    for seed, name in enumerate(NAMES, start=2):
        write_adapter(tmp_path / "loras" / name, seed=seed)
    return write_settings(tmp_path)


@pytest.fixture
def folders(tmp_path: Path, settings: dict[str, Any]) -> dict[str, str]:
    return {name: str(tmp_path / "loras" / name) for name in NAMES}


@pytest.fixture
def expected(settings: dict[str, Any], folders: dict[str, str]) -> dict[str, list[int]]:
    """The answers of an engine that has the adapters from the start."""
    llm = LLM(**settings | {"lora_modules": folders})
    asked = [LoRARequest(name) for name in NAMES]
    told = llm.generate(["abc"] * 3, SEEDED, lora_request=asked, use_tqdm=False)
    answers = {name: list(answer.outputs[0].token_ids) for name, answer in zip(NAMES, told, strict=True)}
    assert len({tuple(tokens) for tokens in answers.values()}) == 3
    return answers


@pytest.fixture
def llm(settings: dict[str, Any]) -> Iterator[AsyncLLM]:
    with running(settings | {"max_loras": 1}) as llm:
        yield llm


def served(engine: LLMEngine) -> list[str]:
    return [module.name for module in engine.loras.served]


async def tokens(llm: AsyncLLM, adapter: LoRARequest | None, name: str = "r") -> list[int]:
    return list((await ask(llm, "abc", SEEDED, adapter, name=name))[-1].outputs[0].token_ids)


async def test_each_is_there_for_who_asks_and_others_wait_for_room(
    llm: AsyncLLM, folders: dict[str, str], expected: dict[str, list[int]]
) -> None:
    """Requests for three adapters come at once, with room for one beside an adapter that stays."""
    wishes = [LoRARequest(name, number, folders[name]) for number, name in enumerate(NAMES * 2)]
    answers = await asyncio.gather(*(tokens(llm, wish, f"r{wish.lora_int_id}") for wish in wishes))
    assert answers == [expected[wish.lora_name] for wish in wishes]
    assert await tokens(llm, LoRARequest("sql")) != await tokens(llm, None)
    last = (await llm.engine.call(served))[0]
    assert await tokens(llm, LoRARequest(last)) == expected[last], "one that is there needs no folder"
    assert await llm.engine.call(is_at_rest)


async def test_a_folder_is_read_once_and_who_was_asked_for_longest_ago_goes(
    settings: dict[str, Any], folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read_lora = LLMEngine.read_lora

    def read(engine: LLMEngine, module: LoRAModule) -> ReadAdapter:
        reads.append(module.name)
        return read_lora(engine, module)

    monkeypatch.setattr(LLMEngine, "read_lora", read)
    with running(settings | {"max_loras": 2}) as llm:
        a, b, c = (LoRARequest(name, 1, folders[name]) for name in NAMES)
        await asyncio.gather(*(tokens(llm, a, f"r{number}") for number in range(3)))
        for wish in (b, a, c):
            await tokens(llm, wish)
        assert reads == ["a", "b", "c"]
        assert await llm.engine.call(served) == ["a", "c", "sql"]


async def test_what_is_there_is_looked_up_where_it_changes(
    llm: AsyncLLM, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of adapters is read on the event loop, which changes it, and not on the thread that reads prompts."""
    threads: list[threading.Thread] = []
    look_up = AsyncLoRAs.folders.fget
    assert look_up is not None

    def look(loras: AsyncLoRAs) -> Mapping[str, Path]:
        threads.append(threading.current_thread())
        return look_up(loras)

    monkeypatch.setattr(AsyncLoRAs, "folders", property(look))
    await tokens(llm, LoRARequest("a", 1, folders["a"]))
    assert threads == [threading.current_thread()]


async def test_who_begins_goes_on_with_the_one_it_began_with(
    settings: dict[str, Any], folders: dict[str, str], expected: dict[str, list[int]]
) -> None:
    """All n answers of a request use its adapter, although the engine adds all but the first only after the first
    token, when the name already belongs to another adapter."""
    prompt, params = [5 + i % 200 for i in range(2000)], replace(SEEDED, n=3, max_tokens=150)
    with running(settings | {"max_loras": 2, "max_num_batched_tokens": 16}) as llm:

        async def several(name: str) -> list[list[int]]:
            last = (await ask(llm, prompt, params, LoRARequest(name, 1, folders["a"]), name=name))[-1]
            return [each.token_ids for each in last.outputs]

        began = asyncio.create_task(several("x"))
        await until(lambda: "x" in llm._loras.folders)  # type: ignore[union-attr]
        for number, source in enumerate("baba"):
            assert await tokens(llm, LoRARequest("x", number, folders[source])) == expected[source]
            assert number or not began.done()
        assert await began == await several("y")
        assert await llm.engine.call(served) == ["sql", "x", "y"], "whoever had the name before is gone"
        assert await llm.engine.call(is_at_rest)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["aborted", "left", "shut down"])
async def test_who_waits_for_room_does_not_wait_for_ever(
    llm: AsyncLLM, folders: dict[str, str], expected: dict[str, list[int]], how: str
) -> None:
    running = llm.generate("abc", LONG, "running", lora_request=LoRARequest("a", 1, folders["a"]))
    await anext(running)
    waiting = asyncio.create_task(tokens(llm, LoRARequest("b", 2, folders["b"]), "waiting"))
    assert llm._loras is not None
    await until(llm._loras._is_bringing.locked)
    for _ in range(3):
        await tokens(llm, None, "other")
    assert not waiting.done()
    if how == "aborted":
        await llm.abort("waiting")
        assert await waiting == []
    elif how == "left":
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await waiting
        return
    assert not (await anext(running)).finished, "it is none of its business"
    await running.aclose()
    assert await tokens(llm, LoRARequest("b", 2, folders["b"])) == expected["b"]
    assert await llm.engine.call(served) == ["b", "sql"]
    await until(lambda: not llm._loras._tasks)  # type: ignore[union-attr]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_another_leaving", [False, True])
async def test_who_waits_for_room_is_overtaken_by_nobody_who_asks_for_it(
    settings: dict[str, Any], folders: dict[str, str], expected: dict[str, list[int]], is_another_leaving: bool
) -> None:
    """Otherwise a request that waits for room would wait forever while overlapping requests use the loaded adapter, or
    as long as a leaving adapter is in use."""
    a, b = (LoRARequest(name, 1, folders[name]) for name in "ab")
    with running(settings | {"max_loras": 1 + is_another_leaving}) as llm:
        leaving = llm.generate("abc", LONG, "leaving", lora_request=LoRARequest("a", 1, folders["c"]))
        if is_another_leaving:
            await anext(leaving)
        uses = llm.generate("abc", LONG, "uses", lora_request=a)
        await anext(uses)
        waiting = asyncio.create_task(tokens(llm, b, "waiting"))
        await until(lambda: llm._loras._going == "a")  # type: ignore[union-attr]
        behind = [asyncio.create_task(tokens(llm, wish, f"behind {wish}")) for wish in (LoRARequest("a"), a)]
        for _ in range(3):
            await tokens(llm, None, "other")
        assert not any(task.done() for task in behind)
        await uses.aclose()
        assert await waiting == expected["b"]
        await leaving.aclose()
        assert [await task for task in behind] == [expected["a"]] * 2


async def test_who_is_aborted_in_line_ends_at_once(llm: AsyncLLM, folders: dict[str, str]) -> None:
    """Although the request before it still waits. Its adapter is not read."""
    assert llm._loras is not None
    running = llm.generate("abc", LONG, "running", lora_request=LoRARequest("a", 1, folders["a"]))
    await anext(running)
    in_line = [asyncio.create_task(tokens(llm, LoRARequest(name, 1, folders[name]), name)) for name in "bc"]
    await until(lambda: len(llm._loras._tasks) == 2)  # type: ignore[union-attr]
    shutil.rmtree(folders["c"])
    await llm.abort("c")
    async with asyncio.timeout(20):
        assert await in_line[1] == []
    assert not (await anext(running)).finished
    await running.aclose()
    assert await in_line[0]
    await until(lambda: not llm._loras._tasks)  # type: ignore[union-attr]
    assert await llm.engine.call(served) == ["b", "sql"]


async def test_one_that_cannot_be_served_harms_nobody(
    llm: AsyncLLM, folders: dict[str, str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    before = LoRARequest("a", 1, folders["a"])
    assert await tokens(llm, before) == expected["a"]
    (tmp_path / "broken").mkdir()
    shutil.copy(tmp_path / "loras" / "a" / "adapter_config.json", tmp_path / "broken")
    for wish, says in (
        (LoRARequest("a", 1, str(tmp_path / "broken")), "adapter 'a': .*adapter_model.safetensors"),
        (LoRARequest("z"), "lora_request names 'z', which is not loaded"),
        (LoRARequest("sql", 1, folders["a"]), "lora_request: 'sql' was loaded from"),
        (LoRARequest("z", 1, "~nobody-here/a"), "lora_request: lora_path '~nobody-here/a'"),
        (LoRARequest("z", 1, "x" * 5000), "adapter 'z': there is no folder"),
    ):
        with pytest.raises(ValueError, match=says):
            await tokens(llm, wish)
    assert await tokens(llm, LoRARequest("a")) == expected["a"], "it is what was read"
    assert await llm.engine.call(is_at_rest)


async def test_whoever_leaves_while_it_comes_leaves_no_trace(
    llm: AsyncLLM, folders: dict[str, str], expected: dict[str, list[int]]
) -> None:
    """The cancel comes after various numbers of steps of the event loop."""
    assert llm._loras is not None
    add_lora = LLMEngine.add_lora
    for number in range(12):
        name = NAMES[number % 2]
        began, goes_on = threading.Event(), threading.Event()

        def add(*args: Any, began=began, goes_on=goes_on, **named: Any) -> int:  # type: ignore[no-untyped-def]
            began.set()
            assert goes_on.wait(20)
            return add_lora(*args, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LLMEngine, "add_lora", add)
            asking = asyncio.create_task(tokens(llm, LoRARequest(name, 1, folders[name])))
            await until(began.is_set)
            for _ in range(number // 2):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.sleep(0)
            goes_on.set()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await until(lambda: not llm._loras._tasks)  # type: ignore[union-attr]
        assert await llm.engine.call(served) == sorted(llm._loras.folders)
    for name in NAMES:
        assert await tokens(llm, LoRARequest(name, 1, folders[name])) == expected[name]
