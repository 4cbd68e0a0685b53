"""Regexes, for grammars, of texts that do not contain certain words, or that end with the first occurrence of one.

A grammar could say "not any text that contains the word", but llguidance would have to prove in every state whether
anything can follow: milliseconds per token. So the regex says what may come, state by state; a state is how much of a
word has been written.

    ([^<] | < a word's beginning, again < …, and a character that does not continue it)*, < a word's beginning or not

The states and their transitions are Aho and Corasick's. They are eliminated one after the other, the longest beginnings
first, to give a regex (Arden's rule: x = ax | b is a*b).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

MAX_WORD_CHARS = 64
"""Each character makes the regex one level deeper, and regexes may have 250 levels."""
MAX_CHARS = 100_000
"""Maximum length of a regex. Words that can follow each other in many ways, such as four that begin with different
characters, would make an endless one."""

_Target = tuple[str, str]
"""Where a state leads: to a state, to a complete word, or to the text's end behind certain characters."""
_STATE, _WORD, _END = "state", "word", "end"
_ROOT = (_STATE, "")


def text_without(words: Sequence[str]) -> str:
    """The regex of any text without any of `words`. Raises `ValueError` as `FreeText` does."""
    free = FreeText([word for word in words if not any(other in word for other in words if other != word)])
    return free.said + free.ending_with("")


class FreeText:
    """A text up to the first of `words`, or to its end. No word may contain another. `ends`: what the text may have to
    end with if it contains no word; these are beginnings of words. Raises `ValueError` if the words cannot be told
    apart, or not cheaply."""

    def __init__(self, words: Sequence[str], ends: Sequence[str] = ("",)) -> None:
        for number, word in enumerate(words):
            if len(word) > MAX_WORD_CHARS:
                raise ValueError(f"{word!r:.40} must have at most {MAX_WORD_CHARS} characters, has {len(word)}")
            for other in (*words[:number], *words[number + 1 :]):
                if word in other:
                    raise ValueError(f"{other!r:.80} contains {word!r:.80}, and could never be reached")
        self._words = words
        self._ends = ends
        self._states = {word[:length] for word in words for length in range(len(word))}

    @property
    def said(self) -> str:
        """The first part of the regex; `up_to` or `ending_with` gives the second."""
        return f"{self._grouped(self._solved.get(_ROOT, []))}*"

    def up_to(self, word: str) -> str:
        """The part behind `said`, up to the end of `word`: its first occurrence, and no other word occurs before."""
        return self._grouped(self._solved[_WORD, word])

    def ending_with(self, end: str) -> str:
        """The part behind `said`, up to the text's end, which is `end`, if none of the words occurs. Empty: any end is
        allowed."""
        return self._grouped(self._solved.get((_END, end), []))

    @cached_property
    def _solved(self) -> dict[_Target, list[str]]:
        """For the state in which no part of a word has been written: the regexes that lead to each target."""
        leads = {begun: self._leads_from(begun) for begun in self._states | {""}}
        for begun in sorted(self._states - {""}, key=lambda begun: (-len(begun), begun)):
            onward = leads.pop(begun)
            again = onward.pop((_STATE, begun), [])
            for other in leads.values():
                before = other.pop((_STATE, begun), None)
                if before is None:
                    continue
                head = self._grouped(before) + (f"{self._grouped(again)}*" if again else "")
                for target, pieces in onward.items():
                    other.setdefault(target, []).append(head + self._grouped(pieces))
            if sum(len(piece) for other in leads.values() for pieces in other.values() for piece in pieces) > MAX_CHARS:
                raise ValueError(
                    "the words that end free text are too costly to tell apart; let them begin with the same character"
                )
        return leads[""]

    def _leads_from(self, begun: str) -> dict[_Target, list[str]]:
        """For one state: the regexes of the next character, by the target that it leads to."""
        leads: dict[_Target, list[str]] = {}
        others = []
        for char in dict.fromkeys("".join(self._words)):
            target = self._target(begun + char)
            if target != _ROOT:
                leads.setdefault(target, []).append(pattern(char))
                others.append(_in_class(char))
        leads.setdefault(_ROOT, []).append(f"[^{''.join(others)}]" if others else "(?s:.)")
        for end in self._ends:
            if begun.endswith(end):
                leads[_END, end] = [""]
        return leads

    def _target(self, said: str) -> _Target:
        """The longest part of a word at the end of `said`, or a whole word."""
        for start in range(len(said)):
            if (rest := said[start:]) in self._words:
                return _WORD, rest
            if rest in self._states:
                return _STATE, rest
        return _ROOT

    @staticmethod
    def _grouped(pieces: Sequence[str]) -> str:
        """A regex that matches one of `pieces`."""
        some = [piece for piece in pieces if piece]
        if not some:
            return ""
        is_class = len(some) == 1 and re.fullmatch(r"\[\^?(?:\\.|[^\]\\])+\]|\\.|[^\\]|\(\?s:\.\)", some[0], re.DOTALL)
        said = some[0] if is_class else f"(?:{'|'.join(some)})"
        return f"{said}?" if len(some) < len(pieces) else said


def pattern(text: str) -> str:
    """A regex that matches exactly `text`."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "\\]^-[/&~" else "\\n" if char == "\n" else char
