"""Clients of a router: `Client` for blocking code, `AsyncClient` for asyncio. They use protos/tandem_inference.proto.

    client = Client("127.0.0.1:50051")
    print(client.generate("The capital of France is", max_tokens=8).text)

Each client owns one channel, which `close` or the end of a `with` block closes. A client checks every stream while
reading it (see `tandem.answer`), and continues it at another router if its own is lost (`tandem.resume`). Errors are
those of `rpc.errors`; a wrong parameter is an `InvalidRequest` that names its field, or a `ValueError` if it cannot
even be sent. Calls that still run when the client is closed, and later calls, raise `ClientClosed`. Dropping a stream
(break, cancel, an exception) cancels its request on every worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self, TypeVar, Unpack

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from protos import tandem_inference_pb2 as pb
from protos import tandem_worker_pb2
from rpc.channel import open_blocking_channel, open_channel
from rpc.errors import TandemError
from rpc.spread_channel import BlockingSpreadChannel, SpreadChannel
from rpc.tls import ClientTLS
from tandem.answer import Answer
from tandem.client_base import INFERENCE_SERVICE, ClientBase, ClientClosed, checked_address
from tandem.requests import (
    Generating,
    Messages,
    Prompt,
    Tokenizing,
    detokenize_request,
    profile_request,
    tokenize_request,
)
from tandem.resume import LOST, OnBroken, ResumableStream

T = TypeVar("T")

DEFAULT_ADDRESS = "127.0.0.1:50051"
CONTROL_TIMEOUT_S = 10.0
"""Timeout of calls that do not generate."""
PROFILE_READ_S = 70.0
"""The time that router and worker may take, after profiling, to evaluate and return the profile."""
RESUME_S = 20.0
"""Default time that a broken stream waits: longer than a router takes to start, or to notice a cut connection."""
_READINESS = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)


class Client(ClientBase):
    """Blocking client of the router at `address`. Threads may share one."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str = "",
        tls: ClientTLS | None = None,
        resume_s: float = RESUME_S,
        on_broken: OnBroken = lambda error, left_s: None,
    ) -> None:
        """
        address: one router, or several ("ipv4:10.0.0.4:50051,10.0.0.5:50051"). With several, requests go in turn to
            those that can serve. A request that its router has not accepted is sent to another router: once, or, if
            the router refuses it because it leaves, for up to 10 s (and `resume_s`). A call that is not answered is
            sent to another router once.
        api_key: one of the router's keys, if it requires one.
        tls: for a router that is served over TLS.
        resume_s: how long a stream that broke after it was accepted waits for a router that continues it; 0: not at
            all.
        on_broken: called whenever a request or a stream begins to wait for a router.
        """
        super().__init__(address, api_key=api_key, resume_s=resume_s, on_broken=on_broken)
        if self._is_spread:
            self._use(BlockingSpreadChannel(self._address, service=INFERENCE_SERVICE, tls=tls))
        else:
            self._use(open_blocking_channel(self._address, tls=tls))

    def generate(self, prompt: Prompt, **asked: Unpack[Generating]) -> Answer:
        """Return the whole answer."""
        self._check_one_answer(asked)
        (answer,) = self.generate_n(prompt, 1, **asked)
        return answer

    def generate_n(self, prompt: Prompt, n: int, **asked: Unpack[Generating]) -> list[Answer]:
        """Return `n` whole answers to one prompt, which is prefilled once. With a seed, answer i is the one to seed +
        i."""
        stream = self._begin(prompt, n=n, **asked)  # a stream, because it can be resumed
        for _ in self._read(stream):
            pass
        return stream.answers().answers()

    def stream(self, prompt: Prompt, *, n: int = 1, **asked: Unpack[Generating]) -> Generator[pb.GenerateResponse]:
        """Yield the messages of the `n` answers as they come. Closing the generator cancels the request."""
        return self._read(self._begin(prompt, n=n, **asked))

    def _read(self, stream: ResumableStream) -> Generator[pb.GenerateResponse]:
        while True:
            try:
                with self._errors_of_ours():
                    left_s = stream.timeout_s()
                    call = self._inference.Generate(stream.request(), timeout=left_s, metadata=stream.metadata)
                    try:
                        stream.note_metadata(call.initial_metadata())
                        for message in call:
                            yield stream.accept(message)
                    finally:
                        call.cancel()  # has no effect once the call has ended
            except (TandemError, ClientClosed) as error:
                if stream.has_ended:  # everything has come except the status
                    return
                self._closed.wait(stream.wait_s(error))
                continue
            stream.answers().check_ended()
            return

    def _ask(self, method: Callable[..., T], request: Message, timeout_s: float | None = None) -> T:
        """Make a unary call. If the router does not answer, and there are several, ask another one."""
        try:
            with self._asking():
                return method(request, timeout=timeout_s or CONTROL_TIMEOUT_S)
        except LOST:
            if not self._is_spread:
                raise
        with self._asking():
            return method(request, timeout=timeout_s or CONTROL_TIMEOUT_S)

    def abort(self, request_id: str) -> bool:
        """End a running request; its stream then ends with finish_reason abort. False if it was not running. A client
        that is spread over several routers raises `RuntimeError`."""
        response: pb.AbortResponse = self._ask(self._inference.Abort, self._abort_request(request_id))
        return response.was_running

    def tokenize(self, prompt: str | Messages, **asked: Unpack[Tokenizing]) -> pb.TokenizeResponse:
        """Return the token ids that `generate` would make of a text or of messages, and the context length."""
        response: pb.TokenizeResponse = self._ask(self._tokenizer.Tokenize, tokenize_request(prompt, **asked))
        return response

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`."""
        request = detokenize_request(token_ids, model, skip_special_tokens)
        response: pb.DetokenizeResponse = self._ask(self._tokenizer.Detokenize, request)
        return response.text

    def is_serving(self) -> bool:
        """Whether requests can be served now, which needs a decode worker. Raises `Unreachable` without a router."""
        health: health_pb2.HealthCheckResponse = self._ask(self._health.Check, _READINESS)
        return bool(health.status == health_pb2.HealthCheckResponse.SERVING)

    def model_info(self) -> pb.GetModelInfoResponse:
        info: pb.GetModelInfoResponse = self._ask(self._inference.GetModelInfo, pb.GetModelInfoRequest())
        return info

    def status(self) -> tandem_worker_pb2.ClusterStatus:
        """The state of the router and of every worker."""
        status: tandem_worker_pb2.ClusterStatus = self._ask(
            self._cluster.GetStatus, tandem_worker_pb2.GetClusterStatusRequest()
        )
        return status

    def audit(self) -> tandem_worker_pb2.ClusterAudit:
        """The owners of all KV blocks of every worker, counted anew."""
        audit: tandem_worker_pb2.ClusterAudit = self._ask(self._cluster.Audit, tandem_worker_pb2.AuditRequest())
        return audit

    def profile(
        self, worker_id: str, *, num_steps: int = 5, timeout_s: float = 30.0, with_trace: bool = False
    ) -> tandem_worker_pb2.WorkerProfile:
        """The time of each operation in a worker's next `num_steps` steps, or in as many as there are within
        `timeout_s`."""
        request = profile_request(worker_id, num_steps, timeout_s, with_trace)
        profile: tandem_worker_pb2.WorkerProfile = self._ask(self._cluster.Profile, request, timeout_s + PROFILE_READ_S)
        return profile

    def close(self) -> None:
        """Close the client. Calls that still run, in other threads too, raise `ClientClosed`."""
        self._closed.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(ClientBase):
    """asyncio client of the router at `address`. May be created anywhere, and belongs to the event loop of its first
    use; in another loop it raises `RuntimeError`."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str = "",
        tls: ClientTLS | None = None,
        resume_s: float = RESUME_S,
        on_broken: OnBroken = lambda error, left_s: None,
        is_spread: bool | None = None,
    ) -> None:
        """As `Client`'s, but several routers with TLS need a name for `address`, which their certificates contain: gRPC
        does not look up a list's addresses in certificates. `is_spread`: whether there may be several routers behind
        `address`; None: if it lists several."""
        checked_address(address, has_tls=tls is not None)
        super().__init__(address, api_key=api_key, resume_s=resume_s, on_broken=on_broken, is_spread=is_spread)
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        """Set with `_closed`; tasks can wait for it."""

    def _bind(self) -> None:
        """Open the channel on first use: gRPC's channels belong to the event loop on which they are opened."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            if self._is_spread:
                self._use(SpreadChannel(self._address, service=INFERENCE_SERVICE, tls=self._tls))
            else:
                self._use(open_channel(self._address, tls=self._tls))
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError("this AsyncClient was first used on another event loop: make one for each loop")

    @contextmanager
    def _errors_of_ours(self) -> Generator[None]:
        with super()._errors_of_ours():
            self._bind()
            yield

    async def generate(self, prompt: Prompt, **asked: Unpack[Generating]) -> Answer:
        """As `Client.generate`."""
        self._check_one_answer(asked)
        (answer,) = await self.generate_n(prompt, 1, **asked)
        return answer

    async def generate_n(self, prompt: Prompt, n: int, **asked: Unpack[Generating]) -> list[Answer]:
        """As `Client.generate_n`."""
        stream = self._begin(prompt, n=n, **asked)
        async for _ in self._read(stream):
            pass
        return stream.answers().answers()

    def stream(self, prompt: Prompt, *, n: int = 1, **asked: Unpack[Generating]) -> AsyncGenerator[pb.GenerateResponse]:
        """As `Client.stream`. Use `contextlib.aclosing` if the loop may be left early."""
        return self._read(self._begin(prompt, n=n, **asked))

    async def _read(self, stream: ResumableStream) -> AsyncGenerator[pb.GenerateResponse]:
        while True:
            try:
                with self._errors_of_ours():
                    left_s = stream.timeout_s()
                    call = self._inference.Generate(stream.request(), timeout=left_s, metadata=stream.metadata)
                    try:
                        stream.note_metadata(await call.initial_metadata())
                        async for message in call:
                            yield stream.accept(message)
                    finally:
                        call.cancel()  # has no effect once the call has ended
            except (TandemError, ClientClosed) as error:
                if stream.has_ended:
                    return
                await self._wait(stream.wait_s(error))
                continue
            stream.answers().check_ended()
            return

    async def _wait(self, wait_s: float) -> None:
        """Wait so long; less if the client is closed meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._closing.wait()

    async def _ask(
        self, method: Callable[[], Callable[..., Awaitable[T]]], request: Message, timeout_s: float | None = None
    ) -> T:
        """As `Client._ask`. `method` returns the stub's method, once the channel is open."""
        try:
            with self._asking():
                return await method()(request, timeout=timeout_s or CONTROL_TIMEOUT_S)
        except LOST:
            if not self._is_spread:
                raise
        with self._asking():
            return await method()(request, timeout=timeout_s or CONTROL_TIMEOUT_S)

    async def abort(self, request_id: str) -> bool:
        """As `Client.abort`."""
        response: pb.AbortResponse = await self._ask(lambda: self._inference.Abort, self._abort_request(request_id))
        return response.was_running

    async def tokenize(self, prompt: str | Messages, **asked: Unpack[Tokenizing]) -> pb.TokenizeResponse:
        """As `Client.tokenize`."""
        return await self._ask(lambda: self._tokenizer.Tokenize, tokenize_request(prompt, **asked))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        """As `Client.detokenize`."""
        request = detokenize_request(token_ids, model, skip_special_tokens)
        response: pb.DetokenizeResponse = await self._ask(lambda: self._tokenizer.Detokenize, request)
        return response.text

    async def is_serving(self) -> bool:
        """As `Client.is_serving`."""
        health: health_pb2.HealthCheckResponse = await self._ask(lambda: self._health.Check, _READINESS)
        return bool(health.status == health_pb2.HealthCheckResponse.SERVING)

    async def model_info(self) -> pb.GetModelInfoResponse:
        return await self._ask(lambda: self._inference.GetModelInfo, pb.GetModelInfoRequest())

    async def status(self) -> tandem_worker_pb2.ClusterStatus:
        """As `Client.status`."""
        return await self._ask(lambda: self._cluster.GetStatus, tandem_worker_pb2.GetClusterStatusRequest())

    async def audit(self) -> tandem_worker_pb2.ClusterAudit:
        """As `Client.audit`."""
        return await self._ask(lambda: self._cluster.Audit, tandem_worker_pb2.AuditRequest())

    async def profile(
        self, worker_id: str, *, num_steps: int = 5, timeout_s: float = 30.0, with_trace: bool = False
    ) -> tandem_worker_pb2.WorkerProfile:
        """As `Client.profile`."""
        request = profile_request(worker_id, num_steps, timeout_s, with_trace)
        return await self._ask(lambda: self._cluster.Profile, request, timeout_s + PROFILE_READ_S)

    async def close(self) -> None:
        """Close the client. Calls that still run, in other tasks, raise `ClientClosed`."""
        if self._loop is not None:
            self._bind()
        self._closed.set()
        self._closing.set()
        if self._loop is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
