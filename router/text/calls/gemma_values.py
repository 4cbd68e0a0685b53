"""Turns the arguments of Gemma 4's calls into JSON, as they come. Pure.

    city:<|"|>Oslo<|"|>,days:[1,2],more:{a:null}}   ──>   {"city": "Oslo", "days": [1, 2], "more": {"a": null}}

    ITEM ── a key ──> VALUE ── <|"|> ──> STRING ──┐
     │  ^              │ └──── a word ──> WORD ───┴──> COMMA ──> ITEM …, or the end
     │  └── a bracket ─┘
     └─ what the syntax does not allow ──> BROKEN

Strings come as they are said, and have no escapes; numbers and words when they are complete. A word that is no literal
(`city:Oslo`) is a string; so is a number where the schema allows only strings. A string is told as what it contains
where the schema allows none. Keys and words may have JSON's quotes. Arguments that are broken end there, and stay
incomplete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from router.text.calls.objects import unquoted
from router.text.calls.python_values import json_of_word
from router.text.calls.stepwise import BracketedReader, State
from router.text.calls.text_values import TYPES, Schema, escaped, json_of_text
from router.text.words import num_held

QUOTE = '<|"|>'
MAX_KEY_CHARS = 256
"""Maximum length of a key, with its quotes and the white space behind it."""
_PLAIN_KEY = r'[^\s:,{}\[\]<"][^:,{}\[\]<"]*'
_QUOTE = re.escape(QUOTE)
_KEY = re.compile(rf'(?:{_QUOTE}((?:(?!{_QUOTE}).)*){_QUOTE}\s*|("(?:[^"\\]|\\.)*")\s*|({_PLAIN_KEY})):', re.DOTALL)
_MAY_BE_KEY = re.compile(
    rf'{_QUOTE}(?:(?!{_QUOTE}).)*(?:{_QUOTE}\s*)?|"(?:[^"\\]|\\.)*(?:\\|"\s*)?|{_PLAIN_KEY}', re.DOTALL
)
_IN_WORD = re.compile(r"[,}\]<]")
_IN_QUOTED = re.compile(r'["\\]')
_ENDS = {"[": "]", "{": "}"}


class GemmaArguments(BracketedReader):
    """Reads the arguments of one call, behind its bracket."""

    def __init__(self, schema: Schema, broken_by: Sequence[str]) -> None:
        super().__init__(schema, broken_by, opens="{")
        self._is_quoted = False
        """The word is in JSON's quotes, and within them."""
        self._told.append("{")

    # -- brackets, keys and signs -------------------------------------------------------------------------------------

    def _read_item(self, text: str) -> bool:
        if text[self._at] == _ENDS[self._open[-1]]:
            return self._close()
        if self._open[-1] == "[":
            self._begin_item("")
            return True
        window = text[self._at : self._at + MAX_KEY_CHARS]
        match = _KEY.match(window)
        if match is None:
            may_be = QUOTE.startswith(window) or _MAY_BE_KEY.fullmatch(window)
            return False if may_be and len(window) < MAX_KEY_CHARS else self._break()
        self._at += match.end()
        plain = unquoted(match[2]) if match[2] is not None else match[3].strip() if match[1] is None else match[1]
        self._types = self._schema.types_of(plain) if len(self._open) == 1 else TYPES
        self._begin_item(f"{json.dumps(plain, ensure_ascii=False)}: ")
        return True

    def _begin_item(self, said: str) -> None:
        self._told.append((", " if self._num_items[-1] else "") + said)
        self._num_items[-1] += 1
        self._state = State.VALUE

    def _close(self) -> bool:
        self._at += 1
        self._num_items.pop()
        self._told.append(_ENDS[self._open.pop()])
        self._state = State.COMMA if self._open else State.OVER
        return bool(self._open)

    def _read_sign(self, text: str) -> bool:
        """A comma, or the end of what is open."""
        if text[self._at] == _ENDS[self._open[-1]]:
            return self._close()
        if text[self._at] != ",":
            return self._break()
        self._at += 1
        self._state = State.ITEM
        return True

    # -- values -------------------------------------------------------------------------------------------------------

    def _read_value(self, text: str) -> bool:
        char = text[self._at]
        if char in _ENDS:
            self._open_bracket(char)
            self._types = TYPES
        elif text.startswith(QUOTE, self._at):
            self._at += len(QUOTE)
            self._held = None if "string" in self._types else []
            if self._held is None:
                self._told.append('"')
            self._state = State.STRING
        elif QUOTE.startswith(text[self._at :]):
            return False
        else:
            self._is_quoted = char == '"'
            if self._is_quoted:
                self._word.append(char)
                self._at += 1
            self._state = State.WORD
        return True

    def _read_string(self, text: str) -> bool:
        end = text.find(QUOTE, self._at)
        is_whole = end >= 0
        if not is_whole:
            end = len(text) - num_held(text[self._at :], (QUOTE,))
        said = text[self._at : end]
        if self._held is None:
            self._told.append(escaped(said))
        else:
            self._held.append(said)
        self._at = end
        if not is_whole:
            return False
        self._at += len(QUOTE)
        self._told.append('"' if self._held is None else json_of_text("".join(self._held), self._types))
        self._go_on()
        return True

    def _go_on(self) -> None:
        """A value is complete."""
        self._held = None
        self._types = TYPES
        self._state = State.COMMA

    def _read_word(self, text: str) -> bool:
        match = (_IN_QUOTED if self._is_quoted else _IN_WORD).search(text, self._at)
        end = len(text) if match is None else match.start()
        self._word.append(text[self._at : end])
        self._at = end
        if match is None:
            return False
        sign = match[0]
        if sign == "\\" and end + 1 == len(text):
            return False
        if sign == "<":
            if any(text.startswith(word, end) for word in self._broken_by):
                return self._break()
            if any(word.startswith(text[end : end + len(word)]) for word in self._broken_by):
                return False
        elif sign not in '"\\':
            return self._end_word()
        elif sign == '"':
            self._is_quoted = False
        num_taken = 2 if sign == "\\" else 1
        self._word.append(text[end : end + num_taken])
        self._at = end + num_taken
        return True

    def _end_word(self) -> bool:
        word, self._word = "".join(self._word).strip(), []
        if not word:
            return self._break()
        if len(word) > 1 and word[0] == word[-1] == '"':
            said = unquoted(word)
            is_text = "string" in self._types
            self._told.append(json.dumps(said, ensure_ascii=False) if is_text else json_of_text(said, self._types))
        else:
            self._told.append(json_of_word(word, self._types))
        self._go_on()
        return True
