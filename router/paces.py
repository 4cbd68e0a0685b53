"""How fast decode workers step beside each other, learned from the answers that they have given. Pure: times are passed
in.

    answered ──> a line for each worker: seconds per token over KV in use ──> all at the same load ──> slowness:
                                                                              over the median worker's

A step takes longer the more KV its streams have: hence the lines. So a GPU that is throttled, an older one, or one that
shares its host with others is told from one that has more to do. Newer answers count more, and a worker that has given
none for minutes is thought to be as the others are, so that it is tried again, however slow it once was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from router.fading import FADE, MIN_S, FadingLine, FadingRatio
from router.request_events import WorkerKey

MIN_TOKENS = 8
"""Of an answer that tells a pace: fewer say how a step went, not how steps go."""
PRIOR_ANSWERS = 3.0
"""What is thought of a worker before it has answered counts as so many answers."""
NOISE = math.log(1.25)
"""Who is nearer to the median, either way, is taken to be as fast."""
LOOK_S = 0.05
"""All are compared once in so long: with each of hundreds of workers, for each request, is too often."""


@dataclass(slots=True)
class Paces:
    """Of one router's decode workers."""

    _lines: dict[WorkerKey, FadingLine] = field(default_factory=dict)
    _num_blocks: FadingRatio = field(default_factory=FadingRatio)
    """That were in use, in the mean of all."""
    _slowness: dict[WorkerKey, float] = field(default_factory=dict)
    """Of those that are not as the others are, as of when they were compared last."""
    _looked_s: float = -math.inf

    def answered(self, worker: WorkerKey, num_tokens: int, seconds: float, num_blocks: float, now_s: float) -> None:
        """`worker` has decoded so many tokens of an answer in `seconds`, with `num_blocks` of its KV blocks in use."""
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
        """It is gone."""
        self._lines.pop(worker, None)

    def slowness(self, worker: WorkerKey, now_s: float) -> float:
        """How many times longer its steps take than the others' under the same load: 1 as long, 2 twice as long."""
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
        """Per token, at that load. Of two the faster one's. None: nobody has answered."""
        seconds = sorted(line.at(num_blocks) for line in self._lines.values())
        return max(seconds[(len(seconds) - 1) // 2], MIN_S) if seconds else None
