"""Moves streams between workers while they run. `moves` decides which; a stream's life cycle does it.

    MovingStream ──emitted──> known here ──look, at most every LOOK_S──> choose_move ──> move_to: it leaves its worker,
         └─────────ended────> forgotten                                                  and waits for a plan, which is
                                                                                         the other worker if it has room

Tokens wake it up: a router whose workers decode nothing does nothing here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set

from protos.tandem_worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from router.moves import LOOK_S, Loaded, PromptShares, choose_move
from router.needs import Needs
from router.policy import PolicyConfig
from router.queue import RequestQueue
from router.request_events import Plan, WorkerKey
from router.worker_handle import WorkerHandle
from router.worker_pool import WorkerPool


class Rebalancer:
    """One per router."""

    def __init__(
        self,
        config: PolicyConfig,
        pool: WorkerPool,
        queue: RequestQueue,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_on = config.rebalance and config.learn_costs
        self._pool = pool
        self._queue = queue
        self._now_s = now_s
        self._looked_s = -LOOK_S
        self._shares = PromptShares()
        self._streams: dict[WorkerKey, dict[MovingStream, None]] = {}
        """The streams that may move, by their decode worker."""

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def add(self, stream: MovingStream) -> None:
        self._streams.setdefault(stream.worker, {})[stream] = None

    def discard(self, stream: MovingStream) -> None:
        """Forget the stream, if it is known."""
        streams = self._streams.get(stream.worker, {})
        streams.pop(stream, None)
        if not streams:
            self._streams.pop(stream.worker, None)

    def look(self) -> None:
        """Move a stream, if one gains by it. Not while requests wait: they need the workers more."""
        now_s = self._now_s()
        if now_s - self._looked_s < LOOK_S or not self._is_on:
            return
        self._looked_s = now_s
        self._shares.note(((h.key, h.num_queued_tokens > 0) for h in self._usable(ROLE_PREFILL)), now_s)
        if len(self._queue):
            return
        chosen = choose_move(
            self._pool.costs,
            now_s=now_s,
            busy=[_loaded(handle) for handle in self._usable(ROLE_DECODE) if handle.key in self._streams],
            idle=[_loaded(handle)._replace(prompt_share=self._shares.of(handle.key)) for handle in self._idle()],
            streams_of=lambda worker: self._streams[worker],
        )
        if chosen is not None:
            stream, worker = chosen
            self.discard(stream)
            stream.move_to(worker)

    def _idle(self) -> list[WorkerHandle]:
        """The prefill workers that could take a stream."""
        # A shorter context would end some answers early.
        max_model_len = min((handle.facts.max_model_len for handle in self._usable(ROLE_DECODE)), default=0)
        return [
            handle
            for handle in self._usable(ROLE_PREFILL)
            if not handle.num_queued_tokens
            and handle.has_room_to_move(1)
            and handle.facts.can_generate
            and handle.facts.max_model_len >= max_model_len
            and not self._pool.is_left_out(handle.key)
        ]

    def _usable(self, role: int) -> Sequence[WorkerHandle]:
        roster = self._pool.roster
        return roster.usable_by.get((role, roster.compat_digest), [])  # type: ignore[arg-type]


def _loaded(handle: WorkerHandle) -> Loaded:
    return Loaded(handle.key, handle.num_used_blocks, handle.facts.block_size)


class MovingStream:
    """The part of one attempt in which its decode worker sends tokens."""

    def __init__(
        self,
        rebalancer: Rebalancer,
        pool: WorkerPool,
        plan: Plan,
        *,
        needs: Needs,
        avoid: Set[WorkerKey],
        num_prompt_tokens: int,
        token_ids: Sequence[int],
        max_tokens: int,
        move_to: Callable[[WorkerKey], None],
    ) -> None:
        """
        plan: of the attempt.
        needs: the request's, with the kind of its workers.
        avoid: workers that have failed the request.
        token_ids: the answer so far; it grows.
        max_tokens: the most that the answer may get.
        move_to: has the request continue at another worker.
        """
        self._rebalancer = rebalancer
        self._pool = pool
        self._plan = plan
        self._needs = needs
        self._avoid = avoid
        self._num_prompt_tokens = num_prompt_tokens
        self._token_ids = token_ids
        self._max_tokens = max_tokens
        self.move_to = move_to
        self.worker = plan.decode
        self._is_known = False

    def emitted(self) -> None:
        """Tokens are on their way to the client, and its decode worker goes on."""
        if not self._is_known:
            self._is_known = True
            self._rebalancer.add(self)
        self._rebalancer.look()

    def stays(self) -> None:
        """It was to move and did not. It may move later."""
        self._is_known = False

    def end(self) -> None:
        """The attempt is over."""
        self._rebalancer.discard(self)

    # -- as `moves.Movable` ------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return self._num_prompt_tokens + len(self._token_ids)

    @property
    def num_answer_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def max_tokens_left(self) -> int:
        return self._max_tokens - len(self._token_ids)

    def num_tokens_again(self, worker: WorkerKey) -> int:
        """The worker that computed the prompt is assumed to keep all full blocks of it, if it keeps any prefixes."""
        handle = self._pool.workers.handles[worker]
        if worker != self._plan.prefill or handle.record.keeps_no_prefixes:
            return self.num_tokens
        block_size = handle.facts.block_size
        return max(1, self.num_tokens - self._num_prompt_tokens // block_size * block_size)

    def may_go_to(self, worker: WorkerKey) -> bool:
        return worker not in self._avoid and self._pool.has_room_to_move(worker, self._needs, self.num_tokens)
