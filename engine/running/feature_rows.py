"""Where the last step left the feature of each token: which row. Integers only.

    step 1   tokens 0 1 2 3 of a sequence    rows 1 2 3 4    row 0 stands for none
    step 2   token 4: the one before it, 3, is in row 4      notes where step 2 leaves 4

The rows of a step begin anew, and those of the step before come before them: see `HeadDrafter.read`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.sequence import SchedulerOutput

NO_FEATURE = 0


class FeatureRows:
    """One per engine."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._first_of: dict[int, tuple[int, range]] = {}
        """By `seq_id`, of the sequences of the last step: the position of the first token that it computed, and the
        rows of these tokens."""

    def find(self, seq_id: int, position: int) -> int:
        """The row of a token of the last step; NO_FEATURE if that step did not compute it."""
        first, rows = self._first_of.get(seq_id, (0, range(0)))
        return rows[position - first] if 0 <= position - first < len(rows) else NO_FEATURE

    def next_step(self, output: SchedulerOutput) -> NDArray[np.int64]:
        """[T] the rows of the tokens before those of `output`, which is launched next: of the last step, or, from
        `1 + its number of rows` on, of this one. From here on, this step is the last: a launch that fails ends the
        engine."""
        num_tokens = sum(item.num_new_tokens for item in output.scheduled)
        rows_before = np.arange(num_tokens) + self._num_rows
        first_of, start = {}, 0
        for item in output.scheduled:
            rows_before[start] = self.find(item.seq.seq_id, item.first - 1)
            first_of[item.seq.seq_id] = item.first, range(1 + start, 1 + start + item.num_new_tokens)
            start += item.num_new_tokens
        self._num_rows, self._first_of = num_tokens, first_of
        return rows_before
