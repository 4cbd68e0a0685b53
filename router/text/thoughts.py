"""How a model's thoughts begin and end, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The thoughts in the answers to one prompt."""

    begin: str
    end: str
    has_begun: bool
    """The prompt has begun the first one."""
    may_repeat: bool
    """An answer may have several."""
    other_ends: tuple[str, ...] = ()
    """Further words that end a thought."""
