"""Which tokens are told when: the first of an answer at once, the others so many at a time. Pure.

    step ──[a: 1 token]──> first of a: told
    step ──[a: 1 token]──> kept                     ── a is aborted: forgotten
    step ──[a: 1 token]──> kept and this are `stream_interval` tokens, or a ends: told together

Each message costs whoever it passes through, worker, router and gateway, some tens of microseconds whatever is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.outputs import FinishReason, RequestOutput


class StreamInterval:
    """Of one engine."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._kept: dict[str, RequestOutput | None] = {}
        """Of each request whose first token has been told, what has not."""

    def take_in(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Of one step's outputs and those kept before, what is told now."""
        if self._num_tokens == 1:
            return list(outputs)
        return [due for output in outputs for due in self._due(output)]

    def _due(self, output: RequestOutput) -> list[RequestOutput]:
        name = output.request_id
        is_first = name not in self._kept
        kept = self._kept.pop(name, None)
        if output.finish_reason is FinishReason.ERROR:
            return [output] if kept is None else [kept, output]
        told = output if kept is None else kept.joined(output)
        is_due = is_first or told.is_finished or len(told.token_ids) >= self._num_tokens
        if not told.is_finished:
            self._kept[name] = None if is_due else told
        return [told] if is_due else []

    def forget(self, request_id: str) -> None:
        """The request has ended; repeating it is harmless."""
        self._kept.pop(request_id, None)
