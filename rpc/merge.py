"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all `streams` as they come, each with its stream's index.

    The first error of any of them ends it, and with it the others; so does closing it. Who reads slowly is waited for:
    each stream is at most one item ahead. One alone needs no task and no queue, and is read where it is waited for.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as alone:
            async for its in alone:
                yield 0, its
        return
    items: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()
    """A task: one stream has ended, well or not."""
    room = asyncio.Semaphore(1)
    """For an item that is not taken yet."""

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
