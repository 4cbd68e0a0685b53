"""Which workers serve a request, and in which mode. Pure: numbers in, a plan out.

The decode worker chosen is the one with room whose cost in blocks is least: the blocks that it would have to receive,
plus those that it already works on, times how much slower than the others it was seen to step (`paces`). The prefill
worker chosen is the one that would have the first token soonest, given what is in its queue and what its prefix cache
lacks of this prompt. So the longest cached prefix wins unless its owner is busier by more than the prefix saves.

The decode worker prefills the prompt itself where that costs less, in seconds learned from earlier requests (`costs`):

    there   the prefill worker's queue, the prompt, and the handover: room asked for, KV that moves
    here    this worker's queue, the prompt, and a share of its time for each request that decodes here and is slowed
            down meanwhile (`STALL_WEIGHT`), one more than now: others come

So short prompts stay where they decode, and long ones beside streams do not. An idle decode worker takes part in a
burst of prompts, a busy one does not, and a slow one stops sooner. The decode worker prefills in any case if there is
no prefill worker that it can be paired with, or if it lacks at most `local_max_uncached_tokens` of the prompt.

If no decode worker has room, a request waits for one; but not for longer than it would hold up the prompts of a prefill
worker that is idle now: then that prefill worker keeps it, and decodes, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from router.costs import Costs
from router.request_events import Plan, WorkerKey, WorkerPair
from router.served_kind import Kind

STALL_WEIGHT = 0.1
"""What a second of delay within a stream costs, of what it costs before the first token. It is hardly felt: a decode
worker cuts prompts so that its streams go on, only slower (engine/scheduling/pace.py)."""

STAY_SHARE = 0.25
"""A request waits for a decode worker's room for so much of the time that its answer takes, before a prefill worker
keeps it: its steps would hold up the prompts there for about as long."""
UNKNOWN_ANSWER_S = 2.0
"""What an answer is thought to take before any has ended."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    local_max_uncached_tokens: int = field(
        default=16,
        metadata={
            "help": "A decode worker prefills a prompt itself if it has all but at most this many of the "
            "prompt's tokens cached."
        },
    )
    learn_costs: bool = field(
        default=True,
        metadata={
            "help": "Compare workers in seconds, learned from earlier requests. Otherwise compare them in tokens "
            "and blocks, as if all were equally fast and moving KV took no time."
        },
    )
    max_prefill_backlog_tokens: int = field(
        default=32768,
        metadata={
            "help": "A prefill worker with more than this many tokens queued gets no new prompt; the prompt "
            "waits in the router."
        },
    )

    def __post_init__(self) -> None:
        if self.local_max_uncached_tokens < 0:
            raise ValueError(f"local_max_uncached_tokens must be at least 0, is {self.local_max_uncached_tokens}")
        if self.max_prefill_backlog_tokens < 1:
            raise ValueError(f"max_prefill_backlog_tokens must be at least 1, is {self.max_prefill_backlog_tokens}")


class PrefillCandidate(NamedTuple):
    key: WorkerKey
    kind: Kind | None
    num_queued_tokens: int
    num_cached_tokens: int
    """Of this prompt."""
    num_blocks: int
    """Of its pool."""
    num_available_blocks: int
    is_full: bool
    """As of a decode worker, for what would be decoded here."""
    transport: str = ""


class DecodeCandidate(NamedTuple):
    key: WorkerKey
    kind: Kind | None
    block_size: int
    num_available_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    """Of this prompt."""
    is_full: bool
    """It runs as many requests as it may, or refused one and has not freed anything since."""
    num_queued_tokens: int
    """Of prompts that it prefills itself."""
    num_running: int
    """Requests that decode here, and would stand still while it prefills."""
    transport: str = ""
    slowness: float = 1.0
    """How many times longer its steps take than others' under the same load."""

    def cost_blocks(self, num_tokens: int) -> float:
        """Of a prompt of `num_tokens` here."""
        return self.slowness * (max(0, self.num_blocks(num_tokens) - self.num_cached_blocks) + self.num_used_blocks)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_uncached_tokens(self, num_tokens: int) -> int:
        """Of a prompt of `num_tokens`."""
        return num_tokens - self.num_cached_blocks * self.block_size


def choose_plan(
    config: PolicyConfig,
    learned: Costs,
    *,
    now_s: float,
    num_tokens: int,
    prefill: Sequence[PrefillCandidate],
    decode: Sequence[DecodeCandidate],
    avoid: frozenset[WorkerKey],
    are_apart: Callable[[WorkerPair], bool] = lambda _: False,
    may_stay: bool,
) -> Plan | None:
    """The best plan now for a prompt of `num_tokens` tokens, or None: wait until something changes.

    Workers in `avoid` decode only if no other worker can, and do not prefill: the decode worker can do without them.
    `are_apart`: whether transfers between two workers fail, so that they are not to be paired.
    `may_stay`: whether the request has waited long enough for a decode worker's room (`STAY_SHARE`).
    """
    costs = learned if config.learn_costs else Costs()
    with_room = [d for d in decode if not d.is_full and d.num_available_blocks >= d.num_blocks(num_tokens)]
    if not with_room:
        return _stay(costs, now_s, num_tokens, prefill, decode, avoid) if may_stay else None
    best = min(with_room, key=lambda d: (d.key in avoid, d.cost_blocks(num_tokens), d.slowness))
    compatible = [
        p
        for p in prefill
        if (p.kind, p.transport) == (best.kind, best.transport)
        and p.key not in avoid
        and not are_apart(WorkerPair(p.key, best.key))
    ]
    if best.num_uncached_tokens(num_tokens) <= config.local_max_uncached_tokens or not compatible:
        return Plan(best.key, None)

    return _here_or_there(config, costs, now_s, num_tokens, best, compatible)


def _here_or_there(
    config: PolicyConfig,
    costs: Costs,
    now_s: float,
    num_tokens: int,
    decode: DecodeCandidate,
    prefill: Sequence[PrefillCandidate],
) -> Plan | None:
    """Where the prompt costs less: at its decode worker, or at the best of those that may prefill for that. None: at
    one of these, but each has too much before it."""
    num_uncached_tokens = decode.num_uncached_tokens(num_tokens)

    def there_s(p: PrefillCandidate) -> float:
        return costs.prompt_s(p.key, p.num_queued_tokens + max(1, num_tokens - p.num_cached_tokens), now_s)

    free = [p for p in prefill if p.num_queued_tokens <= config.max_prefill_backlog_tokens]
    soonest = min(free or prefill, key=there_s)
    # What this worker takes, beside streams, is stretched by them: they are held up by what it computes, not by that.
    alone_s = min(costs.prompt_s(key, num_uncached_tokens, now_s) for key in (decode.key, soonest.key))
    stall_s = STALL_WEIGHT * (decode.num_running + 1) * alone_s
    here_s = costs.prompt_s(decode.key, decode.num_queued_tokens + num_uncached_tokens, now_s) + stall_s
    if there_s(soonest) + costs.handover_s(num_uncached_tokens, now_s) > here_s:
        return Plan(decode.key, None)
    return Plan(decode.key, soonest.key) if free else None


def _stay(
    costs: Costs,
    now_s: float,
    num_tokens: int,
    prefill: Sequence[PrefillCandidate],
    decode: Sequence[DecodeCandidate],
    avoid: frozenset[WorkerKey],
) -> Plan | None:
    """The prefill worker that keeps the request, and decodes, too: one that has nothing to do just now.

    Half of its pool is kept for prompts. It says Busy beyond that itself, since it knows what answers may grow to.
    """
    if not decode:
        return None
    num_needed = decode[0].num_blocks(num_tokens)
    kinds = {d.kind for d in decode}
    idle = [
        p
        for p in prefill
        if not p.num_queued_tokens
        and not p.is_full
        and p.num_available_blocks - num_needed >= p.num_blocks // 2
        and p.kind in kinds
        and p.key not in avoid
    ]
    if not idle:
        return None
    soonest = min(idle, key=lambda p: costs.prompt_s(p.key, max(1, num_tokens - p.num_cached_tokens), now_s))
    return Plan(soonest.key, None, is_stay=True)
