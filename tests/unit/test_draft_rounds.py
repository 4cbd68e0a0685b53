"""A draft model that lacks two tokens reads them in a step of its own rows, or as two rows of a recorded one."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from grammar_cases import EOS, grammar_text, write_model

from engine.running.draft_rounds import Followed
from engine.sampling_params import SamplingParams
from engine.scheduling.grammar import Grammars, GrammarState
from engine.scheduling.sequence import DraftPart, Sequence

PROMPT = [5, 6]
NUM_LACKING = 2


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = write_model(tmp_path_factory.mktemp("model"))
    return Grammars(folder, vocab_size=300, eos_token_ids=frozenset({EOS}))


def compiled(grammars: Grammars) -> GrammarState:
    state = grammars.state(grammar_text("json"))
    assert state.allowed([]) is not None  # waits until it is compiled
    return state


def sequence_of(answer: list[int]) -> Sequence:
    seq = Sequence(0, "r", [*PROMPT, *answer], len(PROMPT), SamplingParams())
    seq.num_computed_tokens = len(seq) - 1
    return seq


def followed_by(seq: Sequence) -> Followed:
    part = DraftPart(seq, len(seq) - NUM_LACKING, len(seq), 3)
    return Followed(part, reads_pairs_apart=True)


def test_two_tokens_are_two_rows_of_a_recorded_step() -> None:
    item = followed_by(sequence_of([7, 8, 9])).next_item()
    assert [list(seq.token_ids[len(PROMPT) :]) for seq in item.sampled_seqs] == [[7, 8], [7, 8, 9]]


def test_a_grammar_reads_each_token_of_the_answer_once(grammars: Grammars) -> None:
    """The engine has asked already what may follow the whole answer. Were there a row before its last token, the
    grammar would be asked about a shorter answer, and then read that token again."""
    answer, state, plain = list[int](), compiled(grammars), compiled(grammars)
    for _ in range(12):
        allowed = plain.allowed(array("q", answer))
        assert allowed is not None
        np.testing.assert_array_equal(allowed, state.allowed(array("q", answer)), f"after {answer}")
        tokens = np.flatnonzero(allowed)
        answer.append(int(tokens[len(answer) * 7 % len(tokens)]))
        if answer[-1] == EOS:
            break
        if len(answer) >= NUM_LACKING:
            state.propose(array("q", answer), lambda _: [], 4)
            seq = sequence_of(answer)
            seq.grammar = state
            for row in followed_by(seq).next_item().sampled_seqs:
                assert state.allowed(row.token_ids[row.num_prompt_tokens :], row.num_drafts) is not None
    assert len(answer) > 4


def test_no_shorter_answer_is_asked_about(grammars: Grammars) -> None:
    state = compiled(grammars)
    answer = array("q")
    for _ in range(3):
        allowed = state.allowed(answer)
        assert allowed is not None
        answer.append(int(np.flatnonzero(allowed)[0]))
    assert state.allowed(answer) is not None
    with pytest.raises(AssertionError, match="shorter"):
        state.allowed(answer[:-1])
