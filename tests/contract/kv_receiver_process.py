"""A receiver in a process of its own, which a test kills. Prints its grant as hex once it serves."""

from __future__ import annotations

import asyncio
import sys

from kv_harness import Receiving


async def main(transport: str, num_blocks: int) -> None:
    receiving = Receiving(transport, lease_s=60, num_blocks=num_blocks, num_kv_heads=8, head_dim=64, block_size=16)
    await receiving.start()
    grant = receiving.receiver.issue("router", list(range(num_blocks)), 0)
    print(grant.SerializeToString().hex(), flush=True)
    await asyncio.Event().wait()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
