"""One step's input tensors, built from a `StepInput`. What the device need not know stays there: the layout, which a
backend's plan is made from, and the rows of adapters and states.

Owns the tensors: `build_input_batch` makes them, the model and the attention backend read them, and they are dropped at
the end of the step.

Shapes: T tokens, R rows that are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.step_input import StepInput
from engine.to_device import to_device


@dataclass(frozen=True, slots=True)
class InputBatch:
    token_ids: torch.Tensor
    """[T] int64"""
    positions: torch.Tensor
    """[T] int64, each token's position in its sequence"""
    sample_rows: torch.Tensor | None
    """[R] rows of T whose logits are sampled; None: all rows, in order."""

    @property
    def last_token_ids(self) -> torch.Tensor:
        """[R] the token before each sampled one; possibly only the device knows its value yet."""
        return self.token_ids if self.sample_rows is None else self.token_ids[self.sample_rows]


def build_input_batch(step: StepInput, device: str, sampled_before: torch.Tensor | None) -> InputBatch:
    """`sampled_before`: the tokens that the previously launched step samples, on the device. Required if tokens are
    pending."""
    # Sent as one array, since each copy to a device has a fixed cost.
    parts = [step.token_ids, step.positions, step.sample_rows, step.pending_rows, step.rows_before]
    on_device = torch.split(to_device(np.concatenate(parts), device), [len(part) for part in parts])
    ids_T, positions_T, sample_rows_R, pending_rows_P, rows_before_P = on_device
    if len(step.pending_rows):
        assert sampled_before is not None
        # INVALID_TOKEN becomes id 0: its sequence will fail, whatever is computed for it here.
        ids_T.index_copy_(0, pending_rows_P, sampled_before[rows_before_P].clamp_min(0))
    return InputBatch(
        token_ids=ids_T,
        positions=positions_T,
        sample_rows=None if step.samples_all else sample_rows_R,
    )
