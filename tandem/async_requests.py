"""The requests of an `AsyncLLM` that are under way: distributes the tokens of each step, and wakes the readers.

    open ──> begin ──> on_step … ──> each reader wakes once for whatever has come since
      │        └── abort: its answers end with "abort"   └── all answers ended: its id is free again
      └── leave, in any state: its part in the engine is aborted

Lives on one event loop. Owns neither the engine nor its thread; it only tells them what to add and to abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from engine.async_llm_engine import AsyncLLMEngine, EngineDeadError, StepNews
from engine.llm_engine import LLMEngine
from engine.outputs import RequestOutput as StepOutput
from tandem.checks import check_text
from tandem.offline_answer import OfflineAnswer, OfflineRequest, RequestOutput
from tandem.sampling_params import RequestOutputKind


class AsyncRequest:
    """One request, as its reader sees it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_aborted = False
        self.is_over = False
        """The request has ended, or nobody waits for it: the engine has no part of it, and gets none."""
        self.on_over: Callable[[], object] = lambda: None
        """Called once, when the request is over."""
        self._has_news = asyncio.Event()
        self._error: Exception | None = None
        self._kind = RequestOutputKind.CUMULATIVE
        self.answers: OfflineRequest | None = None
        """None until the prompt has been read."""

    def take(self, answers: OfflineRequest, kind: RequestOutputKind) -> None:
        self.answers, self._kind = answers, kind

    def wake(self) -> None:
        self._has_news.set()

    def end(self) -> None:
        """Mark the request as over."""
        if not self.is_over:
            self.is_over = True
            self.on_over()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.wake()

    async def next(self) -> RequestOutput:
        """Wait until something has come since the last call, and return the output. Raises the error with which the
        request failed."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if self._error is not None:
                raise self._error
            assert self.answers is not None, "news are of its answers"
            if self._kind is RequestOutputKind.DELTA:
                return self.answers.delta()
            if self._kind is RequestOutputKind.CUMULATIVE or self.answers.is_finished:
                return self.answers.output()


class AsyncRequests:
    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine
        self._requests: dict[str, AsyncRequest] = {}
        """Unfinished requests, by the caller's ids."""
        self._answers: dict[str, tuple[AsyncRequest, OfflineAnswer]] = {}
        """Unfinished answers, by the engine's names."""
        self.why_ended = ""
        """Why no more requests are served. A text, since an error would keep the engine, and its device memory,
        alive."""

    def open(self, request_id: str) -> AsyncRequest:
        """Open a request. Raises `ValueError` for an id that is invalid or in use, and `EngineDeadError`."""
        if self.why_ended:
            raise EngineDeadError(self.why_ended)
        check_text("request_id", request_id)
        if not request_id:
            raise ValueError("request_id: must not be empty")
        if request_id in self._requests:
            raise ValueError(f"request_id: {request_id!r:.80} is in use by a running request")
        request = self._requests[request_id] = AsyncRequest(request_id)
        return request

    async def begin(self, request: AsyncRequest) -> None:
        """Add the request's first answer to the engine. Raises `ValueError` for what the engine can never run, and
        `EngineDeadError`."""
        answers = request.answers
        assert answers is not None, "its prompt has been read"
        if request.is_aborted:
            self._end_aborted(request)
            return
        if self.why_ended:
            raise EngineDeadError(self.why_ended)
        self._answers |= {answer.name: (request, answer) for answer in answers.answers}
        try:
            await self._engine.call(answers.answers[0].add_to)
        except ValueError as error:
            raise ValueError(f"{answers.prompt.name}: {error}") from error
        except EngineDeadError as error:
            raise EngineDeadError(self.why_ended or str(error)) from error

    def on_step(self, news: StepNews) -> None:
        for output in news.outputs:
            if output.request_id in self._answers:  # otherwise it was aborted meanwhile
                self._advance(*self._answers[output.request_id], output)

    def on_failure(self, error: BaseException) -> None:
        self.end(f"the engine has failed: {type(error).__name__}: {error}")

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Abort these requests; unknown ids are ignored. Returns once their blocks are free."""
        names: list[str] = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.is_aborted = True
                names += self._forget(request)
                self._end_aborted(request)
        if names:
            await self._engine.call(partial(_abort, names))

    def leave(self, request: AsyncRequest) -> None:
        """The request's reader is gone: abort the request in the engine."""
        if names := self._forget(request):
            self._engine.post(partial(_abort, names))

    def end(self, why: str) -> None:
        """Fail all requests, and all later ones."""
        self.why_ended = self.why_ended or why
        for request in list(self._requests.values()):
            self._forget(request)
            request.fail(EngineDeadError(self.why_ended))

    def _advance(self, request: AsyncRequest, answer: OfflineAnswer, output: StepOutput) -> None:
        try:
            answer.advance(output, add=self._add_later, abort=self._abort_later)
        except Exception as error:  # its reader waits, so it must learn of any error
            self.leave(request)
            request.fail(error)
            return
        if answer.is_finished:
            del self._answers[answer.name]
        if request.answers is not None and request.answers.is_finished:
            del self._requests[request.request_id]
            request.end()
        request.wake()

    def _add_later(self, answer: OfflineAnswer) -> None:
        self._engine.post(answer.add_to)

    def _abort_later(self, name: str) -> None:
        self._engine.post(partial(_abort, [name]))

    def _end_aborted(self, request: AsyncRequest) -> None:
        """End the answers and wake the reader. If the prompt is still being read, `begin` does this later."""
        if request.answers is not None:
            for answer in request.answers.answers:
                answer.abort()
            request.wake()

    def _forget(self, request: AsyncRequest) -> list[str]:
        """Drop the request; its id is free from now on. Returns the names of its answers that the engine may still
        have."""
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
            request.end()
        names = [] if request.answers is None else [answer.name for answer in request.answers.answers]
        return [name for name in names if self._answers.pop(name, None) is not None]


def _abort(names: list[str], engine: LLMEngine) -> None:
    for name in names:
        engine.abort(name)
