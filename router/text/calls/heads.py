"""What stands before a call's arguments, read a piece at a time: its words, and the name. Pure.

A head that is not over may be read again with each new character, so it is bounded: one that says more than
`MAX_HEAD_CHARS` is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from router.text.calls.call_format import Head

MAX_HEAD_CHARS = 512
NAME = re.compile(r"[\w.-]*")
_SPACE = re.compile(r"\s*")


class TooShort(Exception):  # noqa: N818 (no error: more will come)
    """The text ends before it can be told what is there."""


class Cursor:
    """Goes through a text. What it finds in one, it finds in each that goes on from there."""

    def __init__(self, text: str) -> None:
        self.text = text[:MAX_HEAD_CHARS]
        self.position = 0

    def take(self, word: str) -> bool:
        """Whether the word comes next; then goes behind it."""
        if self.text.startswith(word, self.position):
            self.position += len(word)
            return True
        if word.startswith(self.text[self.position :]):
            raise TooShort
        return False

    def is_at(self, word: str) -> bool:
        """Whether the word comes next."""
        if not self.take(word):
            return False
        self.position -= len(word)
        return True

    def run(self, pattern: re.Pattern[str]) -> str:
        """All that comes next of characters that `pattern` takes any number of. What then must come is to be taken:
        where the text ends here, there may be more of them."""
        match = pattern.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        return match[0]

    def space(self) -> None:
        self.run(_SPACE)


def head_of(text: str, read: Callable[[Cursor], Head]) -> Head | None:
    """What `read` finds at the beginning of `text`. None: it ends too early to tell."""
    try:
        return read(Cursor(text))
    except TooShort:
        return None if len(text) < MAX_HEAD_CHARS else Head(0)
