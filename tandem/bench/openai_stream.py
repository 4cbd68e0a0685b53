"""Checks one streamed answer of an OpenAI-compatible server, event by event. Pure: payloads in.

    OPEN ── finish_reason ──> FINISHED ── usage ──> COUNTED ── [DONE] ──> ENDED      (usage may come with the former)
      └───── anything else, anything twice, anything after the end, an end too early: StreamBroken

OpenAI's events carry no index, so the check compares a server's own statements: its count of tokens so far
(`continuous_usage_stats`: Tandem, vLLM, SGLang) must grow with every piece of text and reach the usage at the end. If
events contain `token_ids` (Tandem and vLLM, with `return_token_ids`), a gap or repetition within the stream shows, too.
"""

from __future__ import annotations

import json
from typing import Any

from tandem.answer import StreamBroken
from tandem.bench.outcome import Usage

DONE = "[DONE]"


class ServerError(Exception):
    """The stream contained an error instead of an answer. `code`: the server's code for it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class OpenAIStream:
    """Takes the payloads of a stream's `data:` lines in order."""

    def __init__(self, *, is_chat: bool, prompt_tokens: int | None = None) -> None:
        """`prompt_tokens`: how many were sent, if known; the usage must say the same."""
        self._is_chat = is_chat
        self._prompt_tokens = prompt_tokens
        self._id: Any = None
        self._num_tokens = 0
        """Tokens so far: as the server counts, or else the number of pieces."""
        self._counts = False
        """Whether the server reports the number of tokens so far in its events."""
        self._finish_reason: str | None = None
        self._usage_at_end: dict[str, Any] | None = None
        """The usage in the event with the finish_reason; some servers report it only there."""
        self._usage: Usage | None = None
        self._has_ended = False

    def accept(self, payload: str) -> int:
        """Take in an event's payload. Returns its number of new tokens. Raises `StreamBroken`, `ServerError`."""
        if self._has_ended:
            raise StreamBroken(f"an event came after {DONE}: {payload[:80]!r}")
        if payload == DONE:
            self._end()
            return 0
        try:
            event = json.loads(payload)
        except ValueError as error:
            raise StreamBroken(f"an event that is not JSON: {payload[:80]!r}") from error
        if not isinstance(event, dict):
            raise StreamBroken(f"an event that is no object: {payload[:80]!r}")
        if event.get("error"):
            raise _server_error(event["error"])
        self._check_id(event.get("id"))
        choices = _choices_of(event)
        usage = _object_or_none("usage", event.get("usage"))
        if len(choices) > 1 or any(choice.get("index", 0) != 0 for choice in choices):
            raise StreamBroken("an event with a choice that was not asked for")
        return self._piece(choices[0], usage) if choices else self._last(usage)

    def _check_id(self, answer_id: Any) -> None:
        if self._id is not None and answer_id != self._id:
            raise StreamBroken(f"an event of another answer: {answer_id!r} instead of {self._id!r}")
        self._id = answer_id

    def _piece(self, choice: dict[str, Any], usage: dict[str, Any] | None) -> int:
        """Take in an event with new text, or the end of the answer, or both."""
        if self._finish_reason is not None:
            what = "second end" if choice.get("finish_reason") else "piece of text"
            raise StreamBroken(f"a {what} came after the end ({self._finish_reason})")
        self._finish_reason = choice.get("finish_reason")
        token_ids = choice.get("token_ids")
        if token_ids is not None and not isinstance(token_ids, list):
            raise StreamBroken(f"token_ids is no list: {_short(token_ids)}")
        num_new = 1 if self._text_of(choice) else 0
        if self._finish_reason is not None:
            self._usage_at_end = usage
        # If the first usage comes with the last piece, the server counts only at the end (llama.cpp).
        if usage is not None and (self._counts or self._finish_reason is None or self._num_tokens == 0):
            self._counts = True
            num_new = self._advance(usage, has_text=num_new > 0)
        if token_ids is not None:
            if self._counts and usage is not None and len(token_ids) != num_new:
                raise StreamBroken(f"{len(token_ids)} tokens came where the count went up by {num_new}")
            num_new = len(token_ids)
            self._counts = True
        self._num_tokens += num_new
        return num_new

    def _advance(self, usage: dict[str, Any], *, has_text: bool) -> int:
        num_new = _count_of(usage, "completion_tokens") - self._num_tokens
        if num_new < 0:
            raise StreamBroken(f"the count of tokens went back by {-num_new}, from {self._num_tokens}")
        # The last piece may contain text that was held back; the text of any other piece comes from new tokens.
        if has_text and num_new == 0 and self._finish_reason is None:
            raise StreamBroken(f"a piece of text came, and the count of tokens stayed {self._num_tokens}: repeated")
        return num_new

    def _text_of(self, choice: dict[str, Any]) -> str:
        if not self._is_chat:
            return str(choice.get("text") or "")
        delta = _object_or_none("delta", choice.get("delta")) or {}
        # Servers use two names for a model's thoughts.
        return "".join(str(delta.get(name) or "") for name in ("reasoning", "reasoning_content", "content"))

    def _last(self, usage: dict[str, Any] | None) -> int:
        """Take in an event without choices, which has the usage of the whole answer."""
        if usage is None:
            return 0  # some servers send such events as keep-alives
        if self._usage is not None:
            raise StreamBroken("the usage came twice")
        if self._finish_reason is None:
            raise StreamBroken("the usage came before the end")
        self._usage = self._checked(usage)
        return 0

    def _checked(self, usage: dict[str, Any]) -> Usage:
        """The usage. Raises `StreamBroken` if it does not match what came."""
        details = _object_or_none("prompt_tokens_details", usage.get("prompt_tokens_details")) or {}
        found = Usage(
            prompt_tokens=_count_of(usage, "prompt_tokens"),
            completion_tokens=_count_of(usage, "completion_tokens"),
            cached_tokens=None if details.get("cached_tokens") is None else _count_of(details, "cached_tokens"),
        )
        if self._prompt_tokens not in (None, found.prompt_tokens):
            raise StreamBroken(
                f"a prompt of {self._prompt_tokens} tokens was sent, {found.prompt_tokens} prompt tokens were counted"
            )
        if (found.cached_tokens or 0) > found.prompt_tokens:
            raise StreamBroken(f"{found.cached_tokens} of {found.prompt_tokens} prompt tokens were cached")
        came = self._num_tokens
        if found.completion_tokens != came if self._counts else found.completion_tokens < came:
            raise StreamBroken(f"{came} tokens came, {found.completion_tokens} were counted")
        if usage.get("total_tokens", sum_of(found)) != sum_of(found):
            raise StreamBroken(f"the usage does not add up: {usage}")
        return found

    def _end(self) -> None:
        if self._finish_reason is None:
            raise StreamBroken(f"{DONE} came before the end: there was no finish_reason")
        if self._usage is None:
            if self._usage_at_end is None:
                raise StreamBroken(f"{DONE} came, and no usage")
            self._usage = self._checked(self._usage_at_end)
        self._has_ended = True

    def check_ended(self) -> Usage:
        """Call this when the connection has ended. Returns the usage. Raises `StreamBroken` unless [DONE] has come."""
        if not self._has_ended or self._usage is None:
            raise StreamBroken(f"the stream ended without {DONE}")
        return self._usage


def _choices_of(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The event's choices. Raises `StreamBroken`, as the functions below do, if the field has the wrong type."""
    choices = event.get("choices")
    if choices is None:
        return []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise StreamBroken(f"choices is no list of objects: {_short(choices)}")
    return choices


def _object_or_none(name: str, value: Any) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise StreamBroken(f"{name} is no object: {_short(value)}")
    return value


def _count_of(counts: dict[str, Any], name: str) -> int:
    if name not in counts:
        raise StreamBroken(f"the usage has no {name}")
    value = counts[name]
    if type(value) is not int or value < 0:  # a bool is an int, too
        raise StreamBroken(f"{name} is no count of tokens: {_short(value)}")
    return value


def _short(value: Any) -> str:
    return repr(value)[:80]


def sum_of(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens


def _server_error(error: Any) -> ServerError:
    if not isinstance(error, dict):
        return ServerError("error", str(error))
    return ServerError(str(error.get("code") or error.get("type") or "error"), str(error.get("message") or error))
