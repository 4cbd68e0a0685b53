"""JSON that comes in pieces: where an object ends, and what a whole one calls. Pure."""

from __future__ import annotations

import json
import re

from router.text.calls.call_format import Body

ARGUMENT_KEYS = ("arguments", "parameters")
_BRACKETS = re.compile(r'["\\{}\[\]<]')
BROKEN_BY = "<"
_IN_STRING = re.compile(r'["\\]')


class ObjectScan:
    """Looks for the end of a JSON object in a text that grows. One that is broken ends before `broken_by` outside its
    texts, which JSON does not know: there the model has gone on, to the word that ends a call or to the next one."""

    __slots__ = ("_broken_by", "_depth", "_is_in_string", "_position")

    def __init__(self, broken_by: str = BROKEN_BY, *, depth: int = 0) -> None:
        self._broken_by = broken_by
        self._depth = depth
        self._is_in_string = False
        self._position = 0

    def end_of_object(self, text: str) -> int | None:
        """Behind the bracket that closes it, or where it breaks off. `text` is what it was, and more."""
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
                self._position += 1  # whatever it is that comes then
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
        """Characters that are the object's for certain."""
        return self._position

    def rebase(self, num_chars: int) -> None:
        """So many characters have been taken from the text's beginning."""
        self._position -= num_chars


class ArgumentsReader:
    """Of a call whose arguments are a JSON object and all that there is of it behind its head."""

    joint = ""
    ends: tuple[str, ...] = ()

    def __init__(self, broken_by: str = BROKEN_BY) -> None:
        self._scan = ObjectScan(broken_by)

    def body(self, text: str) -> Body:
        end = self._scan.end_of_object(text)
        if end is not None:
            return Body(end, text[:end], is_over=True)
        num_chars = min(self._scan.num_seen, len(text))
        self._scan.rebase(num_chars)
        return Body(num_chars, text[:num_chars])


def call_of(text: str) -> tuple[str, str] | None:
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
    return encodable(name), encodable(json.dumps(arguments, ensure_ascii=False))


def unquoted(text: str) -> str:
    """Of a JSON text, or what looks like one."""
    try:
        return encodable(json.loads(text, strict=False))
    except ValueError:
        return text[1:-1]


def encodable(text: str) -> str:
    """JSON may name halves of characters, which no message may hold."""
    return text.encode(errors="replace").decode()
