"""Adds draft tokens to decoding sequences before a step, and removes the wrong ones after the step.

    decoding sequences ──add──> some of them with drafts ──computed──> drop_wrong: as if only the right ones had been

speculation.py says where drafts come from.
"""

from __future__ import annotations

from engine.config import SchedulerConfig
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.sequence import INVALID_TOKEN, ScheduledSequence, Sequence
from engine.scheduling.speculation import SpeculativeConfig, propose
from engine.scheduling.stats import SchedulerStats
from engine.scheduling.stop_rule import StopRule


class Drafting:
    """One per scheduler. Owns nothing: the sequence owns the blocks of its drafts."""

    def __init__(
        self, config: SchedulerConfig, block_manager: BlockManager, stop_rule: StopRule, stats: SchedulerStats
    ) -> None:
        self._config = config.speculation
        self._max_rows = config.draft_batch_tokens
        self._block_manager = block_manager
        self._stop_rule = stop_rule
        self._stats = stats

    def add(self, decoding: list[ScheduledSequence], budget: int) -> list[ScheduledSequence]:
        """Return `decoding` with drafts added where some are found and blocks are available, at most `budget` drafts in
        all. Sequences with drafts come last. Prefill-only sequences get none."""
        if self._config is None:
            return decoding
        budget = min(budget, self._max_rows - len(decoding))
        plain, guessed = [], []
        for scheduled in decoding:
            seq = scheduled.seq
            most = min(self._config.num_speculative_tokens, budget, self._stop_rule.num_left(seq, len(seq)) - 1)
            drafts = [] if seq.is_prefill_only else _propose(seq, self._config, most)
            if drafts and self._block_manager.can_append(seq, num_drafts=len(drafts)):
                self._block_manager.append(seq, len(drafts))
                guessed.append(ScheduledSequence(seq, 1 + len(drafts), drafts))
                budget -= len(drafts)
            else:
                plain.append(scheduled)
        return plain + guessed

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
        del seq.token_ids[len(seq) - num_wrong :]
        self._block_manager.give_back(seq)
        seq.draft_history.note(len(drafts), num_right, len(seq))
        self._stats.num_drafts += 1
        self._stats.num_draft_tokens += len(drafts)
        self._stats.num_accepted_tokens += num_right
        return num_wrong


def _propose(seq: Sequence, config: SpeculativeConfig, most: int) -> list[int]:
    """Guess at most `most` next tokens. How many are looked up depends on how earlier drafts went. With a grammar, the
    tokens that it forces come first, and no draft violates it."""
    if most < 1:
        return []
    num_wanted = min(most, seq.draft_history.num_wanted(len(seq)))
    if seq.grammar is None:
        return propose(seq.token_ids, config, num_wanted)

    def look_up(forced: list[int]) -> list[int]:
        return propose(seq.followed_by(forced).token_ids, config, num_wanted - len(forced))

    return seq.grammar.propose(seq.token_ids[seq.num_prompt_tokens :], look_up, most)
