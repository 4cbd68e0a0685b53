"""Adds draft tokens to decoding sequences before a step, and removes the wrong ones after the step.

    decoding sequences ──add──> some of them with drafts ──computed──> drop_wrong: as if only the right ones had been
                          └─ with a draft model or head: DraftParts, whose drafts `add_models` adds

speculation.py says where drafts come from.

Keys and values of wrong drafts are written over. Layers that keep a state have read the wrong drafts, too: such a state
is put back to what it was before the step, of which the step keeps a copy, and the sequence's next step computes the
tokens that were right once more, before the next one (`Sequence.num_replayed`). A step with a few more tokens takes
hardly longer.
"""

from __future__ import annotations

from typing import Protocol

from engine.config import SchedulerConfig
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.head_drafting import HeadDrafting
from engine.scheduling.model_drafting import ModelDrafting
from engine.scheduling.sequence import (
    INVALID_TOKEN,
    DraftPart,
    PutBack,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
)
from engine.scheduling.speculation import SpeculativeConfig, propose
from engine.scheduling.stats import SchedulerStats
from engine.scheduling.stop_rule import StopRule

PATIENCE = {"ngram": 1, "draft_model": 8, "eagle3": 8, "mtp": 8}
"""See `DraftHistory.note`. What a lookup finds is right or wrong for a while; a model that is right half of the time is
wrong now and then."""


MOST_REPLAYED = 6
"""A sequence that computes more tokens again gets no drafts, so that its state catches up. Up to eight rows take hardly
longer than one (docs/performance.md)."""


class Planner(Protocol):
    """Decides what a draft model or head computes before a step."""

    def begin(self, decoding: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Begin a step. Returns the sequences in the order in which to plan."""

    def plan(self, seq: Sequence, num_wanted: int, num_left: int) -> DraftPart | None:
        """Plan what is computed for `seq`, whose tokens are all known: guess at most `num_wanted` tokens, at least one,
        or read what must be read before. Returns None for nothing. Allocates the blocks of the drafts. `num_left`: the
        tokens that may still follow, more than `num_wanted`."""

    def settle(self, seq: Sequence) -> None:
        """A step has dropped the wrong drafts of `seq`."""


def _planner(config: SchedulerConfig, block_manager: BlockManager) -> Planner | None:
    """None: drafts are looked up."""
    if config.speculation is None or config.speculation.method == "ngram":
        return None
    return HeadDrafting(block_manager) if config.speculation.has_head else ModelDrafting(config, block_manager)


class Drafting:
    """One per scheduler. Owns only notes: the sequence owns the blocks of its drafts, the runner copies of states."""

    def __init__(
        self, config: SchedulerConfig, block_manager: BlockManager, stop_rule: StopRule, stats: SchedulerStats
    ) -> None:
        self._config = config.speculation
        self._max_rows = config.draft_batch_tokens
        self._block_manager = block_manager
        self._stop_rule = stop_rule
        self._stats = stats
        self._patience = 1 if self._config is None else PATIENCE[self._config.method]
        self._model = _planner(config, block_manager)
        self._has_states = block_manager.num_state_blocks > 0
        self._max_drafted = config.max_kept_states if self._has_states else config.max_num_seqs
        self._copy_of: dict[int, int] = {}
        """By `seq_id`: which copy the launched step keeps of the sequence's state before its drafts."""
        self._spoilt: list[tuple[int, Sequence]] = []
        """Copies of states that the last step has spoilt, and whose they are."""

    def add(self, decoding: list[ScheduledSequence], budget: int) -> tuple[list[ScheduledSequence], list[DraftPart]]:
        """Return `decoding` with drafts added where some are found and blocks are available, at most `budget` drafts in
        all, and what the draft model or head must do. Sequences with drafts, or for which it guesses, or of which some
        tokens are computed again, come last. Prefill-only sequences get none."""
        if self._config is None:
            return decoding, []
        if self._model is not None:
            decoding = self._model.begin(decoding)
        budget = min(budget, self._max_rows - sum(each.num_new_tokens for each in decoding))
        plain: list[ScheduledSequence] = []
        guessed: list[ScheduledSequence] = []
        parts: list[DraftPart] = []
        num_drafted = 0
        for scheduled in decoding:
            most = budget if num_drafted < self._max_drafted else 0
            item, part = self._guess(scheduled, self._config, most)
            if part is not None:
                parts.append(part)
            num_drafts = len(item.draft_token_ids) if part is None else part.num_drafts
            (guessed if num_drafts or item.num_new_tokens > 1 else plain).append(item)
            budget -= num_drafts
            num_drafted += num_drafts > 0
        return plain + guessed, parts

    def _guess(
        self, scheduled: ScheduledSequence, config: SpeculativeConfig, budget: int
    ) -> tuple[ScheduledSequence, DraftPart | None]:
        """Add drafts that are looked up, or plan what the draft model or head does."""
        seq = scheduled.seq
        num_left = self._stop_rule.num_left(seq, len(seq))
        most = min(config.num_speculative_tokens, budget, num_left - 1)
        if most < 1 or seq.is_prefill_only or seq.num_replayed > MOST_REPLAYED:
            return scheduled, None
        if self._model is None or seq.grammar is not None:
            scheduled = self._looked_up(scheduled, config, most)
        num_wanted = min(most, seq.draft_history.num_wanted(len(seq)))
        if self._model is None or scheduled.draft_token_ids or not num_wanted or not _may_guess(seq):
            return scheduled, None
        return scheduled, self._model.plan(seq, num_wanted, num_left)

    def add_models(self, output: SchedulerOutput, drafts: list[list[int]]) -> list[ScheduledSequence]:
        """Return the step's sequences with `drafts`, those of each of `output.draft_parts`."""
        of_seq = {part.seq.seq_id: guessed for part, guessed in zip(output.draft_parts, drafts, strict=True)}
        for part in output.draft_parts:
            if part.num_drafts and not of_seq[part.seq.seq_id]:
                self._settle(part.seq)
        return [
            _with_drafts(item, guessed) if (guessed := of_seq.get(item.seq.seq_id)) else item
            for item in output.scheduled
        ]

    def _looked_up(self, scheduled: ScheduledSequence, config: SpeculativeConfig, most: int) -> ScheduledSequence:
        """Add at most `most` drafts of the lookup or the grammar, if there are some and their blocks are available."""
        seq = scheduled.seq
        drafts = _propose(seq, config, most)
        if not drafts or not self._block_manager.can_append(seq, num_drafts=len(drafts)):
            return scheduled
        self._block_manager.append(seq, len(drafts))
        return _with_drafts(scheduled, drafts)

    def begin(self, output: SchedulerOutput) -> None:
        """`output` has been launched: it has put back what `put_back` names, and keeps copies of the states of all
        sequences with drafts."""
        self._spoilt = []
        if self._has_states:
            drafted = [item.seq.seq_id for item in output.scheduled if item.draft_token_ids]
            self._copy_of = {seq_id: copy for copy, seq_id in enumerate(drafted)}

    def put_back(self) -> list[PutBack]:
        """The states that the next step must put back: those of sequences that still have theirs."""
        return [
            PutBack(copy, seq.state_slot)
            for copy, seq in self._spoilt
            if seq.num_replayed and seq.status is SequenceStatus.RUNNING
        ]

    def drop_wrong(self, scheduled: ScheduledSequence, sampled: list[int]) -> int:
        """Drop the drafts from the first that differs from the token sampled in its place, ends the answer, or has no
        valid token sampled after it. Returns how many were dropped."""
        seq, drafts = scheduled.seq, scheduled.draft_token_ids
        num_right, length = 0, scheduled.end - len(drafts)
        for draft, token_id, following in zip(drafts, sampled[:-1], sampled[1:], strict=True):
            length += 1
            has_ended = self._stop_rule.finish_reason(seq, length) is not None
            if token_id != draft or following == INVALID_TOKEN or has_ended:
                break
            num_right += 1
        num_wrong = len(drafts) - num_right
        seq.num_computed_tokens -= num_wrong
        if num_wrong and self._has_states:
            seq.num_replayed = seq.num_computed_tokens - scheduled.first
            seq.num_computed_tokens = scheduled.first
            self._spoilt.append((self._copy_of[seq.seq_id], seq))
        del seq.token_ids[len(seq) - num_wrong :]
        self._settle(seq)
        seq.draft_history.note(len(drafts), num_right, len(seq), patience=self._patience)
        self._stats.count_drafts(len(drafts), num_right)
        return num_wrong

    def _settle(self, seq: Sequence) -> None:
        """What comes after the last token of `seq` is gone."""
        self._block_manager.give_back(seq)
        if self._model is not None:
            self._model.settle(seq)


def _with_drafts(scheduled: ScheduledSequence, drafts: list[int]) -> ScheduledSequence:
    return ScheduledSequence(scheduled.seq, scheduled.num_new_tokens + len(drafts), drafts)


def _may_guess(seq: Sequence) -> bool:
    """Whether the sequence's grammar, if any, has time for guesses."""
    return seq.grammar is None or seq.grammar.may_guess(seq.num_output_tokens)


def _propose(seq: Sequence, config: SpeculativeConfig, most: int) -> list[int]:
    """Guess at most `most` next tokens. How many are looked up depends on how earlier drafts went. With a grammar, the
    tokens that it forces come first, and no draft violates it. With a draft model or head, nothing is looked up."""
    num_wanted = min(most, seq.draft_history.num_wanted(len(seq)))
    if seq.grammar is None:
        return propose(seq.token_ids, config, num_wanted)

    def look_up(forced: list[int]) -> list[int]:
        if config.method != "ngram":
            return []
        return propose(seq.followed_by(forced).token_ids, config, num_wanted - len(forced))

    return seq.grammar.propose(seq.token_ids[seq.num_prompt_tokens :], look_up, most)
