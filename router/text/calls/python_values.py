"""Turns the arguments of a call in Python's syntax into JSON, as they come. Nothing is evaluated. Pure.

    city="Oslo", days=[1, 2], more={'a': None})   ──>   {"city": "Oslo", "days": [1, 2], "more": {"a": null}}

    ITEM ── a key ──> VALUE ── a quote ──> STRING ──> BEHIND_STRING ──┐
     │  ^              │ └──── a word ──> WORD ───────────────────────┴──> COMMA ──> ITEM …, or the end
     │  └── a bracket ─┘
     └─ what Python's syntax does not allow ──> BROKEN

Strings come as they are said; numbers and words when they are complete. A word that is no literal (`city=Oslo`) is a
string, since some templates show models their values without quotes; so is a number where the schema allows only
strings. Others show all values in quotes: a string is told as what it contains where the schema allows none. Arguments
that are broken end there, and stay incomplete.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence

from router.text.calls.objects import encodable
from router.text.calls.stepwise import BracketedReader, State
from router.text.calls.text_values import STRING, TYPES, Schema, escaped, json_of_text
from router.text.words import num_held

MAX_KEY_CHARS = 256
"""Maximum length of an argument's name, and of the white space behind it."""
KEY = r"[\w.-]+"
_KEY = re.compile(rf"({KEY})\s*=(?=[^=])")
_MAY_BE_KEY = re.compile(r"[\w.-]*\s*=?")
_OPEN_STRING = re.compile(r"[rRuU]?(\"\"\"|'''|\"|')")
_MAY_OPEN_STRING = re.compile(r"[rRuU]?(?:\"{1,2}|'{1,2})?")
_IN_STRING = {quote: re.compile(rf"{quote}|\\") for quote in ('"', "'", '"""', "'''")}
_ESCAPE = re.compile(
    r"x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8}|[0-7]{3}|[0-7]{1,2}(?=[^0-7])|[^xuU0-7]", re.ASCII | re.DOTALL
)
_MAY_BE_ESCAPE = re.compile(r"x[\da-fA-F]?|u[\da-fA-F]{0,3}|U[\da-fA-F]{0,7}|[0-7]{0,2}", re.ASCII)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "/": "/",
            "\\": "\\", "'": "'", '"': '"'}  # fmt: skip
"""What a letter behind a backslash means; Python keeps the backslash before any other. \\/ is JSON's."""
_IN_WORD = re.compile(r"[,:()\[\]{}'\"<\\]")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d+)?|0[xXoObB][\da-fA-F_]+", re.ASCII)
_NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ENDS = {"(": ")", "[": "]", "{": "}"}
_CALL, _DICT = "(", "{"


class PythonArguments(BracketedReader):
    """Reads the arguments of one call, behind its bracket."""

    def __init__(self, schema: Schema, broken_by: Sequence[str]) -> None:
        super().__init__(schema, broken_by, opens=_CALL)
        self._is_key = False
        """A dictionary's key is read, no value."""
        self._quote = ""
        self._is_raw = False
        self._word_open: list[str] = []
        """The brackets that are open within the word, and, last, a quote."""

    # -- brackets, keys and signs -------------------------------------------------------------------------------------

    def _read_item(self, text: str) -> bool:
        if text[self._at] == _ENDS[self._open[-1]]:
            return self._close()
        of = self._open[-1]
        if of == _CALL:
            match = _KEY.match(text, self._at, self._at + MAX_KEY_CHARS)
            if match is None:
                may_be = _MAY_BE_KEY.match(text, self._at, self._at + MAX_KEY_CHARS)
                assert may_be is not None
                if may_be.end() == len(text) and len(text) - self._at < MAX_KEY_CHARS:
                    return False
                return self._break()
            self._at = match.end()
            self._begin_item(f"{json.dumps(match[1], ensure_ascii=False)}: ")
            self._types = self._schema.types_of(match[1])
            self._state = State.VALUE
            return True
        self._begin_item("")
        self._types = STRING if of == _DICT else TYPES
        self._is_key = of == _DICT
        self._state = State.VALUE
        return True

    def _begin_item(self, said: str) -> None:
        is_first_argument = len(self._open) == 1 and not self._num_items[-1]
        self._told.append(("{" if is_first_argument else ", " if self._num_items[-1] else "") + said)
        self._num_items[-1] += 1

    def _close(self) -> bool:
        self._at += 1
        of, num_items = self._open.pop(), self._num_items.pop()
        if of == _CALL:
            self._told.append("}" if num_items else "{}")
            self._state = State.OVER
            return False
        self._told.append(_ENDS[of])
        self._state = State.COMMA
        return True

    def _read_sign(self, text: str) -> bool:
        """A comma or colon, or the end of what is open."""
        if self._state is State.BEHIND_STRING:
            return self._read_behind_string(text)
        is_behind_key = self._state is State.COLON
        if text[self._at] == (":" if is_behind_key else ","):
            self._at += 1
            if is_behind_key:
                self._told.append(": ")
            self._state = State.VALUE if is_behind_key else State.ITEM
            return True
        if not is_behind_key and text[self._at] == _ENDS[self._open[-1]]:
            return self._close()
        return self._break()

    # -- values -------------------------------------------------------------------------------------------------------

    def _read_value(self, text: str) -> bool:
        char = text[self._at]
        if char in "[{" and not self._is_key:
            self._open_bracket(char)
            return True
        may_be = _MAY_OPEN_STRING.match(text, self._at)
        assert may_be is not None
        if may_be.end() == len(text) and may_be.end() > self._at:
            return False
        opens = _OPEN_STRING.match(text, self._at)
        if opens is None:
            self._state = State.WORD
            return True
        self._held = None if "string" in self._types else []
        self._tell_string('"')
        self._open_string(text, opens)
        return True

    def _open_string(self, text: str, opens: re.Match[str]) -> None:
        self._quote, self._is_raw, self._at = opens[1], text[self._at] in "rR", opens.end()
        self._state = State.STRING

    def _tell_string(self, said: str) -> None:
        """A piece of a string, as JSON."""
        (self._told if self._held is None else self._held).append(said)

    def _read_string(self, text: str) -> bool:
        match = _IN_STRING[self._quote].search(text, self._at)
        if match is None:
            end = len(text) - num_held(text[self._at :], (self._quote,))
            self._tell_string(escaped(text[self._at : end]))
            self._at = end
            return False
        self._tell_string(escaped(text[self._at : match.start()]))
        self._at = match.start()
        if match[0] != "\\":
            self._at = match.end()
            self._state = State.BEHIND_STRING
            return True
        return self._read_escape(text)

    def _read_escape(self, text: str) -> bool:
        start = self._at + 1
        if self._is_raw:
            if start == len(text):
                return False
            self._tell_string(escaped(text[self._at : start + 1]))
            self._at = start + 1
            return True
        match = _ESCAPE.match(text, start)
        if match is None:
            may_be = _MAY_BE_ESCAPE.match(text, start)
            if may_be is not None and may_be.end() == len(text):
                return False
            self._tell_string("\\\\")
            self._at = start
            return True
        self._tell_string(_json_of_escape(match[0]))
        self._at = match.end()
        return True

    def _read_behind_string(self, text: str) -> bool:
        """Python joins strings that stand next to each other."""
        if text[self._at] in "\"'":
            may_be = _MAY_OPEN_STRING.match(text, self._at)
            opens = _OPEN_STRING.match(text, self._at)
            assert may_be is not None
            assert opens is not None
            if may_be.end() == len(text):
                return False
            self._open_string(text, opens)
            return True
        self._tell_string('"')
        if self._held is not None:
            said = encodable(json.loads("".join(self._held)))
            self._held = None
            self._told.append(json_of_text(said, self._types))
        self._go_on()
        return True

    def _go_on(self) -> None:
        """A key or value is complete."""
        self._state = State.COLON if self._is_key else State.COMMA
        self._is_key, self._types = False, TYPES

    def _read_word(self, text: str) -> bool:
        match = _IN_WORD.search(text, self._at)
        end = len(text) if match is None else match.start()
        self._word.append(text[self._at : end])
        self._at = end
        if match is None:
            return False
        sign, within = match[0], self._word_open[-1] if self._word_open else ""
        is_quoted = within in ("'", '"')
        if sign == "<" and not is_quoted:
            if any(text.startswith(word, end) for word in self._broken_by):
                return self._break()
            if any(word.startswith(text[end : end + len(word)]) for word in self._broken_by):
                return False
        if sign == "\\" and end + 1 == len(text):
            return False
        if within and sign == (within if is_quoted else _ENDS[within]):
            self._word_open.pop()
        elif is_quoted:
            pass
        elif sign in "'\"" or sign in _ENDS:
            self._word_open.append(sign)
        elif not within and (sign in ",)]}" or (sign == ":" and self._is_key)):
            return self._end_word()
        num_taken = 2 if sign == "\\" else 1
        self._word.append(text[end : end + num_taken])
        self._at = end + num_taken
        return True

    def _end_word(self) -> bool:
        word, self._word = "".join(self._word).strip(), []
        if not word:
            return self._break()
        self._told.append(f'"{escaped(word)}"' if self._is_key else json_of_word(word, self._types))
        self._go_on()
        return True


def json_of_word(word: str, types: frozenset[str]) -> str:
    """What stands without quotes, as JSON. `types`: those that it may have."""
    if word in _NAMES:
        return _NAMES[word]
    if types != STRING and _NUMBER.fullmatch(word):
        try:
            json.loads(word)
        except ValueError:
            return _json_of_number(word)
        return word
    return json.dumps(word, ensure_ascii=False)


def _json_of_number(word: str) -> str:
    """A number that only Python writes so. One that JSON cannot tell is a string."""
    readings: tuple[Callable[[str], int | float], ...] = (int, lambda each: int(each, 0), float)
    for reading in readings:
        try:
            value = reading(word)
            if math.isfinite(value):
                return json.dumps(value)
        except (ValueError, OverflowError):
            pass
    return json.dumps(word)


def _json_of_escape(escape: str) -> str:
    """What `escape` means behind a backslash, within a JSON string."""
    kind = escape[0]
    if kind not in "xuU01234567":
        return escaped(_ESCAPED.get(escape, f"\\{escape}"))
    code = int(escape, 8) if kind.isdigit() else int(escape[1:], 16)
    if 0xD800 <= code <= 0xDFFF:  # half a character: no message may contain it
        return f"\\u{code:04x}"
    return escaped(chr(code) if code <= 0x10FFFF else f"\\{escape}")
