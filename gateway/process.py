"""The gateway process, from its flags to its exit code.

flags ──> listening ──SIGTERM──> no new connections, running requests finish ──grace──> or are told so ──> exit 0
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import click

from gateway.app import create_app
from gateway.args import GatewayArgs
from gateway.metrics import Metrics
from gateway.models import Models
from rpc import entrypoint
from rpc.http import HttpServer, show_metrics
from rpc.keys import first_key
from rpc.otlp_endpoint import create_tracing
from tandem.client import AsyncClient

_log = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""Time to tell clients, after the grace period, that their answers end here."""


async def run_gateway(
    args: GatewayArgs,
    stop: asyncio.Event,
    *,
    announce: Callable[[str], object] = lambda address: entrypoint.announce(address, way="http"),
) -> int:
    """Serve until `stop` is set. `announce` gets the address on which it listens. Returns the exit code. Raises
    `CannotListen`."""
    try:
        tracing = create_tracing(args.otlp_traces_endpoint, "tandem-gateway")
    except ValueError as error:
        click.echo(f"Error: {error}", err=True)
        return 2
    async with _models_of(args) as models:
        leaving, metrics = asyncio.Event(), Metrics()
        app = create_app(
            models,
            api_keys=args.api_key,
            allowed_origins=args.origins,
            max_body_bytes=args.max_body_bytes,
            sse_keep_alive_s=args.sse_keep_alive_s,
            leaving=leaving,
            tracing=tracing,
            metrics=metrics,
            is_alone=not args.reuse_port,
        )
        metrics_server = show_metrics(metrics.registry, args.metrics_listen, lambda: not stop.is_set())
        server = HttpServer(app, tls=args.server_tls())
        address = server.start(args.listen, flag="--listen (tandem up: --http-port)", reuse_port=args.reuse_port)
        announce(address)
        _log.info("listening", extra={"address": address, "router": " ".join(args.router)})
        stopping, ending = asyncio.create_task(stop.wait()), asyncio.create_task(server.wait_ended())
        await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        giving_up = asyncio.get_running_loop().call_later(args.drain_grace_s, leaving.set)
        await server.close(args.drain_grace_s + LAST_WORDS_S)
        giving_up.cancel()
        await ending
        if metrics_server is not None:
            await metrics_server.close()
    await asyncio.to_thread(tracing.close)
    return 0


@asynccontextmanager
async def _models_of(args: GatewayArgs) -> AsyncIterator[Models]:
    api_key = first_key("router_api_key", args.router_api_key)
    async with AsyncExitStack() as clients:
        by_address = {
            address: await clients.enter_async_context(
                AsyncClient(address, api_key=api_key, tls=args.client_tls, resume_s=args.resume_s, is_spread=True)
            )
            for address in args.router
        }
        async with aclosing(Models(by_address)) as models:
            yield models
