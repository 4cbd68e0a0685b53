"""The router's own books: the room it counts as taken on workers, and the requests whose events it listens for.

What belongs to no request that runs is a leak: it makes workers look busier than they are until the router ends. For a
moment anything may be in nobody's hands, as a plan that its request is about to hear of. So a leak is what is found
twice, with a wait between.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from router.lifecycle import Lifecycle
from router.queue import RequestQueue
from router.worker_handle import WorkerHandle
from router.worker_pool import WorkerPool


def find_ownerless(pool: WorkerPool, queue: RequestQueue, running: Iterable[Lifecycle]) -> dict[Hashable, str]:
    """What belongs to none of the `running` requests just now: what it is -> a sentence."""
    running = list(running)
    found: dict[Hashable, str] = {}
    planned: dict[WorkerHandle, list[int]] = {handle: [0, 0] for handle in pool.handles}
    for room in pool.rooms:
        for handle, num_blocks, num_tokens in room.taken():
            sums = planned.setdefault(handle, [0, 0])
            sums[0] += num_blocks
            sums[1] += num_tokens
    for room in pool.rooms - {lifecycle.room for lifecycle in running}:
        found[room] = f"room on {room.plan.decode.worker_id} for a prompt of {room.num_tokens} tokens is nobody's"
    names = {lifecycle.name for lifecycle in running}
    for handle in pool.handles:
        worker_id = handle.record.worker_id
        for name in handle.session.names - names if handle.session is not None else ():
            found[handle.key, name] = f"events of {name!r} at {worker_id} are waited for by nobody"
        num_blocks, num_tokens = planned[handle]
        if (num_blocks, num_tokens) != (handle.num_planned_blocks, handle.num_prefill_tokens):
            found[handle.key] = (
                f"{worker_id} is counted as having {handle.num_planned_blocks} blocks and {handle.num_prefill_tokens} "
                f"tokens planned, its requests have {num_blocks} and {num_tokens}"
            )
    if not len(queue) and queue.num_tokens:
        found["queue"] = f"the queue is empty and counts {queue.num_tokens} tokens"
    return found
