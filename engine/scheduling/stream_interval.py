"""Batches an answer's tokens for reporting: the first token at once, later ones `stream_interval` at a time. Pure.

    step ──[a: 1 token]──> first of a: reported
    step ──[a: 1 token]──> kept                     ── a is aborted: dropped
    step ──[a: 1 token]──> with the kept ones these are `stream_interval` tokens, or a ends: reported together

A message costs the worker, the router and the gateway some tens of microseconds each, whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.outputs import FinishReason, RequestOutput


class StreamInterval:
    """One per engine."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._kept: dict[str, RequestOutput | None] = {}
        """By request whose first token has been reported: the output that has not been."""

    def take_in(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Take in one step's outputs, and return those to report now, joined with the kept ones."""
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
        """Drop what is kept of a request that has ended. Safe to repeat."""
        self._kept.pop(request_id, None)
