"""Adapters that come and go on several ranks: each reads its own part of one, and all have it before the same step.

    rank 0's RankAdapters: read ──which──> follow: read, on a thread of its own; "" or what is wrong ──> read returns
                   put, remove ──────────> change, between the same two steps as here

Owns on rank 0 what is known of the adapter that was read last, on another rank that adapter: until it is put, or the
next one is read. What is to be read comes on a connection of its own: a rank that reads goes on computing. What is put
is told in turn with the steps: none computes with it on some ranks alone.

Where a rank cannot put what it has read, it ends, and the engine with it: ranks must not differ.
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
    """The one before, which nobody has put; 0: somebody has."""


@dataclass(frozen=True, slots=True)
class _Change:
    """`adapter_id`'s rows are from now on those of what was read with this number; 0: nobody's."""

    adapter_id: int
    reading: int


@dataclass(frozen=True, slots=True)
class _Answer:
    number: int
    """Of the reading."""
    why_not: str
    """Empty: it has been read."""


_READING, _ANSWER, _CHANGE = TypeAdapter(_Reading), TypeAdapter(_Answer), TypeAdapter(_Change)


class RankAdapters:
    """Rank 0's. `read` on any thread, the others on the stepping thread; `tell`: on that, all others of a change."""

    def __init__(self, connections: Sequence[Connection[bytes, bytes]], tell: Callable[[bytes], None]) -> None:
        self._connections = connections
        self._tell = tell
        self._is_reading = threading.Lock()
        self._changing = threading.Lock()
        self._num_readings = 0
        self._unput = 0
        """The last one, unless it was put: others may have what it read."""
        self._read_last: ReadAdapter | None = None
        """What it read, once every rank has."""

    def read(self, module: LoRAModule, read_here: Callable[[LoRAModule], ReadAdapter]) -> ReadAdapter:
        """What rank 0 has of it, once all have read theirs. Raises `ValueError` as `read_here`, and where another rank
        cannot read it; `RankLost`."""
        with self._is_reading:
            adapter = read_here(module)  # first: whatever is wrong with it mostly is for all
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
        """What `read` returned last. Raises what `put_here` raises, of which others then do not hear; `RankLost`."""
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
    """What is wrong with it there."""
    while True:
        answer = _ANSWER.validate_json(connection.recv_bytes())
        if answer.number == number:  # else of one that nobody waits for any more: Ctrl-C came meanwhile
            return answer.why_not


class FollowedAdapters:
    """Another rank's. `change` on its stepping thread, as it is told between two steps."""

    def __init__(self, adapters: Adapters, connection: Connection[bytes, bytes], device: torch.device | None) -> None:
        """From now on it reads what `connection` says, on a thread. `device`: the GPU."""
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
            torch.cuda.set_device(self._device)  # each thread has its own
        with suppress(EOFError, OSError):
            while True:
                reading = _READING.validate_json(self._connection.recv_bytes())
                self._read.pop(reading.unwanted, None)
                answer = _Answer(reading.number, self._try_to_read(reading))
                self._connection.send_bytes(_ANSWER.dump_json(answer))

    def _try_to_read(self, reading: _Reading) -> str:
        """What is wrong."""
        try:
            with torch.inference_mode():
                self._read[reading.number] = self._adapters.read(reading.module)
        except (ValueError, OSError) as error:
            return f"{error}" or type(error).__name__
        except Exception as error:  # none of the adapter's, perhaps: for want of memory others compute on
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        return ""
