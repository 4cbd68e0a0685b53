"""Grammars that would block a router, or crash it: they end only the checker's process, and the next grammar is
served."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from standstill import hold_up

from protos import tandem_inference_pb2 as pb
from router.validation import grammar_checker, grammar_process
from router.validation.grammar_checker import MAX_KNOWN_BYTES, GrammarChecker, KnownGrammars
from router.validation.grammar_process import Compiled
from rpc.errors import Draining, InternalError, Overloaded

FINE = {"json": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}
NUMBERS = itertools.count()
MULTIPLES = [{"multipleOf": number} for number in (101, 103, 107, 109)]
CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "a"\n'


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    await checker.close()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def check(checker: GrammarChecker, n: int = 1, client: str = "", **asked: Any) -> str:
    return await checker.check(pb.StructuredOutputs(**asked), n, client=client)


def another() -> dict[str, str]:
    """One that is not known yet."""
    return {"json": json.dumps({"type": "object", "properties": {f"p{next(NUMBERS)}": {"type": "integer"}}})}


async def serves(checker: GrammarChecker) -> bool:
    """Whether it compiles one that it does not know, and takes no other answer for that one's."""
    asked = another()
    return f"p{next(NUMBERS) - 1}" in await check(checker, **asked)


@pytest.mark.parametrize(
    ("hostile", "why"),
    [
        ({"grammar": CHAIN}, "is nested too deeply"),
        ({"json": json.dumps({"type": "integer", "allOf": MULTIPLES})}, "takes more than 0.25 s"),
        ({"regex": "((a{1000}){1000}){1000}"}, "takes more than 0.25 s"),
    ],
    ids=["ends the process that reads it", "takes for ever, and all memory", "takes long"],
)
async def test_what_would_end_or_hold_up_a_router_is_refused_and_the_next_one_served(
    checker: GrammarChecker, hostile: dict[str, str], why: str
) -> None:
    assert await serves(checker)
    child = checker._process._child
    assert child is not None
    async with asyncio.timeout(8):
        with pytest.raises(ValueError, match=f"^{why} to compile; make it simpler$"):
            await check(checker, **hostile)
    assert child.returncode is not None
    assert await serves(checker)
    assert checker._process._child is not child


async def test_one_that_takes_more_memory_than_its_own_limit_is_to_blame(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = "checks.MAX_MEMORY_BYTES, checks.MAX_CPU_S = 300 << 20, 60"
    program = f"from router.validation import grammar_process as checks; {limits}; checks.main()"
    monkeypatch.setattr(grammar_process, "COMMAND", (sys.executable, "-P", "-c", program))
    monkeypatch.setattr(grammar_process, "MAX_WALL_S", 60.0)
    with pytest.raises(ValueError, match="takes more than 2 GiB of memory to compile; make it simpler"):
        await check(checker, json=json.dumps({"type": "integer", "allOf": MULTIPLES}))
    assert await serves(checker)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_one_whose_process_is_killed_is_not_to_blame(checker: GrammarChecker, how: signal.Signals) -> None:
    """The system kills processes when memory runs out: the request may be sent again."""
    assert await serves(checker)
    child = checker._process._child
    assert child is not None
    hold_up(child.pid)
    asked = asyncio.create_task(check(checker, **another()))
    await settle()
    os.kill(child.pid, how)  # `send_signal` would take the exit code from the checker
    if how is not signal.SIGKILL:
        os.kill(child.pid, signal.SIGCONT)
    with pytest.raises(Overloaded, match="was killed") as killed:
        await asked
    assert killed.value.retry_after_s
    assert await serves(checker)


async def test_nor_is_the_first_whose_process_is_killed_while_it_starts(checker: GrammarChecker) -> None:
    asked = asyncio.create_task(check(checker, **another()))
    while checker._process._child is None:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)
    checker._process._child.kill()
    with pytest.raises(Overloaded, match="was killed"):
        await asked
    assert await serves(checker)


async def test_nor_is_one_that_waits_for_a_busy_machine(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await serves(checker)
    assert checker._process._child is not None
    hold_up(checker._process._child.pid)
    monkeypatch.setattr(grammar_process, "MAX_WALL_S", 0.1)
    with pytest.raises(Overloaded, match="too busy") as busy:
        await check(checker, **another())
    monkeypatch.undo()
    assert busy.value.retry_after_s
    assert await serves(checker)


async def test_where_no_process_can_be_started_others_may_have_room(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*command: str, **pipes: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
    with pytest.raises(Overloaded) as full:
        await check(checker, **another())
    assert full.value.retry_after_s
    monkeypatch.undo()
    assert await serves(checker)


async def test_a_process_that_does_not_start_is_no_grammars_fault(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grammar_process, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    leaving = asyncio.create_task(check(checker, **another()))
    await settle()
    leaving.cancel()
    with pytest.raises(InternalError, match="did not start"):
        await check(checker, **another())
    del leaving
    gc.collect()
    told = [record.getMessage() for record in caplog.records]
    assert not [message for message in told if "never retrieved" in message], "nobody is left to hear of it"
    monkeypatch.undo()
    assert await serves(checker)


async def test_why_a_grammar_is_none_is_said_and_costs_no_process(checker: GrammarChecker) -> None:
    assert await serves(checker)
    child = checker._process._child
    with pytest.raises(ValueError, match="json: is not JSON: NaN is not a JSON number"):
        await check(checker, json='{"minimum": NaN}')
    assert checker._process._child is child


async def test_a_request_for_many_answers_may_not_cost_as_many_times_as_much(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await check(checker, 128, **FINE)
    monkeypatch.setattr(grammar_checker, "MAX_CPU_S_OF_ALL", -1.0)  # clocks may be coarse
    with pytest.raises(ValueError, match=r"s to compile, too much for n=128"):
        await check(checker, 128, **FINE)


async def test_so_many_may_wait(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAITING_OF_ONE", 3)
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 4)
    of_one = [check(checker, client="a", **another()) for _ in range(5)]
    of_others = [check(checker, client=client, **another()) for client in ("b", "c")]
    results = await asyncio.gather(*of_one, *of_others, return_exceptions=True)
    assert [isinstance(result, Overloaded) for result in results] == [False] * 3 + [True] * 2 + [False, True]
    assert not checker._waiting
    assert not checker._turns


async def test_one_compilation_serves_all_who_ask_for_the_same(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the prompts of one request do. They neither wait in turn, nor does it count that they wait."""
    asked = requests_to(checker, monkeypatch)
    monkeypatch.setattr(grammar_checker, "MAX_WAITING_OF_ONE", 1)
    same = await asyncio.gather(*(check(checker, client=str(i % 3), **FINE) for i in range(300)))
    assert len(set(same)) == 1
    assert await check(checker, **FINE) == same[0], "it is known"
    assert len(asked) == 1
    with pytest.raises(ValueError, match="is not JSON"):
        await check(checker, json="{")
    with pytest.raises(ValueError, match="is not JSON"):
        await check(checker, json="{")
    assert len(asked) == 2, "what is wrong is known, too"


async def test_who_leaves_takes_the_grammar_from_nobody_who_waits_for_the_same(checker: GrammarChecker) -> None:
    first = asyncio.create_task(check(checker, **another()))
    same = another()
    leaving, staying, alone = (asyncio.create_task(check(checker, **of)) for of in (same, same, another()))
    await settle()
    leaving.cancel()
    alone.cancel()
    await asyncio.wait([leaving, alone])
    assert len(checker._waiting) == 2, "nobody waits for the last one"
    assert await first != await staying
    assert not checker._waiting


async def test_clients_take_turns(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many grammars one of them has, another waits for one of them, and for none of those that come later."""
    asked = requests_to(checker, monkeypatch)
    clients = ["a"] * 6 + ["b", "c", "b"]
    forms = [another()["json"] for _ in clients]
    await asyncio.gather(*(check(checker, client=c, json=form) for c, form in zip(clients, forms, strict=True)))
    order = [next(i for i, form in enumerate(forms) if form.encode() in request) for request in asked]
    assert [clients[i] for i in order] == ["a", "b", "c", "a", "b", "a", "a", "a", "a"]
    assert [i for i in order if clients[i] == "a"] == list(range(6))


async def test_what_was_too_much_costs_one_process_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    checker = GrammarChecker(lambda: clock[0])
    asked = requests_to(checker, monkeypatch)
    for now_s, num in ((0.0, 1), (59.0, 1), (60.5, 2), (61.0, 2)):
        clock[0] = now_s
        with pytest.raises(ValueError, match="is nested too deeply"):
            await check(checker, grammar=CHAIN)
        assert len(asked) == num
    await checker.close()


def test_the_latest_are_known_as_far_as_there_is_room() -> None:
    known = KnownGrammars(lambda: 0.0)
    large = "x" * (MAX_KNOWN_BYTES // 8)
    for i in range(5):
        known.add(b"%d" % i, Compiled(grammar=f"{i}{large}"))
        assert known.get(b"0"), "it is asked for each time"
    assert [known.get(b"%d" % i) is not None for i in range(5)] == [True, False, False, True, True]
    assert known.num_bytes <= MAX_KNOWN_BYTES
    known.add(b"0", Compiled(error="e" * MAX_KNOWN_BYTES))
    assert known.get(b"0") is None
    assert known.num_bytes == 0


def requests_to(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the process is asked from now on."""
    asked, ask = list[bytes](), checker._process.ask

    async def noting(request: bytes) -> Compiled:
        asked.append(request)
        return await ask(request)

    monkeypatch.setattr(checker._process, "ask", noting)
    return asked


async def test_whoever_leaves_while_its_grammar_is_compiled_leaves_no_answer_for_the_next(
    checker: GrammarChecker,
) -> None:
    assert await serves(checker)
    child = checker._process._child
    leaving = asyncio.create_task(check(checker, regex="(ab){500}"))
    waiting = asyncio.create_task(check(checker, regex="(abc){500}"))
    await settle()
    for task in (leaving, waiting):
        task.cancel()
        await asyncio.wait([task])
    assert await serves(checker)
    assert checker._process._child is child, "the next one need not wait for another process"


async def test_nor_does_whoever_leaves_while_the_process_starts(checker: GrammarChecker) -> None:
    leaving = asyncio.create_task(check(checker, **another()))
    while checker._process._child is None:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)
    child = checker._process._child
    leaving.cancel()
    await asyncio.wait([leaving])
    assert await serves(checker)
    assert checker._process._child is child


async def test_closing_leaves_no_process_where_one_was_just_started() -> None:
    checker = GrammarChecker()
    waiting = asyncio.create_task(check(checker, **another()))
    await settle()
    async with asyncio.timeout(5):
        await checker.close()
        with pytest.raises(Draining):
            await waiting
    assert checker._process._child is None


async def test_closing_does_not_wait_for_what_is_compiled() -> None:
    checker = GrammarChecker()
    await check(checker, **FINE)
    hostile = asyncio.create_task(check(checker, json=json.dumps({"type": "integer", "allOf": MULTIPLES})))
    while not checker._process._child or checker._turns:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)
    child = checker._process._child
    assert child is not None
    async with asyncio.timeout(5):
        await checker.close()
        with pytest.raises(Draining):
            await hostile
    assert child.returncode is not None


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"json": '{"type": "integer", "minimum": 9223372036854775808}'}, "json: minimum must be within 64 bits"),
        (
            {"json": '{"items": [{"exclusiveMaximum": -9223372036854775809}]}'},
            "exclusiveMaximum must be within 64",
        ),
        ({"grammar": 'start: "a" <[2]>'}, r"token numbers \(<\[...\]>\) are not supported"),
    ],
)
async def test_what_would_be_taken_for_something_else_is_refused(
    checker: GrammarChecker, asked: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        await check(checker, **asked)


async def test_what_only_looks_like_a_token_number_is_text(checker: GrammarChecker) -> None:
    assert await check(checker, grammar='start: "<[2]>" /<[a-z]>/  // <[5]>')
