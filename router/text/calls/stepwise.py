"""Readers of arguments that are not JSON: one state after the other, as far as the text goes."""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from router.text.calls.call_format import Body, Bracketed
from router.text.calls.text_values import TYPES, Schema
from router.text.words import first_of, num_held

_SPACE = re.compile(r"\s*")


class StepwiseReader(Bracketed, ABC):
    """Reads the arguments of one call. What it tells does not depend on how the text is cut into pieces."""

    def __init__(self) -> None:
        self._at = 0
        """Position in the text that is being read."""
        self._told: list[str] = []
        """Pieces of the arguments, as JSON, since the last `body`."""

    @property
    @abstractmethod
    def _is_over(self) -> bool:
        """The call has ended."""

    @abstractmethod
    def _step(self, text: str) -> bool:
        """Read on from `_at`. Returns whether another step may find more."""

    def body(self, text: str) -> Body:
        """See `CallReader`."""
        self._at = 0
        while self._step(text):
            pass
        told, self._told = "".join(self._told), []
        return Body(self._at, told, is_over=self._is_over)

    def _skip_space(self, text: str) -> None:
        match = _SPACE.match(text, self._at)
        assert match is not None
        self._at = match.end()


class State(enum.Enum):
    """What comes next in arguments within brackets."""

    ITEM = enum.auto()
    VALUE = enum.auto()
    STRING = enum.auto()
    BEHIND_STRING = enum.auto()
    WORD = enum.auto()
    COLON = enum.auto()
    COMMA = enum.auto()
    BROKEN = enum.auto()
    OVER = enum.auto()


class BracketedReader(StepwiseReader):
    """Reads arguments within brackets, in a notation near to JSON's: items and values, strings and words. `opens`: the
    call's bracket. `broken_by`: words behind the call; none of them can stand outside strings. Broken arguments end
    there."""

    def __init__(self, schema: Schema, broken_by: Sequence[str], *, opens: str) -> None:
        super().__init__()
        self._schema = schema
        self._broken_by = broken_by
        self._state = State.ITEM
        self._open = [opens]
        """The brackets that are open, the call's first."""
        self._num_items = [0]
        """How many items each of them has so far."""
        self._types = TYPES
        """JSON types that the value may have."""
        self._held: list[str] | None = None
        """The pieces of a string where the schema allows none: told as what it contains when it is complete."""
        self._word: list[str] = []
        """The pieces of a word, which is told when it is complete."""

    @property
    def _is_over(self) -> bool:
        return self._state is State.OVER

    def _step(self, text: str) -> bool:
        match self._state:
            case State.STRING:
                return self._read_string(text)
            case State.WORD:
                return self._read_word(text)
            case State.BROKEN:
                return self._read_broken(text)
            case State.OVER:
                return False
        self._skip_space(text)
        if self._at == len(text):
            return False
        match self._state:
            case State.ITEM:
                return self._read_item(text)
            case State.VALUE:
                return self._read_value(text)
            case _:
                return self._read_sign(text)

    @abstractmethod
    def _read_item(self, text: str) -> bool:
        """An item, up to its value; or the end of what is open."""

    @abstractmethod
    def _read_value(self, text: str) -> bool:
        """The beginning of a value."""

    @abstractmethod
    def _read_string(self, text: str) -> bool:
        """More of a string, its end included."""

    @abstractmethod
    def _read_word(self, text: str) -> bool:
        """More of a word, up to what ends it."""

    @abstractmethod
    def _read_sign(self, text: str) -> bool:
        """What stands behind a value or a key."""

    def _open_bracket(self, bracket: str) -> None:
        self._at += 1
        self._told.append(bracket)
        self._open.append(bracket)
        self._num_items.append(0)
        self._state = State.ITEM

    def _break(self) -> bool:
        self._state = State.BROKEN
        return True

    def _read_broken(self, text: str) -> bool:
        found = first_of(text, self._broken_by, self._at)
        if found is not None:
            self._at = found[0]
            self._state = State.OVER
        else:
            self._at = len(text) - num_held(text[self._at :], self._broken_by)
        return False
