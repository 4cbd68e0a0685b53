"""Asks the prefix index how much of a prompt each worker has cached. The result is a hint: a wrong one only costs
time."""

from __future__ import annotations

from prefix_hash import block_hashes, salted_key
from registry.prefix_index import PrefixIndex
from router.request_events import WorkerKey
from router.worker_pool import WorkerPool


class PrefixLookup:
    """The longest cached prefix of a prompt, per usable worker."""

    def __init__(self, index: PrefixIndex, pool: WorkerPool) -> None:
        self._index = index
        self._pool = pool

    async def longest_match(self, token_ids: list[int], cache_salt: str, lora_digest: str = "") -> dict[WorkerKey, int]:
        """Number of leading blocks of `token_ids` that each worker has cached for requests with that salt and adapter;
        workers with none are left out.

        Makes one round trip per prefix key (that is: one, unless workers of several models share the registry), within
        a bounded time. Empty if Redis does not answer.
        """
        found: dict[WorkerKey, int] = {}
        for (prefix_key, block_size), keys in self._pool.roster.usable_by_prefix.items():
            known = token_ids[: self._index.max_hashes * block_size]  # the rest of a long prompt is not looked up
            hashes = block_hashes(known, block_size, salted_key(prefix_key, cache_salt, lora_digest))
            if hashes:
                match = await self._index.longest_match(hashes, keys)
                found |= {k: match[k.worker_id] for k in keys if match.get(k.worker_id)}
        return found
