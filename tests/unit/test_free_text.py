"""Regexes for texts without certain words, compared with a search for the words."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.text.calls.free_text import MAX_CHARS, FreeText, text_without

ALPHABET = "</abc"
TEXTS = ["".join(chars) for length in range(7) for chars in itertools.product(ALPHABET, repeat=length)]
WORDS = [
    (), ("a",), ("aa",), ("</ab>",), ("</ab>", "</ac"), ("<a", "<b", "<c"), ("aab", "baa"), ("ab<c", "b<d"), ("abab",),
    ("a</", "b<<"), ("aba", "bb", "<a<"), ("///a",), ("ab", "ba", "c/"),
]  # fmt: skip


@pytest.mark.parametrize("words", [*WORDS, ("<a", "<ab", "<c")])
def test_texts_without_words(words: tuple[str, ...]) -> None:
    regex = re.compile(text_without(words), re.DOTALL)
    assert [text for text in TEXTS if bool(regex.fullmatch(text)) == any(word in text for word in words)] == []


@pytest.mark.parametrize("words", WORDS)
def test_texts_up_to_the_first_of_the_words(words: tuple[str, ...]) -> None:
    """And texts that end with the beginning of a word."""
    begun = {word[:length] for word in words for length in range(1, len(word))}
    free = FreeText(words, ["", *begun])
    for word in words:
        regex = re.compile(free.said + free.up_to(word), re.DOTALL)
        for text in TEXTS:
            is_first = text.endswith(word) and not any(other in text[:-1] for other in words)
            assert bool(regex.fullmatch(text)) == is_first, text
    for end in begun:
        regex = re.compile(free.said + free.ending_with(end), re.DOTALL)
        for text in TEXTS:
            is_without = text.endswith(end) and not any(word in text for word in words)
            assert bool(regex.fullmatch(text)) == is_without, text


CHARS = "ab<\n&^]-~é"


@given(words=st.lists(st.text(CHARS, min_size=1, max_size=4), min_size=1, max_size=3), text=st.text(CHARS))
def test_any_words_in_any_text(words: list[str], text: str) -> None:
    assume(not any(a in b for a, b in itertools.permutations(words, 2)))
    assert bool(re.fullmatch(text_without(words), text, re.DOTALL)) != any(word in text for word in words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["ab", "xaby"], "'xaby' contains 'ab'"),
        (["ab", "ab"], "'ab' contains 'ab'"),
        (["a" * 65], "at most 64 characters, has 65"),
        (["Thought:", "Action:", "Observation:", "Final Answer:", "Question:"], "let them begin with the same char"),
    ],
)
def test_words_that_cannot_be_told_apart_cheaply(words: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FreeText(words).said  # noqa: B018


def test_words_as_people_choose_them_take_little() -> None:
    assert len(text_without(["<function=", "<tool_call>", "<|python_tag|>", "<think>"])) < 3000
    assert len(text_without(["Thought:", "Action:", "Observation:", "Final Answer:"])) < MAX_CHARS
