"""Adapters that come and go with several ranks: each rank reads its own part, and all install it before the same step.

    rank 0's RankAdapters: read ──which──> follow: read, on a thread of its own; "" or an error ──> read returns
                   put, remove ──────────> change, between the same two steps as here

Until the adapter that was read last is put, or the next one is read, rank 0 owns a record of it, and the other ranks
own what they have read. Requests to read come over a connection of their own, so that a rank computes while it reads.
Changes are sent in order with the steps, so that no step uses an adapter on some ranks only.

If a rank cannot put what it has read, it ends, and so does the engine, since ranks must not differ.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from pydantic import TypeAdapter

from engine.lora.adapters import Adapters, ReadAdapter
from engine.lora.modules import LoRAModule
from engine.running.executor import RankLost
from engine.tensor_parallel.rank_watch import LOST


@dataclass(frozen=True, slots=True)
class _Reading:
    number: int
    module: LoRAModule
    unwanted: int
    """Number of the previous reading if it was never put, so that it can be dropped; else 0."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Put the adapter of this reading under `adapter_id`; `reading` 0: remove `adapter_id`."""

    adapter_id: int
    reading: int


@dataclass(frozen=True, slots=True)
class _Answer:
    number: int
    """Number of the reading."""
    why_not: str
    """The error; empty if the adapter has been read."""


_READING, _ANSWER, _CHANGE = TypeAdapter(_Reading), TypeAdapter(_Answer), TypeAdapter(_Change)


class RankAdapters:
    """Rank 0's end. `read` may run on any thread, the other methods on the stepping thread. `tell` sends a change to
    all other ranks."""

    def __init__(self, connections: Sequence[Connection[bytes, bytes]], tell: Callable[[bytes], None]) -> None:
        self._connections = connections
        self._tell = tell
        self._is_reading = threading.Lock()
        self._changing = threading.Lock()
        self._num_readings = 0
        self._unput = 0
        """Number of the last reading unless it was put: other ranks may hold its adapter."""
        self._read_last: ReadAdapter | None = None
        """Rank 0's result of the last reading, once every rank has read the adapter."""

    def read(self, module: LoRAModule, read_here: Callable[[LoRAModule], ReadAdapter]) -> ReadAdapter:
        """Let all ranks read their parts, and return rank 0's. Raises what `read_here` raises, `ValueError` if another
        rank cannot read its part, and `RankLost`."""
        with self._is_reading:
            adapter = read_here(module)  # first: most errors affect all ranks
            with self._changing:
                reading = _Reading(self._num_readings + 1, module, unwanted=self._unput)
                message = _READING.dump_json(reading)
                self._read_last = None
                self._unput = self._num_readings = reading.number
            try:
                for connection in self._connections:
                    connection.send_bytes(message)
                answers = [_answer(connection, reading.number) for connection in self._connections]
            except (EOFError, OSError) as error:
                raise RankLost(LOST) from error
            for rank, why_not in enumerate(answers, start=1):
                if why_not:
                    raise ValueError(f"rank {rank}: {why_not}")
            self._read_last = adapter
            return adapter

    def put(self, adapter_id: int, adapter: ReadAdapter, put_here: Callable[[int, ReadAdapter], None]) -> None:
        """Put the adapter that `read` returned last, on all ranks. If `put_here` raises, other ranks change nothing.
        Raises `ValueError` for any other adapter, and `RankLost`."""
        with self._changing:
            if adapter is not self._read_last:
                raise ValueError("another adapter has been read since: on several ranks they are put one by one")
            put_here(adapter_id, adapter)
            self._read_last = None
            self._tell(_CHANGE.dump_json(_Change(adapter_id, self._unput)))
            self._unput = 0

    def remove(self, adapter_id: int) -> None:
        """Raises `RankLost`."""
        self._tell(_CHANGE.dump_json(_Change(adapter_id, 0)))


def _answer(connection: Connection[bytes, bytes], number: int) -> str:
    """Receive another rank's answer: the error, or an empty string."""
    while True:
        answer = _ANSWER.validate_json(connection.recv_bytes())
        if answer.number == number:  # else the answer to a reading that Ctrl-C interrupted
            return answer.why_not


class FollowedAdapters:
    """Another rank's end. Its stepping thread calls `change` between two steps."""

    def __init__(self, adapters: Adapters, connection: Connection[bytes, bytes], device: torch.device | None) -> None:
        """Start the thread that reads the adapters that `connection` requests. `device`: the rank's GPU, or None."""
        self._adapters = adapters
        self._connection = connection
        self._device = device
        self._read: dict[int, ReadAdapter] = {}
        threading.Thread(target=self._follow, name="rank-adapters", daemon=True).start()

    def change(self, message: bytes | memoryview) -> None:
        change = _CHANGE.validate_json(bytes(message))
        if change.reading:
            self._adapters.put(change.adapter_id, self._read.pop(change.reading))
        else:
            self._adapters.remove(change.adapter_id)

    def _follow(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # the current device is per thread
        with suppress(EOFError, OSError):
            while True:
                reading = _READING.validate_json(self._connection.recv_bytes())
                self._read.pop(reading.unwanted, None)
                answer = _Answer(reading.number, self._try_to_read(reading))
                self._connection.send_bytes(_ANSWER.dump_json(answer))

    def _try_to_read(self, reading: _Reading) -> str:
        """Return the error, or an empty string."""
        try:
            with torch.inference_mode():
                self._read[reading.number] = self._adapters.read(reading.module)
        except (ValueError, OSError) as error:
            return f"{error}" or type(error).__name__
        except Exception as error:  # such as too little memory: the engine goes on without the adapter
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        return ""
