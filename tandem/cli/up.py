"""`tandem up`: runs a whole Tandem cluster on this machine, in the foreground."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from types import FrameType
from typing import Any, TypeVar

import click

from engine.engine_args import EngineArgs
from gateway.args import API_KEY_HELP
from router.policy import PolicyConfig
from rpc.entrypoint import Several, build, options_of, stop_signals
from tandem.cli.options import check_rebalance, examples, is_given
from tandem.cluster import Cluster, ClusterError
from tandem.cluster_args import AUTO, OWN, SERVICES, ClusterArgs
from tandem.stderr import tell
from tandem.vllm_settings import instead_of_flag

NEED_HTTP = {"--http-port": "http_port", "--allowed-origins": "allowed_origins", "--gateways": "num_gateways"}
Command = TypeVar("Command", bound=Callable[..., Any])


def _option(flag: str, *names: str, **settings: Any) -> Callable[[Command], Command]:
    """A flag whose help shows its default and environment variable."""
    settings.setdefault("envvar", "TANDEM_" + flag.removeprefix("--").replace("-", "_").upper())
    return click.option(
        flag, *names, show_default=settings.get("default") not in ("", ()), show_envvar=True, **settings
    )


def _service_options(command: Command) -> Command:
    """Add the flags of services whose settings are passed on; flags of several services are added once."""
    told = set(OWN)
    decorators = []
    for service in SERVICES:
        decorators.append(options_of(service, leave_out=frozenset(told)))
        told |= {entry.name for entry in fields(service)}
    for decorate in reversed(decorators):  # in the order of decorators on a function
        command = decorate(command)
    return command


class _Up(click.Command):
    """Tells vLLM's users which flag to use instead of vLLM's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if instead := instead_of_flag(error.option_name):
                raise click.UsageError(f"No such option {error.option_name!r}: {instead}", ctx) from error
            raise
        except click.UsageError as error:
            if error.message.startswith("Got unexpected extra argument"):
                hint = "A model is named with --model; several values of a flag have commas between them: a,b"
                raise click.UsageError(f"{error.message}. {hint}", ctx) from error
            raise


@click.command(
    cls=_Up,
    short_help="Start Redis, router, workers and gateway on this machine.",
    epilog=examples(
        "tandem up                              # then, in another terminal:",
        "tandem generate --chat 'Hello!'",
        "tandem status",
        "",
        "tandem up --prefill 2 --decode 2 --transport nixl --listen 127.0.0.1:0",
        "tandem up --aggregated --decode 2 --model ~/models/Qwen3-0.6B --max-model-len 4096",
        "tandem up --decode 4 --routers 2 --gateways 2",
    ),
)
@_option("--prefill", "num_prefill", type=int, default=1, help="Number of prefill workers.")
@_option("--decode", "num_decode", type=int, default=1, help="Number of decode workers.")
@_option("--aggregated", "is_aggregated", is_flag=True,
         help="Start no prefill workers; the --decode workers prefill, too.")  # fmt: skip
@_option("--routers", "num_routers", type=int, default=1,
         help="Number of routers. Requests are spread over them; if one dies, its streams continue at another at "
              "once.")  # fmt: skip
@_option("--gateways", "num_gateways", type=int, default=1,
         help="Number of gateways, which all serve HTTP on --http-port, like vLLM's --api-server-count.")  # fmt: skip
@_option("--listen", default=ClusterArgs.listen, metavar="HOST:PORT",
         help="Address that the router listens on; further routers take the next ports. Port 0: a free "
              "port.")  # fmt: skip
@_option("--http-port", type=int, default=8000,
         help="Port for OpenAI's HTTP API and the chat page, on the host of --listen. 0: a free port.")  # fmt: skip
@_option("--no-http", "has_no_http", is_flag=True, help="Serve no HTTP, only gRPC.")
@_option("--api-key", cls=Several, multiple=True, default=(),
         help=f"{API_KEY_HELP} If given, the router requires it, too: `tandem status --api-key KEY`.")  # fmt: skip
@_option("--metrics-port", type=int, default=None,
         help="Port for the router's Prometheus metrics; further routers and the workers take the next ports, in the "
              "order of their names. A single gateway serves /metrics on --http-port; several take the next ports, "
              "too. 0: free ports, which the logs show. Default: no metrics of routers and workers.")  # fmt: skip
@_option("--redis", "redis_url", default="", envvar="REDIS_URL", metavar="URL",
         help="Redis to use: redis://HOST:PORT or unix://PATH. Default: start one, which stops with the "
              "cluster.")  # fmt: skip
@_option("--transport", default=AUTO,
         help="Transport for KV blocks between workers: grpc, ipc (writes into the other worker's memory), nixl "
              "(NVIDIA's NIXL) or auto (ipc if all workers have the same GPU, else grpc).")  # fmt: skip
@_service_options
@options_of(PolicyConfig)
@options_of(EngineArgs)
@click.pass_context
def up(context: click.Context, /, **options: Any) -> None:
    """Start Redis, a router, prefill and decode workers and an HTTP gateway, and keep them running.

    Prints one line, `ready grpc=HOST:PORT http=HOST:PORT`, to stdout once requests can be served; everything else goes
    to stderr. With several routers it lists all of them: `grpc=ipv4:HOST:PORT,HOST:PORT`. Give this value to --router
    of other commands, and to clients. OpenAI's clients take http://HOST:PORT/v1 as their base URL; the chat page is at
    /.

    A process that dies is restarted. Ctrl-C, SIGTERM or closing the terminal lets running streams finish and exits with
    0, or with 1 if a process had to be killed; a second Ctrl-C does not wait. With --num-threads 0 the workers share
    the cores.
    """
    engine, policy = build(EngineArgs, options), build(PolicyConfig, options)
    check_rebalance(context, policy)
    if options["is_aggregated"] and is_given(context, "num_prefill"):
        raise click.UsageError("--aggregated starts no prefill workers: leave out either --prefill or --aggregated")
    own = {name: value for name, value in options.items() if name not in vars(engine) | vars(policy)}
    if own.pop("has_no_http"):
        for flag, name in NEED_HTTP.items():
            if is_given(context, name):
                raise click.UsageError(f"{flag} needs HTTP: leave out either {flag} or --no-http")
        own["http_port"] = None
    try:
        args = ClusterArgs(engine=engine, policy=policy, **own)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        problems = asyncio.run(_serve(args))
    except ClusterError as error:
        raise click.ClickException(str(error)) from error
    for problem in problems:
        tell(f"Error: {problem}")
    sys.exit(1 if problems else 0)


async def _serve(args: ClusterArgs) -> list[str]:
    """Run the cluster until a signal comes. Returns a sentence for each process that did not end properly. Raises
    `ClusterError`."""
    cluster = Cluster(args)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: int) -> None:
        if not stop.is_set():
            stop.set()
            tell("tandem: stopping when running streams have finished; Ctrl-C (again) ends them now")
        elif number == signal.SIGINT:  # a repeated SIGTERM does not mean to hurry
            cluster.hurry()

    def on_any(number: int, _: FrameType | None) -> None:
        loop.call_soon_threadsafe(on_signal, number)

    numbers = stop_signals()
    for number in numbers:
        signal.signal(number, on_any)
    try:
        return await _run(cluster, stop)
    finally:
        # Ignore further signals: nothing is left to stop, and this process has ended properly. (When the loop removes
        # its handlers, a signal would kill the process.)
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


async def _run(cluster: Cluster, stop: asyncio.Event) -> list[str]:
    """Run the cluster until `stop` is set. Returns a sentence for each process that did not end properly."""
    if not await _before(stop, cluster.start()):
        return []
    http = f" http={cluster.http_address}" if cluster.http_address else ""
    try:
        click.echo(f"ready grpc={cluster.router_address}{http}")
        await _before(stop, cluster.wait_failed())
    finally:
        problems = await cluster.stop()
    return problems


async def _before(stop: asyncio.Event, work: Any) -> bool:
    """Await `work`, but cancel it when `stop` is set. Returns whether it ended before. Raises what it raises."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False
