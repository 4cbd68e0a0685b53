"""`tandem top`: the cluster, live."""

from __future__ import annotations

import time
from contextlib import nullcontext

import click
from rich.console import Console
from rich.live import Live

from rpc.tls import ClientTLS
from tandem.cli.errors import readable_errors
from tandem.cli.options import examples, key_option, no_nan, router_option, tls_option
from tandem.cli.routers import all_routers
from tandem.tables import router_line, seen_by_all
from tandem.top import Look, view


@click.command(
    short_help="Watch queue, workers, pools and rates, live.",
    epilog=examples("tandem top", "tandem top --interval-s 5", "tandem top --count 2 > snapshot.txt"),
)
@click.option(
    "--interval-s",
    type=click.FloatRange(0.1, 3600),
    callback=no_nan,
    default=1.0,
    show_default=True,
    help="Seconds between updates.",
)
@click.option(
    "--count",
    type=click.IntRange(1),
    default=None,
    help="Exit after this many updates; if stdout is not a terminal, only the last one is printed. Rates need "
    "at least 2. Default: run until Ctrl-C.",
)
@router_option
@key_option
@tls_option
def top(interval_s: float, count: int | None, address: str, api_key: str, tls: ClientTLS | None) -> None:
    """Watch the router's queue, and of every worker the running requests, tokens per second, prefix cache hits and KV
    in use. If there are several routers, list them all in --router, as for `tandem status`.

    Rates cover the time since the previous update, so the first one shows none (-); hits are prompt tokens found in the
    worker's prefix cache.
    """
    console = Console()
    before: Look | None = None
    with (
        readable_errors(address),
        all_routers(address, api_key, tls) as routers,
        Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live,
    ):
        num_looks = 0
        while True:
            answers = routers.ask(lambda client: client.status())
            seen = seen_by_all(list(answers.by_address.values()))
            now, num_looks = Look(seen, time.monotonic()), num_looks + 1
            heads = [router_line(answer, each) for each, answer in answers.by_address.items()] + answers.away
            if live is not None:
                live.update(view(before, now, heads), refresh=True)
            elif count is None or num_looks == count:
                console.print(view(before, now, heads))
            if num_looks == count:
                return
            before = now
            time.sleep(interval_s)
