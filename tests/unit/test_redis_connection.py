"""Redis clients, with a server whose answers are scripted."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ResponseError

from registry.connection import open_redis

REFUSALS = {
    "a command": b"-READONLY You can't write against a read only replica.\r\n",
    "a script, Redis 7": b"-READONLY You can't write against a read only replica. script: 0c1, on @user_script:2.\r\n",
    "a script, Redis 6": b"-ERR Error running script (call to f_0c1): @user_script:2: @user_script: 2: "
    b"-READONLY You can't write against a read only replica.\r\n",
}


async def num_connections_of_two_calls(answer: bytes) -> int:
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while data := await reader.read(4096):
            writer.write(b"+OK\r\n" * data.count(b"CLIENT") or answer)  # the client introduces itself first
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = open_redis(f"redis://127.0.0.1:{port}/0", timeout_s=5.0)
        for _ in range(2):
            with pytest.raises(ResponseError):
                await client.execute_command("EVALSHA", "0c1", 0)
        await client.aclose()
    return num_connections


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
async def test_a_connection_to_who_takes_no_writes_is_left(refusal: bytes) -> None:
    assert await num_connections_of_two_calls(refusal) == 2


async def test_a_connection_stays_after_any_other_error() -> None:
    assert await num_connections_of_two_calls(b"-ERR wrong number of arguments\r\n") == 1
