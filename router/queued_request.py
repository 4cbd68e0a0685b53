"""A request as the queue and the planning of workers see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Set
from dataclasses import dataclass, field
from typing import TypeAlias

from router.fair_shares import Share
from router.needs import NO_NEEDS, Needs
from router.request_events import WorkerKey
from router.taken_room import TakenRoom


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The part of a prompt that another answer to the same prompt has in use on `worker`. A request that joins it there
    needs no memory and no time for this part."""

    worker: WorkerKey
    num_blocks: int
    num_tokens: int


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest:
    """What planning needs to know about a request. The caller creates it; the queue and the pool own the fields that
    the constructor does not take."""

    num_tokens: int
    """Tokens to prefill: the prompt, and the part of the answer that exists already."""
    num_cached_blocks: dict[WorkerKey, int] = field(default_factory=dict)
    """Longest cached prefix on each worker, according to the prefix index."""
    needs: Needs = NO_NEEDS
    avoid: frozenset[WorkerKey] = frozenset()
    """Workers that have failed this request."""
    wanted: WorkerKey | None = None
    """The worker that it should get, if that one has room: it is a stream that moves there."""
    shared: SharedPrefix | None = None
    answer_s: float = 0.0
    """How long its answer may take, from the first token on."""
    arrived_s: float = 0.0
    """When it began to wait for workers. A request that found its worker busy returns with the time it had before."""
    has_begun: bool = False
    """The client has received part of this answer, or of another answer to the same prompt."""
    is_resumed: bool = False
    """The answer began at another router. Only the client says so, so the request goes before others of that client
    alone."""
    is_return: bool = False
    """It has waited its turn and was charged for its prompt before: it goes to the front of its priority."""
    barred: Set[WorkerKey] = field(default=frozenset(), init=False)
    """Workers that a request before this one waits for."""
    waits_for_prompts: bool = field(default=False, init=False)
    """When workers were last sought for it, they had room, but too many prompts before it."""
    overtakes: QueuedRequest | None = field(default=None, init=False)
    """The head of the line, for which its decode worker must keep room, if it is planned before that one."""
    planned: asyncio.Future[TakenRoom] = field(init=False)
    share: ClientShare = field(init=False)
    """The share of its client."""
    patience: asyncio.TimerHandle | None = field(default=None, init=False)
    """Set while no worker can continue the request: the timer that fails it."""
    is_waiting: bool = field(default=False, init=False)
    has_waited: bool = field(default=False, init=False)
    """No worker had room when it arrived."""

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.arrived_s

    @property
    def num_own_tokens(self) -> int:
        """The tokens that the queue counts: those to prefill, without the part that another answer to the same prompt
        has in use."""
        return self.num_tokens - (self.shared.num_tokens if self.shared is not None else 0)

    def num_shared_blocks(self, worker: WorkerKey) -> int:
        """Blocks of the prompt that another answer to it has in use on `worker`."""
        return self.shared.num_blocks if self.shared is not None and self.shared.worker == worker else 0


ClientShare: TypeAlias = Share[QueuedRequest]
"""The share of one client at one priority."""
