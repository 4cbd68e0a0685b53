"""The answer of /v1/responses in OpenAI's words: the object, whole, and a stream's events. Pure.

    created ── in_progress ── what the items tell ── … ──> completed, incomplete or failed

Both are made of the same messages by the same `Output`, so that they agree. The last object carries `timings`, as those
of other routes do.
"""

from __future__ import annotations

from typing import Any

from gateway.answers import timings_of
from gateway.errors import KINDS, Refusal
from gateway.responses.output import Output, Status
from gateway.responses.request import ChosenTool, ResponseRequest
from gateway.spoken import Event
from protos.tandem_inference_pb2 import FinishReason, GenerateResponse, Usage
from rpc.errors import InvalidRequest, Overloaded

_CODES = {KINDS[Overloaded].type: "rate_limit_exceeded", KINDS[InvalidRequest].type: "invalid_prompt"}
"""Of errors, by their type on other routes; of all others "server_error"."""


class ResponseAnswer:
    """To one request."""

    def __init__(self, body: ResponseRequest, *, request_id: str, created_s: int, model: str) -> None:
        self._output = Output(request_id, has_logprobs=body.wants_logprobs)
        self._num_events = 0
        self._told = {"id": f"resp_{request_id}", "object": "response", "created_at": created_s, "model": model}
        self._told |= _asked_of(body)
        self._whole: dict[str, Any] | None = None

    def opening(self) -> list[Event]:
        """That there will be one."""
        response = self._response("in_progress")
        return self._numbered(
            [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]
        )

    def accept(self, message: GenerateResponse) -> list[Event]:
        """What is new with `message`; with the last one, the end. Raises `StreamBroken`."""
        events = self._output.accept(message)
        if message.HasField("usage"):
            events += self._end(message)
        return self._numbered(events)

    def failed(self, refusal: Refusal) -> Event:
        """The last event where there is no end."""
        self._output.cut()
        response = {**self._response("failed"), "error": _error_of(refusal)}
        (event,) = self._numbered([{"type": "response.failed", "response": response}])
        return event

    def whole(self) -> dict[str, Any]:
        """After the last message."""
        assert self._whole is not None
        return self._whole

    def _end(self, message: GenerateResponse) -> list[Event]:
        is_whole = message.finish_reason == FinishReason.FINISH_REASON_STOP
        status: Status = "completed" if is_whole else "incomplete"
        events = self._output.end(status)
        self._whole = {
            **self._response(status),
            "incomplete_details": None if is_whole else _why(message.finish_reason),
            "usage": _usage_of(message.usage, self._output.num_thought_tokens),
            "timings": timings_of([message.timings]),
        }
        return [*events, {"type": f"response.{status}", "response": self._whole}]

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._told,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output.items(),
            "usage": None,
        }

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events


def _asked_of(body: ResponseRequest) -> dict[str, Any]:
    """What an answer repeats of its request. Null: the model's default."""
    chosen = body.tool_choice
    form = body.text.format if body.text is not None else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_logprobs": body.top_logprobs,
        "tools": [tool.to_response() for tool in body.tools or ()],
        "tool_choice": chosen.model_dump() if isinstance(chosen, ChosenTool) else chosen or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "metadata": body.metadata or {},
        "reasoning": None if body.reasoning is None else {"effort": body.reasoning.effort, "summary": None},
        "previous_response_id": None,
        "truncation": "disabled",
        "background": False,
        "store": False,
    }


def _why(finish_reason: int) -> dict[str, Any]:
    """An answer ended. OpenAI has no word for one that somebody has aborted."""
    is_length = finish_reason == FinishReason.FINISH_REASON_LENGTH
    return {"reason": "max_output_tokens" if is_length else None}


def _usage_of(usage: Usage, num_thought_tokens: int) -> dict[str, Any]:
    """`cache_write_tokens`: what is paid for to be kept, which nothing is."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error_of(refusal: Refusal) -> dict[str, Any]:
    """By one of the few codes that OpenAI's type has."""
    return {"code": _CODES.get(refusal.kind.type, "server_error"), "message": refusal.message}
