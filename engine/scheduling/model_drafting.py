"""Decides what a draft model computes before a step, and how far it has read each sequence. Integers only, no torch.

    a decoding sequence ──plan──> DraftPart ──the draft model guesses──> take ──> drafts of the step ──> settle
                                     └─ no drafts yet: it has more to read than a step allows

The draft model keeps keys and values of its own, in a pool of as many blocks: what it has of block b of the engine's
pool is in block b of its own (engine/running/draft_model.py). So a sequence's block table serves both, and nobody else
must allocate, free or transfer anything. It reads a sequence while the sequence decodes here: a prompt that came from
another worker, from the prefix cache or from host memory is read then, some tokens in each step. Blocks that it has
read for another sequence are known by their hashes.

What the draft model has decides how good its guesses are, and nothing else: the step verifies them.
"""

from __future__ import annotations

from engine.config import SchedulerConfig
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.sequence import DraftPart, ScheduledSequence, Sequence


class ModelDrafting:
    """One per scheduler. Owns nothing but its notes: the sequence owns the blocks."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager) -> None:
        self._max_catch_up_tokens = config.draft_catch_up_tokens
        self._max_model_len = config.draft_model_len
        self._block_manager = block_manager
        self._block_size = block_manager.block_size
        self._read: dict[int, bytes] = {}
        """By block: the hash of the tokens that the draft model has read into it."""
        self._num_left = 0
        """How many more tokens the draft model may read in this step."""

    def begin(self, decoding: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Begin a step. Returns the sequences in the order in which to plan: what has least to read goes first, since a
        long prompt must not take all that may be read from the others."""
        self._num_left = self._max_catch_up_tokens
        return sorted(decoding, key=lambda scheduled: len(scheduled.seq) - scheduled.seq.num_drafted_tokens)

    def plan(self, seq: Sequence, num_wanted: int, num_left: int) -> DraftPart | None:
        """Plan what the draft model does for `seq`, whose tokens are all known: guess at most `num_wanted` tokens, or
        catch up. Returns None for nothing. Allocates the blocks of the drafts. `num_left`: the tokens that may still
        follow."""
        num_ever = min(num_left - 1, self._max_model_len - len(seq))
        num_wanted = min(num_wanted, num_ever)
        if num_wanted < 1 or not self._num_left:
            return None
        self._find_read(seq)
        first = seq.num_drafted_tokens
        if len(seq) - first > num_ever * self._max_catch_up_tokens:
            return None  # the answer, with a token in each step, ends before anything could be guessed
        if len(seq) - first > self._num_left:
            # Whole blocks: a step clears a block that it begins, and others may have read that block to its end.
            end = (first + self._num_left) // self._block_size * self._block_size
            if end <= first:
                return None
            part = DraftPart(seq, first, end, 0)
        elif self._block_manager.can_append(seq, num_drafts=num_wanted):
            self._block_manager.append(seq, num_wanted)
            part = DraftPart(seq, first, len(seq), num_wanted)
        else:
            return None
        self._num_left -= part.end - first
        self._note(part)
        return part

    def settle(self, seq: Sequence) -> None:
        """A step has dropped the wrong drafts of `seq`: forget what the draft model has read of them."""
        seq.num_drafted_tokens = min(seq.num_drafted_tokens, seq.num_computed_tokens + seq.num_replayed)

    def _find_read(self, seq: Sequence) -> None:
        """Note the blocks that have become full, or find those that the draft model has read for others."""
        table, hashes = seq.block_table, seq.block_hashes
        if not seq.num_drafted_tokens:
            for block_id, block_hash in zip(table, hashes, strict=False):
                if self._read.get(block_id) != block_hash:
                    break
                seq.num_drafted_blocks += 1
            seq.num_drafted_tokens = min(seq.num_drafted_blocks * self._block_size, len(seq) - 1)
            return
        num_full = min(seq.num_drafted_tokens // self._block_size, len(hashes))
        for index in range(seq.num_drafted_blocks, num_full):
            self._read[table[index]] = hashes[index]
        seq.num_drafted_blocks = max(seq.num_drafted_blocks, num_full)

    def _note(self, part: DraftPart) -> None:
        """The draft model will write to these blocks, also the drafts that it computes: all but the last one."""
        seq = part.seq
        seq.num_drafted_tokens = part.end + max(0, part.num_drafts - 1)
        end_block = self._block_manager.num_blocks_for(seq.num_drafted_tokens)
        for block_id in seq.block_table[part.first // self._block_size : end_block]:
            self._read.pop(block_id, None)
