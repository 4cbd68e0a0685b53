"""Separates tool calls from content in an answer's text, as it comes, and streams the calls' arguments. Pure.

    text ──> TEXT ── a call begins ──> HEAD ── its name is known ──> BODY ──> END ──> TEXT
              │                          │                            └─> pieces of its arguments
              └─> content                └─ is no call: it was content

The formats (`calls`) know how calls are written. The output depends only on the text so far, however it is cut into
pieces, so that an answer can continue at another router. Text that begins like a call and is none, or that calls an
unknown tool, becomes content as it is. An answer that ends within arguments leaves them incomplete, as OpenAI's do.
White space beside a call is dropped, unless text follows it.
"""

from __future__ import annotations

import enum
import string
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

from protos import tandem_inference_pb2 as pb
from router.text.calls.call_format import CallReader, Head, ToolFormat
from router.text.calls.text_values import Schema
from router.text.words import first_of, num_held

_ALPHANUMERIC = string.digits + string.ascii_letters


class CallIds:
    """Ids of the calls in the answers to one prompt: the same on whichever router an answer continues, different in
    each turn of a chat."""

    def __init__(self, prompt_token_ids: Sequence[int], *, is_short: bool = False) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._is_short = is_short

    @cached_property
    def _prompt(self) -> bytes:
        """The prompt's digest. It takes milliseconds for a long prompt, so it is computed once, not for each call."""
        return blake2b(array("I", self._prompt_token_ids).tobytes(), digest_size=16).digest()

    def of(self, seed: int, index: int) -> str:
        """The id of call `index` in the answer with that seed."""
        digest = blake2b(f"{seed} {index}".encode(), digest_size=12, key=self._prompt).digest()
        if not self._is_short:
            return f"call_{digest.hex()}"
        number = int.from_bytes(digest)
        return "".join(_ALPHANUMERIC[number // 62**place % 62] for place in range(9))


Span = tuple[int, int | None]
"""Begin and end of a part of an answer's text, in characters. None: it goes on."""


@dataclass(slots=True)
class Told:
    """New parts of an answer."""

    content: str = ""
    calls: list[pb.ToolCallDelta] = field(default_factory=list)
    reasoning: str = ""

    def add(self, more: Told) -> None:
        """Append `more`, which came later."""
        self.content += more.content
        self.reasoning += more.reasoning
        self.calls += more.calls


class _State(enum.Enum):
    TEXT = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    END = enum.auto()


class ToolCallParser:
    """Reads one answer. `schemas`: schemas of the arguments, by the name of each tool that it may call. `id_of`: from a
    call's number to its id. `is_one`: calls after the first one are dropped. `is_held`: the answer consists of calls
    only, so a call that is cut off by the answer's end is not content."""

    def __init__(
        self,
        tool_format: ToolFormat,
        schemas: Mapping[str, Schema],
        id_of: Callable[[int], str],
        *,
        is_one: bool = False,
        is_held: bool = False,
    ) -> None:
        self._format = tool_format
        self._id_of = id_of
        self._is_one = is_one
        self._is_held = is_held
        self._schemas = schemas
        self._state = _State.TEXT
        self._space: list[str] = []
        """White space before `_begin` and `_text`: content, if text follows."""
        self._begin = ""
        """The text that began the call that HEAD reads."""
        self._text = ""
        """Text that has not been emitted yet. From HEAD on, it belongs to a call."""
        self._may_begin = True
        """Whether a call in a format without begin words may begin here."""
        self._call: CallReader | None = None
        """Reads the call that has begun."""
        self._num_ends = 0
        """How many of the words behind the call are done: read, or left out by the model."""
        self._num_calls = 0
        self._ids: set[str] = set()
        """Ids that the model gave the calls so far."""
        self._told = Told()

    @property
    def thoughts(self) -> Sequence[Span]:
        """Where the thoughts are in the answer's text: this parser knows none."""
        return ()

    def may_call(self, name: str) -> bool:
        """Whether the answer may call a tool of that name."""
        return name in self._schemas

    def push(self, text: str) -> Told:
        """What is new with `text`."""
        self._text += text
        while self._step():
            pass
        told, self._told = self._told, Told()
        return told

    def finish(self, *, is_whole: bool = False) -> Told:
        """The answer is over: the rest is content, unless it belongs to a call, or is only what stands between calls.
        `is_whole`: the model ended it, so that of a call only words around it can be missing."""
        if is_whole and self._state is _State.BODY:
            assert self._call is not None
            self._tell_arguments(self._call.rest(self._text))
        rest = self._begin + self._text if self._state in (_State.TEXT, _State.HEAD) else ""
        is_nothing = self._is_held or (self._num_calls and rest.strip() in ("", self._format.between.strip()))
        content = "" if is_nothing else "".join(self._space) + rest
        self._state, self._space, self._begin, self._text = _State.TEXT, [], "", ""
        told, self._told = self._told, Told()
        told.content += content
        return told

    def _step(self) -> bool:
        """Read on. Returns whether another step may find more."""
        match self._state:
            case _State.TEXT:
                return self._read_text()
            case _State.HEAD:
                return self._read_head()
            case _State.BODY:
                return self._read_body()
            case _State.END:
                return self._read_end()

    # -- text ---------------------------------------------------------------------------------------------------

    def _read_text(self) -> bool:
        return self._find_word() if self._format.begins else self._find_object()

    def _find_word(self) -> bool:
        """For formats in which a word begins each call: look for one. Returns whether it is there."""
        words = self._format.begins
        found = first_of(self._text, words)
        if found is None:
            num_told = len(self._text) - num_held(self._text, words)
            self._tell(self._text[:num_told])
            self._text = self._text[num_told:]
            return False
        position, word = found
        self._tell(self._text[:position])
        self._text = self._text[position + len(word) :]
        self._begin_call(word)
        return True

    def _find_object(self) -> bool:
        """For formats in which a call begins with a bracket at the answer's beginning, or after another call: look for
        one. Returns whether it is there."""
        if not self._may_begin:
            self._tell(self._text)
            self._text = ""
            return False
        self._hold_space()
        leads = "" if self._num_calls else self._format.leads
        word = self._format.between.strip() if self._num_calls else leads
        word = word if self._text.startswith(word) else ""
        rest = self._text[len(word) :].lstrip()
        if rest.startswith(self._format.opens):
            begin, self._text = self._text[: len(self._text) - len(rest)], rest
            self._begin_call(begin)
            return True
        if rest and not leads.startswith(rest):
            self._may_begin = False
            return self._find_object()
        return False

    def _hold_space(self) -> None:
        stripped = self._text.lstrip()
        if len(stripped) < len(self._text):
            self._space.append(self._text[: len(self._text) - len(stripped)])
            self._text = stripped

    def _tell(self, content: str) -> None:
        """Emit `content`, except for white space at its end, which is held."""
        said = content.rstrip()
        if said:
            self._told.content += "".join(self._space) + said
            self._space = []
        if len(said) < len(content):
            self._space.append(content[len(said) :])

    # -- calls --------------------------------------------------------------------------------------------------

    def _begin_call(self, begin: str) -> None:
        self._begin = begin
        self._call = self._format.reader(begin, self._schemas)
        self._state = _State.HEAD

    def _read_head(self) -> bool:
        assert self._call is not None
        stripped = self._text.lstrip()
        self._begin += self._text[: len(self._text) - len(stripped)]
        self._text = stripped
        head = self._call.head(stripped) if stripped else None
        if head is None:
            return False
        if head.name not in self._schemas:
            return self._give_up(head.num_chars)
        self._open_call(head)
        self._text = stripped[head.num_chars :]
        self._state = _State.BODY
        if head.arguments is not None:
            self._tell_arguments(head.arguments)
            self._state, self._num_ends = _State.END, 0
        return True

    def _give_up(self, num_chars: int) -> bool:
        """It was no call: its beginning, and `num_chars` characters behind it, are content."""
        self._tell(self._begin + self._text[:num_chars])
        self._text = self._text[num_chars:]
        self._begin = ""
        self._may_begin = False
        self._state = _State.TEXT
        return True

    def _read_body(self) -> bool:
        assert self._call is not None
        body = self._call.body(self._text)
        self._tell_arguments(body.arguments)
        self._text = self._text[body.num_chars :]
        if body.is_over:
            self._state, self._num_ends = _State.END, 0
        return body.is_over

    def _read_end(self) -> bool:
        """Read the words that end a call. The model may leave them out."""
        assert self._call is not None
        if self._num_ends == 0 and self._call.joint and (may_go_on := self._find_joint(self._call.joint)) is not None:
            return may_go_on
        while self._num_ends < len(self._call.ends):
            word = self._call.ends[self._num_ends]
            self._hold_space()
            if self._text.startswith(word):
                self._text = self._text[len(word) :]
                self._space = []
            elif word.startswith(self._text):
                return False
            self._num_ends += 1
        self._begin = ""
        self._may_begin = True
        self._state = _State.TEXT
        return True

    def _find_joint(self, joint: str) -> bool | None:
        """Whether another call of a list begins. True: it does. None: it does not. False: it is too early to tell."""
        self._hold_space()
        joint = joint.strip()  # white space is held already
        if not self._text.startswith(joint):
            return None if self._text else False
        rest = self._text[len(joint) :].lstrip()
        assert self._call is not None
        if any(rest.startswith(word) for word in self._call.ends):
            return None
        if any(word.startswith(rest) for word in self._call.ends) or not rest:
            return False
        begin, self._text = self._text[: len(self._text) - len(rest)], rest
        self._begin_call(begin)
        return True

    def _open_call(self, head: Head) -> None:
        self._space = []
        if not (self._is_one and self._num_calls):
            is_new = head.id and head.id not in self._ids  # the same id twice could not be told apart by the client
            call_id = head.id if is_new else self._id_of(self._num_calls)
            self._told.calls.append(pb.ToolCallDelta(index=self._num_calls, id=call_id, name=head.name))
        self._ids.add(head.id)
        self._num_calls += 1

    def _tell_arguments(self, text: str) -> None:
        if text and not (self._is_one and self._num_calls > 1):
            self._told.calls.append(pb.ToolCallDelta(index=self._num_calls - 1, arguments=text))
