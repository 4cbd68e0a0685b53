"""Asks a server for every answer that an output lacks, and writes each down once, as soon as it is there.

    input ──each line checked──> those that the output lacks ──up to `max_concurrency` at once──> asked
      asked ── answered, or refused for good ──> a line of the output
        ^  └── refused for now (429, 502, 503), or the connection broke ──> wait ──┐
        └──────────────────────────────────────────────────────────────────────────┘

Owns the output while it runs: a lock keeps a second run out. A run that ends early, however it does, has lost nothing:
the same one again goes on with what is missing. A server that is there, and has no room, is waited for; one that cannot
be reached for `retry_s` ends the run.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import secrets
import ssl
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.batch.lines import BatchError, BatchRequest, read_done, read_requests, result_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx2

FOR_NOW = (429, 502, 503)
"""What a server says that has no room, or is not there."""
NOT_LET_IN = (401, 403)
"""It is the run's key that is wrong, and no line's fault."""
CONNECT_TIMEOUT_S = 10.0
ANSWER_MARGIN_S = 30.0
"""Beyond a request's own deadline, for a server that does not know it, or has gone without a word."""
FIRST_WAIT_S, LAST_WAIT_S = 0.5, 30.0
"""Between two tries, where the server does not say how long."""
MAX_RETRY_AFTER_S = 300.0


KEY_VARIABLE = "OPENAI_API_KEY"


class ServerAway(Exception):  # noqa: N818 - named for what happened
    """It cannot be reached, or lets nobody in. The message says what to do."""


@dataclass(frozen=True, kw_only=True)
class BatchArgs:
    """What is run. Raises `ValueError` naming the flag."""

    input_file: Path
    output_file: Path
    base_url: str
    api_key: str = ""
    ssl_ca_certs: str = ""
    max_concurrency: int = 64
    priority: int = 1
    """Of bodies that have none; 0: none."""
    request_timeout_s: float = 3600.0
    retry_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"--base-url must begin with http:// or https://, is {self.base_url!r}")
        if self.output_file.exists() and self.input_file.exists() and self.output_file.samefile(self.input_file):
            raise ValueError("--output-file must be another file than --input-file")


@dataclass(slots=True)
class BatchProgress:
    """Kept up to date while it runs."""

    num_requests: int = 0
    num_before: int = 0
    """Of them those that an earlier run has answered."""
    num_answered: int = 0
    num_failed: int = 0
    """Refused for good: their lines say why."""
    num_running: int = 0
    num_waiting: int = 0
    """Of those that run: refused for now."""
    num_retries: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    last_refusal: str = ""
    last_failure: str = ""

    @property
    def num_left(self) -> int:
        return self.num_requests - self.num_before - self.num_answered - self.num_failed


async def answer_all(args: BatchArgs, progress: BatchProgress) -> None:
    """Returns when the output has a line for every request. Raises `BatchError`, `ServerAway`, `OSError`."""
    with _opened(args.output_file) as output:
        done, num_bytes = read_done(args.output_file)
        os.ftruncate(output, num_bytes)
        os.lseek(output, num_bytes, os.SEEK_SET)
        for request in read_requests(args.input_file):  # all of it is checked before anything is asked
            progress.num_requests += 1
            progress.num_before += request.custom_id in done
        async with _open_client(args) as client:
            if progress.num_left:
                await _refuse_if_away(client, args)
                await _Run(args, client, output, progress).run(done)
        os.fsync(output)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file descriptor to write through, of a file that is made if it is not there. Locked."""
    try:
        output = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"{path}: another run writes to it") from None
        yield output
    finally:
        os.close(output)


@asynccontextmanager
async def _open_client(args: BatchArgs) -> AsyncIterator[httpx2.AsyncClient]:
    import httpx2

    timeout = httpx2.Timeout(args.request_timeout_s + ANSWER_MARGIN_S, connect=CONNECT_TIMEOUT_S, pool=None)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"x-request-timeout-ms": str(round(1000 * args.request_timeout_s))}
    if args.api_key:
        headers["authorization"] = f"Bearer {args.api_key}"
    try:
        trusted = ssl.create_default_context(cafile=args.ssl_ca_certs) if args.ssl_ca_certs else True
    except (OSError, ssl.SSLError) as error:
        raise BatchError(f"--ssl-ca-certs {args.ssl_ca_certs}: {error}") from error
    async with httpx2.AsyncClient(
        base_url=args.base_url.removesuffix("/").removesuffix("/v1"), timeout=timeout, limits=limits, headers=headers,
        verify=trusted, trust_env=False,
    ) as client:  # fmt: skip
        yield client


async def _refuse_if_away(client: httpx2.AsyncClient, args: BatchArgs) -> None:
    """Whoever has just typed an address wants to know now. It may be busy."""
    import httpx2

    try:
        response = await client.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
        if response.status_code in NOT_LET_IN:
            raise _not_let_in(args)
    except httpx2.TransportError as error:
        why = str(error) or type(error).__name__
        raise ServerAway(
            f"no server answers at {args.base_url} ({why}). Start one with `tandem up`, or name another with --base-url"
        ) from error


@dataclass
class _Run:
    args: BatchArgs
    client: httpx2.AsyncClient
    output: int
    """A file descriptor, at its end."""
    progress: BatchProgress
    heard_s: float = field(default_factory=time.monotonic)
    """When the server last said anything but that it is not there."""

    async def run(self, done: set[str]) -> None:
        left = (request for request in read_requests(self.args.input_file) if request.custom_id not in done)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.args.max_concurrency, self.progress.num_left)):
                    group.create_task(self._ask_on(left))
        except* (ServerAway, BatchError, OSError) as errors:
            raise errors.exceptions[0] from None

    async def _ask_on(self, left: Iterator[BatchRequest]) -> None:
        for request in left:
            self.progress.num_running += 1
            try:
                status, request_id, body = await self._answer(request)
            finally:
                self.progress.num_running -= 1
            _write(self.output, result_line(request.custom_id, status, request_id, body))
            self._count(status, body)

    async def _answer(self, request: BatchRequest) -> tuple[int, str, Any]:
        """Status, the request's id and the body, once they are for good."""
        import httpx2

        body = request.body
        if self.args.priority and "priority" not in body:
            body = {**body, "priority": self.args.priority}
        wait_s = FIRST_WAIT_S
        while True:
            request_id = secrets.token_hex(12)
            try:
                response = await self.client.post(request.url, json=body, headers={"x-request-id": request_id})
                if response.status_code in NOT_LET_IN:
                    raise _not_let_in(self.args)
                if response.status_code not in FOR_NOW:
                    self.heard_s = time.monotonic()
                    return response.status_code, response.headers.get("x-request-id", request_id), _read(response)
                if response.status_code == 429:
                    self.heard_s = time.monotonic()
                why, told_s = f"{response.status_code}: {_message(_read(response))}", _retry_after_s(response)
            except httpx2.TransportError as error:
                why, told_s = str(error) or type(error).__name__, None
            self._refuse_if_gone(why)
            await self._wait(why, wait_s if told_s is None else told_s)
            wait_s = min(2 * wait_s, LAST_WAIT_S)

    def _refuse_if_gone(self, why: str) -> None:
        away_s = time.monotonic() - self.heard_s
        if away_s > self.args.retry_s and self.progress.num_running == self.progress.num_waiting + 1:
            raise ServerAway(
                f"{self.args.base_url} has not answered for {away_s:.0f} s ({why}); the same command goes on with the "
                f"{self.progress.num_left} requests that are left"
            )

    async def _wait(self, why: str, wait_s: float) -> None:
        self.progress.last_refusal = why
        self.progress.num_retries += 1
        self.progress.num_waiting += 1
        try:
            # Not all at the same moment: what was refused together would be refused together again.
            await asyncio.sleep(wait_s * random.uniform(1.0, 1.25))
        finally:
            self.progress.num_waiting -= 1

    def _count(self, status: int, body: Any) -> None:
        progress = self.progress
        if status == 200:
            progress.num_answered += 1
        else:
            progress.num_failed += 1
            progress.last_failure = f"{status}: {_message(body)}"
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            progress.num_prompt_tokens += _number(usage, "prompt_tokens", "input_tokens")
            progress.num_output_tokens += _number(usage, "completion_tokens", "output_tokens")


def _not_let_in(args: BatchArgs) -> ServerAway:
    return ServerAway(f"{args.base_url} requires a key: give it with --api-key KEY or {KEY_VARIABLE}")


def _write(output: int, line: bytes) -> None:
    """All of it, or none: a disk that is full takes a part, behind which nothing else may stand."""
    start = os.lseek(output, 0, os.SEEK_CUR)
    try:
        while line:
            line = line[os.write(output, line) :]
    except OSError:
        os.ftruncate(output, start)
        os.lseek(output, start, os.SEEK_SET)
        raise


def _read(response: httpx2.Response) -> Any:
    """What came, as JSON where it is some."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return response.text


def _message(body: Any) -> str:
    """What an error says, in a line."""
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:300]


def _retry_after_s(response: httpx2.Response) -> float | None:
    try:
        return min(max(float(response.headers["retry-after"]), 0.1), MAX_RETRY_AFTER_S)
    except (KeyError, ValueError):  # none, or a date
        return None


def _number(usage: dict[str, Any], *names: str) -> int:
    return next((usage[name] for name in names if isinstance(usage.get(name), int)), 0)
