"""What is wrong with a request, field by field, and the check that all fields with token ids share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from router.model_info import ModelInfo

Violations: TypeAlias = list[tuple[str, str]]
"""(field, description) pairs."""


def check_in_vocabulary(field: str, token_ids: Sequence[int], model: ModelInfo, violations: Violations) -> None:
    if not token_ids or max(token_ids) < model.vocab_size:
        return
    position = next(i for i, token_id in enumerate(token_ids) if token_id >= model.vocab_size)
    violations.append(
        (field, f"ids must be below the vocabulary's size {model.vocab_size}, is {token_ids[position]} at {position}")
    )
