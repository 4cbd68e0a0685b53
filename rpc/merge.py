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
    items: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=1)
    """None: one stream has ended."""

    is_closing = False

    async def read(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as open_stream:
                async for item in open_stream:
                    await items.put((index, item))
        except Exception as error:
            if not is_closing:  # else nobody takes it
                await items.put(error)
        else:
            await items.put(None)

    readers = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(readers)
    try:
        while num_open:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        is_closing = True
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
