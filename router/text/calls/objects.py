"""JSON objects that come in pieces: where one ends, and which call a whole one is. Pure."""

from __future__ import annotations

import json
import re

from router.text.calls.call_format import Body, Bracketed

ARGUMENT_KEYS = ("arguments", "parameters")
_BRACKETS = re.compile(r'["\\{}\[\]<]')
BROKEN_BY = "<"
_IN_STRING = re.compile(r'["\\]')
_TO_ESCAPE = re.compile(r'["\\\x00-\x1f]')
_QUOTE = re.compile('"')


class ObjectScan:
    """Finds the end of a JSON object in a text that grows. A broken object ends before `broken_by` outside its strings,
    where JSON cannot have it: there the model has gone on to the word that ends the call, or to the next call."""

    __slots__ = ("_broken_by", "_depth", "_is_in_string", "_position")

    def __init__(self, broken_by: str = BROKEN_BY, *, depth: int = 0) -> None:
        self._broken_by = broken_by
        self._depth = depth
        self._is_in_string = False
        self._position = 0

    def end_of_object(self, text: str) -> int | None:
        """The position behind the closing bracket, or where a broken object ends. None: not in `text` yet. `text`: that
        of the last call, and more."""
        while match := (_IN_STRING if self._is_in_string else _BRACKETS).search(text, self._position):
            char = match[0]
            if not self._is_in_string and char == self._broken_by[0]:
                if text.startswith(self._broken_by, match.start()):
                    return match.start()
                if self._broken_by.startswith(text[match.start() :]):
                    self._position = match.start()
                    return None
            self._position = match.end()
            if char == "\\":
                self._position += 1  # skip the escaped character
            elif char == '"':
                self._is_in_string = not self._is_in_string
            elif char == "<":
                pass
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return self._position
        self._position = max(self._position, len(text))
        return None

    @property
    def num_seen(self) -> int:
        """How many characters certainly belong to the object."""
        return self._position

    def rebase(self, num_chars: int) -> None:
        """`num_chars` characters have been removed from the text's beginning."""
        self._position -= num_chars


class ControlEscapes:
    """Escapes line breaks, tabs and other control characters within the strings of a JSON text that comes in pieces:
    models write them as they are, above all in contents of files, though JSON forbids it."""

    __slots__ = ("_is_escaped", "_is_in_string")

    def __init__(self) -> None:
        self._is_in_string = False
        self._is_escaped = False
        """The last piece ended with a backslash."""

    def escaped(self, piece: str) -> str:
        parts: list[str] = []
        told = position = 0
        while position < len(piece):
            if self._is_escaped:
                self._is_escaped = False
                if piece[position] < " ":  # behind its backslash, only the letter of an escape is missing
                    parts += piece[told:position], _escape_of(piece[position])[1:]
                    told = position + 1
                position += 1
                continue
            match = (_TO_ESCAPE if self._is_in_string else _QUOTE).search(piece, position)
            if match is None:
                break
            position = match.end()
            if match[0] == '"':
                self._is_in_string = not self._is_in_string
            elif match[0] == "\\":
                self._is_escaped = True
            else:
                parts += piece[told : match.start()], _escape_of(match[0])
                told = position
        return "".join((*parts, piece[told:])) if parts else piece


def _escape_of(char: str) -> str:
    return json.dumps(char)[1:-1]


class ArgumentsReader(Bracketed):
    """Reads a call that consists, behind its head, only of its arguments, a JSON object."""

    joint = ""
    ends: tuple[str, ...] = ()

    def __init__(self, broken_by: str = BROKEN_BY) -> None:
        self._scan = ObjectScan(broken_by)
        self._escapes = ControlEscapes()

    def body(self, text: str) -> Body:
        end = self._scan.end_of_object(text)
        if end is not None:
            return Body(end, self._escapes.escaped(text[:end]), is_over=True)
        num_chars = min(self._scan.num_seen, len(text))
        self._scan.rebase(num_chars)
        return Body(num_chars, self._escapes.escaped(text[:num_chars]))


def call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments, as JSON, of a call that is a whole object; None: it is no call. Models mix up the two keys
    for arguments, and leave them out if there are none."""
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
    return encodable(name), encodable(json.dumps(arguments, ensure_ascii=False))


def unquoted(text: str) -> str:
    """The content of a quoted JSON string, or of what looks like one."""
    try:
        return encodable(json.loads(text, strict=False))
    except ValueError:
        return text[1:-1]


def encodable(text: str) -> str:
    """`text` with half characters replaced: JSON may contain them, but no message may."""
    return text.encode(errors="replace").decode()
