"""Finds words in a text that comes in pieces. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def first_of(text: str, words: Iterable[str], start: int = 0) -> tuple[int, str] | None:
    """Position of the first of `words` in `text`, and the word; of several at one position, the longest. None: `text`
    has none of them."""
    found = [(position, -len(word), word) for word in words if (position := text.find(word, start)) >= 0]
    if not found:
        return None
    position, _, word = min(found)
    return position, word


def num_held(text: str, words: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `words`."""
    return max((_num_held(text, word) for word in words), default=0)


def _num_held(text: str, word: str) -> int:
    at = text.find(word[:1], max(len(text) - len(word) + 1, 0))
    while at >= 0 and not word.startswith(text[at:]):
        at = text.find(word[:1], at + 1)
    return len(text) - at if at >= 0 else 0
