"""Messages as gpt-oss writes them, in OpenAI's "harmony" format, and its calls, which are messages to a function.

    <|start|>assistant <|channel|>analysis <|message|> what is thought <|end|>
    <|start|>assistant <|channel|>commentary to=functions.weather <|constrain|>json <|message|> {"city": …} <|call|>
    <|start|>assistant <|channel|>final <|message|> the answer <|return|>

(without the spaces between words). The recipient of a message may also stand before its channel, as in the chat
template. This module knows one message: its words, its header, its call. `router.text.harmony` reads a whole answer.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.text.calls.call_format import Body, CallReader, GrammarLines, Head, Tool, ToolFormat, add_json_calls
from router.text.calls.heads import MAX_HEAD_CHARS
from router.text.calls.objects import ControlEscapes
from router.text.calls.text_values import Schema
from router.text.words import first_of, num_held

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
"""A message ends with one of these; an answer with one of the last two, which are stop tokens of the model."""
ENDS = (END, CALL, RETURN)
WORDS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
HEADER_ENDS = (MESSAGE, START, *ENDS)
"""Words that end a header. It was a header only if MESSAGE comes first."""
_BODY_ENDS = (*ENDS, START, CHANNEL)
ROLE = "assistant"
TO = "to="
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
_NAMESPACE = "functions."
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_ROLE = re.compile(r"\s*([^\s<]*)")


class Header(NamedTuple):
    """The header of a message."""

    channel: str
    """Empty: none."""
    function: str
    """The function that the message calls, without the functions' namespace. Empty: it calls none."""


def header_of(text: str) -> Header:
    """Parse a header. `text`: any text between START, or the beginning of an answer, and MESSAGE."""
    channel, recipient, role = _CHANNEL.search(text), _RECIPIENT.search(text), _ROLE.match(text)
    assert role is not None
    is_own = role[1] in ("", ROLE) or role[1].startswith(TO)
    function = recipient[1].removeprefix(_NAMESPACE) if recipient is not None and is_own else ""
    return Header(channel[1] if channel is not None else "", function)


def head_of_call(function: str) -> str:
    """The head of a message that calls `function`, including START."""
    return f"{START}{ROLE} {TO}{_NAMESPACE}{function}{CHANNEL}{COMMENTARY} json{MESSAGE}"


@dataclass(frozen=True, kw_only=True, slots=True)
class HarmonyFormat(ToolFormat):
    @property
    def words(self) -> tuple[str, ...]:
        return WORDS

    def reader(self, begin: str, schemas: Mapping[str, Schema]) -> CallReader:
        return HarmonyCallReader(begin.removeprefix(START))

    def answer(self, lines: GrammarLines, tools: Sequence[Tool], *, is_one: bool) -> str:
        """See `ToolFormat.answer`. The prompt contains the START of the first message. A stop token ends the last one;
        it may come wherever an answer may end."""

        def around(name: str) -> tuple[str, str]:
            return lines.literal(f"{CHANNEL}{COMMENTARY} {TO}{_NAMESPACE}{name} {CONSTRAIN}json{MESSAGE}"), ""

        add_json_calls(lines, tools, around)
        return "call" if is_one else f"call ({lines.literal(END + START + ROLE)} call)*"


class HarmonyCallReader:
    """Reads a call. The whole message is its arguments, whatever it contains."""

    joint = ""
    ends: tuple[str, ...] = ()

    def __init__(self, begin: str) -> None:
        self._begin = begin
        """The beginning of the header."""
        self._escapes = ControlEscapes()
        self._has_told = False

    def head(self, text: str) -> Head | None:
        found = first_of(text[:MAX_HEAD_CHARS], HEADER_ENDS)
        if found is None:
            return None if len(text) < MAX_HEAD_CHARS else Head(0)
        position, word = found
        if word != MESSAGE:
            return Head(position)
        function = header_of(f"{self._begin} {text[:position]}").function
        return Head(position + len(word), function) if function else Head(position)

    def body(self, text: str) -> Body:
        found = first_of(text, _BODY_ENDS)
        if found is None:
            num_chars = len(text) - num_held(text, _BODY_ENDS)
            return Body(num_chars, self._arguments(text[:num_chars]))
        position, word = found
        arguments = self._arguments(text[:position]) + self.rest("")
        return Body(position + (len(word) if word in ENDS else 0), arguments, is_over=True)

    def rest(self, text: str) -> str:
        """See `CallReader`. An empty message calls without arguments."""
        return "" if self._has_told else "{}"

    def _arguments(self, text: str) -> str:
        self._has_told = self._has_told or bool(text.strip())
        return self._escapes.escaped(text)


OPENAI = HarmonyFormat(
    name="openai",
    begins=(START + ROLE, CHANNEL),
    known_by=(CHANNEL, CALL),
    form_begins=f"{CHANNEL}{FINAL}{MESSAGE}",
)
