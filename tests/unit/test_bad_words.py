"""Which tokens form the words that an answer must not contain, and when the last token of a word is forbidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import PENDING_TOKEN, Sequence
from router.text.bad_words import bad_words_token_ids
from router.text.tokenizer import Tokenizer

WORDS = ((7,), (1, 2), (3, 1, 2), (4, 5, 6))


def sequence(output: list[int], **params: Any) -> Sequence:
    settings = {"max_tokens": 100, "temperature": 0.0, "bad_words_token_ids": WORDS} | params
    return Sequence(0, "r", [1, 4, 5, *output], 3, SamplingParams(**settings))


def forbidden(seq: Sequence) -> set[int]:
    values = torch.zeros(1, 10)
    Sampler(frozenset()).sample(values, [seq], torch.tensor([0]))
    return set(values.isinf()[0].nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], {7}),  # the prompt's tokens do not count
        ([PENDING_TOKEN], {7}),
        ([1], {7, 2}),
        ([3, 1], {7, 2}),
        ([5], {7}),
        ([4, 5], {7, 6}),
        ([8, 8, 4, 5], {7, 6}),
        ([4, 5, 6], {7}),
    ],
)
def test_the_last_token_of_a_word_may_not_come_behind_the_others(output: list[int], expected: set[int]) -> None:
    assert forbidden(sequence(output)) == expected


def test_behind_drafts() -> None:
    seq = sequence([4])
    assert [forbidden(seq.followed_by(drafts)) for drafts in ((), (5,), (5, 1))] == [{7}, {7, 6}, {7, 2}]


def test_only_words_of_several_tokens_hang_on_the_token_before() -> None:
    assert sequence([]).needs_known_tokens
    assert not sequence([], bad_words_token_ids=((7,), (8,))).needs_known_tokens
    assert not sequence([], bad_words_token_ids=()).needs_known_tokens


def test_its_neighbours_are_not_concerned() -> None:
    values = torch.zeros(2, 10)
    values[:, 7] = 5
    chosen = Sampler(frozenset()).sample(values, [sequence([]), sequence([], bad_words_token_ids=())], torch.zeros(2))
    assert chosen.tolist() == [0, 7]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bad_words_token_ids": ((1,),) * 513}, "bad_words_token_ids must have at most 512 words, has 513"),
        ({"bad_words_token_ids": ((1,), ())}, "bad_words_token_ids must hold no empty word"),
        (
            {"allowed_token_ids": frozenset({5})},
            "bad_words cannot be combined with structured outputs or allowed_token_ids",
        ),
        ({"grammar": "x"}, "bad_words cannot be combined with structured outputs or allowed_token_ids"),
    ],
)
def test_what_cannot_be(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sequence([], **params)


def test_words_as_tokens(model_folder: Any) -> None:
    tokenizer = Tokenizer.from_folder(model_folder)
    encode = tokenizer.encode_plain
    lisbon, behind = encode("Lisbon"), encode(" Lisbon")
    assert bad_words_token_ids(["Lisbon", " Lisbon", "Lisbon"], encode) == [tuple(lisbon), tuple(behind)]
    assert (len(lisbon), len(behind)) == (3, 1), "by vLLM's rule the second may come"
    # If a space is a token of its own, the tokens after it are the word's own.
    assert bad_words_token_ids(["ab"], lambda text: [ord(char) for char in text]) == [(97, 98)]
    assert bad_words_token_ids([], encode) == []
