"""Texts that an answer must not contain, as the token sequences that would write them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def bad_words_token_ids(words: Iterable[str], encode: Callable[[str], list[int]]) -> list[tuple[int, ...]]:
    """The token ids of each word as it is written at the beginning of a text or within a word; and as it is written
    behind a space, unless these tokens end with the former. `encode`: adds no special tokens.

    vLLM leaves out the tokens behind a space if their number differs: " naive" may be one token, "naive" two.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone, behind_space = tuple(encode(word.lstrip())), tuple(encode(f" {word.lstrip()}"))
        found[alone] = None
        if behind_space[-len(alone) :] != alone:
            found[behind_space] = None
    found.pop((), None)
    return list(found)
