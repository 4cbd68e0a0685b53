"""How long an answer may think: which token is forced is a function of its tokens, however they arrive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from grammar_cases import EOS, tokenizer, write_model
from hypothesis import example, given
from hypothesis import strategies as st
from many_endings import is_free

from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.scheduling.grammar import Grammars
from engine.scheduling.sequence import PENDING_TOKEN, Sequence
from engine.scheduling.thinking import MAX_BEGIN_TOKENS, MAX_OTHER_ENDS, MAX_SPACE_TOKENS, Thinking, ThinkingBudget

END, BEGIN = 7, (3, 4, 5)
PROMPT = [1, BEGIN[0], 2]
VOCAB_SIZE = 300
SPACE = frozenset({2, 6})
SPLIT = [BEGIN[0], 2, *BEGIN[1:], 8]
"""The words that begin a thought, with white space among them."""
ONE_WORD = ThinkingBudget(num_tokens=0, end_token_id=END, begin_token_ids=BEGIN[:1], has_begun=True)


def sequence(answer: list[int], budget: ThinkingBudget, grammars: Grammars | None = None, **params: Any) -> Sequence:
    asked = SamplingParams(max_tokens=100, temperature=0, thinking_budget=budget, **params)
    thinking = Thinking(budget, len(PROMPT))
    state = grammars.state(asked.grammar) if grammars is not None and asked.grammar is not None else None
    return Sequence(0, "r", [*PROMPT, *answer], len(PROMPT), asked, thinking=thinking, grammar=state)


def allowed(seq: Sequence) -> set[int]:
    """The tokens that may come next."""
    values = torch.zeros(1, VOCAB_SIZE)
    Sampler(frozenset({EOS})).sample(values, [seq], torch.tensor([0]))
    return set((~values.isinf()[0]).nonzero().flatten().tolist())


budgets = st.builds(
    ThinkingBudget,
    num_tokens=st.integers(0, 4),
    end_token_id=st.just(END),
    begin_token_ids=st.sampled_from([BEGIN, BEGIN[:1], BEGIN[:2]]),
    has_begun=st.booleans(),
    may_repeat=st.booleans(),
    other_end_token_ids=st.frozensets(st.sampled_from([2, 3, 8]), max_size=2),
    space_token_ids=st.frozensets(st.sampled_from([2, 6]), max_size=2),
)


@given(budgets, st.lists(st.integers(2, 8), max_size=14), st.data())
@example(ThinkingBudget(num_tokens=1, end_token_id=END, has_begun=True), [8, 7, 8], None)
@example(ThinkingBudget(num_tokens=0, end_token_id=END, begin_token_ids=BEGIN, space_token_ids=SPACE), SPLIT, None)
@example(replace(ONE_WORD, other_end_token_ids=frozenset(BEGIN[:1])), [BEGIN[0], 8], None)
def test_what_must_come_is_a_function_of_the_tokens(
    budget: ThinkingBudget, answer: list[int], data: st.DataObject | None
) -> None:
    """In whatever order tokens are asked about, known or drafted, and whether or not the last one is known."""
    thinking, token_ids, num_known = Thinking(budget, len(PROMPT)), [*PROMPT, *answer], 0
    while True:
        for num_drafts in range(len(answer) - num_known + 1):
            forced = thinking.forced(token_ids[: len(PROMPT) + num_known + num_drafts], num_drafts)
            assert forced == (None if is_free(budget, answer[: num_known + num_drafts]) else END)
        if num_known == len(answer):
            return
        before = [*token_ids[: len(PROMPT) + num_known], PENDING_TOKEN]
        if not thinking.hangs_on_last(before):
            for token_id in range(2, 9):
                assert is_free(budget, [*answer[:num_known], token_id])
        num_known += 1 if data is None else data.draw(st.integers(1, len(answer) - num_known))


def test_a_message_that_begins_has_ended_the_thought_before() -> None:
    """If the model leaves out the thought's own end, the message is not cut off as if it were a thought."""
    said: dict[str, Any] = {"num_tokens": 2, "end_token_id": END, "begin_token_ids": BEGIN, "has_begun": True}
    budget = ThinkingBudget(**said, may_repeat=True, other_end_token_ids=frozenset({2, BEGIN[0]}))
    left = [8, BEGIN[0], 6, BEGIN[2], 8, 8, 8]
    for num_tokens in range(1, len(left) + 1):
        assert sequence(left[:num_tokens], budget).forced_token_id is None
    assert sequence([8, *BEGIN, 8], budget).forced_token_id == END, "where it is another thought, both count"
    assert sequence([8, 2, 8, 8, *BEGIN, 8], budget).forced_token_id == END
    assert sequence([8, 2, 8, 8], budget).forced_token_id is None
    assert sequence([8, BEGIN[0]], ThinkingBudget(**said)).forced_token_id == END


def test_a_word_within_an_answer_begins_no_thought() -> None:
    """An answer that mentions the word, as in "The <think> tag", would be cut off in its middle. Only white space, in
    any amount, may come before a thought."""
    budget = ThinkingBudget(num_tokens=1, end_token_id=END, begin_token_ids=BEGIN, space_token_ids=SPACE)
    assert sequence([8, *BEGIN, 8], budget).forced_token_id is None
    assert sequence([BEGIN[0], *BEGIN, 8], budget).forced_token_id is None
    assert sequence([*BEGIN, 8], budget).forced_token_id == END
    assert sequence([2, 6, 2, 2, *BEGIN, 8], budget).forced_token_id == END


def test_only_near_its_end_a_thought_keeps_steps_apart() -> None:
    budget = ThinkingBudget(num_tokens=3, end_token_id=END, has_begun=True)
    waits = [sequence([8] * n + [PENDING_TOKEN], budget).needs_known_tokens for n in range(4)]
    assert waits == [False, False, True, True]
    assert not sequence([8, 8, 8, END, PENDING_TOKEN], budget).needs_known_tokens
    assert sequence([8, 8, PENDING_TOKEN], budget).forced_token_id is None


def test_an_answer_that_may_think_again_keeps_steps_apart_where_it_may_begin_to() -> None:
    budget = ThinkingBudget(num_tokens=1, end_token_id=END, begin_token_ids=BEGIN, has_begun=True, may_repeat=True)
    answer = [8, END, 8, 8, *BEGIN]
    waits = [sequence([*answer[:n], PENDING_TOKEN], budget).needs_known_tokens for n in range(len(answer) + 1)]
    assert waits == [True, True, False, False, False, False, True, True]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"min_tokens": 20, "stop_token_ids": frozenset({END})},
        {"bad_words_token_ids": ((END,), (8, END))},
        {"logit_bias": {END: -100.0, 9: 100.0}},
        {"presence_penalty": 2.0, "repetition_penalty": 2.0},
    ],
)
def test_what_ends_a_thought_is_all_that_may_come(params: dict[str, Any]) -> None:
    budget = ThinkingBudget(num_tokens=2, end_token_id=END, has_begun=True)
    assert allowed(sequence([8, 8], budget, **params)) == {END}
    assert len(allowed(sequence([8], budget, **params))) > VOCAB_SIZE - 5
    seq = sequence([8], budget, **params)
    assert allowed(seq.followed_by([9])) == {END}
    assert len(allowed(seq.followed_by([9, END]))) > VOCAB_SIZE - 5


def test_its_neighbours_are_not_concerned() -> None:
    budget = ThinkingBudget(num_tokens=0, end_token_id=END, has_begun=True)
    plain = Sequence(1, "s", [1, 2], 2, SamplingParams(max_tokens=5, temperature=0))
    values = torch.zeros(3, VOCAB_SIZE)
    values[:, 9] = 5
    values[1, 4] = float("nan")
    seqs = [sequence([], budget), sequence([], budget), plain]
    chosen = Sampler(frozenset({EOS})).sample(values, seqs, torch.zeros(3, dtype=torch.int64))
    assert chosen.tolist() == [END, -1, 9], "where the model's numbers are none, nothing is chosen"


def test_a_grammar_has_a_character_ended_first(tmp_path: Any) -> None:
    """If a thought is cut within a character, the last byte of the character comes first, and then the end. (The tokens
    are bytes.)"""
    grammars = Grammars(write_model(tmp_path), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    first, second = tokenizer().encode("\u00fc").ids
    end = tokenizer().encode("]").ids[0]
    budget = ThinkingBudget(num_tokens=1, end_token_id=end, has_begun=True)
    held = 'start: /[^\\]]*/ "]" /(yes|no)/'
    assert allowed(sequence([first], budget, grammars, grammar=held)) > {second}
    assert allowed(sequence([first, second], budget, grammars, grammar=held)) == {end}
    assert end not in allowed(sequence([first, second, end], budget, grammars, grammar=held))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_tokens": -1}, "num_tokens must be at least 0, is -1"),
        ({"has_begun": False}, "begin_token_ids must not be empty"),
        ({"begin_token_ids": (3, 4, 3)}, "begin_token_ids must not have its first id again"),
        ({"begin_token_ids": (3, 3)}, "begin_token_ids must not have its first id again"),
        ({"begin_token_ids": tuple(range(MAX_BEGIN_TOKENS + 1))}, "must have at most 16 ids, has 17"),
        ({"other_end_token_ids": frozenset(range(MAX_OTHER_ENDS + 1))}, "must have at most 16 ids, has 17"),
        ({"space_token_ids": frozenset(range(MAX_SPACE_TOKENS + 1))}, "must have at most 4096 ids, has 4097"),
    ],
)
def test_a_useless_budget_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ThinkingBudget(**{"num_tokens": 3, "end_token_id": END, "has_begun": True, **wrong})


def test_a_budget_may_reach_its_bounds() -> None:
    ThinkingBudget(
        num_tokens=0, end_token_id=END, begin_token_ids=tuple(range(MAX_BEGIN_TOKENS)),
        other_end_token_ids=frozenset(range(MAX_OTHER_ENDS)), space_token_ids=frozenset(range(MAX_SPACE_TOKENS)),
    )  # fmt: skip


def test_an_end_that_may_not_come_is_refused() -> None:
    budget = ThinkingBudget(num_tokens=2, end_token_id=END, has_begun=True)
    with pytest.raises(ValueError, match="cannot be combined with allowed_token_ids"):
        sequence([], budget, allowed_token_ids=frozenset({1, END}))
