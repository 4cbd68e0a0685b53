"""The answer of /v1/responses in OpenAI's format: the whole object, and a stream's events. Pure.

    created ── in_progress ── events of the items ── … ──> completed, incomplete or failed

Both are made from the same messages by the same `Output`, so that they agree. The last object has `timings`, as on
other routes.
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
"""Error codes, by the error's type on other routes; "server_error" for all others."""


class ResponseAnswer:
    """The answer to one request."""

    def __init__(self, body: ResponseRequest, *, request_id: str, created_s: int, model: str) -> None:
        self._output = Output(request_id, has_logprobs=body.wants_logprobs)
        self._num_events = 0
        name = f"resp_{request_id.removeprefix('resp_')}"  # ids of vLLM's requests begin with it
        self._told = {"id": name, "object": "response", "created_at": created_s, "model": model}
        self._told |= _asked_of(body)
        self._whole: dict[str, Any] | None = None

    def opening(self) -> list[Event]:
        """The events that begin the answer."""
        response = self._response("in_progress")
        return self._numbered(
            [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]
        )

    def accept(self, message: GenerateResponse) -> list[Event]:
        """The events for `message`; for the last one, with those of the end. Raises `StreamBroken`."""
        events = self._output.accept(message)
        if message.HasField("usage"):
            events += self._end(message)
        return self._numbered(events)

    def failed(self, refusal: Refusal) -> Event:
        """The last event of an answer that fails."""
        self._output.cut()
        response = {**self._response("failed"), "error": _error_of(refusal)}
        (event,) = self._numbered([{"type": "response.failed", "response": response}])
        return event

    def whole(self) -> dict[str, Any]:
        """The whole answer, after the last message."""
        assert self._whole is not None
        return self._whole

    def _end(self, message: GenerateResponse) -> list[Event]:
        is_whole = message.finish_reason == FinishReason.FINISH_REASON_STOP
        status: Status = "completed" if is_whole else "incomplete"
        events = self._output.end(status)
        self._whole = {
            **self._response(status),
            "incomplete_details": None if is_whole else _why(message.finish_reason),
            "usage": _usage_of(message.usage),
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
    """The fields of the request that an answer repeats. Null: the model's default applied."""
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
        "truncation": body.truncation or "disabled",
        "background": False,
        "store": False,
    }


def _why(finish_reason: int) -> dict[str, Any]:
    """Why an answer is incomplete. Null for an aborted one, for which OpenAI has no word."""
    is_length = finish_reason == FinishReason.FINISH_REASON_LENGTH
    return {"reason": "max_output_tokens" if is_length else None}


def _usage_of(usage: Usage) -> dict[str, Any]:
    """The usage. `cache_write_tokens` counts tokens that clients pay to have cached, which do not exist here."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error_of(refusal: Refusal) -> dict[str, Any]:
    """The error, with one of the few codes that OpenAI's type allows."""
    return {"code": _CODES.get(refusal.kind.type, "server_error"), "message": refusal.message}
