"""Runs the answers to one prompt, each a sequence with a life cycle of its own, and merges their messages into one
stream.

    first    queue ── prefill ── decodes ─────────────────────────────────────────> its last message
                                  │ the prompt's KV lies in its worker's cache
    others   wait ────────────────┴─> queue ──────── there, or elsewhere ─────────> their last messages

So the prompt is prefilled once and its KV moved once. The other answers do not count as new requests: neither the
queue's bound nor the deadline's forecast refuses them. But they wait their turn, so that a request for many answers
delays others no longer than as many requests would. An error that ends one answer ends them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from protos import tandem_inference_pb2 as pb
from router.lifecycle import Lifecycle
from router.request_events import Stopped
from router.timings import AttemptStamps
from rpc.merge import merged

Responses = AsyncGenerator[pb.GenerateResponse, None]


class Sequences:
    """All answers to one prompt. Iterate `run` once. A caller that stops iterating cancels them all, on every
    worker."""

    def __init__(self, lifecycles: Sequence[Lifecycle], *, is_streaming: bool) -> None:
        """`lifecycles`: the first answer's, then those that follow it. If not `is_streaming`, each answer is one
        message."""
        self.lifecycles = lifecycles
        self._is_streaming = is_streaming
        self._is_prefilled = asyncio.Event()

    def stop(self, stopped: Stopped) -> None:
        """End all answers from outside: Abort."""
        for lifecycle in self.lifecycles:
            lifecycle.stop(stopped)

    @property
    def attempts(self) -> dict[int, list[AttemptStamps]]:
        """By the answer's number: the attempts at it."""
        return {lifecycle.sequence: lifecycle.account.attempts for lifecycle in self.lifecycles}

    def run(self) -> Responses:
        """The messages of all answers, as they come. Raises the first error that ends one of them."""
        first, *others = self.lifecycles
        if not others:
            return self._messages(first.run())
        streams = [self._messages(self._first(first)), *(self._messages(self._other(each)) for each in others)]
        return _without_index(streams)

    def _messages(self, responses: Responses) -> Responses:
        return responses if self._is_streaming else _as_one(responses)

    async def _first(self, lifecycle: Lifecycle) -> Responses:
        num_tokens = 0
        async with aclosing(lifecycle.run()) as responses:
            async for response in responses:
                num_tokens += len(response.token_ids)
                # The second token comes from a worker that has the KV of the whole prompt; the first need not.
                if num_tokens > 1 or response.finish_reason or lifecycle.has_one_worker:
                    self._is_prefilled.set()
                yield response

    async def _other(self, lifecycle: Lifecycle) -> Responses:
        await self._is_prefilled.wait()
        async with aclosing(lifecycle.run()) as responses:
            async for response in responses:
                yield response


async def _without_index(streams: Sequence[Responses]) -> Responses:
    async with aclosing(merged(streams)) as messages:
        async for _, message in messages:
            yield message


async def _as_one(responses: Responses) -> Responses:
    """Join all messages of an answer into one."""
    whole = pb.GenerateResponse()
    texts: list[str] = []
    thoughts: list[str] = []
    calls: dict[int, pb.ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    async with aclosing(responses):
        async for response in responses:
            texts.append(response.text)
            thoughts.append(response.reasoning)
            for piece in response.tool_calls:
                calls.setdefault(piece.index, piece)
                arguments.setdefault(piece.index, []).append(piece.arguments)
            whole.MergeFrom(response)  # appends repeated fields; other fields take the last value set
    whole.offset -= len(whole.token_ids)
    whole.text = "".join(texts)
    whole.reasoning = "".join(thoughts)
    del whole.tool_calls[:]
    for index, first in calls.items():
        whole.tool_calls.add(index=index, id=first.id, name=first.name, arguments="".join(arguments[index]))
    yield whole
