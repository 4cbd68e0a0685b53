"""Compiles the grammars that requests bring, in a process of its own, which may be lost: llguidance bounds the work for
a token, but not what reading a grammar may take, and one that nests deeply enough ends the process that reads it.

    Router                                     child: python -m router.validation.grammar_checker
    (first) <──────────────────────────ready──┐
    check(asked) ──StructuredOutputs, tokens──> compile, on a stack half as large as a worker's thread has
          <──────────{"grammar" | "error", "cpu_s"}──┘  └─ too long, too large, too deep: ended, and begun anew

Owns the child, which is started with the first grammar and ends with the router: its input ends then, and while it
computes, its own limit of processor time ends it. One grammar at a time, so many may wait; the next is refused. What
has been asked is heard to its end though its client has left: the next one would have to wait for another child.

A grammar is to blame for what its own limits end (processor time, memory, stack), and for nothing else: a child that
the system kills, or that a busy machine holds up, leaves a request that may be sent again.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from protos import tandem_inference_pb2 as pb
from router.text.structured_outputs import grammar_of
from rpc.errors import Draining, InternalError, Overloaded

_log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "router.validation.grammar_checker")
START_S = 30.0

NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""Why a process is not started: no open file, no process, no memory is left."""
MAX_CPU_S = 0.25
"""For one grammar: schemas as people write them take milliseconds. A worker compiles them one after the other."""
MAX_CPU_S_OF_ALL = 2.0
"""For one request: each of its answers compiles the grammar again, at its worker."""
MAX_WALL_S = 10.0
"""On a machine that is busy with other things. No grammar's fault: its own time is that of the processor."""
MAX_MEMORY_BYTES = 2 << 30
MAX_WAITING = 64
STACK_BYTES = 4 << 20
TOO_MUCH = "takes too much time, memory or nesting to compile; make it simpler"
TOO_MUCH_OF = {
    -signal.SIGPROF: f"takes more than {MAX_CPU_S} s to compile; make it simpler",
    -signal.SIGABRT: f"takes more than {MAX_MEMORY_BYTES >> 30} GiB of memory to compile; make it simpler",
    -signal.SIGSEGV: "is nested too deeply to compile; make it simpler",
}
"""What the child's end says of its grammar: the timer's signal, Rust where it is given no memory, a stack that is full.
"""
ENDED_BY_OTHERS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""The child's end where no limit of ours ends it. The system kills where a machine, or a container, has no memory left.
"""


class GrammarChecker:
    """One per router. `close` it."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._asking: asyncio.Task[dict[str, Any]] | None = None
        """The last grammar's, of whose answer half may have come: its own, and nobody cancels it but `close`."""
        self._num_waiting = 0
        self._is_closed = False

    async def check(self, asked: pb.StructuredOutputs, n: int, tokens: Mapping[str, int] = MappingProxyType({})) -> str:
        """The grammar that workers go by, for `n` answers. `tokens`: as `grammar_of` has them. Raises `ValueError`
        saying why there is none, `Overloaded` where too many wait, and `Draining` once closed."""
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} grammars wait to be compiled; retry later", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            async with self._turn:
                if self._asking is not None:
                    await asyncio.wait([self._asking])
                self._refuse_if_closed()
                request = _framed(asked.SerializeToString()) + _framed(_text(tokens))
                self._asking = asking = asyncio.create_task(self._ask(request))
                asking.add_done_callback(_note_end)
                await asyncio.wait([asking])
        finally:
            self._num_waiting -= 1
        self._refuse_if_closed()
        answer = asking.result()
        if "error" in answer:
            raise ValueError(answer["error"])
        cpu_s = float(answer["cpu_s"])
        if n * cpu_s > MAX_CPU_S_OF_ALL:
            raise ValueError(f"takes {cpu_s:.2f} s to compile, too much for n={n}; make it simpler, or n smaller")
        return str(answer["grammar"])

    async def close(self) -> None:
        """End the child, whatever it does."""
        self._is_closed = True
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await self._end_child()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise Draining("this router is leaving; ask another", retry_after_s=1.0)

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            if child.returncode is None:
                child.kill()
            await child.wait()

    async def _ask(self, request: bytes) -> dict[str, Any]:
        child = await self._running_child()
        assert child.stdin is not None
        try:
            async with asyncio.timeout(MAX_WALL_S):
                child.stdin.write(request)
                await child.stdin.drain()
                answer: dict[str, Any] = json.loads(await _read_frame(child))
                return answer
        except TimeoutError as error:
            await self._end_child()
            _log.warning("a grammar was given up: this machine is too busy", extra={"wall_s": MAX_WALL_S})
            raise Overloaded("this router is too busy to compile a grammar now", retry_after_s=1.0) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            exit_code = await self._exit_code_of(child)
            _log.warning("a grammar was given up", extra={"exit_code": exit_code})
            if exit_code in ENDED_BY_OTHERS:
                raise _killed() from error
            return {"error": TOO_MUCH_OF.get(exit_code, TOO_MUCH)}

    async def _exit_code_of(self, child: asyncio.subprocess.Process) -> int:
        """Of the child, which is ending. Not by `_end_child`: what is killed then says nothing of why it ended."""
        exit_code = await child.wait()
        self._child = None
        return exit_code

    async def _running_child(self) -> asyncio.subprocess.Process:
        """Raises `InternalError` where there can be none, and `Overloaded` where there is no room for one: that is no
        grammar's fault."""
        if self._child is not None and self._child.returncode is None:
            return self._child
        try:
            self._child = child = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            _log.warning("no process that compiles grammars can be started", extra={"why": error.strerror})
            raise Overloaded("this router can start no process to compile grammars now", retry_after_s=1.0) from error
        try:
            async with asyncio.timeout(START_S):
                await _read_frame(child)
        except TimeoutError as error:
            await self._end_child()
            raise InternalError("the process that compiles grammars did not start") from error
        except asyncio.IncompleteReadError as error:
            if await self._exit_code_of(child) in ENDED_BY_OTHERS:
                raise _killed() from error
            raise InternalError("the process that compiles grammars did not start") from error
        return child


def _killed() -> Overloaded:
    return Overloaded("the process that compiled the grammar was killed; send the request again", retry_after_s=1.0)


def _note_end(asking: asyncio.Task[dict[str, Any]]) -> None:
    """Else asyncio tells of an error that nobody asks for: whoever would have may have left."""
    if not asking.cancelled():
        asking.exception()


async def _read_frame(child: asyncio.subprocess.Process) -> bytes:
    assert child.stdout is not None
    size = int.from_bytes(await child.stdout.readexactly(4), "big")
    return await child.stdout.readexactly(size)


def _text(value: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(value)).encode()


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def main() -> None:
    """The child: answers until its input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()


def _answer_all() -> None:
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    grammar_of(pb.StructuredOutputs(json_object=True))  # what is made once is not the first grammar's
    stdout.write(_framed(b"ready"))
    stdout.flush()
    while header := stdin.read(4):
        asked = pb.StructuredOutputs.FromString(stdin.read(int.from_bytes(header, "big")))
        tokens = json.loads(stdin.read(int.from_bytes(stdin.read(4), "big")))
        began_s = time.process_time(), time.perf_counter()
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # so much processor time later the kernel ends this process
        answer: dict[str, Any]
        try:
            grammar = grammar_of(asked, tokens)
            # The lesser: one counts other processes, too, the other is coarse on some machines.
            cpu_s = min(time.process_time() - began_s[0], time.perf_counter() - began_s[1])
            answer = {"grammar": grammar, "cpu_s": cpu_s}
        except ValueError as error:
            answer = {"error": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        stdout.write(_framed(_text(answer)))
        stdout.flush()


if __name__ == "__main__":
    main()
