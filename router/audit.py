"""Audits the router's own books: the room that it counts as taken on workers, and the requests whose events it listens
for.

An entry that belongs to no running request is a leak: it makes workers look busier than they are until the router ends.
For a moment an entry may belong to no request, such as a plan that its request is about to receive. So only an entry
that is found twice, with a wait in between, is a leak.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from router.lifecycle import Lifecycle
from router.queue import RequestQueue
from router.worker_handle import WorkerHandle
from router.worker_pool import WorkerPool


def find_ownerless(pool: WorkerPool, queue: RequestQueue, running: Sequence[Lifecycle]) -> dict[Hashable, str]:
    """The entries that belong to none of the `running` requests now: from what identifies an entry to a sentence about
    it."""
    found = {**_rooms(pool, running), **_names(pool, running), **_miscounted(pool)}
    if not len(queue) and queue.num_tokens:
        found["queue"] = f"the queue is empty, but its counter has {queue.num_tokens} tokens"
    if not running and not len(queue) and queue.num_clients:
        found["clients"] = f"counters of {queue.num_clients} clients are kept, but none of them has a request"
    return found


def _rooms(pool: WorkerPool, running: Sequence[Lifecycle]) -> dict[Hashable, str]:
    ownerless = pool.rooms - {lifecycle.room for lifecycle in running}
    return {
        room: f"room on {room.plan.decode.worker_id} for a prompt of {room.num_tokens} tokens belongs to no request"
        for room in ownerless
    }


def _names(pool: WorkerPool, running: Sequence[Lifecycle]) -> dict[Hashable, str]:
    names = {lifecycle.name for lifecycle in running}
    return {
        (handle.key, name): f"nobody waits for the events of {name!r} at {handle.record.worker_id}"
        for handle in pool.handles
        if handle.session is not None
        for name in handle.session.names - names
    }


def _miscounted(pool: WorkerPool) -> dict[Hashable, str]:
    """Workers whose counts of planned blocks, sequences or tokens differ from the sum over all rooms."""
    planned: defaultdict[WorkerHandle, Counter[str]] = defaultdict(Counter)
    for room in pool.rooms:
        for handle, what, num in room.taken():
            planned[handle][what] += num
    counted = {
        handle: {"blocks": handle.num_planned_blocks, "sequences": handle.num_planned_seqs,
                 "tokens": handle.num_prefill_tokens}
        for handle in pool.handles
    }  # fmt: skip
    return {
        (handle.key, what): f"{handle.record.worker_id} is counted as having {num} {what} planned, but its requests "
        f"have {planned[handle][what]}"
        for handle, nums in counted.items()
        for what, num in nums.items()
        if num != planned[handle][what]
    }
