"""Compiles the grammars of requests in a separate process that may die: llguidance bounds the work per token but not
the work of reading a grammar, and a grammar that nests deeply enough crashes the process that reads it.

    GrammarChecker                             child: python -m router.validation.grammar_process
    (first) <──────────────────────────ready──┐
    ask(request) ──StructuredOutputs, tokens──> compile, on a stack a quarter as large as a worker's thread has
        <────────────{"grammar" | "error", "cpu_s"}──┘  └─ too long, too large, too deep: ended, and begun anew

Owns the child, which starts with the first grammar and ends with the router: its input ends then, and if it is
computing, its own limit of processor time ends it. It compiles one grammar at a time, and its answer must be awaited
before the next one is asked about.

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
from dataclasses import dataclass
from typing import Any

from protos import tandem_inference_pb2 as pb
from router.text.structured_outputs import grammar_of
from rpc.errors import InternalError, Overloaded

_log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "router.validation.grammar_process")
START_S = 30.0

NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""Errors of starting a process for lack of open files, processes or memory."""
MAX_CPU_S = 0.25
"""For one grammar: usual schemas take milliseconds. A worker compiles grammars one after the other."""
MAX_WALL_S = 10.0
"""Reached only on a machine that is busy with other work. Not the grammar's fault: its own limit is processor time."""
MAX_MEMORY_BYTES = 2 << 30
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the child says about a grammar."""

    grammar: str = ""
    """What workers follow; empty if there is an error."""
    error: str = ""
    cpu_s: float = 0.0
    """The processor time that it took."""
    has_ended_child: bool = False
    """One of the child's limits did: on another day it may be just within them."""


def request_of(asked: pb.StructuredOutputs, tokens: Mapping[str, int]) -> bytes:
    """What the child is asked. The same for equal arguments. `tokens`: as in `grammar_of`."""
    return _framed(asked.SerializeToString(deterministic=True)) + _framed(json.dumps(dict(tokens)).encode())


class GrammarProcess:
    """One per router, for one caller at a time. `close` it."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None

    async def close(self) -> None:
        """End the child, whatever it is doing. Nobody may be asking."""
        await self._end_child()

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            if child.returncode is None:
                child.kill()
            await child.wait()

    async def ask(self, request: bytes) -> Compiled:
        """Raises `Overloaded` if this machine has no room or time for it, and `InternalError` if the child does not
        start. Whoever cancels this must `close` afterwards: half of the answer may have come."""
        child = await self._running_child()
        assert child.stdin is not None
        try:
            async with asyncio.timeout(MAX_WALL_S):
                child.stdin.write(request)
                await child.stdin.drain()
                return Compiled(**json.loads(await _read_frame(child)))
        except TimeoutError as error:
            await self._end_child()
            _log.warning("compiling a grammar was abandoned: this machine is too busy", extra={"wall_s": MAX_WALL_S})
            raise Overloaded("this router is too busy to compile a grammar now", retry_after_s=1.0) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            exit_code = await self._exit_code_of(child)
            _log.warning("compiling a grammar was abandoned", extra={"exit_code": exit_code})
            if exit_code in ENDED_BY_OTHERS:
                raise _killed() from error
            return Compiled(error=TOO_MUCH_OF.get(exit_code, TOO_MUCH), has_ended_child=True)

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


async def _read_frame(child: asyncio.subprocess.Process) -> bytes:
    assert child.stdout is not None
    size = int.from_bytes(await child.stdout.readexactly(4), "big")
    return await child.stdout.readexactly(size)


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
        stdout.write(_framed(json.dumps(answer).encode()))
        stdout.flush()


if __name__ == "__main__":
    main()
