"""Which prefix blocks are cached where: workers report, routers ask for the longest match.

Owns one set of block hashes per worker process in Redis, and keeps it correct. The engine is the authority: the set is
a copy, which is discarded and rebuilt whenever it might differ. Does not define the hashes (see `prefix_hash`). Lookups
have a time limit: without Redis nothing is known, and the router chooses without it.

    worker: PrefixReporter                                       Redis                    router: PrefixIndex
    report(events) ─> pending ─> batch n ─ seq is n-1? ────────> set, seq := n <───────── longest_match(): one script
                                    │ no: missing, or another                             finds where each
                                    v                                                     one's hits end; bounded time
                  RESYNC: snapshot() ─> set anew, renamed over the old one, seq := 0
                    ^
                    └── at start; after any failed call (was it applied?); when too many events are pending

Set and sequence number expire without heartbeats, so that a dead worker's entries vanish; its successor has another
incarnation and hence other keys.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Protocol

from registry.connection import (
    DEFAULT_BEAT_MS,
    DEFAULT_TTL_MS,
    REDIS_FAILURES,
    REDIS_TIMEOUT_S,
    Outage,
    check_beat,
    open_redis,
    wait_for,
    watch_task,
    wrong_answers_as_failures,
)
from registry.keys import Keys

logger = logging.getLogger(__name__)

HASH_BYTES = 16
DEFAULT_FLUSH_MS = 20
MAX_PENDING = 65_536
MAX_BATCH = 2_048
"""Hashes per command: keeps commands short for other users of the server."""
MAX_CONCURRENT_LOOKUPS = 16
MAX_KNOWN_KEYS = 4_096
"""Size of the cache of keys: checking and formatting them took half of a lookup's time in a router."""
LOOKUP_TIMEOUT_S = 0.05
LOOKUP_RETRY_S = 0.5
"""For this long after a failed lookup, further ones answer "nothing known" at once."""
TOLD_AFTER_S = 1.0
"""An outage is logged if lookups fail for this long: a single late one is no outage."""

# KEYS: set, seq. ARGV: expected seq, expected cardinality, new seq, ttl in ms, number of stored hashes, those stored,
# those evicted. Answers the new cardinality, or -1 and changes nothing where the set is not as expected.
_APPLY = """
if redis.call('GET', KEYS[2]) ~= ARGV[1] or redis.call('SCARD', KEYS[1]) ~= tonumber(ARGV[2]) then
  return -1
end
local first_evicted = 6 + tonumber(ARGV[5])
if first_evicted > 6 then redis.call('SADD', KEYS[1], unpack(ARGV, 6, first_evicted - 1)) end
if first_evicted <= #ARGV then redis.call('SREM', KEYS[1], unpack(ARGV, first_evicted, #ARGV)) end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return redis.call('SCARD', KEYS[1])
"""

# KEYS: one set per worker. ARGV: the prompt's hashes in order. Returns the number of leading hits per set, as a
# comma-separated text, which clients parse fastest. A worker that has a block also has those before it (the last blocks
# of a prompt are evicted first; otherwise the result is too high), so the script searches for the end, in nine parts at
# a time. It first tries the previous set's end, and whether there is any hit: usually workers share a prefix, or
# nothing.
_LONGEST_MATCH = """
local hashes = ARGV[1]
local answer, guess = {}, 0
for i, key in ipairs(KEYS) do
  local has, lacks = 0, #hashes / 16 + 1
  local places = guess > 1 and {1, guess, guess + 1} or {1}
  while has + 1 < lacks do
    local probes = {}
    for j, place in ipairs(places) do probes[j] = string.sub(hashes, 16 * place - 15, 16 * place) end
    for j, is_member in ipairs(redis.call('SMISMEMBER', key, unpack(probes))) do
      if is_member == 0 then
        lacks = places[j]
        break
      end
      has = places[j]
    end
    local step = math.ceil((lacks - has) / 9)
    places = {}
    for place = has + step, lacks - 1, step do places[#places + 1] = place end
  end
  answer[i] = has
  guess = has
end
return table.concat(answer, ',')
"""


class CacheEvent(Protocol):
    """An engine's report about one prefix block: it was stored or evicted."""

    @property
    def is_stored(self) -> bool: ...
    @property
    def block_hash(self) -> bytes: ...


class PrefixReporter:
    """Keeps one worker process' set in Redis equal to its prefix cache. See the module's docstring. Used only on the
    event loop's thread."""

    def __init__(
        self,
        redis_url: str,
        *,
        namespace: str,
        worker_id: str,
        incarnation: str,
        snapshot: Callable[[], Awaitable[Iterable[bytes]]],
        ttl_ms: int = DEFAULT_TTL_MS,
        beat_ms: int = DEFAULT_BEAT_MS,
        flush_ms: int = DEFAULT_FLUSH_MS,
        max_pending: int = MAX_PENDING,
    ) -> None:
        """`snapshot` returns the hashes of all blocks in the cache at one moment.

        All events before and after that moment must be passed to `report`, in order, whenever the snapshot returns. At
        most one batch is sent per `flush_ms`.
        Raises `ValueError` for a bad URL or name.
        """
        check_beat(ttl_ms, beat_ms)
        keys = Keys(namespace)
        self._set_key = keys.prefix(worker_id, incarnation)
        self._seq_key = keys.prefix_seq(worker_id, incarnation)
        self._new_key = keys.prefix_new(worker_id, incarnation)
        self._snapshot = snapshot
        self._ttl_ms = ttl_ms
        self._beat_s = beat_ms / 1000
        self._flush_s = flush_ms / 1000
        self._max_pending = max_pending
        self._name = f"prefix reporter of {worker_id}"
        self._redis = open_redis(redis_url, timeout_s=REDIS_TIMEOUT_S)
        self._apply_script = self._redis.register_script(_APPLY)
        self._outage = Outage(logger, self._name)
        self._pending: dict[bytes, bool] = {}
        """Hash -> whether its last event stored it: only the last event of a hash counts."""
        self._needs_resync = True
        self._seq = 0
        self._num_hashes = 0
        """Cardinality of the set after the last batch."""
        self._news = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.num_resyncs = 0
        """How often the whole set was written, including the first time."""

    @property
    def is_reachable(self) -> bool:
        """Whether Redis answered the last call."""
        return self._outage.is_reachable

    @property
    def num_pending(self) -> int:
        """Hashes whose last event has not been sent."""
        return len(self._pending)

    def start(self) -> None:
        """Start reporting, with a snapshot. Does not wait for Redis."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name=self._name)
        watch_task(self._task, logger)

    def report(self, events: Iterable[CacheEvent]) -> None:
        """Queue the events of one engine step, in order. Never waits; too many pending events cause a resync."""
        for event in events:
            assert len(event.block_hash) == HASH_BYTES
            self._pending[event.block_hash] = event.is_stored
        if len(self._pending) > self._max_pending:
            self._pending.clear()
            self._needs_resync = True
        self._news.set()

    async def close(self) -> None:
        """Stop reporting and delete the set. If Redis is away, the set is left to expire."""
        self._closing.set()
        self._news.set()
        try:
            if self._task is not None:
                await asyncio.wait([self._task])  # an error that ended it has been logged
            with wrong_answers_as_failures():
                await self._redis.delete(self._set_key, self._seq_key, self._new_key)
        except REDIS_FAILURES as error:
            logger.warning("%s: the set stays until it expires (%s)", self._name, type(error).__name__)
        finally:
            await self._redis.aclose()

    async def _run(self) -> None:
        while not self._closing.is_set():
            self._news.clear()
            snapshot = await self._take_snapshot() if self._needs_resync else None
            try:
                await (self._flush() if snapshot is None else self._write_anew(snapshot))
                self._outage.answered()
            except REDIS_FAILURES as error:
                self._outage.failed(error)
                self._needs_resync = True  # the batch may or may not have been applied
            await self._wait_until_due()

    async def _wait_until_due(self) -> None:
        """Wait until there is something to send or a heartbeat is due, but at least a flush interval."""
        if not self.is_reachable:
            await wait_for(self._closing, self._outage.retry_s)
        elif not await wait_for(self._closing, self._flush_s) and not self._pending and not self._needs_resync:
            await wait_for(self._news, self._beat_s)

    async def _flush(self) -> None:
        """Send pending events, or an empty batch: the heartbeat, which checks the set and renews its expiry."""
        while True:
            batch = dict(islice(self._pending.items(), MAX_BATCH))
            for block_hash in batch:
                del self._pending[block_hash]
            stored = [block_hash for block_hash, is_stored in batch.items() if is_stored]
            evicted = [block_hash for block_hash, is_stored in batch.items() if not is_stored]
            numbers = [self._seq, self._num_hashes, self._seq + 1, self._ttl_ms, len(stored)]
            with wrong_answers_as_failures():
                num_hashes = int(
                    await self._apply_script(keys=[self._set_key, self._seq_key], args=[*numbers, *stored, *evicted])
                )
            if num_hashes < 0:
                logger.warning("%s: its set in Redis was changed or lost; writing it again", self._name)
                self._needs_resync = True
                return
            self._seq += 1
            self._num_hashes = num_hashes
            if not self._pending or self._needs_resync or self._closing.is_set():
                return

    async def _take_snapshot(self) -> set[bytes]:
        # Events from here on stay pending. Those older than the snapshot only repeat its content, or are followed by
        # newer ones, and only the last event of a hash counts.
        self._pending.clear()
        self._needs_resync = False
        return set(await self._snapshot())

    async def _write_anew(self, hashes: set[bytes]) -> None:
        """Replace the whole set. The new set is built beside the old one and renamed over it, so that no command is
        long.
        """
        self.num_resyncs += 1
        with wrong_answers_as_failures():
            await self._redis.delete(self._new_key)
            remaining = iter(hashes)
            while chunk := list(islice(remaining, MAX_BATCH)):
                async with self._redis.pipeline(transaction=True) as pipe:
                    pipe.sadd(self._new_key, *chunk)
                    pipe.pexpire(self._new_key, self._ttl_ms)
                    await pipe.execute()
            async with self._redis.pipeline(transaction=True) as pipe:
                if hashes:
                    pipe.rename(self._new_key, self._set_key)
                else:
                    pipe.delete(self._set_key)
                pipe.pexpire(self._set_key, self._ttl_ms)
                pipe.set(self._seq_key, 0, px=self._ttl_ms)
                await pipe.execute()
        self._seq = 0
        self._num_hashes = len(hashes)


class PrefixIndex:
    """Looks up the longest cached prefix. Used only on the event loop's thread. Between calls it only remembers whether
    Redis answers."""

    def __init__(
        self,
        redis_url: str,
        *,
        namespace: str,
        timeout_s: float = LOOKUP_TIMEOUT_S,
        max_hashes: int = 4096,
    ) -> None:
        """A lookup takes at most `timeout_s` and covers the first `max_hashes` blocks. Raises `ValueError`."""
        self._set_key = lru_cache(maxsize=MAX_KNOWN_KEYS)(Keys(namespace).prefix)
        self._timeout_s = timeout_s
        self.max_hashes = max_hashes
        self._redis = open_redis(redis_url, timeout_s=REDIS_TIMEOUT_S, max_connections=MAX_CONCURRENT_LOOKUPS)
        self._match_script = self._redis.register_script(_LONGEST_MATCH)
        self._outage = Outage(logger, "prefix index", told_after_s=TOLD_AFTER_S)
        self._next_try_at = 0.0

    @property
    def is_reachable(self) -> bool:
        """Whether Redis answered the last lookup in time."""
        return self._outage.is_reachable

    async def longest_match(self, hashes: Sequence[bytes], workers: Sequence[tuple[str, str]]) -> dict[str, int]:
        """Worker id -> how many leading blocks of `hashes` that (worker id, incarnation) has, in one round trip.

        {} if nothing is known, because Redis is away or slow, or nothing was asked. Never raises for that.
        """
        if not hashes or not workers or time.monotonic() < self._next_try_at:
            return {}
        try:
            with wrong_answers_as_failures():
                async with asyncio.timeout(self._timeout_s):
                    answer: bytes = await self._match_script(
                        keys=[self._set_key(worker_id, incarnation) for worker_id, incarnation in workers],
                        args=[b"".join(hashes[: self.max_hashes])],
                    )
                found = {w: int(n) for (w, _), n in zip(workers, answer.split(b","), strict=True)}
                if not all(0 <= num_blocks <= len(hashes) for num_blocks in found.values()):
                    raise ValueError(f"of {len(hashes)} blocks nobody has {found}")
        except REDIS_FAILURES as error:
            self._outage.failed(error)
            self._next_try_at = time.monotonic() + LOOKUP_RETRY_S
            return {}
        self._outage.answered()
        return found

    async def close(self) -> None:
        await self._redis.aclose()
