"""A regex of texts in which certain words are not, as grammars have it.

A grammar could say "not any text with the word in it", and would have to prove in every state whether anything can
follow: milliseconds for a token. So it is said what may come, state by state: how much of a word has been said.

    ([^<] | < a word's beginning, again < …, and a character that does not go on with it)*, < a word's beginning or not
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def text_without(words: Sequence[str]) -> str:
    """`words`, of two characters and more, begin with the same one, which is nowhere else in them."""
    first = words[0][0]
    assert all(word[0] == first and first not in word[1:] and len(word) > 1 for word in words)
    rests = [word[1:] for word in words]
    again, past = _again(rests, first), _past(rests, first)
    said = f"(?:[^{_in_class(first)}]|{pattern(first)}(?:{again})*(?:{past}))*"
    return f"{said}(?:{pattern(first)}(?:{again})*{_begun(rests)})?"


def pattern(text: str) -> str:
    """Of a regex: these characters."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def _following(rests: Sequence[str]) -> dict[str, list[str]]:
    """What is left of each, by its next character. Of a whole word, nothing: it may not be said."""
    chars = dict.fromkeys(rest[0] for rest in rests if rest)
    return {char: [rest[1:] for rest in rests if rest[:1] == char] for char in chars}


def _again(rests: Sequence[str], first: str) -> str:
    """From here to the beginning of another word."""
    if "" in rests:
        return ""
    going_on = [
        f"{pattern(char)}(?:{said})" for char, left in _following(rests).items() if (said := _again(left, first))
    ]
    return "|".join([pattern(first), *going_on])


def _past(rests: Sequence[str], first: str) -> str:
    """From here to what is no word."""
    if "" in rests:
        return ""
    following = _following(rests)
    others = f"[^{''.join(_in_class(char) for char in (first, *following))}]"
    going_on = [f"{pattern(char)}(?:{said})" for char, left in following.items() if (said := _past(left, first))]
    return "|".join([others, *going_on])


def _begun(rests: Sequence[str]) -> str:
    """Any part of a word, but not all of one."""
    going_on = [f"{pattern(char)}{_begun(left)}" for char, left in _following(rests).items() if "" not in left]
    return f"(?:{'|'.join(going_on)})?" if going_on else ""


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "\\]^-[/" else "\\n" if char == "\n" else char
