"""Redis clients whose calls all have a time limit, and an outage log that reports once that Redis is away."""

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
"""What a call raises while Redis is away, slow or misbehaving. Trying again heals all of it."""

REDIS_TIMEOUT_S = 1.0
DEFAULT_TTL_MS = 6_000
"""How long a worker's entries live after its last heartbeat."""
DEFAULT_BEAT_MS = 2_000
MIN_RETRY_S = 0.1
MAX_RETRY_S = 2.0


@contextmanager
def wrong_answers_as_failures() -> Iterator[None]:
    """Context for calls and for parsing their results: turns errors caused by an invalid answer, as when something else
    answers in Redis' place, into one of `REDIS_FAILURES`. For example, redis-py's parser raises ValueError for an
    invalid length, and its pipelines raise TypeError."""
    try:
        yield
    except REDIS_FAILURES:
        raise
    except Exception as error:
        raise InvalidResponse(f"Redis sent an unexpected answer: {error!r:.200}") from error


def check_beat(ttl_ms: int, beat_ms: int) -> None:
    """Raise `ValueError` if entries would expire after one lost heartbeat."""
    if beat_ms < 1 or ttl_ms < 2 * beat_ms:
        raise ValueError(f"ttl_ms must be at least twice beat_ms, are {ttl_ms} and {beat_ms}")


def open_redis(url: str, *, timeout_s: float, max_connections: int = 4) -> Redis:
    """A client for `url` (redis://, rediss:// or unix://). Connects at the first call; the caller closes it.

    `timeout_s` limits connecting and each answer. Nothing is retried here: callers know what a retry means. If all
    `max_connections` are in use, a call waits for one, within the caller's own limit. Raises `ValueError` for a bad
    URL.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=None,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
        protocol=2,  # no server pushes: the next message is always the answer
    )
    pool.connection_class = type("Connection", (_OwnConnection, pool.connection_class), {})
    return Redis.from_pool(pool)


class _OwnConnection:
    """Mixin for the connection class of the URL: makes cancellation reliable, and closes the connection after a
    failover.

    redis-py sends within `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes just when the
    awaited call is done or has failed (CPython issue 86296): the cancelled caller would continue.

    A master that has become a replica keeps its connections and refuses writes. By then the name in the URL leads to
    another server, which only a new connection reaches.
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
    """Whether a replica has refused a write. Before Redis 7, a script's error is wrapped in another message."""
    return isinstance(error, ReadOnlyError) or "-READONLY " in str(error)


class Outage:
    """Tracks whether Redis answers, logs changes of that, and says how long to wait before trying again."""

    def __init__(self, logger: logging.Logger, who: str, *, told_after_s: float = 0.0) -> None:
        """`told_after_s`: shorter outages are not logged; for calls with such short time limits that a busy moment of
        either side exceeds them."""
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
            # A timeout only says that no answer was read: this process itself may have been too busy.
            why = "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            self._logger.warning("%s: Redis does not answer (%s), continuing with what is known", self._who, why)
        self._num_failures += 1

    def answered(self) -> None:
        if self._is_told:
            self._logger.warning("%s: Redis answers again, after %d failed calls", self._who, self._num_failures)
        self._num_failures = 0
        self._is_told = False


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until `event` is set (returns True) or `timeout_s` has passed (returns False)."""
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
            logger.error("%s ended with an error", done.get_name(), exc_info=done.exception())

    task.add_done_callback(on_done)
