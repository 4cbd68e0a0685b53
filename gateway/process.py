"""The gateway process, from its flags to its exit code.

flags ──> listening ──SIGTERM──> no new connections, running requests finish (bounded) ──> exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Generator

import uvicorn

from gateway.app import create_app
from gateway.args import GatewayArgs
from rpc.server import CannotListen, split_address
from tandem.client import AsyncClient

_log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""For which an idle connection of a client stays open: longer than load balancers keep theirs."""


class _Server(uvicorn.Server):
    """Without signal handlers of its own: the entry point's are in place."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def announce(address: str) -> None:
    """Print the one line on stdout by which whoever started the process learns that and where it serves."""
    sys.stdout.write(f"listening http={address}\n")
    sys.stdout.flush()


async def run_gateway(args: GatewayArgs, stop: asyncio.Event, *, announce: Callable[[str], object] = announce) -> int:
    """Serve until `stop` is set. `announce` is told where it listens. Returns the exit code. Raises `CannotListen`."""
    listener = _listen(args.listen)
    async with AsyncClient(args.router) as client:
        app = create_app(client, api_key=args.api_key, max_body_bytes=args.max_body_bytes)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(args.drain_grace_s)),
            server_header=False,
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        announce(address)
        _log.info("listening", extra={"address": address, "router": args.router})
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        stopping.cancel()
        await serving
    return 0


def _listen(address: str) -> socket.socket:
    """A listening socket. Raises `CannotListen` naming the address."""
    host, port = split_address(address)
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen on {address}: {error.strerror}") from error
    listener.setblocking(False)
    return listener
