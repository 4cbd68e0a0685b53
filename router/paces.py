"""Compares how fast decode workers step, learned from the answers that they have given. Pure: times are passed in.

    answered ──> a line for each worker: seconds per token over KV in use ──> token_s
                                                                          └─> all at the same load ──> slowness:
                                                                              over the median worker's

A step takes longer the more KV its streams have, hence a line over the KV in use. This tells a GPU that is throttled,
older, or sharing its host from one that merely has more to do. Newer answers count more, and a worker that has given
none for minutes counts as fast as the others, so that it is tried again however slow it once was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from router.fading import FADE, MIN_S, FadingLine, FadingRatio
from router.request_events import WorkerKey

MIN_TOKENS = 8
"""An answer with fewer tokens than this is not counted: it shows a few steps, not the worker's pace."""
PRIOR_ANSWERS = 3.0
"""The weight, in answers, of the assumption that a worker is as fast as the median."""
NOISE = math.log(1.25)
"""Workers closer to the median than this, in either direction, count as equally fast."""
LOOK_S = 0.05
"""Workers are compared at most once in this time: doing so for each request and hundreds of workers is too slow."""


@dataclass(slots=True)
class Paces:
    """The paces of one router's decode workers."""

    _lines: dict[WorkerKey, FadingLine] = field(default_factory=dict)
    _num_blocks: FadingRatio = field(default_factory=FadingRatio)
    """Mean number of KV blocks in use, over the answers of all workers."""
    _slowness: dict[WorkerKey, float] = field(default_factory=dict)
    """Slowness of the workers that are not as fast as the others, as of the last comparison."""
    _looked_s: float = -math.inf

    def answered(self, worker: WorkerKey, num_tokens: int, seconds: float, num_blocks: float, now_s: float) -> None:
        """`worker` has decoded `num_tokens` tokens of an answer in `seconds`, with `num_blocks` KV blocks in use."""
        if num_tokens < MIN_TOKENS:
            return
        line = self._lines.get(worker)
        expected_s = None
        if line is None:
            expected_s = self._median_s(num_blocks)
            line = self._lines[worker] = FadingLine()
        line.add(num_blocks, seconds / num_tokens, now_s, expected_s=expected_s)
        self._num_blocks.add(num_blocks, 1, FADE)

    def forget(self, worker: WorkerKey) -> None:
        """The worker is gone."""
        self._lines.pop(worker, None)

    def token_s(self, worker: WorkerKey, num_blocks: float) -> float:
        """Expected seconds per token of the worker's answers with `num_blocks` KV blocks in use. 0 if it has given
        none."""
        line = self._lines.get(worker)
        return line.at(num_blocks) if line is not None else 0.0

    def slowness(self, worker: WorkerKey, now_s: float) -> float:
        """How many times as long the worker's steps take as others' under the same load: 1 as long, 2 twice as long."""
        if now_s - self._looked_s >= LOOK_S:
            self._compare(now_s)
        return self._slowness.get(worker, 1.0)

    def _compare(self, now_s: float) -> None:
        self._looked_s = now_s
        self._slowness.clear()
        num_blocks = self._num_blocks.value
        median_s = self._median_s(num_blocks)
        if median_s is None:
            return
        for worker, line in self._lines.items():
            weight = line.weight(now_s)
            ratio = math.log(max(line.at(num_blocks), MIN_S) / median_s) * weight / (weight + PRIOR_ANSWERS)
            if abs(ratio) > NOISE:
                self._slowness[worker] = math.exp(ratio)

    def _median_s(self, num_blocks: float) -> float | None:
        """The median worker's seconds per token with `num_blocks` KV blocks in use; of two workers, the faster one's.
        None: no worker has answered yet."""
        seconds = sorted(line.at(num_blocks) for line in self._lines.values())
        return max(seconds[(len(seconds) - 1) // 2], MIN_S) if seconds else None
