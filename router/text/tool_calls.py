"""Calls of tools in an answer's text, told from what is said: as it comes, a call's arguments, too. Pure.

    text ──> TEXT ── a call begins ──> HEAD ── its name is known ──> ARGUMENTS ──> TAIL ──> END ──> TEXT
              │                          │                              └─> pieces of them
              └─> content                └─ is no call: it was content

What is told depends on the text so far alone, however it is cut into pieces: an answer that goes on at another router
goes on here, too. What begins like a call and is none, or calls no tool that was given, becomes content, as it is; an
answer that ends within arguments leaves them as they are, as OpenAI's do. White space beside a call is no content,
unless text follows it.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from hashlib import blake2b

from protos import tandem_inference_pb2 as pb
from router.text.tool_formats import ToolFormat

PYTHON_TAG = "<|python_tag|>"
"""What Llama may say before a call, where special tokens are shown."""
MAX_HEAD_CHARS = 512
"""Up to a call's arguments. One that says more before is told when it is whole."""
ARGUMENT_KEYS = ("arguments", "parameters")
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BRACKETS = re.compile(r'["\\{}\[\]<]')
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
    reasoning: str = ""


class _State(enum.Enum):
    TEXT = enum.auto()
    HEAD = enum.auto()
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()
    END = enum.auto()


class ToolCallParser:
    """Of one answer. `names`: of the tools that it may call. `id_of`: a call's id by its number. `is_one`: what it
    calls after its first call is left out. `is_held`: it is calls and nothing else: a beginning of one that an end has
    cut off is no content."""

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        id_of: Callable[[int], str],
        *,
        is_one: bool = False,
        is_held: bool = False,
    ) -> None:
        self._format = tool_format
        self._names = names
        self._id_of = id_of
        self._is_one = is_one
        self._is_held = is_held
        self._state = _State.TEXT
        self._space: list[str] = []
        """White space before `_begin` and `_text`: content, if text follows."""
        self._begin = ""
        """What began the call that HEAD reads."""
        self._text = ""
        """Not told yet. From HEAD on, a call's object."""
        self._may_begin = True
        """A call that needs no word to begin could, here."""
        self._scan = _Scan()
        self._num_calls = 0
        self._told = Told()

    def push(self, text: str) -> Told:
        """What is new with `text`."""
        self._text += text
        while self._step():
            pass
        told, self._told = self._told, Told()
        return told

    def finish(self) -> Told:
        """The answer is over: what is left is content, but for the end of a call that has begun, and what stands
        between calls."""
        rest = self._begin + self._text if self._state in (_State.TEXT, _State.HEAD) else ""
        is_nothing = self._is_held or (self._num_calls and rest.strip() in ("", self._format.between.strip()))
        content = "" if is_nothing else "".join(self._space) + rest
        self._state, self._space, self._begin, self._text = _State.TEXT, [], "", ""
        return Told(content)

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
        has_begun = self._find_word() if self._format.begin else self._find_object()
        if has_begun:
            self._scan = _Scan()
            self._state = _State.HEAD
        return has_begun

    def _find_word(self) -> bool:
        """Where each call has a word to begin with: whether one is there."""
        word = self._format.begin
        position = self._text.find(word)
        if position < 0:
            num_told = len(self._text) - num_held(self._text, word)
            self._tell(self._text[:num_told])
            self._text = self._text[num_told:]
            return False
        self._tell(self._text[:position])
        self._begin, self._text = word, self._text[position + len(word) :]
        return True

    def _find_object(self) -> bool:
        """Where a call is an object at an answer's beginning, or after another call: whether one is there."""
        if not self._may_begin:
            self._tell(self._text)
            self._text = ""
            return False
        self._hold_space()
        word = self._format.between.strip() if self._num_calls else PYTHON_TAG
        word = word if self._text.startswith(word) else ""
        rest = self._text[len(word) :].lstrip()
        if rest.startswith("{"):
            self._begin, self._text = self._text[: len(self._text) - len(rest)], rest
            return True
        if rest and not (self._num_calls == 0 and PYTHON_TAG.startswith(rest)):
            self._may_begin = False
            return self._find_object()
        return False

    def _hold_space(self) -> None:
        stripped = self._text.lstrip()
        if len(stripped) < len(self._text):
            self._space.append(self._text[: len(self._text) - len(stripped)])
            self._text = stripped

    def _tell(self, content: str) -> None:
        """All but the white space at its end, which is held."""
        said = content.rstrip()
        if said:
            self._told.content += "".join(self._space) + said
            self._space = []
        if len(said) < len(content):
            self._space.append(content[len(said) :])

    # -- a call -------------------------------------------------------------------------------------------------

    def _read_head(self) -> bool:
        stripped = self._text.lstrip()
        self._begin += self._text[: len(self._text) - len(stripped)]
        self._text = stripped
        if not stripped:
            return False
        if stripped[0] != "{":
            return self._give_up("")
        match = _HEAD.match(stripped[: MAX_HEAD_CHARS + 1])
        if match is not None:
            name = _unquoted(match[1])
            if name not in self._names:
                return self._give_up(match[0])
            self._open_call(name)
            self._text = stripped[match.end() :]
            self._scan = _Scan()
            self._state = _State.ARGUMENTS
            return True
        end = self._scan.end_of_object(stripped)
        if end is None:
            return False
        call = _call_of(stripped[:end])
        if call is None or call[0] not in self._names:
            return self._give_up(stripped[:end])
        self._open_call(call[0])
        self._tell_arguments(call[1])
        self._text = stripped[end:]
        self._state = _State.END
        return True

    def _give_up(self, also: str) -> bool:
        """It was no call: what began it is content, and `also`, the beginning of what followed."""
        self._tell(self._begin + also)
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
        word = self._format.end
        if word:
            self._hold_space()
            if self._text.startswith(word):
                self._text = self._text[len(word) :]
                self._space = []
            elif word.startswith(self._text):
                return False
        self._begin = ""
        self._may_begin = True
        self._state = _State.TEXT
        return True

    def _drop_scanned(self) -> None:
        self._scan.rebase(len(self._text))
        self._text = ""

    def _open_call(self, name: str) -> None:
        self._space = []
        if not (self._is_one and self._num_calls):
            delta = pb.ToolCallDelta(index=self._num_calls, id=self._id_of(self._num_calls), name=name)
            self._told.calls.append(delta)
        self._num_calls += 1

    def _tell_arguments(self, text: str) -> None:
        if text and not (self._is_one and self._num_calls > 1):
            self._told.calls.append(pb.ToolCallDelta(index=self._num_calls - 1, arguments=text))


class _Scan:
    """Looks for the end of a JSON object in a text that grows. One that is broken ends before a `<` outside its texts,
    which JSON does not know: there the model has gone on, to the word that ends a call or to the next one."""

    __slots__ = ("_depth", "_is_in_string", "_position")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_in_string = False
        self._position = 0

    def end_of_object(self, text: str) -> int | None:
        """Behind the bracket that closes it, or where it breaks off. `text` is what it was, and more."""
        while match := (_IN_STRING if self._is_in_string else _BRACKETS).search(text, self._position):
            char, self._position = match[0], match.end()
            if char == "\\":
                self._position += 1  # whatever it is that comes then
            elif char == '"':
                self._is_in_string = not self._is_in_string
            elif char == "<":
                return match.start()
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


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments, as JSON, of a call's whole object; None: it is none. Models mix up the two words for
    arguments; and leave them out, where there are none."""
    try:
        call = json.loads(text, strict=False)
        name = call.pop("name")
        given = [call[key] for key in ARGUMENT_KEYS if key in call]
        if not given and call:
            return None
        arguments = given[0] if given else None
        if arguments is None or arguments == "":
            arguments = {}
        if isinstance(arguments, str):  # some models quote them
            arguments = json.loads(arguments, strict=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
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


def num_held(text: str, word: str) -> int:
    """How many characters at the end of `text` may be the beginning of `word`."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-n:])), 0)
