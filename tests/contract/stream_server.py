"""A server that streams a few bytes. On SIGTERM it leaves like our servers: it refuses new calls, waits a moment and
ends the rest."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator

import grpc


async def main(port: str) -> None:
    leaving = asyncio.Event()

    async def stream(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        if leaving.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "leaving")
        for _ in range(random.randint(3, 15)):
            await asyncio.sleep(0.01)
            yield b"x" * 50

    server = grpc.aio.server()
    method = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Streams", {"Stream": method}),))
    port_bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(port_bound, flush=True)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leaving.set)
    await leaving.wait()
    await asyncio.sleep(0.15)
    await server.stop(0)


asyncio.run(main(sys.argv[1]))
