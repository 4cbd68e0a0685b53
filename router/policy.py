"""Which workers serve a request, and in which mode. Pure: numbers in, a plan out.

Of the decode workers with room, the policy chooses the one with the lowest cost in blocks: the blocks that it would
have to receive plus those that it already works on, times how much slower its steps are than other workers' (`paces`).
Of the prefill workers, it chooses the one that would produce the first token soonest, given its queue and the part of
this prompt that its prefix cache lacks. So the longest cached prefix wins unless its owner is busier by more than the
prefix saves.

The decode worker prefills the prompt itself where that costs less, in seconds learned from earlier requests (`costs`):

    there   the prefill worker's queue, the prompt, and the handover: asking for room, moving KV
    here    this worker's queue, the prompt, and a share of its time for each request that decodes here and is slowed
            down meanwhile (`STALL_WEIGHT`), counting one more than now, since others come

So short prompts are prefilled where they are decoded, and long ones beside running streams are not. An idle decode
worker takes part in a burst of prompts, a busy one does not, and a slow one stops sooner. The decode worker prefills in
any case if no prefill worker can be paired with it, or if it lacks at most `local_max_uncached_tokens` of the prompt.

If no decode worker has room, a request waits for one, but no longer than its decoding would hold up the prompts of a
prefill worker that is idle now: then that prefill worker keeps the request and decodes it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from router.costs import Costs
from router.request_events import Plan, WorkerKey, WorkerPair
from router.served_kind import Kind

STALL_WEIGHT = 0.1
"""The cost of a second of delay within a stream, relative to a second before the first token. Clients hardly feel it: a
decode worker cuts prompts so that its streams go on, only slower (engine/scheduling/pace.py)."""

STAY_SHARE = 0.25
"""A request waits for a decode worker's room for this fraction of the time that its answer takes before a prefill
worker keeps it: its decode steps would hold up that worker's prompts for about as long."""
UNKNOWN_ANSWER_S = 2.0
"""How long an answer is assumed to take before any has ended."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    local_max_uncached_tokens: int = field(
        default=16,
        metadata={
            "help": "A decode worker prefills a prompt itself if at most this many of the prompt's tokens are not "
            "in its prefix cache."
        },
    )
    learn_costs: bool = field(
        default=True,
        metadata={
            "help": "Choose workers by predicted seconds, learned from earlier requests. If off, by tokens and "
            "blocks, as if all workers were equally fast and moving KV took no time."
        },
    )
    max_prefill_backlog_tokens: int = field(
        default=32768,
        metadata={
            "help": "Maximum tokens queued at a prefill worker. With more it gets no new prompts; these wait in "
            "the router."
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
    """Tokens of this prompt that it has cached."""
    num_blocks: int
    """Size of its block pool."""
    num_available_blocks: int
    is_full: bool
    """It cannot decode this request now: as in `DecodeCandidate`, or it cannot decode at all."""
    transport: str = ""


class DecodeCandidate(NamedTuple):
    key: WorkerKey
    kind: Kind | None
    block_size: int
    num_available_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    """Blocks of this prompt that it has cached."""
    is_full: bool
    """It runs as many requests as it may, or it refused one and has not freed anything since."""
    num_queued_tokens: int
    """Waiting tokens of prompts that it prefills itself."""
    num_running: int
    """Requests that decode here; prefilling a prompt here would delay them."""
    transport: str = ""
    slowness: float = 1.0
    """How many times longer its steps take than others' under the same load."""

    def cost_blocks(self, num_tokens: int) -> float:
        """The cost of placing a prompt of `num_tokens` here."""
        return self.slowness * (max(0, self.num_blocks(num_tokens) - self.num_cached_blocks) + self.num_used_blocks)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_uncached_tokens(self, num_tokens: int) -> int:
        """Tokens of a prompt of `num_tokens` that are not cached here."""
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
    """The best plan now for a prompt of `num_tokens` tokens; None: wait until something changes.

    Workers in `avoid` decode only if no other worker can. They never prefill, since the decode worker can do that.
    `are_apart`: whether transfers between two workers fail, so that they must not be paired.
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
    """The cheaper place to prefill the prompt: its decode worker, or the best of the `prefill` workers. None: a prefill
    worker is cheaper, but all of them have too much queued."""
    num_uncached_tokens = decode.num_uncached_tokens(num_tokens)

    def there_s(p: PrefillCandidate) -> float:
        return costs.prompt_s(p.key, p.num_queued_tokens + max(1, num_tokens - p.num_cached_tokens), now_s)

    free = [p for p in prefill if p.num_queued_tokens <= config.max_prefill_backlog_tokens]
    soonest = min(free or prefill, key=there_s)
    # Streams on this worker stretch the time that it takes for a prompt, yet only the computing itself holds them up.
    # So the stall counts the time of whichever worker is expected to be faster.
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
    """The prefill worker, one that is idle now, that keeps the request and decodes it too.

    Half of its block pool stays reserved for prompts. The worker itself says Busy if this answer could need more than
    the other half, since it knows how long answers may grow.
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
