"""Redis clients whose every call ends within a stated time, and the log that says once that Redis is away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, ReadOnlyError, RedisError, ResponseError

REDIS_FAILURES = (RedisError, OSError, TimeoutError)
"""What a call raises while Redis is away, slow or not itself. All of it heals by trying again."""

REDIS_TIMEOUT_S = 1.0
DEFAULT_TTL_MS = 6_000
"""What a worker has written expires so long after its last beat."""
DEFAULT_BEAT_MS = 2_000
MIN_RETRY_S = 0.1
MAX_RETRY_S = 2.0


@contextmanager
def wrong_answers_as_failures() -> Iterator[None]:
    """Around calls, and the taking apart of what they return: whatever an answer breaks that no Redis of ours gives, as
    when something else answers in its place, leaves the block as one of `REDIS_FAILURES`. redis-py's parser raises
    ValueError for a length that is none, its pipelines TypeError."""
    try:
        yield
    except REDIS_FAILURES:
        raise
    except Exception as error:
        raise InvalidResponse(f"that is no answer to what was asked: {error!r:.200}") from error


def check_beat(ttl_ms: int, beat_ms: int) -> None:
    """Raises `ValueError` where one lost beat would let expire what is written."""
    if beat_ms < 1 or ttl_ms < 2 * beat_ms:
        raise ValueError(f"ttl_ms must be at least twice beat_ms, are {ttl_ms} and {beat_ms}")


def open_redis(url: str, *, timeout_s: float, max_connections: int = 4) -> Redis:
    """A client for `url` (redis://, rediss:// or unix://). Connects at the first call; the caller closes it.

    `timeout_s` bounds connecting and each answer. Nothing is retried here: callers know what a retry means. With all
    `max_connections` in use a call waits for one, within the caller's own bound. Raises `ValueError` for a bad URL.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=None,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
        protocol=2,  # no pushes from the server: an answer is the next thing on the wire
    )
    pool.connection_class = type("Connection", (_OwnConnection, pool.connection_class), {})
    return Redis.from_pool(pool)


class _OwnConnection:
    """A connection (mixed into the one that the URL asks for) on which who is cancelled is cancelled, and which ends
    with a failover.

    redis-py sends within `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes when what it
    waits for is just done, or has failed (CPython issue 86296): its caller goes on though nobody waits for it.

    A master that has become a replica keeps its connections and refuses what is written over them; the name in the URL
    leads to another server by then, which only a new connection finds.
    """

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        num_before = task.cancelling()
        try:
            await super().send_packed_command(*args, **kwargs)  # type: ignore[misc]
        finally:
            if task.cancelling() > num_before:
                await self.disconnect(nowait=True)  # type: ignore[attr-defined]  # an answer is on its way here
                raise asyncio.CancelledError

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)  # type: ignore[misc]
        except ResponseError as error:
            if _is_of_replica(error):
                await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise


def _is_of_replica(error: ResponseError) -> bool:
    """Whether a write was refused. Before Redis 7 a script's errors are within another's words."""
    return isinstance(error, ReadOnlyError) or "-READONLY " in str(error)


class Outage:
    """Whether Redis answers, logged when it changes, and how long to wait before trying again."""

    def __init__(self, logger: logging.Logger, who: str, *, told_after_s: float = 0.0) -> None:
        """`told_after_s`: what is over sooner is not told, where calls have so little time that a busy moment of either
        side takes it."""
        self._logger = logger
        self._who = who
        self._told_after_s = told_after_s
        self._num_failures = 0
        self._since_s = 0.0
        self._is_told = False

    @property
    def is_reachable(self) -> bool:
        """Whether the last call was answered; true before the first."""
        return self._num_failures == 0

    @property
    def retry_s(self) -> float:
        """How long to wait before the next try: doubling from MIN_RETRY_S to MAX_RETRY_S."""
        return min(MIN_RETRY_S * 2.0 ** min(self._num_failures - 1, 10), MAX_RETRY_S)

    def failed(self, error: BaseException) -> None:
        now_s = time.monotonic()
        if self._num_failures == 0:
            self._since_s = now_s
        if not self._is_told and now_s - self._since_s >= self._told_after_s:
            self._is_told = True
            # A timeout says only that no answer was taken in: this process itself may have been too busy for that.
            why = "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            self._logger.warning("%s: nothing from Redis (%s), going on with what is known", self._who, why)
        self._num_failures += 1

    def answered(self) -> None:
        if self._is_told:
            self._logger.warning("%s: Redis answers again, after %d failed calls", self._who, self._num_failures)
        self._num_failures = 0
        self._is_told = False


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """Until `event` is set (true) or `timeout_s` has passed (false)."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def watch_task(task: asyncio.Task[None], logger: logging.Logger) -> None:
    """Log the exception that ends `task`, so that a bug in a background task is seen when it happens."""

    def on_done(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and done.exception() is not None:
            logger.error("%s ended by an error", done.get_name(), exc_info=done.exception())

    task.add_done_callback(on_done)
