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
If the cheaper one has `MAX_BACKLOG_S` of prompts waiting, the request waits here in the router, where the choice stays
open: how busy the decode worker will be with streams shows only while a burst is computed.

A prefill worker keeps a request and decodes it too, in two cases:

    a burst                 prompts take long now (`BURST_S`), and answers will take longer. Once the prefill worker
                            would have less KV in use than the decode worker even if it kept all that wait in the
                            router, it keeps them: else it would soon be idle beside a decode worker with all streams.
                            Not one whose first token the decode worker would give far sooner (`KEEP_WAIT_RATIO`)
    no decode worker has    and the prefill worker is idle now. The request waits for a decode worker first, for as long
    room                    as its decoding would hold up prompts

It gets others while they run, if that turns out to be better (`moves`).
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

MAX_BACKLOG_S = 4.0
"""A worker with prompts for longer than this gets no further ones, unless nothing else could compute them. It is enough
that a worker never runs out of prompts while the router still has some."""
BURST_S = 1.0
"""It may be a burst if the soonest prefill worker would take longer than this for its prompts, those of the decode
worker, and those that wait in the router. Under steady traffic there are seldom so many, and streams that it kept would
slow down the prompts to come."""
PILE_UP_RATIO = 2.0
"""It is a burst if answers take this many times as long as the prompts to come. Shorter ones do not pile up."""
KEEP_WAIT_RATIO = 4.0
"""In a burst, a prefill worker keeps no request whose first token would take this many times as long as at the decode
worker: one long prompt is as much work as a burst, but must not hold up short ones."""
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
    rebalance: bool = field(
        default=True,
        metadata={
            "help": "Move streams that run, from a decode worker to a prefill worker that has no prompts and would "
            "give their tokens much sooner. That worker computes what they have again. Needs learned costs."
        },
    )
    max_prefill_backlog_tokens: int = field(
        default=32768,
        metadata={
            "help": "Maximum prompt tokens queued at a worker. With more it gets no new prompts if others could "
            "compute them; these wait in the router. With learned costs, they also wait once a worker has prompts for "
            "four seconds."
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
    num_used_blocks: int = 0
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


def those_with_room(decode: Sequence[DecodeCandidate], num_tokens: int) -> list[DecodeCandidate]:
    """Those that can take a prompt of `num_tokens` now. If there are some, and yet no plan, the request waits until
    prompts before it are computed."""
    return [d for d in decode if not d.is_full and d.num_available_blocks >= d.num_blocks(num_tokens)]


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
    is_return: bool = False,
    num_waiting_tokens: int = 0,
) -> Plan | None:
    """The best plan now for a prompt of `num_tokens` tokens; None: wait until something changes.

    Workers in `avoid` decode only if no other worker can. They never prefill, since the decode worker can do that.
    `are_apart`: whether transfers between two workers fail, so that they must not be paired.
    `may_stay`: whether the request has waited long enough for a decode worker's room (`STAY_SHARE`).
    `is_return`: whether a worker has had the request before. No prefill worker keeps such a request in a burst: one may
    just have said Busy to it, and would be asked again whenever it frees a prompt's blocks.
    `num_waiting_tokens`: tokens of the prompts that wait in the router behind this one.
    """
    costs = learned if config.learn_costs else Costs()
    choice = _Choice(config, costs, now_s, num_tokens, num_waiting_tokens)
    with_room = those_with_room(decode, num_tokens)
    if not with_room:
        return choice.stay(prefill, decode, avoid) if may_stay and decode else None
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
    return choice.here_or_there(best, compatible, may_keep=not is_return)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice for one prompt, now."""

    config: PolicyConfig
    costs: Costs
    now_s: float
    num_tokens: int
    num_waiting_tokens: int

    def here_or_there(
        self, decode: DecodeCandidate, prefill: Sequence[PrefillCandidate], *, may_keep: bool
    ) -> Plan | None:
        """The cheaper place to prefill the prompt: its decode worker, or the best of the `prefill` workers, which may
        keep the request. None: the cheaper one has too much queued. `may_keep`: whether one may keep it in a burst."""
        free = [p for p in prefill if not self._has_backlog(p)]
        soonest = min(free or prefill, key=self._there_s)
        here_s = self._here_s(decode, soonest)
        num_behind = self.num_waiting_tokens / len(prefill)
        is_burst = may_keep and self.config.learn_costs and self._is_burst(soonest, decode, num_behind)
        is_near = self._there_s(soonest) <= KEEP_WAIT_RATIO * here_s
        if is_burst and is_near and self._should_keep_all(soonest, decode, num_behind):
            return Plan(soonest.key, None, is_stay=True) if free else None
        # If prompts wait in the router, each that is prefilled here lets all behind it come sooner.
        there_s = self._there_s(soonest, 0 if free else num_behind)
        if there_s + self.costs.handover_s(decode.num_uncached_tokens(self.num_tokens), self.now_s) > here_s:
            return None if self._has_backlog(decode) else Plan(decode.key, None)
        if not free:
            return None
        return Plan(decode.key, soonest.key)

    def stay(
        self, prefill: Sequence[PrefillCandidate], decode: Sequence[DecodeCandidate], avoid: frozenset[WorkerKey]
    ) -> Plan | None:
        """The prefill worker, one that is idle now, that keeps the request and decodes it too."""
        num_needed = decode[0].num_blocks(self.num_tokens)
        kinds = {d.kind for d in decode}
        idle = [p for p in prefill if not p.num_queued_tokens and p.kind in kinds and p.key not in avoid]
        idle = [p for p in idle if _has_room_to_keep(p, num_needed)]
        return Plan(min(idle, key=self._there_s).key, None, is_stay=True) if idle else None

    def _there_s(self, worker: PrefillCandidate, num_behind: float = 0) -> float:
        """Until the first token, if this prefill worker prefills the prompt, and `num_behind` tokens more."""
        own = max(1, self.num_tokens - worker.num_cached_tokens)
        return self.costs.prompt_s(worker.key, worker.num_queued_tokens + own + num_behind, self.now_s)

    def _here_s(self, decode: DecodeCandidate, soonest: PrefillCandidate) -> float:
        """Until the first token, if the decode worker prefills the prompt; with what that costs its streams."""
        num_uncached_tokens = decode.num_uncached_tokens(self.num_tokens)
        # Streams on this worker stretch the time that it takes for a prompt, yet only the computing itself holds them
        # up. So the stall counts the time of whichever worker is expected to be faster.
        alone_s = min(self.costs.prompt_s(key, num_uncached_tokens, self.now_s) for key in (decode.key, soonest.key))
        stall_s = STALL_WEIGHT * (decode.num_running + 1) * alone_s
        return self.costs.prompt_s(decode.key, decode.num_queued_tokens + num_uncached_tokens, self.now_s) + stall_s

    def _has_backlog(self, worker: PrefillCandidate | DecodeCandidate) -> bool:
        num_queued, config = worker.num_queued_tokens, self.config
        is_slow = config.learn_costs and self.costs.prompt_s(worker.key, num_queued, self.now_s) > MAX_BACKLOG_S
        return num_queued > config.max_prefill_backlog_tokens or (num_queued > 0 and is_slow)

    def _is_burst(self, prefill: PrefillCandidate, decode: DecodeCandidate, num_behind: float) -> bool:
        """Whether streams will pile up at `decode`, because answers take longer than the prompts that are to come:
        those at the prefill worker, and `num_behind` tokens of others that wait in the router. Whether prompts take
        long shows at both workers, since a burst's first prompts go to either."""
        num_to_come = prefill.num_queued_tokens + num_behind
        if self.costs.prompt_s(prefill.key, num_to_come + decode.num_queued_tokens, self.now_s) <= BURST_S:
            return False
        answer_s = self.costs.paces.answer_s(decode.key, decode.num_used_blocks)
        return not answer_s or answer_s > PILE_UP_RATIO * self.costs.prompt_s(prefill.key, num_to_come, self.now_s)

    def _should_keep_all(self, prefill: PrefillCandidate, decode: DecodeCandidate, num_behind: float) -> bool:
        """Whether the prefill worker should decode the request, and all those behind it, rather than `decode`. Not if
        `decode` has more of the prompt cached."""
        num_kept = prefill.num_used_blocks + (self.num_tokens + num_behind) / decode.block_size
        has_less = decode.num_cached_blocks * decode.block_size > prefill.num_cached_tokens
        has_room = _has_room_to_keep(prefill, decode.num_blocks(self.num_tokens))
        return num_kept < decode.num_used_blocks and has_room and not has_less


def _has_room_to_keep(worker: PrefillCandidate, num_blocks: int) -> bool:
    """Whether a prefill worker has room to decode a request with `num_blocks` blocks.

    Half of its block pool stays reserved for prompts. The worker itself says Busy if this answer and those that it has
    are expected to need more than the other half, since it knows how far they are."""
    return not worker.is_full and worker.num_available_blocks - num_blocks >= worker.num_blocks // 2
