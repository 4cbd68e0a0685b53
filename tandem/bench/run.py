"""Sends a workload and records the answers. An open loop: requests are sent when due, whatever the server does.

    for each request: wait until it is due ──> a task of its own ──backend.send──> pieces ──> Outcome

Owns the clock of a run and its tasks; the tasks are done, or cancelled, when `run_load` returns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple, Protocol

from tandem.answer import StreamBroken
from tandem.bench.outcome import BROKEN_STREAM, WRONG_LENGTH, Outcome, Progress, Usage
from tandem.bench.workload import Request, Workload


class Piece(NamedTuple):
    """A message of an answer. The last one has the usage, and no tokens."""

    num_tokens: int
    usage: Usage | None = None


class NotAnswered(Exception):  # noqa: N818 - named for what happened, as the errors of `rpc.errors` are
    """The server answered with an error, or not at all."""

    def __init__(self, code: str, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.is_refused = is_refused


class Backend(Protocol):
    """A server to measure."""

    ignores_eos: bool
    """Whether every answer has as many tokens as requested."""

    def send(self, request: Request) -> AsyncGenerator[Piece, None]:
        """The answer's messages as they come, checked. Raises `NotAnswered`, `StreamBroken`."""


async def run_load(workload: Workload, backend: Backend, progress: Progress | None = None) -> list[Outcome]:
    """Send all requests. Returns one outcome for each, in their order. Updates `progress` meanwhile."""
    progress = progress or Progress(len(workload.requests))
    start_s = time.perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for request in workload.requests:
            # Sleep even if the request is late, so that running tasks get their turn.
            await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - start_s)))
            tasks.append(group.create_task(_send_one(request, backend, start_s, progress)))
    return [task.result() for task in tasks]


async def _send_one(request: Request, backend: Backend, start_s: float, progress: Progress) -> Outcome:
    outcome = Outcome(due_s=request.at_s, sent_s=time.perf_counter() - start_s)
    progress.num_sent += 1
    try:
        async with aclosing(backend.send(request)) as pieces:
            async for piece in pieces:
                if piece.num_tokens:
                    outcome.arrived_s.append(time.perf_counter() - start_s)
                    progress.num_tokens += piece.num_tokens
                if piece.usage is not None:
                    outcome.usage = piece.usage
        _check_answer(outcome, request, backend.ignores_eos)
    except NotAnswered as error:
        outcome.code, outcome.message, outcome.is_refused = error.code, error.message, error.is_refused
    except StreamBroken as error:
        outcome.code, outcome.message = BROKEN_STREAM, str(error)
    except Exception as error:  # any error of the server is a failed request, and does not end the run
        outcome.code, outcome.message = type(error).__name__, str(error)
    outcome.ended_s = time.perf_counter() - start_s
    progress.count(outcome)
    return outcome


def _check_answer(outcome: Outcome, request: Request, ignores_eos: bool) -> None:
    """Raise `StreamBroken` if there are no tokens or no usage, and `NotAnswered` if the answer does not have the
    requested length."""
    if outcome.usage is None or not outcome.arrived_s:
        raise StreamBroken("the stream ended without " + ("a token" if outcome.usage else "its usage"))
    outcome.num_tokens = outcome.usage.completion_tokens
    if ignores_eos and outcome.num_tokens != request.output_tokens:
        raise NotAnswered(WRONG_LENGTH, f"{outcome.num_tokens} tokens came instead of {request.output_tokens}")
