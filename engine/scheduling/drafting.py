"""Drafts behind sequences that decode: the scheduler puts them into a step, and takes back those that were wrong.

    decoding sequences ──add──> some of them with drafts ──computed──> drop_wrong: as if only the right ones had been

Where guesses come from is said in speculation.py.
"""

from __future__ import annotations

from engine.config import SchedulerConfig
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.sequence import INVALID_TOKEN, ScheduledSequence, Sequence
from engine.scheduling.speculation import SpeculativeConfig, propose
from engine.scheduling.stats import SchedulerStats
from engine.scheduling.stop_rule import StopRule


class Drafting:
    """Of one scheduler. Owns nothing: blocks for drafts are the sequence's."""

    def __init__(
        self, config: SchedulerConfig, block_manager: BlockManager, stop_rule: StopRule, stats: SchedulerStats
    ) -> None:
        self._config = config.speculation
        self._max_rows = config.draft_batch_tokens
        self._block_manager = block_manager
        self._stop_rule = stop_rule
        self._stats = stats

    def add(self, decoding: list[ScheduledSequence], budget: int) -> list[ScheduledSequence]:
        """`decoding`, some of them with drafts, at most `budget` in all, where some are found and there is room; these
        come last. None behind a prompt's last token, if no more than the prompt is to be computed here."""
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
        """Drop all drafts from the first that was not sampled in its place, or comes after the answer's end, or has no
        token after it. Returns how many."""
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
    """At most `most` guesses at what comes next. They are looked up, as many as went well before. With a grammar, what
    it says must come is guessed first, and nothing that it forbids."""
    if most < 1:
        return []
    num_wanted = min(most, seq.draft_history.num_wanted(len(seq)))
    if seq.grammar is None:
        return propose(seq.token_ids, config, num_wanted)

    def look_up(forced: list[int]) -> list[int]:
        return propose(seq.followed_by(forced).token_ids, config, num_wanted - len(forced))

    return seq.grammar.propose(seq.token_ids[seq.num_prompt_tokens :], look_up, most)
