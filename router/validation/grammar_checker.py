"""Says of each request's grammar what workers follow, or what is wrong with it.

    check ── known? ──────────────────────────────────────────────────────────> its answer
      ├─ others wait for the same? waits with them ──────────────────┐
      └─ waits: clients take turns, each with its own in their order ─┴─> GrammarProcess, one at a time ──> known

Owns the process, what waits for it, and the latest answers. Requests of an application mostly have the same few
grammars, so that compiling is rare. Each client may let `MAX_WAITING_OF_ONE` grammars wait, all together `MAX_WAITING`;
further ones are refused. A grammar for which nobody waits any more is dropped, unless it is being compiled.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType

from protos import tandem_inference_pb2 as pb
from router.validation.grammar_process import Compiled, GrammarProcess, request_of
from rpc.errors import Draining, Overloaded

MAX_CPU_S_OF_ALL = 2.0
"""For one request: a worker compiles the grammar again for each of its answers."""
MAX_WAITING = 256
MAX_WAITING_OF_ONE = 64
MAX_KNOWN_BYTES = 16 << 20
TOO_MUCH_IS_KNOWN_S = 60.0
"""How long a grammar that was too much is refused without trying. Each try costs a child."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A grammar that waits for its turn, or is being compiled."""

    request: bytes
    client: str
    answer: asyncio.Future[Compiled] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    num_waiters: int = 0


class GrammarChecker:
    """One per router. `close` it."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._process = GrammarProcess()
        self._known = KnownGrammars(now_s)
        self._waiting: dict[bytes, _Waiting] = {}
        """By request: all for which somebody may wait."""
        self._turns: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """By client, that whose turn is next first: those that are not being compiled."""
        self._compiling: asyncio.Task[None] | None = None
        self._is_closed = False

    async def check(
        self,
        asked: pb.StructuredOutputs,
        n: int,
        tokens: Mapping[str, int] = MappingProxyType({}),
        *,
        client: str = "",
    ) -> str:
        """The grammar that workers follow, for `n` answers. `tokens`: as in `grammar_of`. `client`: with whom others
        take turns. Raises `ValueError` saying what is wrong with the grammar, `Overloaded` if too many wait or the
        machine is too busy, and `Draining` once closed."""
        request = request_of(asked, tokens)
        compiled = self._known.get(request) or await self._compiled(request, client)
        if compiled.error:
            raise ValueError(compiled.error)
        if n * compiled.cpu_s > MAX_CPU_S_OF_ALL:
            took = f"takes {compiled.cpu_s:.2f} s to compile, too much for n={n}"
            raise ValueError(f"{took}; make it simpler, or n smaller")
        return compiled.grammar

    async def close(self) -> None:
        """End the process, whatever it is doing. Whoever waits is refused."""
        self._is_closed = True
        if self._compiling is not None:
            self._compiling.cancel()
            await asyncio.wait([self._compiling])
        for waiting in self._waiting.values():
            waiting.answer.set_exception(_draining())
        self._waiting.clear()
        self._turns.clear()
        await self._process.close()

    async def _compiled(self, request: bytes, client: str) -> Compiled:
        if self._is_closed:
            raise _draining()
        waiting = self._waiting.get(request) or self._enter(request, client)
        waiting.num_waiters += 1
        try:
            await asyncio.wait([waiting.answer])
            return waiting.answer.result()
        finally:
            waiting.num_waiters -= 1
            if not waiting.num_waiters:
                self._drop(waiting)

    def _enter(self, request: bytes, client: str) -> _Waiting:
        num_own = len(self._turns.get(client, ()))
        num_all = sum(map(len, self._turns.values()))
        if num_own >= MAX_WAITING_OF_ONE or num_all >= MAX_WAITING:
            num = num_own if num_own >= MAX_WAITING_OF_ONE else num_all
            raise Overloaded(f"{num} grammars are waiting to be compiled; retry later", retry_after_s=1.0)
        waiting = self._waiting[request] = _Waiting(request, client)
        # Its error may concern nobody any more: asyncio would log it as never retrieved.
        waiting.answer.add_done_callback(lambda answer: answer.exception())
        self._turns.setdefault(client, deque()).append(waiting)
        if self._compiling is None:
            self._compiling = asyncio.create_task(self._compile_all())
        return waiting

    def _drop(self, waiting: _Waiting) -> None:
        """Nobody waits for it any more."""
        own = self._turns.get(waiting.client, ())
        if waiting in own:
            del self._waiting[waiting.request]
            own.remove(waiting)  # type: ignore[union-attr]
            if not own:
                del self._turns[waiting.client]

    async def _compile_all(self) -> None:
        while self._turns:
            client, own = self._turns.popitem(last=False)
            waiting = own.popleft()
            if own:
                self._turns[client] = own  # behind the others
            try:
                compiled = await self._process.ask(waiting.request)
            except Exception as error:
                waiting.answer.set_exception(error)
            else:
                self._known.add(waiting.request, compiled)
                waiting.answer.set_result(compiled)
            del self._waiting[waiting.request]
        self._compiling = None


class KnownGrammars:
    """The latest answers, up to `MAX_KNOWN_BYTES`."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._known: OrderedDict[bytes, tuple[Compiled, float]] = OrderedDict()
        """By the request's hash: the answer, and until when it holds. That used longest ago first."""
        self.num_bytes = 0

    def get(self, request: bytes) -> Compiled | None:
        key = _key(request)
        compiled, until_s = self._known.get(key, (None, 0.0))
        if compiled is None:
            return None
        if self._now_s() >= until_s:
            self._forget(key)
            return None
        self._known.move_to_end(key)
        return compiled

    def add(self, request: bytes, compiled: Compiled) -> None:
        key = _key(request)
        if key in self._known:
            self._forget(key)
        until_s = self._now_s() + TOO_MUCH_IS_KNOWN_S if compiled.has_ended_child else float("inf")
        self._known[key] = compiled, until_s
        self.num_bytes += _num_bytes(compiled)
        while self.num_bytes > MAX_KNOWN_BYTES:
            self._forget(next(iter(self._known)))

    def _forget(self, key: bytes) -> None:
        compiled, _ = self._known.pop(key)
        self.num_bytes -= _num_bytes(compiled)


def _key(request: bytes) -> bytes:
    return blake2b(request, digest_size=32).digest()


def _num_bytes(compiled: Compiled) -> int:
    """About what an entry takes."""
    return 512 + 2 * (len(compiled.grammar) + len(compiled.error))


def _draining() -> Draining:
    return Draining("this router is shutting down; retry at another router", retry_after_s=1.0)
