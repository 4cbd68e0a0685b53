"""The engine's counters: written by the scheduler and by `LLMEngine.step`, read for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.scheduling.offloading import BlockCopy
from engine.scheduling.sequence import Sequence
from engine.scheduling.speculation import MAX_DRAFTS


class Counter(NamedTuple):
    name: str
    """In metrics, without prefix."""
    about: str
    field: str
    """Of `SchedulerStats`."""


COUNTERS = (
    Counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prefix_queries_tokens"),
    Counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "num_prefix_hits_tokens"),
    Counter("num_preemptions", "Sequences preempted to free KV blocks.", "num_preemptions"),
    Counter("engine_steps", "Steps of the engine.", "num_steps"),
    Counter("engine_seconds", "Seconds in steps of the engine.", "seconds_in_steps"),
    Counter("computed_prompt_tokens", "Prompt tokens computed here.", "num_prompt_tokens"),
    Counter("computed_generation_tokens", "Tokens generated here.", "num_generation_tokens"),
    Counter("spec_decode_num_drafts", "Speculative drafts.", "num_drafts"),
    Counter("spec_decode_num_draft_tokens", "Speculative tokens proposed.", "num_draft_tokens"),
    Counter("spec_decode_num_accepted_tokens", "Speculative tokens accepted.", "num_accepted_tokens"),
)
"""Those that metrics show of every engine."""


@dataclass(slots=True)
class SchedulerStats:
    """Counted since the engine started."""

    num_prefix_queries_tokens: int = 0
    num_prefix_hits_tokens: int = 0
    num_loaded_tokens: int = 0
    """Hits that were loaded from host memory."""
    num_loaded_blocks: int = 0
    num_saved_blocks: int = 0
    """Copied to host memory."""
    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Computed prompt tokens: without those found in the prefix cache, with those computed again after preemption."""
    num_generation_tokens: int = 0
    num_drafts: int = 0
    """How often a step computed drafts for a sequence."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafts that were right."""
    num_accepted_per_pos: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    """Of these, how many were a sequence's first draft in a step, its second, and so on."""
    seconds_in_steps: float = 0.0

    @property
    def num_positions_right(self) -> int:
        """Beyond so many drafts of a sequence in a step, none was ever right: a step may have fewer drafts than the
        most. At least 1."""
        return max((place + 1 for place, num in enumerate(self.num_accepted_per_pos) if num), default=1)

    def count_drafts(self, num_drafts: int, num_right: int) -> None:
        """Count what a step has found of the drafts of one sequence."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_right
        for position in range(num_right):
            self.num_accepted_per_pos[position] += 1

    def count_prefix(self, seq: Sequence, block_size: int) -> None:
        """Count what the prefix cache had for a new sequence."""
        self.num_prefix_queries_tokens += len(seq)
        self.num_prefix_hits_tokens += seq.num_cached_tokens
        self.num_loaded_tokens += min(seq.num_loading_blocks * block_size, seq.num_cached_tokens)

    def count_copy(self, copy: BlockCopy) -> None:
        """Count a copy between the pool and host memory."""
        self.num_loaded_blocks += copy.is_load
        self.num_saved_blocks += not copy.is_load
