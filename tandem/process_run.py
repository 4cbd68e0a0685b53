"""One run of a child process: its pipes, its output lines, its end.

start ──> its lines are read ──the ready line──> `ready_line` ── … ──> exited, and its last lines read
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TAIL_LINES = 8
MAX_LINE_BYTES = 64 * 1024

_DIE_WITH_PARENT = str(Path(__file__).with_name("die_with_parent.py"))


def dying_with_us(*command: str) -> list[str]:
    """A command line that runs `command`, and ends it when this process ends, for whatever reason."""
    return [sys.executable, "-I", "-S", _DIE_WITH_PARENT, str(os.getpid()), *command]


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """How to run a process."""

    name: str
    command: Callable[[str], Sequence[str]]
    """Program and arguments of the next run, given what the last one announced ("" at first)."""
    ready_pattern: str
    """The process is ready when a line of its output matches; group 1 is what it announces: its address."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to our own environment."""
    confirm: Callable[[], Awaitable[None]] | None = None
    """Awaited after the ready line: proves that the process answers."""
    must_start: bool = False
    """If it dies before it was ever ready, it is not started again: it depends on nothing that could improve."""
    is_chatty: bool = False
    """Its lines are only kept to explain its death, and not passed to `on_line`."""


class _Streams(asyncio.subprocess.SubprocessStreamProtocol):
    """A process' pipes, and the event of its exit. (`Process.wait` also waits until the pipes are closed, and another
    process may hold them open.)"""

    def __init__(self) -> None:
        super().__init__(limit=MAX_LINE_BYTES, loop=asyncio.get_running_loop())
        self.has_exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.has_exited.set()


class ProcessRun:
    """One run of the process."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        streams: _Streams,
        spec: ProcessSpec,
        on_line: Callable[[str, str], None],
    ) -> None:
        process = asyncio.subprocess.Process(transport, streams, asyncio.get_running_loop())
        self.pid = process.pid
        self.started_at_s = time.monotonic()
        self.ready_at_s: float | None = None
        self.ready_line: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.announced = ""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self._transport = transport
        self._streams = streams
        self._spec = spec
        self._on_line = on_line
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read(process.stdout)),
            asyncio.create_task(self._read(process.stderr)),
        ]

    @classmethod
    async def start(cls, spec: ProcessSpec, announced: str, on_line: Callable[[str, str], None]) -> ProcessRun:
        loop = asyncio.get_running_loop()
        transport, streams = await loop.subprocess_exec(
            _Streams,
            *dying_with_us(*spec.command(announced)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **spec.env},
            start_new_session=True,  # Ctrl-C reaches only this process, which decides what ends when
        )
        return cls(transport, streams, spec, on_line)

    @property
    def returncode(self) -> int:
        assert self._process.returncode is not None
        return self._process.returncode

    def send(self, signal_number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # the process has just ended by itself
            self._process.send_signal(signal_number)

    async def wait_exited(self) -> None:
        """Wait until the process has exited and its last lines are read."""
        await self._streams.has_exited.wait()
        # A process that it left behind may hold the pipes open: do not wait forever, and close our ends.
        _, pending = await asyncio.wait(self._readers, timeout=1.0)
        for reader in pending:
            reader.cancel()
        self._transport.close()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            match = re.search(self._spec.ready_pattern, line)
            if match and not self.ready_line.done():
                self.ready_line.set_result(match.group(1) if match.re.groups else "")
            self.tail.append(line)
            if not self._spec.is_chatty:
                self._on_line(self._spec.name, line)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines of `stream` without their ends; a longer one than MAX_LINE_BYTES comes in pieces."""
    rest = b""
    while data := await stream.read(MAX_LINE_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")
        if len(rest) >= MAX_LINE_BYTES:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace")
