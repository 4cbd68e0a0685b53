"""What heads guess while an engine answers."""

from __future__ import annotations

from engine.llm_engine import LLMEngine
from engine.scheduling.sequence import DraftPart

Drafts = list[tuple[list[int], list[int]]]
"""Texts, and the guesses after each."""


def drafted(engine: LLMEngine) -> Drafts:
    """Collects, for each draft from now on, the sequence's tokens and the guesses."""
    collected: Drafts = []
    draft = engine.executor.draft

    def collecting(parts: list[DraftPart]) -> list[list[int]]:
        texts = [list(part.seq.token_ids) for part in parts]
        guessed = draft(parts)
        collected.extend(zip(texts, guessed, strict=True))
        return guessed

    engine.executor.draft = collecting  # type: ignore[method-assign]
    return collected


def agreement(found: Drafts, expected: Drafts) -> float:
    """The share of guesses that are equal, of those after texts for which both have some."""
    of_text = {tuple(token_ids): guesses for token_ids, guesses in expected}
    pairs = [
        (guess, other)
        for token_ids, guesses in found
        for guess, other in zip(guesses, of_text.get(tuple(token_ids), []), strict=False)
    ]
    assert len(pairs) > 10
    return sum(guess == other for guess, other in pairs) / len(pairs)
