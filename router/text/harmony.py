"""Reads answers in OpenAI's "harmony" format, of gpt-oss: messages, each in a channel, that come one after the other.

    HEAD ── <|message|> ──> BODY ── <|end|> ──> GAP ── <|start|> ──> HEAD
      └─ is none: content     └─> analysis: a thought; a function that was given: a call; anything else: content

The prompt ends with the START of the first message, or with more of it. Thoughts and calls may take turns, so this
parser reads the whole answer, and passes content and calls on to the tool call parser. Its output depends only on the
text so far, however it is cut into pieces. It never emits the format's words, nor a part of one at the answer's end.
Text in the place of a header that is no header is content, without these words. Consecutive messages of one kind become
paragraphs. Pure.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
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
from router.text.tool_calls import Span, Told, ToolCallParser
from router.text.words import first_of, num_held

MIN_PART_CHARS = 3
"""At an answer's end, a part of a word with fewer characters counts as text: `<` and `<|` are operators."""
MAX_PIECE_CHARS = 4096
"""Text is searched in pieces of at most this length, since the text behind each word found is searched again."""
BETWEEN = "\n\n"
"""Separates messages of one kind."""
_OPENED = re.compile(
    f"{re.escape(START)}{ROLE}({re.escape(CHANNEL)}(?:{ANALYSIS}|{COMMENTARY}|{FINAL}){re.escape(MESSAGE)})"
)


def header_at_end_of(prompt: str) -> str:
    """The header of the prompt's last message behind the role, if the message is open: a channel, which some templates
    choose. Empty: none, or an unknown one."""
    begin = prompt.rfind(START)
    match = _OPENED.fullmatch(prompt.rstrip(), begin) if begin >= 0 else None
    return match[1] if match is not None else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Harmony:
    """How to constrain and read the answers to one prompt."""

    opened: str = ""
    """The header that the prompt ends with (`header_at_end_of`)."""

    def grammar(self, form: str, *, tokens: Mapping[str, int] = MappingProxyType({}), is_calls: bool = False) -> str:
        """The grammar, for llguidance, of answers that think in any number of messages and then make the calls that
        `form` describes, or write a final message that follows `form`. `tokens`: ids of those of `words` that are
        single tokens."""
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
        """How thoughts begin and end."""
        has_begun = bool(self.opened) and header_of(self.opened).channel == ANALYSIS
        others = tuple(word for word in WORDS if word not in (END, MESSAGE, CONSTRAIN))  # as `_read_body` has it
        return Thoughts(CHANNEL + ANALYSIS + MESSAGE, END, has_begun=has_begun, may_repeat=True, other_ends=others)

    @property
    def words(self) -> tuple[str, ...]:
        """Words that delimit messages."""
        return WORDS

    def reader(self, calls: ToolCallParser | None) -> HarmonyParser:
        """A parser for one answer, whose tool calls `calls` reads."""
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
    """Reads one answer. `opened`: the header of its first message that the prompt contains. `calls`: reads content and
    tool calls; it gets all calls in one notation, however the model wrote them."""

    def __init__(self, *, opened: str = "", calls: ToolCallParser | None = None) -> None:
        self._calls = calls
        self._state = _State.HEAD
        self._is_first = True
        """In HEAD: this is the answer's beginning, whose START is in the prompt."""
        self._kind = _Kind.CONTENT
        """Kind of the message in BODY."""
        self._is_new = True
        """Nothing of this message has been emitted."""
        self._has_told: set[_Kind] = set()
        """Kinds of messages of which text has been emitted."""
        self._text = opened
        """Text that has not been emitted yet."""
        self._num_chars = 0
        """Length of the answer's text so far, without `opened`."""
        self._said = Said(calls)

    @property
    def thoughts(self) -> Sequence[Span]:
        """Where the thoughts are in the answer's text, as far as it was read."""
        return self._said.thoughts

    def push(self, text: str) -> Told:
        """What is new with `text`."""
        told = Told()
        for begin in range(0, len(text), MAX_PIECE_CHARS):
            piece = text[begin : begin + MAX_PIECE_CHARS]
            self._text += piece
            self._num_chars += len(piece)
            while self._step():
                pass
            told.add(self._said.take())
        return told

    def finish(self, *, is_whole: bool = False) -> Told:
        """The answer is over: drops an unfinished header, or a part of a word, at its end. `is_whole`: as in
        `ToolCallParser.finish`."""
        held = num_held(self._text, WORDS)
        rest = self._text[: len(self._text) - held] if held >= MIN_PART_CHARS else self._text
        self._text = ""
        is_header = self._state is _State.HEAD and (not self._is_first or _may_be_first(rest, is_whole=True))
        if self._state is not _State.GAP and not is_header:
            self._tell(rest)
        return self._said.take_last(is_whole=is_whole)

    def _step(self) -> bool:
        """Read on. Returns whether another step may find more."""
        match self._state:
            case _State.HEAD:
                return self._read_head()
            case _State.BODY:
                return self._read_body()
            case _State.GAP:
                return self._read_gap()

    # -- headers ------------------------------------------------------------------------------------------------

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
        if kind is _Kind.THOUGHT:
            self._said.begin_thought(self._num_chars - len(self._text))

    # -- messages -----------------------------------------------------------------------------------------------

    def _read_body(self) -> bool:
        found = first_of(self._text, WORDS)
        if found is None:
            position = len(self._text) - num_held(self._text, WORDS)
            self._tell(self._text[:position])
            self._text = self._text[position:]
            return False
        position, word = found
        self._tell(self._text[:position])
        end = self._num_chars - len(self._text) + position
        self._text = self._text[position + len(word) :]
        if word in (MESSAGE, CONSTRAIN):  # of no meaning here
            return True
        if self._kind is _Kind.THOUGHT:
            self._said.end_thought(end)
        if self._kind is _Kind.CALL:
            self._said.answer.append(CALL)
        self._begin(_Kind.CONTENT)
        self._state = _State.GAP if word in ENDS else _State.HEAD
        if word == CHANNEL:
            self._text = word + self._text
        return True

    def _read_gap(self) -> bool:
        """Read the text between messages: drop white space; any other text is content."""
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
    """Whether an answer that begins with `text` may begin with the rest of a header. `is_whole`: `text` is all of
    it."""
    found = first_of(text, WORDS)
    position = len(text) - num_held(text, WORDS) if found is None else found[0]
    lead = text[:position].lstrip()
    if found is None and not is_whole and TO.startswith(lead):
        return True
    return lead.startswith(TO) or (found is not None and not lead)
