"""Which part of a prompt a router looks up in the prefix index. No network."""

from __future__ import annotations

from typing import Any, cast

from lifecycle_bench import BLOCK, PROMPT, Bench

from registry.prefix_index import PrefixIndex
from router.prefix_lookup import PrefixLookup


class Index:
    max_hashes = 3

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []

    async def longest_match(self, hashes: list[bytes], workers: Any) -> dict[str, int]:
        self.asked.append(hashes)
        return {"d": len(hashes)}


async def test_of_a_long_prompt_no_more_is_hashed_than_is_looked_up() -> None:
    bench, index = Bench(), Index()
    lookup = PrefixLookup(cast(PrefixIndex, index), bench.pool)
    assert await lookup.longest_match(PROMPT, "") == {bench.decode.key: 3}
    assert await lookup.longest_match(PROMPT[: 2 * BLOCK], "") == {bench.decode.key: 2}
    long, short = index.asked
    assert (len(long), short) == (3, long[:2])
