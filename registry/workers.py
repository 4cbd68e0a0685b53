"""Who is alive: a worker writes its record with every heartbeat, a router reads all records.

Owns the records in Redis and the tasks that write and read them. The router decides which workers are usable. Nothing
waits for Redis: while it is away, a worker keeps trying, and a router keeps what it last knew.

    worker:  WorkerRegistration                          router:  WorkerDirectory
    start() ─> beat: record() ─> SET … PX ttl_ms         start() ─> first refresh, whether or not Redis answers
               every beat_ms, or at beat_now()                      every refresh_ms: one script, one round trip
               Redis away: 0.1 s, 0.2 s … 2 s                       Redis away: records stay, is_reachable is false
    draining: not over a successor's record
    close() ─> delete, if still our incarnation          close()

Two live workers with the same id overwrite each other's record: at each beat, each finds that the other has written
since its last beat (which a dead or draining predecessor does not), and reports that in its own record
(`rival_address`).

A record that is gone from Redis leaves the directory at once, with one exception: after an outage, or when Redis was
emptied, a missing record says nothing until every live worker has had time to beat, so known records stay for `ttl_ms`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from google.protobuf.message import DecodeError
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from protos import tandem_worker_pb2 as pb
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
from registry.keys import Keys, check_name

logger = logging.getLogger(__name__)

DEFAULT_REFRESH_MS = 500
MAX_RECORD_BYTES = 320 * 1024
"""Most of it may be adapters: 256 names of 128 characters, of up to four bytes each, and all of that twice."""

# Returns the ids of all workers with their records (or the length of a record that is too long), and drops ids whose
# record has expired. One script: it takes one round trip, and cannot drop an id between two beats.
_READ_ALL = """
redis.call('SET', KEYS[2], ARGV[2], 'NX')
local found = {redis.call('GET', KEYS[2])}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local key = ARGV[1] .. id
  local bytes = redis.call('STRLEN', key)
  if bytes == 0 then
    redis.call('SREM', KEYS[1], id)
  elseif bytes > tonumber(ARGV[3]) then
    found[#found + 1] = id
    found[#found + 1] = bytes
  else
    found[#found + 1] = id
    found[#found + 1] = redis.call('GET', key)
  end
end
return found
"""


def role_name(role: pb.Role) -> str:
    """ "prefill" or "decode"."""
    return pb.Role.Name(role).removeprefix("ROLE_").lower()


class WorkerRegistration:
    """A worker's registration. See the module's docstring for its life cycle. Used only on the event loop's thread."""

    def __init__(
        self,
        redis_url: str,
        *,
        namespace: str,
        worker_id: str,
        incarnation: str,
        record: Callable[[], pb.WorkerRecord],
        ttl_ms: int = DEFAULT_TTL_MS,
        beat_ms: int = DEFAULT_BEAT_MS,
    ) -> None:
        """`record` returns the record to write at every beat; it must be quick, and set `worker_id` and `incarnation`.

        Raises `ValueError` for a bad URL or name, or a ttl that one lost beat would exceed.
        """
        check_beat(ttl_ms, beat_ms)
        self._keys = Keys(namespace)
        self._key = self._keys.worker(worker_id)
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._record = record
        self._ttl_ms = ttl_ms
        self._beat_s = beat_ms / 1000
        self._redis = open_redis(redis_url, timeout_s=REDIS_TIMEOUT_S)
        self._outage = Outage(logger, f"heartbeat of {worker_id}")
        self._has_written = False
        self._rival_address = ""
        self._rival_until_s = 0.0
        """Monotonic time at which a rival that has not written again is considered gone."""
        self._due = asyncio.Event()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_reachable(self) -> bool:
        """Whether Redis took the last beat."""
        return self._outage.is_reachable

    @property
    def rival_address(self) -> str:
        """Address of another live process that has this worker's id and is not draining; empty if none is known."""
        return self._rival_address if time.monotonic() < self._rival_until_s else ""

    def start(self) -> None:
        """Start to beat, now. Does not wait for Redis."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._beat_until_closed(), name=f"heartbeat of {self._worker_id}")
        watch_task(self._task, logger)

    def beat_now(self) -> None:
        """Write the record without waiting for the next beat, because something that routers act on has changed."""
        self._due.set()

    async def close(self) -> None:
        """Stop beating and delete the record, unless another incarnation has written it since.

        If Redis is away, the record is left to expire. Takes at most a few REDIS_TIMEOUT_S.
        """
        self._is_closing = True
        self._due.set()
        try:
            if self._task is not None:
                await self._task
            with wrong_answers_as_failures():
                await self._delete_own()
        except REDIS_FAILURES as error:
            logger.warning(
                "cannot delete the record of %s, which stays until it expires (%s)",
                self._worker_id,
                type(error).__name__,
            )
        finally:
            await self._redis.aclose()

    async def _beat_until_closed(self) -> None:
        while not self._is_closing:
            self._due.clear()
            try:
                await self._beat()
                self._outage.answered()
                pause_s = self._beat_s
            except REDIS_FAILURES as error:
                self._outage.failed(error)
                pause_s = min(self._outage.retry_s, self._beat_s)
            await wait_for(self._due, pause_s)

    async def _beat(self) -> None:
        record = self._record()
        assert (record.worker_id, record.incarnation) == (self._worker_id, self._incarnation)
        with wrong_answers_as_failures(), suppress(WatchError):
            async with self._redis.pipeline(transaction=True) as pipe:
                if record.is_draining and await self._watched(pipe) not in (None, self._incarnation):
                    return  # a successor has registered, and takes new work
                pipe.get(self._key)
                pipe.set(self._key, record.SerializeToString(), px=self._ttl_ms)
                pipe.sadd(self._keys.workers, self._worker_id)
                found, *_ = await pipe.execute()
                self._look_for_rival(_record_in(found))
                self._has_written = True

    def _look_for_rival(self, found: pb.WorkerRecord | None) -> None:
        """`found`: the record that this beat has replaced. At the first beat it is a predecessor's, which may be
        dead."""
        if found is None or found.incarnation == self._incarnation or found.is_draining or not self._has_written:
            return
        if self.rival_address != found.address:
            logger.warning(
                "another worker has the same id %s, at %s; give each its own --worker-id",
                self._worker_id,
                found.address,
            )
        self._rival_address, self._rival_until_s = found.address, time.monotonic() + self._ttl_ms / 1000

    async def _delete_own(self) -> None:
        with suppress(WatchError):
            async with self._redis.pipeline(transaction=True) as pipe:
                if await self._watched(pipe) == self._incarnation:
                    pipe.delete(self._key)
                    pipe.srem(self._keys.workers, self._worker_id)
                    await pipe.execute()

    async def _watched(self, pipe: Pipeline) -> str | None:
        """Return the incarnation in the current record, or None. The next `execute` of `pipe` raises `WatchError` if
        the record has changed since, as when a successor has written its own."""
        await pipe.watch(self._key)
        found = _record_in(await pipe.get(self._key))
        pipe.multi()  # type: ignore[no-untyped-call]
        return None if found is None else found.incarnation


def _record_in(found: object) -> pb.WorkerRecord | None:
    """Parse a record; None if there is none, or it does not parse."""
    try:
        return pb.WorkerRecord.FromString(found) if isinstance(found, bytes) else None
    except DecodeError:
        return None


class WorkerDirectory:
    """The records of all workers, as a router last knew them. See the module's docstring for its life cycle. Used only
    on the event loop's thread."""

    def __init__(
        self,
        redis_url: str,
        *,
        namespace: str,
        on_change: Callable[[list[pb.WorkerRecord]], None] | None = None,
        ttl_ms: int = DEFAULT_TTL_MS,
        refresh_ms: int = DEFAULT_REFRESH_MS,
    ) -> None:
        """`on_change` is called with all records when a worker comes, goes, restarts, moves, begins to drain, or gets a
        rival or other adapters.

        It is not called for changes of load, which are in `records` after every refresh. `ttl_ms`: that of the workers'
        registrations.
        Raises `ValueError` for a bad URL or namespace.
        """
        self._keys = Keys(namespace)
        self._on_change = on_change
        self._ttl_s = ttl_ms / 1000
        self._refresh_s = refresh_ms / 1000
        self._redis = open_redis(redis_url, timeout_s=REDIS_TIMEOUT_S)
        self._read_all = self._redis.register_script(_READ_ALL)
        self._outage = Outage(logger, "worker directory")
        self._records: dict[str, pb.WorkerRecord] = {}
        self._read: dict[str, tuple[bytes, pb.WorkerRecord]] = {}
        """Parsed records with their bytes: most are unchanged at several refreshes between two beats."""
        self._bad_ids: set[str] = set()
        """Workers with an invalid record, which has been logged."""
        self._generation: bytes | None = None
        self._absence_counts_at = 0.0
        """Monotonic time from which on a missing record means a missing worker."""
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def records(self) -> list[pb.WorkerRecord]:
        """All workers' latest records, sorted by worker id. Callers must not change them."""
        return [self._records[worker_id] for worker_id in sorted(self._records)]

    @property
    def is_reachable(self) -> bool:
        """Whether Redis answered the last refresh. If not, `records` are the last known ones."""
        return self._outage.is_reachable

    async def start(self) -> None:
        """Read once, then keep reading. Returns after the first try, whether or not Redis answered."""
        assert self._task is None, "started twice"
        await self.refresh()
        self._task = asyncio.create_task(self._refresh_until_closed(), name="worker directory")
        watch_task(self._task, logger)

    async def close(self) -> None:
        """Stop reading. The records stay as they are."""
        self._closing.set()
        try:
            if self._task is not None:
                await self._task
        finally:
            await self._redis.aclose()

    async def refresh(self) -> bool:
        """Read all records now. If Redis does not answer, returns False and keeps the records."""
        was_away = not self._outage.is_reachable
        try:
            with wrong_answers_as_failures():
                generation, *found = await self._read_all(
                    keys=[self._keys.workers, self._keys.generation],
                    args=[self._keys.worker_prefix, secrets.token_hex(8), MAX_RECORD_BYTES],
                )
                read = _pairs(found)
        except REDIS_FAILURES as error:
            self._outage.failed(error)
            return False
        self._outage.answered()
        if was_away or (self._generation is not None and generation != self._generation):
            self._absence_counts_at = time.monotonic() + self._ttl_s
        self._generation = generation
        self._apply(self._parsed(read))
        return True

    async def _refresh_until_closed(self) -> None:
        while not await wait_for(self._closing, self._refresh_s if self.is_reachable else self._outage.retry_s):
            await self.refresh()

    def _parsed(self, found: Iterable[tuple[bytes, bytes | int]]) -> dict[str, pb.WorkerRecord]:
        """Parse records; returns the valid ones by worker id. Others are logged the first time, and skipped."""
        read: dict[str, tuple[bytes, pb.WorkerRecord]] = {}
        bad_ids: set[str] = set()
        for id_bytes, data in found:
            worker_id = id_bytes.decode(errors="backslashreplace")
            before = self._read.get(worker_id)
            if before is not None and before[0] == data:
                read[worker_id] = before
                continue
            try:
                read[worker_id] = _parse(worker_id, data)
            except ValueError as error:
                bad_ids.add(worker_id)
                if worker_id not in self._bad_ids:
                    logger.warning("the record of %.200s is skipped: %s", worker_id, error)
        self._read, self._bad_ids = read, bad_ids
        return {worker_id: record for worker_id, (_, record) in read.items()}

    def _apply(self, records: dict[str, pb.WorkerRecord]) -> None:
        if time.monotonic() < self._absence_counts_at:
            records = {**self._records, **records}
        is_changed = _standing(records) != _standing(self._records)
        self._records = records
        if is_changed and self._on_change is not None:
            self._on_change(self.records)


def _pairs(found: list[object]) -> list[tuple[bytes, bytes | int]]:
    """Pairs of an id and its record, or the record's length. Raises `ValueError` for other data."""
    pairs: list[tuple[bytes, bytes | int]] = []
    for worker_id, data in zip(found[::2], found[1::2], strict=True):
        if not isinstance(worker_id, bytes) or not isinstance(data, bytes | int):
            raise ValueError(f"a {type(worker_id).__name__} and a {type(data).__name__} are no id and record")
        pairs.append((worker_id, data))
    return pairs


def _parse(worker_id: str, data: bytes | int) -> tuple[bytes, pb.WorkerRecord]:
    """Parse the record of `worker_id`; returns it with its bytes. Raises `ValueError` that says what is wrong with
    it."""
    if isinstance(data, int):
        raise ValueError(f"{data} bytes are more than {MAX_RECORD_BYTES}")
    try:
        record = pb.WorkerRecord.FromString(data)
    except DecodeError as error:
        raise ValueError("it does not parse") from error
    if record.worker_id != worker_id:
        raise ValueError(f"it says worker_id {record.worker_id[:100]!r}")
    check_name("worker_id", record.worker_id)  # both become part of other keys
    check_name("incarnation", record.incarnation)
    if not record.address:
        raise ValueError("it has no address")
    if record.role not in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
        raise ValueError(f"it says role {record.role}")
    return data, record


def _standing(records: dict[str, pb.WorkerRecord]) -> dict[str, tuple[object, ...]]:
    """The parts of the records whose changes `on_change` reports."""
    return {
        worker_id: (
            record.incarnation, record.address, record.role, record.is_draining, record.rival_address,
            dict(record.lora_digests), [(each.lora_name, each.lora_digest) for each in record.leaving_loras],
            list(record.exchanged_lora_names),
        )
        for worker_id, record in records.items()
    }  # fmt: skip
