"""Asks a server for every answer that an output lacks, and writes each one down once, as soon as it comes.

    input ──each line checked──> those that the output lacks ──up to `max_concurrency` at once──> asked
      asked ── answered, or refused for good ──> a line of the output
        ^  └── refused for now (429, 502, 503), or the connection broke ──> wait ──┐
        └──────────────────────────────────────────────────────────────────────────┘

Owns the output while it runs: a lock keeps a second run out. A run that ends early, for whatever reason, loses nothing:
running the same command again continues with what is missing. The run waits for a server that is reachable but full; a
server that cannot be reached for `retry_s` ends the run.

Each concurrent task has its own client with one connection: a shared pool looks at all its connections for each
request, so that with a thousand of them it would hardly send any.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import secrets
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rpc.keys import check_keys
from tandem.batch import lines
from tandem.batch.lines import (
    BatchError,
    BatchRequest,
    check_regular,
    error_line,
    read_done,
    read_requests,
    result_line,
)

if TYPE_CHECKING:
    import httpx2

FULL = 429
AWAY = (502, 503)
"""Statuses that mean that the server is not reachable."""
NOT_LET_IN = (401, 403)
"""Statuses that mean that the run's key is wrong, which is no request's fault."""
CONNECT_TIMEOUT_S = 10.0
CONNECTS_S = 2 * CONNECT_TIMEOUT_S
"""A try that is older than this has a connection, TLS included."""
ANSWER_MARGIN_S = 30.0
"""Time beyond a request's own deadline, for a server that does not know deadlines, or is gone without notice."""
FIRST_WAIT_S, LAST_WAIT_S = 0.5, 30.0
"""First and longest wait between two tries, if the server does not give a time."""
MAX_RETRY_AFTER_S = 300.0
TOO_LARGE = f"the answer is larger than {lines.MAX_LINE_BYTES >> 20} MiB and was dropped"
KEY_VARIABLE = "OPENAI_API_KEY"


class ServerAway(Exception):  # noqa: N818 - named for what happened
    """The server cannot be reached, or refuses the key. The message says what to do."""


@dataclass(frozen=True, kw_only=True)
class BatchArgs:
    """The settings of a run. Raises `ValueError` naming the flag."""

    input_file: Path
    output_file: Path
    base_url: str
    api_key: str = ""
    ssl_ca_certs: str = ""
    max_concurrency: int = 64
    priority: int = 1
    """Priority of bodies that have none; 0: send none."""
    request_timeout_s: float = 3600.0
    retry_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"--base-url must begin with http:// or https://, is {self.base_url!r}")
        try:
            host, _ = urlsplit(self.base_url).hostname, urlsplit(self.base_url).port
        except ValueError as error:
            raise ValueError(f"--base-url: {error}") from error
        if not host:
            raise ValueError(f"--base-url must name a host, is {self.base_url!r}")
        if self.api_key:
            check_keys("--api-key", [self.api_key])
        if _are_one(self.input_file, self.output_file):
            raise ValueError("--output-file must be another file than --input-file")


def _are_one(one: Path, other: Path) -> bool:
    """Whether both paths are the same file, even if it does not exist yet."""
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


@dataclass(slots=True)
class BatchProgress:
    """The progress of a run, updated while it runs."""

    num_requests: int = 0
    num_before: int = 0
    """Requests that an earlier run has done."""
    num_answered: int = 0
    num_failed: int = 0
    """Requests that were refused for good: their lines say why."""
    num_running: int = 0
    num_waiting: int = 0
    """Running requests that were refused for now."""
    num_retries: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    last_refusal: str = ""
    last_failure: str = ""

    @property
    def num_left(self) -> int:
        return self.num_requests - self.num_before - self.num_answered - self.num_failed


async def answer_all(args: BatchArgs, progress: BatchProgress) -> None:
    """Run the batch; returns when the output has a line for every request. Raises `BatchError`, `ServerAway`,
    `OSError`."""
    with _opened(args.output_file) as output:
        done, num_bytes = read_done(args.output_file)
        for request in read_requests(args.input_file):  # the whole input is checked before anything is sent
            progress.num_requests += 1
            progress.num_before += request.custom_id in done
        os.ftruncate(output, num_bytes)
        os.lseek(output, num_bytes, os.SEEK_SET)
        if num_bytes and os.pread(output, 1, num_bytes - 1) != b"\n":
            os.write(output, b"\n")
        if progress.num_left:
            open_client = _client_maker(args)
            await _refuse_if_away(open_client, args)
            await _Run(args, open_client, output, progress).run(done)
        if progress.num_left:
            raise BatchError(f"{args.input_file}: has changed since it was checked; run the same command again")
        os.fsync(output)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file descriptor for writing. Creates the file if it does not exist, and locks it."""
    check_regular(path)
    try:
        output = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"{path}: another run is writing to it") from None
        yield output
    finally:
        os.close(output)


def _client_maker(args: BatchArgs) -> Callable[[], httpx2.AsyncClient]:
    """Returns a function that makes clients, each for one request at a time; the caller closes them."""
    import httpx2

    timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
    headers = {"content-type": "application/json", "x-request-timeout-ms": str(round(1000 * args.request_timeout_s))}
    if args.api_key:
        headers["authorization"] = f"Bearer {args.api_key}"
    try:
        trusted = (
            ssl.create_default_context(cafile=args.ssl_ca_certs)
            if args.ssl_ca_certs
            else httpx2.create_ssl_context(trust_env=False)
        )
    except (OSError, ssl.SSLError) as error:
        raise BatchError(f"--ssl-ca-certs {args.ssl_ca_certs}: {error}") from error
    base_url = args.base_url.removesuffix("/").removesuffix("/v1")
    return lambda: httpx2.AsyncClient(
        base_url=base_url, timeout=timeout, headers=headers, verify=trusted, trust_env=False
    )


async def _refuse_if_away(open_client: Callable[[], httpx2.AsyncClient], args: BatchArgs) -> None:
    """Raise `ServerAway` if no server answers, since a person who has just typed its address wants to know at once. A
    busy server is fine."""
    import httpx2

    try:
        async with open_client() as client, asyncio.timeout(CONNECT_TIMEOUT_S):
            response = await client.get("/v1/models")
        if response.status_code in NOT_LET_IN:
            raise _not_let_in(args)
        if response.is_redirect:
            where = response.headers.get("location", "elsewhere")
            raise ServerAway(f"{args.base_url} refers to {where}: name the server itself with --base-url")
    except (httpx2.RequestError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise ServerAway(
            f"no server answers at {args.base_url} ({why}). Start one with `tandem up`, or name another with --base-url"
        ) from error


@dataclass(frozen=True, slots=True)
class _Answer:
    """A response of the server."""

    status_code: int
    request_id: str
    text: bytes
    is_whole: bool
    """The response is no longer than a line may be, so `text` has all of it."""


@dataclass
class _Run:
    args: BatchArgs
    open_client: Callable[[], httpx2.AsyncClient]
    output: int
    """File descriptor of the output, positioned at its end."""
    progress: BatchProgress
    away_since_s: float | None = None
    """When the server was first found unreachable since its last response. None: it is reachable."""
    tries_s: dict[str, float] = field(default_factory=dict)
    """When each try that is under way began, by its request id, the oldest first."""

    async def run(self, done: set[str]) -> None:
        left = (request for request in read_requests(self.args.input_file) if request.custom_id not in done)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.args.max_concurrency, self.progress.num_left)):
                    group.create_task(self._ask_on(left))
        except* (ServerAway, BatchError, OSError) as errors:
            raise errors.exceptions[0] from None

    async def _ask_on(self, left: Iterator[BatchRequest]) -> None:
        async with self.open_client() as client:
            for request in left:
                self.progress.num_running += 1
                try:
                    answer = await self._answer(client, request)
                finally:
                    self.progress.num_running -= 1
                self._keep(request, answer)

    async def _answer(self, client: httpx2.AsyncClient, request: BatchRequest) -> _Answer:
        """Send the request until the response is final."""
        import httpx2

        body = request.body
        if self.args.priority and "priority" not in body:
            body = {**body, "priority": self.args.priority}
        content = json.dumps(body, separators=(",", ":")).encode()
        wait_s = FIRST_WAIT_S
        while True:
            request_id = secrets.token_hex(12)
            try:
                response, answer = await self._try(client, request.url, content, request_id)
                if answer.status_code in NOT_LET_IN:
                    raise _not_let_in(self.args)
                if answer.status_code not in AWAY:
                    self.away_since_s = None
                    if answer.status_code != FULL:
                        return answer
                else:
                    self._is_away()
                why, told_s = f"{answer.status_code}: {_message(_read(answer))}", _retry_after_s(response)
            except TimeoutError:
                self._is_away()
                why, told_s = f"no answer within {self.args.request_timeout_s:g} s", None
            except httpx2.RequestError as error:
                self._is_away()
                why, told_s = str(error) or type(error).__name__, None
            self._refuse_if_gone(why)
            await self._wait(why, wait_s if told_s is None else told_s)
            wait_s = min(2 * wait_s, LAST_WAIT_S)

    async def _try(
        self, client: httpx2.AsyncClient, url: str, content: bytes, request_id: str
    ) -> tuple[httpx2.Response, _Answer]:
        self.tries_s[request_id] = time.monotonic()
        try:
            async with (
                asyncio.timeout(self.args.request_timeout_s + ANSWER_MARGIN_S),
                client.stream("POST", url, content=content, headers={"x-request-id": request_id}) as response,
            ):
                text = bytearray()
                async for piece in response.aiter_bytes():
                    text += piece
                    if len(text) > lines.MAX_LINE_BYTES:
                        break
                given_id = response.headers.get("x-request-id", request_id)
                is_whole = len(text) <= lines.MAX_LINE_BYTES
                return response, _Answer(response.status_code, given_id, bytes(text), is_whole)
        finally:
            del self.tries_s[request_id]

    def _is_away(self) -> None:
        if self.away_since_s is None:
            self.away_since_s = time.monotonic()

    def _refuse_if_gone(self, why: str) -> None:
        """Raise `ServerAway` if the server has been unreachable for too long; but not while a try has a connection,
        since it may still be answered."""
        if self.away_since_s is None:
            return
        now_s = time.monotonic()
        away_s = now_s - self.away_since_s
        longest_s = now_s - next(iter(self.tries_s.values()), now_s)
        if away_s > self.args.retry_s and longest_s <= CONNECTS_S:
            raise ServerAway(
                f"{self.args.base_url} has not answered for {away_s:.0f} s ({why}); run the same command to continue "
                f"with the {self.progress.num_left} requests that are left"
            )

    async def _wait(self, why: str, wait_s: float) -> None:
        self.progress.last_refusal = why
        self.progress.num_retries += 1
        self.progress.num_waiting += 1
        try:
            # A random factor: requests that were refused together should not all return together.
            await asyncio.sleep(wait_s * random.uniform(1.0, 1.25))
        finally:
            self.progress.num_waiting -= 1

    def _keep(self, request: BatchRequest, answer: _Answer) -> None:
        """Write the answer to the output, and count it."""
        progress, body = self.progress, _read(answer)
        line = _line(request, answer, body)
        _write(self.output, line or error_line(request.custom_id, answer.request_id, "answer_too_large", TOO_LARGE))
        if answer.status_code == 200 and line and isinstance(body, dict):
            progress.num_answered += 1
        else:
            progress.num_failed += 1
            progress.last_failure = f"{answer.status_code}: {_message(body) if line else TOO_LARGE}"
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            progress.num_prompt_tokens += _number(usage, "prompt_tokens", "input_tokens")
            progress.num_output_tokens += _number(usage, "completion_tokens", "output_tokens")


def _line(request: BatchRequest, answer: _Answer, body: Any) -> bytes:
    """The line for the output; empty if it would be longer than a next run accepts."""
    try:
        line = result_line(request.custom_id, answer.status_code, answer.request_id, body)
    except (ValueError, RecursionError):  # Python parses some texts that are no JSON, or that it cannot write as JSON
        line = result_line(request.custom_id, answer.status_code, answer.request_id, _text(answer))
    return line if answer.is_whole and len(line) <= lines.MAX_LINE_BYTES else b""


def _not_let_in(args: BatchArgs) -> ServerAway:
    return ServerAway(f"{args.base_url} requires a key: give it with --api-key KEY or {KEY_VARIABLE}")


def _write(output: int, line: bytes) -> None:
    """Write all of `line` or nothing: a full disk may take a part of it, and nothing may follow that. Raises
    `BatchError`."""
    start = os.lseek(output, 0, os.SEEK_CUR)
    try:
        while line:
            line = line[os.write(output, line) :]
    except OSError as error:
        os.ftruncate(output, start)
        os.lseek(output, start, os.SEEK_SET)
        raise BatchError(f"cannot write the output: {error.strerror}; run the same command to continue") from error


def _read(answer: _Answer) -> Any:
    """The response's body, parsed if it is JSON, otherwise as text."""
    try:
        return json.loads(answer.text)
    except (ValueError, RecursionError):
        return _text(answer)


def _text(answer: _Answer) -> str:
    return answer.text.decode(errors="replace")


def _message(body: Any) -> str:
    """An error's message on one line."""
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:300]


def _retry_after_s(response: httpx2.Response) -> float | None:
    try:
        return min(max(0.1, float(response.headers["retry-after"])), MAX_RETRY_AFTER_S)
    except (KeyError, ValueError):  # none, or a date
        return None


def _number(usage: dict[str, Any], *names: str) -> int:
    return next((usage[name] for name in names if isinstance(usage.get(name), int)), 0)
