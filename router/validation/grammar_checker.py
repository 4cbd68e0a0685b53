"""Compiles the grammars of requests in a separate process that may die: llguidance bounds the work per token but not
the work of reading a grammar, and a grammar that nests deeply enough crashes the process that reads it.

    Router                                     child: python -m router.validation.grammar_checker
    (first) <──────────────────────────ready──┐
    check(asked) ──StructuredOutputs, tokens──> compile, on a stack a quarter as large as a worker's thread has
          <──────────{"grammar" | "error", "cpu_s"}──┘  └─ too long, too large, too deep: ended, and begun anew

Owns the child, which starts with the first grammar and ends with the router: its input ends then, and if it is
computing, its own limit of processor time ends it. It compiles one grammar at a time; up to `MAX_WAITING` wait, and
further ones are refused. A grammar that has been sent is awaited even if its client has left: otherwise the next one
would have to wait for a new child.

A grammar is to blame only if its own limits end the child (processor time, memory, stack). If the system kills the
child, or a busy machine delays it, the request may be sent again.
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
"""Errors of starting a process for lack of open files, processes or memory."""
MAX_CPU_S = 0.25
"""For one grammar: usual schemas take milliseconds. A worker compiles grammars one after the other."""
MAX_CPU_S_OF_ALL = 2.0
"""For one request: a worker compiles the grammar again for each of its answers."""
MAX_WALL_S = 10.0
"""Reached only on a machine that is busy with other work. Not the grammar's fault: its own limit is processor time."""
MAX_MEMORY_BYTES = 2 << 30
MAX_WAITING = 64
STACK_BYTES = 4 << 20
TOO_MUCH = "takes too much time, memory or nesting to compile; make it simpler"
TOO_MUCH_OF = {
    -signal.SIGPROF: f"takes more than {MAX_CPU_S} s to compile; make it simpler",
    -signal.SIGABRT: f"takes more than {MAX_MEMORY_BYTES >> 30} GiB of memory to compile; make it simpler",
    -signal.SIGSEGV: "is nested too deeply to compile; make it simpler",
}
"""What the child's exit code says about its grammar: the timer's signal, Rust's abort without memory, a full stack."""
ENDED_BY_OTHERS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes of a child that none of our limits has ended. The system kills it if a machine or a container has no
memory left."""


class GrammarChecker:
    """One per router. `close` it."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._asking: asyncio.Task[dict[str, Any]] | None = None
        """The task of the last grammar. Only `close` cancels it, since half of its answer may have come."""
        self._num_waiting = 0
        self._is_closed = False

    async def check(self, asked: pb.StructuredOutputs, n: int, tokens: Mapping[str, int] = MappingProxyType({})) -> str:
        """The grammar that workers follow, for `n` answers. `tokens`: as in `grammar_of`. Raises `ValueError` saying
        what is wrong with the grammar, `Overloaded` if too many wait or the machine is too busy, and `Draining` once
        closed."""
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} grammars are waiting to be compiled; retry later", retry_after_s=1.0)
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
        """End the child, whatever it is doing."""
        self._is_closed = True
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await self._end_child()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise Draining("this router is shutting down; retry at another router", retry_after_s=1.0)

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
            _log.warning("compiling a grammar was abandoned: this machine is too busy", extra={"wall_s": MAX_WALL_S})
            raise Overloaded("this router is too busy to compile a grammar now", retry_after_s=1.0) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            exit_code = await self._exit_code_of(child)
            _log.warning("compiling a grammar was abandoned", extra={"exit_code": exit_code})
            if exit_code in ENDED_BY_OTHERS:
                raise _killed() from error
            return {"error": TOO_MUCH_OF.get(exit_code, TOO_MUCH)}

    async def _exit_code_of(self, child: asyncio.subprocess.Process) -> int:
        """The exit code of the child, which is ending by itself. (`_end_child` would kill it and hide the reason.)"""
        exit_code = await child.wait()
        self._child = None
        return exit_code

    async def _running_child(self) -> asyncio.subprocess.Process:
        """The running child, started if necessary. Raises `InternalError` if it does not start, and `Overloaded` if
        the system has no resources for it, or killed it."""
        if self._child is not None and self._child.returncode is None:
            return self._child
        try:
            self._child = child = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            _log.warning("cannot start the process that compiles grammars", extra={"why": error.strerror})
            raise Overloaded(
                "this router cannot start the process that compiles grammars now", retry_after_s=1.0
            ) from error
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
    """Retrieve the task's error, since its client may have left: otherwise asyncio would log it as never retrieved."""
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
    """The child process: answers until its input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()


def _answer_all() -> None:
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    grammar_of(pb.StructuredOutputs(json_object=True))  # one-time set-up must not count against the first grammar
    stdout.write(_framed(b"ready"))
    stdout.flush()
    while header := stdin.read(4):
        asked = pb.StructuredOutputs.FromString(stdin.read(int.from_bytes(header, "big")))
        tokens = json.loads(stdin.read(int.from_bytes(stdin.read(4), "big")))
        began_s = time.process_time(), time.perf_counter()
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # after this processor time, the kernel ends this process
        answer: dict[str, Any]
        try:
            grammar = grammar_of(asked, tokens)
            # The lesser of both: wall time includes other processes, and processor time is coarse on some machines.
            cpu_s = min(time.process_time() - began_s[0], time.perf_counter() - began_s[1])
            answer = {"grammar": grammar, "cpu_s": cpu_s}
        except ValueError as error:
            answer = {"error": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        stdout.write(_framed(_text(answer)))
        stdout.flush()


if __name__ == "__main__":
    main()
