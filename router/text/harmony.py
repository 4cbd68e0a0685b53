"""An answer in OpenAI's "harmony" format, of gpt-oss: messages, each in a channel, that come one after the other.

    HEAD ── <|message|> ──> BODY ── <|end|> ──> GAP ── <|start|> ──> HEAD
      └─ is none: content     └─> analysis: what is thought; a function that was given: a call; anything else: content

The prompt ends with the START of the first message, or with more of it. What is thought and what is called may take
turns: so this reads all of an answer, and gives what is content, and calls, to what reads calls. What is told depends
on the text so far alone, however it is cut into pieces. The words themselves are never told, nor a part of one at the
answer's end; what stands where a header should, and is none, is content without them. Messages of one kind that follow
each other are paragraphs. Pure.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from router.text.calls.call_format import GrammarLines, around
from router.text.calls.harmony import (
    ANALYSIS,
    CALL,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    ENDS,
    FINAL,
    HEADER_ENDS,
    MESSAGE,
    ROLE,
    START,
    TO,
    WORDS,
    head_of_call,
    header_of,
)
from router.text.calls.heads import MAX_HEAD_CHARS
from router.text.said import Said
from router.text.thoughts import Thoughts
from router.text.tool_calls import Told, ToolCallParser
from router.text.words import first_of, num_held

MIN_PART_CHARS = 3
"""Of a word, at an answer's end: fewer may be meant as they are, `<` and `<|` are operators."""
MAX_PIECE_CHARS = 4096
"""That are looked through at once: what follows a word is looked through again."""
BETWEEN = "\n\n"
"""Messages of one kind."""
_OPENED = re.compile(
    f"{re.escape(START)}{ROLE}({re.escape(CHANNEL)}(?:{ANALYSIS}|{COMMENTARY}|{FINAL}){re.escape(MESSAGE)})"
)


def header_at_end_of(prompt: str) -> str:
    """What the prompt has said of its last message, behind the role: a channel, which some templates choose. Empty:
    nothing, or nothing that is known here."""
    begin = prompt.rfind(START)
    match = _OPENED.fullmatch(prompt.rstrip(), begin) if begin >= 0 else None
    return match[1] if match is not None else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Harmony:
    """Of the answers to one prompt."""

    opened: str = ""
    """As `header_at_end_of` finds it."""

    def grammar(self, form: str, *, tokens: Mapping[str, int] = MappingProxyType({}), is_calls: bool = False) -> str:
        """Of answers that think, for as many messages as they like, and then are calls, as `form` has them, or have a
        final message that `form` holds. `tokens`: ids of those of `words` that are tokens by themselves. As llguidance
        reads it."""
        if not form:
            return form
        lines = GrammarLines(tokens)
        thought = lines.text_until(END, (0, None), without=WORDS)
        again = lines.literal(START + ROLE)
        lines.add("analysis", f"{lines.literal(CHANNEL + ANALYSIS + MESSAGE)} {thought} {again}")
        said = "@form" if is_calls else f"{lines.literal(CHANNEL + FINAL + MESSAGE)} @form"
        if not self.opened:
            lines.begin_with(f"analysis* {said}")
        elif header_of(self.opened).channel == ANALYSIS:
            lines.begin_with(f"{thought} {again} analysis* {said}")
        elif is_calls:
            lines.begin_with(f"{lines.literal(END)} {again} analysis* {said}")
        else:
            lines.begin_with("@form")
        return around(form, lines.text)

    @property
    def thoughts(self) -> Thoughts:
        """How they begin and end."""
        has_begun = bool(self.opened) and header_of(self.opened).channel == ANALYSIS
        others = tuple(word for word in WORDS if word not in (END, MESSAGE, CONSTRAIN))  # as `_read_body` has it
        return Thoughts(CHANNEL + ANALYSIS + MESSAGE, END, has_begun=has_begun, may_repeat=True, other_ends=others)

    @property
    def words(self) -> tuple[str, ...]:
        """That tell messages apart."""
        return WORDS

    def reader(self, calls: ToolCallParser | None) -> HarmonyParser:
        """Of one answer, which makes those `calls`."""
        return HarmonyParser(opened=self.opened, calls=calls)


class _State(enum.Enum):
    HEAD = enum.auto()
    BODY = enum.auto()
    GAP = enum.auto()


class _Kind(enum.Enum):
    THOUGHT = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()


class HarmonyParser:
    """Of one answer. `opened`: what the prompt has said of its first message. `calls`: reads what is content, and
    calls, which are given to it one way, however they were written."""

    def __init__(self, *, opened: str = "", calls: ToolCallParser | None = None) -> None:
        self._calls = calls
        self._state = _State.HEAD
        self._is_first = True
        """HEAD: the answer's beginning, whose START is not in the text."""
        self._kind = _Kind.CONTENT
        """Of the message in BODY."""
        self._is_new = True
        """Nothing of it has been told."""
        self._has_told: set[_Kind] = set()
        """Kinds of messages that there were."""
        self._text = opened
        """Not told yet."""
        self._said = Said(calls)

    def push(self, text: str) -> Told:
        """What is new with `text`."""
        told = Told()
        for begin in range(0, len(text), MAX_PIECE_CHARS):
            self._text += text[begin : begin + MAX_PIECE_CHARS]
            while self._step():
                pass
            told.add(self._said.take())
        return told

    def finish(self) -> Told:
        """The answer is over: a header that it breaks off in is nothing, nor is a part of a word."""
        held = num_held(self._text, WORDS)
        rest = self._text[: len(self._text) - held] if held >= MIN_PART_CHARS else self._text
        self._text = ""
        is_header = self._state is _State.HEAD and (not self._is_first or _may_be_first(rest, is_whole=True))
        if self._state is not _State.GAP and not is_header:
            self._tell(rest)
        return self._said.take_last()

    def _step(self) -> bool:
        """Whether there may be more to do."""
        match self._state:
            case _State.HEAD:
                return self._read_head()
            case _State.BODY:
                return self._read_body()
            case _State.GAP:
                return self._read_gap()

    # -- a header -----------------------------------------------------------------------------------------------

    def _read_head(self) -> bool:
        if self._is_first and not _may_be_first(self._text):
            self._begin(_Kind.CONTENT)
            return True
        found = first_of(self._text[:MAX_HEAD_CHARS], HEADER_ENDS)
        if found is None:
            if len(self._text) < MAX_HEAD_CHARS:
                return False
            self._text = self._text.removeprefix(CHANNEL)  # which would begin another header
            self._begin(_Kind.CONTENT)
            return True
        position, word = found
        header, self._text = self._text[:position], self._text[position:]
        if word != MESSAGE:
            self._begin(_Kind.CONTENT)
            self._tell(header.replace(CHANNEL, "").replace(CONSTRAIN, "").strip().removeprefix(ROLE))
            return True
        self._text = self._text[len(MESSAGE) :]
        channel, function = header_of(header)
        if function and self._calls is not None and self._calls.may_call(function):
            self._begin(_Kind.CALL)
            self._said.answer.append(head_of_call(function))
        else:
            self._begin(_Kind.THOUGHT if channel == ANALYSIS else _Kind.CONTENT)
        return True

    def _begin(self, kind: _Kind) -> None:
        self._state, self._kind, self._is_first, self._is_new = _State.BODY, kind, False, True

    # -- what it says -------------------------------------------------------------------------------------------

    def _read_body(self) -> bool:
        found = first_of(self._text, WORDS)
        if found is None:
            position = len(self._text) - num_held(self._text, WORDS)
            self._tell(self._text[:position])
            self._text = self._text[position:]
            return False
        position, word = found
        self._tell(self._text[:position])
        self._text = self._text[position + len(word) :]
        if word in (MESSAGE, CONSTRAIN):  # of no meaning here
            return True
        if self._kind is _Kind.CALL:
            self._said.answer.append(CALL)
        self._begin(_Kind.CONTENT)
        self._state = _State.GAP if word in ENDS else _State.HEAD
        if word == CHANNEL:
            self._text = word + self._text
        return True

    def _read_gap(self) -> bool:
        """Between messages. White space there is nothing; any other text is content."""
        self._text = self._text.lstrip()
        if not self._text or any(word.startswith(self._text) and word != self._text for word in WORDS):
            return False
        self._begin(_Kind.CONTENT)
        return True

    def _tell(self, text: str) -> None:
        if not text:
            return
        told = self._said.reasoning if self._kind is _Kind.THOUGHT else self._said.answer
        if self._is_new and self._kind in self._has_told and self._kind is not _Kind.CALL:
            told.append(BETWEEN)
        told.append(text)
        self._is_new = False
        self._has_told.add(self._kind)


def _may_be_first(text: str, *, is_whole: bool = False) -> bool:
    """Whether an answer that begins so may begin with the rest of a header. `is_whole`: there is no more of it."""
    found = first_of(text, WORDS)
    position = len(text) - num_held(text, WORDS) if found is None else found[0]
    lead = text[:position].lstrip()
    if found is None and not is_whole and TO.startswith(lead):
        return True
    return lead.startswith(TO) or (found is not None and not lead)
