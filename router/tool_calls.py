"""Calls of tools in an answer's text, told from what is said: as it comes, a call's arguments, too. Pure.

    text ──> TEXT ── a call begins ──> HEAD ── its name is known ──> ARGUMENTS ──> TAIL ──> END ──> TEXT
              │                          │                              └─> pieces of them
              └─> content                └─ is no call: it was content

What is told depends on the text so far alone, however it is cut into pieces: an answer that goes on at another router
goes on here, too. What begins like a call and is none becomes content; an answer that ends within arguments leaves them
as they are, as OpenAI's do. White space beside a call is no content, unless text follows it.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from protos import tandem_inference_pb2 as pb
from router.tool_formats import ToolFormat

PYTHON_TAG = "<|python_tag|>"
"""What Llama may say before a call, where special tokens are shown."""
MAX_HEAD_CHARS = 512
"""Up to a call's arguments. One that says more before is told when it is whole."""
_BRACKETS = re.compile(r'["\\{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


def call_id(seed: int, prompt_token_ids: list[int], index: int) -> str:
    """The name of an answer's call `index`: the same wherever the answer goes on, another one in each turn."""
    digest = blake2b(f"{seed} {index} {prompt_token_ids}".encode(), digest_size=12)
    return f"call_{digest.hexdigest()}"


@dataclass(slots=True)
class Told:
    """New of an answer."""

    content: str = ""
    calls: list[pb.ToolCallDelta] = field(default_factory=list)


class _State(enum.Enum):
    TEXT = enum.auto()
    HEAD = enum.auto()
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()
    END = enum.auto()


class ToolCallParser:
    """Of one answer. `id_of`: a call's id by its number. `is_one`: what the answer calls after its first call is left
    out."""

    def __init__(self, tool_format: ToolFormat, id_of: Callable[[int], str], *, is_one: bool = False) -> None:
        self._format = tool_format
        self._id_of = id_of
        self._is_one = is_one
        self._head = re.compile(
            r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"' + tool_format.arguments_key + r'"\s*:\s*(?=\{)'
        )
        self._state = _State.TEXT
        self._text = ""
        """Not told yet. From HEAD on, a call's object: what came before its brace is in `_begin`."""
        self._begin = ""
        self._may_begin = True
        """A call that needs no word to begin could, here."""
        self._scan = _Scan()
        self._num_calls = 0
        self._told = Told()

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> Told:
        """What is new with `text`."""
        self._text += text
        while self._step():
            pass
        told, self._told = self._told, Told()
        return told

    def finish(self) -> Told:
        """The answer is over: what is left is content, but for the end of a call that has begun, and white space
        after one."""
        rest = self._begin + self._text if self._state in (_State.TEXT, _State.HEAD) else ""
        self._state, self._begin, self._text = _State.TEXT, "", ""
        return Told("" if self.has_calls and not rest.strip() else rest)

    def _step(self) -> bool:
        """Whether there may be more to do."""
        match self._state:
            case _State.TEXT:
                return self._read_text()
            case _State.HEAD:
                return self._read_head()
            case _State.ARGUMENTS:
                return self._read_arguments()
            case _State.TAIL:
                return self._read_tail()
            case _State.END:
                return self._read_end()

    # -- what is said -------------------------------------------------------------------------------------------

    def _read_text(self) -> bool:
        found = self._find_begin()
        if found is None:
            return False
        content, self._begin, self._text = found
        self._say(content)
        self._scan = _Scan()
        self._state = _State.HEAD
        return True

    def _find_begin(self) -> tuple[str, str, str] | None:
        """Content, what begins the call, and the rest. None: all is told that can be."""
        begin = self._format.begin
        if begin:
            position = self._text.find(begin)
            if position >= 0:
                return self._text[:position].rstrip(), begin, self._text[position + len(begin) :]
            self._tell_but(_num_held(self._text, begin))
            return None
        if not self._may_begin:
            self._tell_but(0)
            return None
        separator = self._format.between.strip() if self._num_calls else PYTHON_TAG
        match = re.match(rf"\s*(?:{re.escape(separator)})?\s*(?=\{{)", self._text)
        if match is not None:
            return "", match[0], self._text[match.end() :]
        stripped = self._text.strip()
        if stripped and not (separator.startswith(stripped) or stripped == separator):
            self._may_begin = False
            self._tell_but(0)
        return None

    def _tell_but(self, num_held: int) -> None:
        """Tell what is no white space, up to the last `num_held` characters, and the white space before it."""
        told = self._text[: len(self._text) - num_held].rstrip()
        self._say(told)
        self._text = self._text[len(told) :]

    def _say(self, content: str) -> None:
        self._told.content += content

    # -- a call -------------------------------------------------------------------------------------------------

    def _read_head(self) -> bool:
        spaces = len(self._text) - len(self._text.lstrip())
        if spaces:
            self._begin += self._text[:spaces]
            self._text = self._text[spaces:]
        if not self._text:
            return False
        if self._text[0] != "{":
            return self._give_up("")
        match = self._head.match(self._text[: MAX_HEAD_CHARS + 1])
        if match is not None:
            self._open_call(_unquoted(match[1]))
            self._text = self._text[match.end() :]
            self._scan = _Scan()
            self._state = _State.ARGUMENTS
            return True
        end = self._scan.end_of_object(self._text)
        if end is None:
            return False
        call = _call_of(self._text[:end], self._format.arguments_key)
        if call is None:
            return self._give_up(self._text[:end])
        self._open_call(call[0])
        self._tell_arguments(call[1])
        self._text = self._text[end:]
        self._state = _State.END
        return True

    def _give_up(self, also: str) -> bool:
        """It was no call: what began it is content, and `also`, the beginning of what followed."""
        self._say(self._begin + also)
        self._text = self._text[len(also) :]
        self._begin = ""
        self._may_begin = False
        self._state = _State.TEXT
        return True

    def _read_arguments(self) -> bool:
        end = self._scan.end_of_object(self._text)
        if end is None:
            self._tell_arguments(self._text)
            self._drop_scanned()
            return False
        self._tell_arguments(self._text[:end])
        self._text = self._text[end:]
        self._scan = _Scan(depth=1)
        self._state = _State.TAIL
        return True

    def _read_tail(self) -> bool:
        """What a model says in a call after its arguments is nothing that anybody asks for."""
        end = self._scan.end_of_object(self._text)
        if end is None:
            self._drop_scanned()
            return False
        self._text = self._text[end:]
        self._state = _State.END
        return True

    def _read_end(self) -> bool:
        """The word that ends a call, unless the model left it out."""
        word, text = self._format.end, self._text.lstrip()
        if word and text.startswith(word):
            self._text = text[len(word) :]
        elif word and word.startswith(text):
            return False
        self._begin = ""
        self._may_begin = True
        self._state = _State.TEXT
        return True

    def _drop_scanned(self) -> None:
        self._scan.rebase(len(self._text))
        self._text = ""

    def _open_call(self, name: str) -> None:
        if not (self._is_one and self._num_calls):
            delta = pb.ToolCallDelta(index=self._num_calls, id=self._id_of(self._num_calls), name=name)
            self._told.calls.append(delta)
        self._num_calls += 1

    def _tell_arguments(self, text: str) -> None:
        if text and not (self._is_one and self._num_calls > 1):
            self._told.calls.append(pb.ToolCallDelta(index=self._num_calls - 1, arguments=text))


class _Scan:
    """Looks for the end of a JSON object in a text that grows."""

    __slots__ = ("_depth", "_is_in_string", "_position")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_in_string = False
        self._position = 0

    def end_of_object(self, text: str) -> int | None:
        """Behind the bracket that closes it. `text` is what it was, and more."""
        while match := (_IN_STRING if self._is_in_string else _BRACKETS).search(text, self._position):
            char, self._position = match[0], match.end()
            if char == "\\":
                self._position += 1  # whatever it is that comes then
            elif char == '"':
                self._is_in_string = not self._is_in_string
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return self._position
        self._position = max(self._position, len(text))
        return None

    def rebase(self, num_chars: int) -> None:
        """So many characters have been taken from the text's beginning."""
        self._position -= num_chars


def _call_of(text: str, arguments_key: str) -> tuple[str, str] | None:
    """Name and arguments, as JSON, of a call's whole object; None: it is none."""
    try:
        call = json.loads(text, strict=False)
        name, arguments = call["name"], call.get(arguments_key, {})
        if isinstance(arguments, str):  # some models quote them
            arguments = json.loads(arguments, strict=False)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return _encodable(name), _encodable(json.dumps(arguments, ensure_ascii=False))


def _unquoted(text: str) -> str:
    try:
        return _encodable(json.loads(text, strict=False))
    except ValueError:
        return text[1:-1]


def _encodable(text: str) -> str:
    """JSON may name halves of characters, which no message may hold."""
    return text.encode(errors="replace").decode()


def _num_held(text: str, word: str) -> int:
    """How many characters at the end of `text` may be the beginning of `word`."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-n:])), 0)
