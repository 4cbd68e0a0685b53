"""What an engine counts: written by its scheduler and its steps, read by whoever shows it."""

from __future__ import annotations

from dataclasses import dataclass


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
