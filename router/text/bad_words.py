"""Texts that an answer is not to have, as the tokens by which it would have them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def bad_words_token_ids(words: Iterable[str], encode: Callable[[str], list[int]]) -> list[tuple[int, ...]]:
    """Of each word as it is written at the beginning of a text, or within a word; and as it is written behind a space,
    where those tokens do not end with the former. `encode`: without special tokens.

    vLLM leaves out what is written behind a space with another number of tokens: " naive" may be one, "naive" two.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone, behind_space = tuple(encode(word.lstrip())), tuple(encode(f" {word.lstrip()}"))
        found[alone] = None
        if behind_space[-len(alone) :] != alone:
            found[behind_space] = None
    found.pop((), None)
    return list(found)
