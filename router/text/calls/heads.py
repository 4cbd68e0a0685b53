"""Reads what stands before a call's arguments, a piece at a time: the format's words, and the name. Pure.

An incomplete head may be read again with each new character, so its length is bounded: a text that has more than
`MAX_HEAD_CHARS` is no head.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from router.text.calls.call_format import Head

MAX_HEAD_CHARS = 512
NAME = re.compile(r"[\w.-]*")
_SPACE = re.compile(r"\s*")


class TooShort(Exception):  # noqa: N818 (no error: more will come)
    """The text ends too early to tell what it is."""


class Cursor:
    """Moves through a text. What it finds does not change when the text continues."""

    def __init__(self, text: str) -> None:
        self.text = text[:MAX_HEAD_CHARS]
        self.position = 0

    def take(self, word: str) -> bool:
        """Whether the word comes next; if so, move behind it."""
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
        """Read what `pattern` matches, any number of certain characters. If the text ends here, more of them may
        follow, so the caller must then `take` what comes behind them."""
        match = pattern.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        return match[0]

    def space(self) -> None:
        self.run(_SPACE)


def head_of(text: str, read: Callable[[Cursor], Head]) -> Head | None:
    """The head that `read` finds at the beginning of `text`. None: the text ends too early to tell."""
    try:
        return read(Cursor(text))
    except TooShort:
        return None if len(text) < MAX_HEAD_CHARS else Head(0)
