"""A client's side of one stream: checks that the stream is exact, and joins its messages into answers.

Pure: messages in, one or several `Answer`s out. Does not own the call that the messages come from. For each answer:

    EMPTY ── accept(message) ──> OPEN ── accept(last message) ──> COMPLETE ── answer() ──> Answer
      └───────── a gap, a repetition, something after the end, or an end too early: StreamBroken

A message's `offset` is the number of tokens before it. The client checks it instead of trusting the server, so that
nobody gets a text with a gap, whatever was retried or moved behind the router.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from protos.tandem_inference_pb2 import FinishReason, GenerateResponse, Timings, TokenLogprobs, Usage
from tandem.tools import CallsStream, ToolCall


class StreamBroken(Exception):  # noqa: N818 - named as the errors of `rpc.errors` are
    """The router sent a stream with a gap, a repetition or no end. This is a bug: do not use the stream as an
    answer."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer of a finished request."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    """ "stop", "length" or "abort"."""
    usage: Usage
    timings: Timings
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """If requested: one for each token."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """If requested: one for each token of the prompt; the first one has no number (rank 0)."""
    prompt_token_ids: list[int] = field(default_factory=list)
    """If requested. With several answers, only the first one has them."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Its tool calls; `text` does not contain them."""
    reasoning: str = ""
    """In a chat with a model that thinks: its thoughts before `text`."""
    stop_reason: str = ""
    """The stop string that ended the answer, if one did."""
    stop_token_id: int | None = None
    """The token that ended the answer, if one did, unless it is the model's own end (the tokenizer's `eos_token`)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the wire's names."""
        return {
            "request_id": self.request_id,
            "text": self.text,
            "reasoning": self.reasoning or None,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason or None,
            "stop_token_id": self.stop_token_id,
            "usage": message_to_dict(self.usage),
            "timings": message_to_dict(self.timings),
            "logprobs": [_readable(each) for each in self.logprobs] or None,
            "prompt_logprobs": [_readable(each) for each in self.prompt_logprobs] or None,
            "prompt_token_ids": self.prompt_token_ids or None,
            "tool_calls": [call.to_dict() for call in self.tool_calls] or None,
        }


def _readable(logprobs: TokenLogprobs) -> dict[str, Any]:
    """As `message_to_dict`, with each token's text (U+FFFD for a part of a character) beside its bytes."""
    sampled, *top = (
        {**message_to_dict(each), "token": each.token.decode(errors="replace"), "bytes": list(each.token)}
        for each in (logprobs.sampled, *logprobs.top)
    )
    return {"sampled": sampled, "top": top, "text_offset": logprobs.text_offset}


class AnswersStream:
    """Takes the messages of a stream of `n` answers in order."""

    def __init__(self, n: int = 1) -> None:
        self._n = n
        self._streams: dict[int, AnswerStream] = {}

    def accept(self, message: GenerateResponse) -> GenerateResponse:
        """Take in a message, and return it. Raises `StreamBroken`."""
        if message.sequence >= self._n:
            raise StreamBroken(f"request {message.request_id}: sequence {message.sequence} was not asked for")
        stream = self._streams.get(message.sequence)
        if stream is None:
            stream = self._streams[message.sequence] = AnswerStream(message.sequence)
        return stream.accept(message)

    @property
    def has_ended(self) -> bool:
        """Whether each answer's last message has come."""
        return len(self._streams) == self._n and all(stream.has_ended for stream in self._streams.values())

    def check_ended(self) -> None:
        """Call this when the stream has ended with status OK. Raises `StreamBroken` unless each answer's last message
        has come."""
        for stream in self._in_order():
            stream.check_ended()

    def answers(self) -> list[Answer]:
        """All whole answers. Raises `StreamBroken` unless the last message of each has come."""
        return [stream.answer() for stream in self._in_order()]

    def _in_order(self) -> list[AnswerStream]:
        return [self._streams.get(sequence, AnswerStream(sequence)) for sequence in range(self._n)]


class AnswerStream:
    """Takes the messages of one answer in order."""

    def __init__(self, sequence: int = 0) -> None:
        self._sequence = sequence
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_token_ids: list[int] = []
        self._tool_calls = CallsStream()
        self._last: GenerateResponse | None = None

    def accept(self, message: GenerateResponse) -> GenerateResponse:
        """Take in a message, and return it. Raises `StreamBroken`."""
        if self._last is not None:
            raise StreamBroken(f"request {message.request_id}: a message came after the last one")
        if message.sequence != self._sequence:
            raise StreamBroken(f"request {message.request_id}: sequence {message.sequence} was not asked for")
        if message.offset != len(self._token_ids):
            raise StreamBroken(
                f"request {message.request_id}: tokens from position {message.offset} came, "
                f"{len(self._token_ids)} was to come"
            )
        self._check_logprobs(message)
        if self._token_ids and (message.prompt_logprobs or message.prompt_token_ids):
            what = "logprobs" if message.prompt_logprobs else "tokens"
            raise StreamBroken(f"request {message.request_id}: {what} of the prompt came after the first token")
        self._token_ids += message.token_ids
        self._texts.append(message.text)
        self._thoughts.append(message.reasoning)
        self._logprobs += message.logprobs
        self._prompt_logprobs += message.prompt_logprobs
        self._prompt_token_ids += message.prompt_token_ids
        if (wrong := self._tool_calls.accept(message.tool_calls)) is not None:
            raise StreamBroken(f"request {message.request_id}: {wrong}")
        if message.HasField("usage"):
            self._end(message)
        elif message.finish_reason:
            raise StreamBroken(f"request {message.request_id}: its end carries no usage")
        return message

    def _check_logprobs(self, message: GenerateResponse) -> None:
        """Check that logprobs come with all of an answer's tokens, or with none."""
        if not message.logprobs and not self._logprobs:
            return
        is_of_them = [each.sampled.token_id for each in message.logprobs] == list(message.token_ids)
        if not is_of_them or len(self._logprobs) != len(self._token_ids):
            raise StreamBroken(f"request {message.request_id}: logprobs came of other tokens than those of the answer")

    def _end(self, message: GenerateResponse) -> None:
        if not message.finish_reason:
            raise StreamBroken(f"request {message.request_id}: its end has no reason")
        if message.usage.completion_tokens != len(self._token_ids):
            raise StreamBroken(
                f"request {message.request_id}: {len(self._token_ids)} tokens came, "
                f"{message.usage.completion_tokens} were counted"
            )
        self._last = message

    @property
    def has_ended(self) -> bool:
        """Whether the last message has come."""
        return self._last is not None

    def check_ended(self) -> None:
        """Call this when the stream has ended with status OK. Raises `StreamBroken` unless its last message has
        come."""
        if self._last is None:
            which = f" of sequence {self._sequence}" if self._sequence else ""
            raise StreamBroken(f"the stream ended with status OK and without its last message{which}")

    def answer(self) -> Answer:
        """The whole answer. Raises `StreamBroken` unless the last message has come."""
        self.check_ended()
        assert self._last is not None
        return Answer(
            request_id=self._last.request_id,
            text="".join(self._texts),
            token_ids=list(self._token_ids),
            finish_reason=short_name(FinishReason.DESCRIPTOR, self._last.finish_reason),
            usage=self._last.usage,
            timings=self._last.timings,
            logprobs=list(self._logprobs),
            prompt_logprobs=list(self._prompt_logprobs),
            prompt_token_ids=list(self._prompt_token_ids),
            tool_calls=self._tool_calls.calls(),
            reasoning="".join(self._thoughts),
            stop_reason=self._last.stop_reason,
            stop_token_id=stop_token_id_of(self._last),
        )


def stop_token_id_of(message: GenerateResponse) -> int | None:
    """The `stop_token_id` in an answer's last message, if it has one."""
    return message.stop_token_id if message.HasField("stop_token_id") else None


def short_name(enum: Any, number: int) -> str:
    """A wire enum's value without its prefix, in lower case: FINISH_REASON_STOP -> "stop", MODE_LOCAL -> "local"."""
    names = [value.name for value in enum.values]
    prefix = names[0].removesuffix("UNSPECIFIED")
    value = enum.values_by_number.get(number)
    return value.name.removeprefix(prefix).lower() if value else str(number)


def message_to_dict(message: Message) -> dict[str, Any]:
    """A message as plain values with the wire's names: every field, enums as short names, bytes in hexadecimal.

    Unlike protobuf's JSON, 64-bit integers stay numbers and zeros are not left out.
    """
    out: dict[str, Any] = {}
    for entry in message.DESCRIPTOR.fields:
        value = getattr(message, entry.name)
        if entry.has_presence and not message.HasField(entry.name):
            out[entry.name] = None
        elif entry.message_type is not None and entry.message_type.GetOptions().map_entry:
            out[entry.name] = dict(value)
        elif entry.is_repeated:
            out[entry.name] = [_plain(entry, item) for item in value]
        else:
            out[entry.name] = _plain(entry, value)
    return out


def _plain(entry: Any, value: Any) -> Any:
    if entry.message_type is not None:
        return message_to_dict(value)
    if entry.enum_type is not None:
        return short_name(entry.enum_type, value)
    return value.hex() if isinstance(value, bytes) else value
