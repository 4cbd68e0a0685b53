"""What an engine counts: written by its scheduler and its steps, read by whoever shows it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.offloading import BlockCopy
from engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class SchedulerStats:
    """Counted since the engine started."""

    num_prefix_queries_tokens: int = 0
    num_prefix_hits_tokens: int = 0
    num_loaded_tokens: int = 0
    """Of those: from host memory."""
    num_loaded_blocks: int = 0
    num_saved_blocks: int = 0
    """Copied to host memory."""
    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Computed: those found in the prefix cache are not among them, those computed again are."""
    num_generation_tokens: int = 0
    num_drafts: int = 0
    """Steps of a sequence with drafts behind its last token."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafts that were right."""
    seconds_in_steps: float = 0.0

    def count_prefix(self, seq: Sequence, block_size: int) -> None:
        """What the prefix cache gave a newcomer."""
        self.num_prefix_queries_tokens += len(seq)
        self.num_prefix_hits_tokens += seq.num_cached_tokens
        self.num_loaded_tokens += min(seq.num_loading_blocks * block_size, seq.num_cached_tokens)

    def count_copy(self, copy: BlockCopy) -> None:
        """Between the pool and host memory."""
        self.num_loaded_blocks += copy.is_load
        self.num_saved_blocks += not copy.is_load
