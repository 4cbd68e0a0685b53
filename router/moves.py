"""Which stream moves to another worker while it runs, so that all workers share what there is to decode. Pure.

Whoever decodes a request is chosen before anything shows how long its answer will be, and how many others come. So a
decode worker may be left with all streams, beside a prefill worker that has nothing to do: after a burst, or with long
answers to short prompts. Then streams move, one at a time:

    from    the decode worker whose next tokens take longest, by the line over KV in use that the router has learned
            for it (`paces`)
    to      the prefill worker that has the least KV in use, of those without prompts and with room; if none of the
            streams may go there, such as for an adapter, the next one, or from the next decode worker
    if      a token takes `MOVE_RATIO` times as long as it would there, beside the prompts that are to come (as of late:
            `PromptShares`), and the rest of the answer gains more than computing it again costs
    which   the stream of which the other worker has least to compute: no KV is sent, and it has computed the prompt of
            many of them

A stream moves once at most, so no two workers can pass one to and fro. Decode workers need not share streams in this
way: new requests go to the one that has less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest, nsmallest
from itertools import product
from typing import NamedTuple, Protocol, TypeVar

from router.costs import Costs
from router.fading import MIN_S, FadingRatio
from router.request_events import WorkerKey

MOVE_RATIO = 1.2
"""A smaller difference may be chance."""
UNKNOWN_RATIO = 1.5
"""The same while nothing is known of how fast the other worker decodes. It may be other hardware."""
SHARE_HALF_LIFE_S = 2.0
"""Half-life of what is known of a worker's prompts."""
MAX_TRIED = 4
"""So many decode workers, and so many prefill workers, are looked at for one move: a fleet may have hundreds."""
MAX_ASKED = 1024
"""Once so many streams have been asked whether they may go to a worker, no further two workers are looked at: the
router does nothing else meanwhile."""
LOOK_S = 0.05
"""The time between two moves of a router at least: by then, workers have reported what the last one changed."""


class Loaded(NamedTuple):
    """A worker, and how much it decodes."""

    key: WorkerKey
    num_used_blocks: int
    block_size: int
    prompt_share: float = 0.0
    """The share of its time in which it computes prompts."""


class PromptShares:
    """In which share of the time each prefill worker has had prompts to compute. Meanwhile its streams wait."""

    def __init__(self) -> None:
        self._shares: dict[WorkerKey, FadingRatio] = {}
        self._noted_s = -math.inf

    def note(self, workers: Iterable[tuple[WorkerKey, bool]], now_s: float) -> None:
        """Take in all prefill workers, and whether each has prompts now."""
        passed_s = min(now_s - self._noted_s, SHARE_HALF_LIFE_S)
        before, self._shares, self._noted_s = self._shares, {}, now_s
        for worker, has_prompts in workers:
            share = self._shares[worker] = before.get(worker) or FadingRatio()
            share.add(passed_s if has_prompts else 0.0, passed_s, 0.5 ** (passed_s / SHARE_HALF_LIFE_S))

    def of(self, worker: WorkerKey) -> float:
        share = self._shares.get(worker)
        return 0.0 if share is None else share.value


class Movable(Protocol):
    """A stream that may move."""

    @property
    def num_tokens(self) -> int:
        """Of the prompt, and of the answer so far."""

    @property
    def num_answer_tokens(self) -> int:
        """Of the answer so far."""

    @property
    def max_tokens_left(self) -> int:
        """The most tokens that the answer may still get."""

    def num_tokens_again(self, worker: WorkerKey) -> int:
        """How many tokens that worker would have to compute before the next one."""

    def may_go_to(self, worker: WorkerKey) -> bool:
        """Whether that worker can continue it now, and would."""


Stream = TypeVar("Stream", bound=Movable)


def choose_move(
    costs: Costs,
    *,
    now_s: float,
    busy: Sequence[Loaded],
    idle: Sequence[Loaded],
    streams_of: Callable[[WorkerKey], Iterable[Stream]],
) -> tuple[Stream, WorkerKey] | None:
    """The stream that should move now, and where to. None: none.

    busy: the decode workers.
    idle: the prefill workers that have no prompts to compute, and room.
    streams_of: the streams of a decode worker that have not moved yet.
    """
    if not busy or not idle:
        return None
    sources = nlargest(MAX_TRIED, busy, key=lambda worker: _here_s(costs, worker))
    targets = nsmallest(MAX_TRIED, idle, key=lambda worker: worker.num_used_blocks)
    num_asked = 0
    for number, other in sorted(product(range(len(sources)), range(len(targets))), key=sum):
        source, target = sources[number], targets[other]
        if not _is_slow(costs, now_s, source, target, target.num_used_blocks):
            continue
        streams = list(streams_of(source.key))
        num_asked += len(streams)
        if may_go := [stream for stream in streams if stream.may_go_to(target.key)]:
            # Not the next ones: the gain is a guess, and when further streams moved, clusters answered less in all.
            stream = min(may_go, key=lambda stream: stream.num_tokens_again(target.key))
            if _gains(costs, now_s, stream, source, target):
                return stream, target.key
        if num_asked >= MAX_ASKED:
            break
    return None


def _is_slow(costs: Costs, now_s: float, source: Loaded, target: Loaded, num_blocks: int) -> bool:
    """Whether a token of `source` takes much longer than it would at `target` with `num_blocks` blocks in use."""
    is_known = costs.paces.ratio(target.key, source.key, now_s) is not None
    ratio = MOVE_RATIO if is_known else UNKNOWN_RATIO
    return 0 < ratio * _there_s(costs, now_s, source, target, num_blocks) < _here_s(costs, source)


def _here_s(costs: Costs, source: Loaded) -> float:
    """Seconds per token at `source`."""
    return costs.paces.token_s(source.key, source.num_used_blocks)


def _there_s(costs: Costs, now_s: float, source: Loaded, target: Loaded, num_blocks: int) -> float:
    """Seconds per token at `target` with `num_blocks` blocks in use, its prompts included. It may have had streams of
    one load only, so the line is that of `source`, as far above or below it as those streams were."""
    ratio = costs.paces.ratio(target.key, source.key, now_s)
    alone_s = costs.paces.token_s(source.key, num_blocks) * (1.0 if ratio is None else ratio)
    return alone_s / max(1 - target.prompt_share, MIN_S)


def _gains(costs: Costs, now_s: float, stream: Movable, source: Loaded, target: Loaded) -> bool:
    """Whether the rest of the answer gains more than computing it again costs."""
    num_blocks = target.num_used_blocks + -(-stream.num_tokens // target.block_size)
    if not _is_slow(costs, now_s, source, target, num_blocks):
        return False
    # An answer that is longer than the mean already may be expected to become twice as long.
    num_tokens, mean = stream.num_answer_tokens, costs.paces.tokens_per_answer
    num_left = mean - num_tokens if num_tokens < mean else num_tokens
    again_s = costs.prompt_s(target.key, stream.num_tokens_again(target.key), now_s)
    gain_s = _here_s(costs, source) - _there_s(costs, now_s, source, target, num_blocks)
    return again_s < min(num_left, stream.max_tokens_left) * gain_s
