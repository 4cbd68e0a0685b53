"""The rounds in which the next tokens of answers are guessed, one token of all sequences after the other.

    round 1   reads what a part says of each sequence, samples a guess
    round 2…  reads the last guess, samples the next one
              the last round's guess is not read

A round is launched before the host knows the guesses of the round before, unless one of them decides what may be
guessed next, as with a grammar.

Owns, while it guesses, copies of the sequences, which only the runner that guesses sees.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

from engine.sampling.sampled_tokens import SampledTokens
from engine.scheduling.sequence import PENDING_TOKEN, DraftPart, ScheduledSequence


def run_rounds(
    followed: list[Followed], launch: Callable[[list[Followed]], SampledTokens], eos_token_ids: frozenset[int]
) -> None:
    """Let `launch` compute `next_item` of some of `followed`, round after round, until each has its guesses. The order
    of `followed`, which must be that of a step, stays in all rounds."""
    launched = _Round(followed, launch(followed), eos_token_ids)
    for num_guessed in range(1, max(each.num_drafts for each in followed)):
        due = [each for each in followed if each.num_drafts > num_guessed]
        if any(each.needs_known_tokens for each in due):
            launched.take()
            due = [each for each in due if not each.has_ended]
        if not due:
            break
        earlier, launched = launched, _Round(due, launch(due), eos_token_ids)
        earlier.take()
    launched.take()


class Followed:
    """One part while it is done: a copy of the sequence that only the draft model's runner sees."""

    def __init__(self, part: DraftPart, *, reads_pairs_apart: bool) -> None:
        """`reads_pairs_apart`: lay out two tokens as two rows, if possible, so that the round can be a recorded one."""
        seq, params = part.seq, part.seq.sampling_params
        self.num_drafts = part.num_drafts
        self.guesses: list[int] = []
        self.has_ended = False
        """The answer cannot go on after the guesses."""
        self.needs_known_tokens = seq.grammar is not None or seq.thinking is not None or params.has_phrases
        self._num_known = len(seq)
        self._num_new = part.end - part.first
        self._apart: list[int] = []
        """A known token that is laid out as the guess after the others are."""
        token_ids = array("q", seq.token_ids)
        # The first of two rows would ask a grammar about a shorter answer than the engine has.
        if part.num_drafts and self._num_new == 2 and reads_pairs_apart and seq.grammar is None:
            self._apart = [token_ids.pop()]
        self._copy = replace(
            seq,
            token_ids=token_ids,
            num_computed_tokens=part.first,
            sampling_params=params if params.logprobs is None else replace(params, logprobs=None),
            lora_id=0,
            # The last known token is counted, too, unless it is the prompt's: then a grammar books its time as that for
            # guesses.
            num_drafts=min(1, seq.num_output_tokens),
        )

    @property
    def place(self) -> int:
        """In the order of a step: first what has one row, then what has several, then prompts."""
        return min(self._num_new, 2) + (self._num_new > 1 and not self._apart)

    def next_item(self) -> ScheduledSequence:
        return ScheduledSequence(self._copy, self._num_new, self._apart)

    def begin(self) -> None:
        """The round has been launched, and samples a guess."""
        copy = self._copy
        copy.num_computed_tokens += self._num_new
        copy.token_ids.extend([*self._apart, PENDING_TOKEN])
        self._num_new, self._apart = 1, []

    def take(self, sampled: list[int], eos_token_ids: frozenset[int]) -> None:
        """The round's tokens are known; none if it only read."""
        if not sampled:
            return
        token_id = max(sampled[-1], 0)  # a broken model samples INVALID_TOKEN, which must not be read on
        if self._copy.grammar is not None and (sampled[-1] < 0 or token_id in eos_token_ids):
            self.has_ended = True
            return
        self._copy.token_ids[self._num_known + len(self.guesses)] = token_id
        self._copy.num_drafts += 1
        self.guesses.append(token_id)


class _Round:
    """A launched round."""

    def __init__(self, followed: list[Followed], tokens: SampledTokens, eos_token_ids: frozenset[int]) -> None:
        for each in followed:
            each.begin()
        self._followed = followed
        self._tokens = tokens
        self._eos_token_ids = eos_token_ids

    def take(self) -> None:
        """Wait for the round's guesses. Safe to repeat."""
        followed, self._followed = self._followed, []
        if followed:
            for each, sampled in zip(followed, self._tokens.wait(), strict=True):
                each.take(sampled, self._eos_token_ids)
