"""Guesses at what comes next in an answer, so that one step may compute several of its tokens: vLLM's words for them,
`speculative_config` with the method `ngram`.

    the tokens so far ──propose──> drafts ──a step computes them behind the last token, and samples after each
    ──those up to the first that was not sampled in its place, and the token after them, are the answer's next ones

What is sampled after a draft hangs on the tokens before it and its position alone, as everywhere
(engine/sampling/sampler.py): a draft decides when a token is computed and never which. Wrong ones cost the time to
compute them.

Drafts are looked up: the last few tokens stood somewhere before, and what followed them there may follow again, as in
code that is edited, texts that are quoted or summed up, and wherever somebody repeats himself. After A. Saxena, Prompt
lookup decoding (2023). In an answer that is held to a grammar what alone may come goes first (grammar.py). Owns
nothing. No torch.
"""

from __future__ import annotations

import json
from collections.abc import MutableSequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

MAX_DRAFTS = 16
"""Of one sequence in one step, at most."""
MAX_PAUSE = 32
"""Tokens without drafts after some that were wrong, at most."""
MAX_LOOKUP = 64
"""Tokens that have to be found again, at most."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Raises `ValueError` naming the field and its bound, behind the name that the whole goes by."""

    num_speculative_tokens: int
    """Drafts of one sequence in one step, at most."""
    method: str = "ngram"
    prompt_lookup_max: int = 5
    """So many last tokens are looked up first, then fewer."""
    prompt_lookup_min: int = 2
    """No fewer than these."""

    def __post_init__(self) -> None:
        _check_method(self.method)
        most_of = {
            "num_speculative_tokens": MAX_DRAFTS,
            "prompt_lookup_max": MAX_LOOKUP,
            "prompt_lookup_min": MAX_LOOKUP,
        }
        for name, most in most_of.items():
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            _check(is_whole and 1 <= value <= most, f"{name} must be a whole number in [1, {most}], is {value!r}")
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        _check(least <= most, f"prompt_lookup_min must be at most prompt_lookup_max={most}, is {least}")

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig | None:
        """From JSON, as a flag has it. Empty: None, no speculation."""
        if not text:
            return None
        try:
            given: Any = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            given = None
        _check(isinstance(given, dict), f"must be a JSON object, such as {EXAMPLE}, is {str(text)[:80]!r}")
        _check_method(given.get("method", cls.method))  # before fields that another one has
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(names))
        _check(not unknown, f"has no {', '.join(unknown)}; there are {', '.join(names)}")
        _check("num_speculative_tokens" in given, f"must have num_speculative_tokens, such as {EXAMPLE}")
        if given.get("prompt_lookup_max") == 1:
            given.setdefault("prompt_lookup_min", 1)
        return cls(**given)


def _check_method(method: object) -> None:
    _check(method == "ngram", f"method must be 'ngram' (drafts are of the text itself), is {method!r:.80}")


EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(f"speculative_config {message}")


def propose(token_ids: MutableSequence[int], config: SpeculativeConfig, num_wanted: int) -> list[int]:
    """What may follow `token_ids`: what followed the last `prompt_lookup_max` of them where they stood before, or fewer
    down to `prompt_lookup_min`, and there the last time. At most `num_wanted`; none where nothing is found.

    What is found reaches into the end itself where a text goes round in circles: then it is gone round again.
    """
    if num_wanted < 1:
        return []
    tokens = np.asarray(token_ids)  # no view of it may outlive this: the array could not grow
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    found = None
    for length in range(1, config.prompt_lookup_max + 1):
        if length > 1:
            places = places[places >= length - 1]
            places = places[tokens[places - (length - 1)] == tokens[-length]]
        if not len(places):
            break
        if length >= config.prompt_lookup_min:
            found = int(places[-1]) + 1
    if found is None:
        return []
    period = len(tokens) - found
    drafts: list[int] = tokens[found + np.arange(num_wanted) % period].tolist()
    return drafts


@dataclass(slots=True)
class DraftHistory:
    """How guessing went in one sequence, and so how much of it is worth its time next: twice as many drafts where all
    were right, else as many as were; and where not even one alone was, none for a while, each time twice as long."""

    max_drafts: int = MAX_DRAFTS
    pause: int = 0
    """In tokens; 0: none since a draft was right."""
    next_length: int = 0
    """Of the sequence, from which on there is a next try."""

    def num_wanted(self, length: int) -> int:
        """For a sequence that has so many tokens."""
        return self.max_drafts if length >= self.next_length else 0

    def note(self, num_drafts: int, num_right: int, length: int) -> None:
        """`length`: of the sequence, with the token behind the drafts that were right."""
        if num_right:
            self.max_drafts = min(MAX_DRAFTS, 2 * num_drafts) if num_right == num_drafts else num_right
            self.pause = 0
        else:
            self.max_drafts = 1
            if num_drafts == 1:
                self.pause = min(MAX_PAUSE, 2 * self.pause or 1)
        self.next_length = length + self.pause
