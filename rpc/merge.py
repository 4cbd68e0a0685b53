"""Merges several streams into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all `streams` as they arrive, each with its stream's index.

    The first error of any stream ends all of them; so does closing the result. A slow reader slows the streams down:
    each is at most one item ahead. A single stream is read directly, without a task or a queue.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as alone:
            async for its in alone:
                yield 0, its
        return
    items: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()
    """Items; or a task whose stream has ended, successfully or not."""
    room = asyncio.Semaphore(1)
    """Room for one item that has not been taken."""

    async def read(index: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream) as open_stream:
            async for item in open_stream:
                await room.acquire()
                items.put_nowait((index, item))

    readers = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    for reader in readers:
        reader.add_done_callback(items.put_nowait)
    num_open = len(readers)
    try:
        while num_open:
            item = await items.get()
            if isinstance(item, asyncio.Task):
                item.result()
                num_open -= 1
            else:
                room.release()
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
