"""Compares how fast decode workers step, learned from the answers that they give. Pure: times are passed in.

    decoded ───> a line for each worker: seconds per token over KV in use ──> all at the same load ──> slowness:
             │                                                                over the median worker's
             └─> another one, of the times without prompts ──> token_s
    answered ──> how long answers are ──> answer_s

A step takes longer the more KV its streams have, hence a line over the KV in use. This tells a GPU that is throttled,
older, or sharing its host from one that merely has more to do. Answers report every few tokens, so that a line knows a
worker under load before its first answer has ended. Each second of a worker counts once, however many of its streams
report it: otherwise a hundred streams' reports of one moment would outweigh all that shows how the pace depends on the
load. Newer seconds count more, and a worker that has decoded nothing for minutes counts as fast as the others, so that
it is tried again however slow it once was.

A worker that computes prompts beside its streams is slower for as long as that takes. All decode workers do so at
times, and so it does not matter where they are compared; but what streams alone cost is learned without these times.
Prefill workers, which may be other hardware, are not compared with them: only their pace without prompts is learned
(`ratio`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from router.fading import FADE, MIN_KNOWN, MIN_S, FadingLine, FadingRatio
from router.request_events import WorkerKey

MIN_TOKENS = 8
"""Answers report this many tokens or more at a time: fewer show a few steps, not the worker's pace."""
MIN_TOKENS_BETWEEN_PROMPTS = 2
"""Those of a prefill worker do so sooner: it has little time between two prompts."""
NEWS_HALF_LIFE_S = 10.0
"""Seconds after which what was learned before weighs half as much as what is new."""
MAX_WEIGHT_S = 1.0
"""The most that one report counts: a pause of the whole process is one outlier, however long it was."""
PRIOR_S = 3.0
"""The weight, in seconds, of the assumption that a worker is as fast as the median."""
NOISE = math.log(1.25)
"""Workers closer to the median than this, in either direction, count as equally fast."""
LOOK_S = 0.05
"""Workers are compared at most once in this time: with hundreds of workers, doing so for each request or report is too
slow."""


@dataclass(slots=True)
class Paces:
    """The paces of one router's decode workers."""

    _lines: dict[WorkerKey, FadingLine] = field(default_factory=dict)
    _lines_alone: dict[WorkerKey, FadingLine] = field(default_factory=dict)
    """Of the times when the worker computed no prompts."""
    _num_blocks: FadingRatio = field(default_factory=FadingRatio)
    """Mean number of KV blocks in use, over the seconds of all workers."""
    _noted_s: float = 0.0
    """When a worker last reported."""
    _tokens_per_answer: FadingRatio = field(default_factory=FadingRatio)
    _slowness: dict[WorkerKey, float] = field(default_factory=dict)
    """Slowness of the workers that are not as fast as the others, as of the last comparison."""
    _median: FadingLine | None = None
    """The line of the median worker when it was last sought, at `_sought_s`."""
    _sought_s: float = -math.inf
    _looked_s: float = -math.inf

    def decoded(
        self,
        worker: WorkerKey,
        num_tokens: int,
        seconds: float,
        num_blocks: float,
        now_s: float,
        *,
        has_prompts: bool = False,
        is_prefill: bool = False,
    ) -> None:
        """`worker` has decoded the next `num_tokens` tokens of an answer in `seconds`, until now, with `num_blocks` KV
        blocks in use. `has_prompts`: it also computed prompts. `is_prefill`: it is a prefill worker, which is not
        compared with the others."""
        token_s = seconds / num_tokens
        if is_prefill:
            if not has_prompts:
                alone = self._lines_alone.setdefault(worker, FadingLine())
                _add(alone, num_blocks, token_s, seconds, now_s, self._median_s(num_blocks, now_s))
            return
        line = self._lines.setdefault(worker, FadingLine())
        expected_s = line.at(num_blocks) if line.is_known else self._median_s(num_blocks, now_s)
        weight = _add(line, num_blocks, token_s, seconds, now_s, expected_s)
        self._num_blocks.add(weight * num_blocks, weight, 0.5 ** (max(0.0, now_s - self._noted_s) / NEWS_HALF_LIFE_S))
        self._noted_s = max(self._noted_s, now_s)
        if not has_prompts:
            alone = self._lines_alone.setdefault(worker, FadingLine())
            _add(alone, num_blocks, token_s, seconds, now_s, expected_s)

    def answered(self, num_tokens: int) -> None:
        """An answer has ended with `num_tokens` tokens."""
        self._tokens_per_answer.add(num_tokens, 1, FADE)

    def forget(self, worker: WorkerKey) -> None:
        """The worker is gone."""
        self._lines.pop(worker, None)
        self._lines_alone.pop(worker, None)

    def token_s(self, worker: WorkerKey, num_blocks: float) -> float:
        """Expected seconds per token of the worker's answers with `num_blocks` KV blocks in use and no prompts to
        compute. 0: unknown."""
        line = self._lines_alone.get(worker)
        return line.at(num_blocks) if line is not None else 0.0

    def ratio(self, worker: WorkerKey, other: WorkerKey, now_s: float) -> float | None:
        """How many times as long `worker` takes for a token as `other` would with as much KV in use, without prompts.
        None: too little is known, or what is known is too old."""
        own, others = self._lines_alone.get(worker), self._lines_alone.get(other)
        if own is None or others is None or own.weight(now_s) < MIN_KNOWN:
            return None
        num_blocks, token_s = own.mean
        return token_s / max(others.at(num_blocks), MIN_S)

    @property
    def tokens_per_answer(self) -> float:
        """Mean length of answers. 0: unknown."""
        return self._tokens_per_answer.value

    def answer_s(self, worker: WorkerKey, num_blocks: float) -> float:
        """Expected seconds of a mean answer of the worker with `num_blocks` KV blocks in use. 0: unknown."""
        return self._tokens_per_answer.value * self.token_s(worker, num_blocks)

    def slowness(self, worker: WorkerKey, now_s: float) -> float:
        """How many times as long the worker's steps take as others' under the same load: 1 as long, 2 twice as long."""
        if now_s - self._looked_s >= LOOK_S:
            self._compare(now_s)
        return self._slowness.get(worker, 1.0)

    def _compare(self, now_s: float) -> None:
        self._looked_s = now_s
        self._slowness.clear()
        num_blocks = self._num_blocks.value
        median = self._median_line()
        if median is None:
            return
        median_s = max(median.at(num_blocks), MIN_S)
        for worker, line in self._lines.items():
            weight = line.weight(now_s)
            ratio = math.log(max(line.at(num_blocks), MIN_S) / median_s) * weight / (weight + PRIOR_S)
            if abs(ratio) > NOISE:
                self._slowness[worker] = math.exp(ratio)

    def _median_s(self, num_blocks: float, now_s: float) -> float | None:
        """The median worker's seconds per token with `num_blocks` KV blocks in use. None: unknown."""
        if now_s - self._sought_s >= LOOK_S:
            self._sought_s, self._median = now_s, self._median_line()
        return None if self._median is None else max(self._median.at(num_blocks), MIN_S)

    def _median_line(self) -> FadingLine | None:
        """The line of the worker that takes the median time under the mean load; of two workers, the faster one's.
        Those of which little is known do not count beside others: their first tokens may have waited until this process
        went on after a pause, and seem to have come all at once. None: no worker has decoded anything yet."""
        lines = [line for line in self._lines.values() if line.is_known] or list(self._lines.values())
        timed = sorted((line.at(self._num_blocks.value), number) for number, line in enumerate(lines))
        timed = [each for each in timed if each[0] > 0]
        return lines[timed[(len(timed) - 1) // 2][1]] if timed else None


def _add(
    line: FadingLine, num_blocks: float, token_s: float, seconds: float, now_s: float, expected_s: float | None
) -> float:
    """Add to the line what took `seconds`. Returns its weight: the part of it that nothing was added for yet."""
    age_s = line.age_s(now_s)
    weight, fade = min(seconds, age_s, MAX_WEIGHT_S), 0.5 ** (age_s / NEWS_HALF_LIFE_S)
    line.add(num_blocks, token_s, now_s, expected_s=expected_s, weight=weight, fade=fade)
    return weight
