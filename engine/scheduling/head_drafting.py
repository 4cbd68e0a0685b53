"""Decides what a head computes before a step. Integers only, no torch.

    a decoding sequence ──plan──> DraftPart ──the head guesses──> drafts of the step

A head has nothing to catch up with: each step of the model also writes the head's keys and values of all its tokens, as
one more layer (engine/running/head_drafter.py). So they are wherever the model's are, whoever computed them.
"""

from __future__ import annotations

from engine.scheduling.block_manager import BlockManager
from engine.scheduling.sequence import DraftPart, ScheduledSequence, Sequence


class HeadDrafting:
    """One per scheduler. Owns nothing: the sequence owns the blocks of its drafts."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager = block_manager

    def begin(self, decoding: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Any order will do."""
        return decoding

    def plan(self, seq: Sequence, num_wanted: int, num_left: int) -> DraftPart | None:
        """Plan that the head guesses `num_wanted` tokens, if blocks are available for them."""
        del num_left  # `num_wanted` is less: a head guesses at once
        if not self._block_manager.can_append(seq, num_drafts=num_wanted):
            return None
        self._block_manager.append(seq, num_wanted)
        return DraftPart(seq, len(seq) - 1, len(seq), num_wanted)

    def settle(self, seq: Sequence) -> None:
        """The head's keys and values go with the model's."""
