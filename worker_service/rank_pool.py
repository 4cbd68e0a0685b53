"""Remote access to the KV pool of another rank, whose process owns the pool's GPU, call by call.

    rank 0: RankPool ──call, deadline, data────> PoolServer: makes the call on its pool, on a thread of the rank's
    process
                     <──result, data | error───

Each side owns one end of a connection that carries JSON and bytes, never pickles. One call at a time per rank;
pool_of_ranks.py calls several ranks in parallel. The calls are those of `KVPool`, and the other side has an ordinary
pool, so that nothing needs more of CUDA than a worker with one GPU does.

A call has a deadline by which it must have begun. A rank that stood still does not begin it later, when the blocks may
have another owner. If a call gets no answer, the rank is lost, and with it the worker. Copies that take a while
(NIXL's) are given up at the deadline, too.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from engine.running.executor import RankLost
from kv_transfer import InvalidTransfer, KVLayout, KVPool, PeerUnreachable, SharedMemory, TransportMissing
from kv_transfer.pool import Copying, Digests, PeerPool, PoolAgent, Rows
from kv_transfer.shared_memory import open_peers_memory
from protos import tandem_kv_transfer_pb2 as pb

_log = logging.getLogger(__name__)

BEGIN_S = 30.0
"""Timeout for a rank to begin a call, for which it has a dedicated thread."""
END_S = 30.0
"""Timeout for a call to end once it has begun."""
SHARED_BYTES = 2 << 20
"""Shared memory for a call's data: two of the largest messages of the "grpc" transport, unless one block is larger."""
MADE_S = 600.0
"""Timeout for a rank's pool after rank 0's is made: ranks load in parallel, and compile the digest kernels."""
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (InvalidTransfer, PeerUnreachable, TransportMissing)
}
"""By name: the errors that a call may raise; all others become `RuntimeError`."""

OnLost = Callable[[RankLost], None]


class RankPool(KVPool):
    """Any thread may use it. Every method raises `RankLost` if the rank has ended or stands still; `on_lost` is then
    called, once."""

    def __init__(self, rank: int, connection: Connection[bytes, bytes], on_lost: OnLost) -> None:
        """Waits until the rank has made its pool."""
        self._rank = rank
        self._line = Line(connection)
        self._on_lost = on_lost
        self._lost: RankLost | None = None
        self._lock = threading.Lock()
        _bound_waiting(connection)
        self._memory = SharedMemory(SHARED_BYTES)
        self._ask("share", self._memory.describe().SerializeToString(), patience_s=MADE_S)
        self._line.shared = memoryview(self._memory.buffer)
        self.memory, layout = self._ask("describe_layout")
        super().__init__(KVLayout.from_proto(pb.KVLayout.FromString(layout)), None)

    def describe_memory(self) -> pb.IpcEndpoint:
        return pb.IpcEndpoint.FromString(self._ask("describe_memory")[1])

    def open_peer(self, endpoint: pb.IpcEndpoint, num_blocks: int) -> PeerPool:
        peer, _ = self._ask("open_peer", endpoint.SerializeToString(), num_blocks=num_blocks)
        return _Peer(self, peer)

    def start_agent(self, name: str) -> PoolAgent:
        agent, described = self._ask("start_agent", name=name)
        return _Agent(self, agent, pb.NixlEndpoint.FromString(described))

    def read(self, layer: int, block_ids: Sequence[int], *, prefix: bytes = b"") -> bytes:
        return self._ask("read", prefix, layer=layer, block_ids=list(block_ids))[1]

    def write(self, layer: int, block_ids: Sequence[int], data: bytes | memoryview) -> None:
        self._ask("write", data, layer=layer, block_ids=list(block_ids))

    def digests(self, block_ids: Sequence[int]) -> Digests:
        _, data = self._ask("digests", block_ids=list(block_ids))
        return np.frombuffer(data, dtype=np.uint64).reshape(self.layout.num_layers, len(block_ids))

    def copy(self, peer: int, rows_2R: Rows, late_at_s: float) -> int:
        """Begin a copy. Returns its number, for `finish`. Raises `PeerUnreachable` if it would begin too late."""
        return int(self._ask("copy", rows_2R.tobytes(), until_s=late_at_s, peer=peer)[0])

    def finish(self, copy: int) -> None:
        self._ask("finish", copy=copy)

    def close_peer(self, peer: int) -> None:
        self._ask("close_peer", peer=peer)

    def open_by_agent(self, agent: int, name: str, endpoint: pb.NixlEndpoint, num_blocks: int) -> PeerPool:
        told = endpoint.SerializeToString()
        return _Peer(self, self._ask("open_by_agent", told, agent=agent, name=name, num_blocks=num_blocks)[0])

    def enter_push(self, agent: int) -> None:
        self._ask("enter_push", agent=agent)

    def leave_push(self, agent: int) -> None:
        self._ask("leave_push", agent=agent)

    def close_agent(self, agent: int) -> None:
        self._ask("close_agent", agent=agent)

    def _ask(
        self,
        call: str,
        data: bytes | memoryview = b"",
        *,
        until_s: float = math.inf,
        patience_s: float = BEGIN_S + END_S,
        **arguments: object,
    ) -> tuple[Any, bytes]:
        """Make a call, and return its result and the data that came with it. Raises what the call raised."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            must_begin_s = min(until_s, time.monotonic() + patience_s - END_S)
            try:
                self._line.send({"call": call, "until_s": must_begin_s} | arguments, data)
                if not self._line.connection.poll(patience_s):
                    raise TimeoutError(f"no answer within {patience_s:g} s")
                answer, told = self._line.receive()
                data = bytes(told)
            except (EOFError, OSError) as error:
                self._lost = RankLost(f"rank {self._rank} of the engine does not answer: {error or 'it has exited'}")
                self._on_lost(self._lost)
                raise self._lost from error
        if "error" in answer:
            raise _ERRORS.get(answer["error"], RuntimeError)(f"rank {self._rank}: {answer['message']}")
        return answer["result"], data


class _Peer:
    """A `kv_transfer.pool.PeerPool` that a rank has opened."""

    def __init__(self, pool: RankPool, peer: int) -> None:
        self._pool = pool
        self._peer = peer

    def copy(self, rows_2R: Rows, late_at_s: Callable[[], float]) -> Copying:
        return _Copying(self._pool, self._pool.copy(self._peer, rows_2R, late_at_s()))

    def close(self) -> None:
        self._pool.close_peer(self._peer)


class _Copying:
    def __init__(self, pool: RankPool, copy: int) -> None:
        self._pool = pool
        self._copy = copy

    def synchronize(self) -> None:
        self._pool.finish(self._copy)


class _Agent:
    """A `kv_transfer.pool.PoolAgent` that a rank has started. All its methods may block."""

    def __init__(self, pool: RankPool, agent: int, described: pb.NixlEndpoint) -> None:
        self._pool = pool
        self._agent = agent
        self._described = described

    def describe(self) -> pb.NixlEndpoint:
        return self._described

    def open_peer(self, name: str, endpoint: pb.NixlEndpoint, num_blocks: int) -> PeerPool:
        return self._pool.open_by_agent(self._agent, name, endpoint, num_blocks)

    def enter_push(self) -> None:
        self._pool.enter_push(self._agent)

    def leave_push(self) -> None:
        self._pool.leave_push(self._agent)

    def close(self) -> None:
        self._pool.close_agent(self._agent)


class PoolServer:
    """The other end, in the rank's process: makes the requested calls on `pool` until the connection ends."""

    def __init__(self, pool: KVPool, connection: Connection[bytes, bytes]) -> None:
        self._pool = pool
        self._line = Line(connection)
        self._numbers = count()
        self._peers: dict[int, PeerPool] = {}
        self._copies: dict[int, Copying] = {}
        self._agents: dict[int, PoolAgent] = {}
        self._until_s = math.inf
        """Deadline of the current call."""
        self._calls: dict[str, Callable[..., tuple[object, bytes]]] = {
            call.__name__.removeprefix("_"): call
            for call in (
                self._share, self._describe_layout, self._describe_memory, self._open_peer, self._read, self._write,
                self._digests, self._copy, self._finish, self._close_peer, self._start_agent, self._open_by_agent,
                self._enter_push, self._leave_push, self._close_agent,
            )
        }  # fmt: skip

    def start(self) -> None:
        """Run on a thread of its own."""
        threading.Thread(target=self.run, name="kv-rank", daemon=True).start()

    def run(self) -> None:
        try:
            self._pool.bind_thread()
            while True:
                self.answer_one()
        except (EOFError, OSError):
            return  # rank 0 has ended, and so does this process

    def answer_one(self) -> None:
        self._line.send(*self._answer(*self._line.receive()))

    def _answer(self, asked: dict[str, Any], data: memoryview) -> tuple[dict[str, Any], bytes]:
        call, self._until_s = self._calls[asked.pop("call")], asked.pop("until_s")
        try:
            if time.monotonic() > self._until_s:
                raise PeerUnreachable("this rank was stalled, and the call came too late")
            result, told = call(data, **asked)
        except tuple(_ERRORS.values()) as error:
            return {"error": type(error).__name__, "message": str(error)}, b""
        except Exception as error:
            _log.exception("a transfer of this rank failed")
            return {"error": type(error).__name__, "message": str(error)}, b""
        return {"result": result}, told

    def _share(self, data: memoryview) -> tuple[None, bytes]:
        self._line.shared = memoryview(open_peers_memory(pb.HostMemory.FromString(bytes(data)), SHARED_BYTES))
        return None, b""

    def _describe_layout(self, _: memoryview) -> tuple[str, bytes]:
        return self._pool.memory, self._pool.layout.to_proto().SerializeToString()

    def _describe_memory(self, _: memoryview) -> tuple[None, bytes]:
        return None, self._pool.describe_memory().SerializeToString()

    def _open_peer(self, data: memoryview, num_blocks: int) -> tuple[int, bytes]:
        opened = self._pool.open_peer(pb.IpcEndpoint.FromString(bytes(data)), num_blocks)
        self._peers[number := next(self._numbers)] = opened
        return number, b""

    def _copy(self, data: memoryview, peer: int) -> tuple[int, bytes]:
        rows_2R = np.frombuffer(data, dtype=np.int64).reshape(2, -1).copy()  # torch wants writable memory
        until_s = self._until_s  # also earlier than rank 0 gives up this rank
        copying = self._peers[peer].copy(rows_2R, lambda: until_s)
        self._copies[number := next(self._numbers)] = copying
        return number, b""

    def _finish(self, _: memoryview, copy: int) -> tuple[None, bytes]:
        self._copies.pop(copy).synchronize()
        return None, b""

    def _close_peer(self, _: memoryview, peer: int) -> tuple[None, bytes]:
        self._peers.pop(peer).close()
        return None, b""

    def _start_agent(self, _: memoryview, name: str) -> tuple[int, bytes]:
        self._agents[number := next(self._numbers)] = agent = self._pool.start_agent(name)
        return number, agent.describe().SerializeToString()

    def _open_by_agent(self, data: memoryview, agent: int, name: str, num_blocks: int) -> tuple[int, bytes]:
        opened = self._agents[agent].open_peer(name, pb.NixlEndpoint.FromString(bytes(data)), num_blocks)
        self._peers[number := next(self._numbers)] = opened
        return number, b""

    def _enter_push(self, _: memoryview, agent: int) -> tuple[None, bytes]:
        self._agents[agent].enter_push()
        return None, b""

    def _leave_push(self, _: memoryview, agent: int) -> tuple[None, bytes]:
        self._agents[agent].leave_push()
        return None, b""

    def _close_agent(self, _: memoryview, agent: int) -> tuple[None, bytes]:
        self._agents.pop(agent).close()
        return None, b""

    def _read(self, prefix: memoryview, layer: int, block_ids: list[int]) -> tuple[None, bytes]:
        return None, self._pool.read(layer, block_ids, prefix=bytes(prefix))

    def _write(self, data: memoryview, layer: int, block_ids: list[int]) -> tuple[None, bytes]:
        self._pool.write(layer, block_ids, data)
        return None, b""

    def _digests(self, _: memoryview, block_ids: list[int]) -> tuple[None, bytes]:
        return None, self._pool.digests(block_ids).tobytes()


class Line:
    """One end of the connection between rank 0 and another rank. A message's data is in shared memory if it is small
    enough, since a megabyte takes twenty times as long through a pipe. It is valid until the next message."""

    def __init__(self, connection: Connection[bytes, bytes]) -> None:
        self.connection = connection
        self.shared = memoryview(b"")

    def send(self, message: dict[str, Any], data: bytes | memoryview) -> None:
        is_shared = len(data) <= len(self.shared)
        if is_shared:
            self.shared[: len(data)] = data
        self.connection.send_bytes(json.dumps(message | {"num_bytes": len(data), "is_shared": is_shared}).encode())
        if not is_shared:
            self.connection.send_bytes(data)

    def receive(self) -> tuple[dict[str, Any], memoryview]:
        message: dict[str, Any] = json.loads(self.connection.recv_bytes())
        num_bytes, is_shared = message.pop("num_bytes"), message.pop("is_shared")
        return message, self.shared[:num_bytes] if is_shared else memoryview(self.connection.recv_bytes())


def _bound_waiting(connection: Connection[bytes, bytes]) -> None:
    """Set a timeout for sending and receiving, after which `OSError` is raised: the other end may have been stopped in
    the middle of a message."""
    with socket.socket(fileno=connection.fileno()) as ours:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(BEGIN_S + END_S), 0))
        ours.detach()
