"""`tandem status` and `tandem audit`: what the workers do, and who owns their memory."""

from __future__ import annotations

import json
import sys

import click

from rpc.tls import ClientTLS
from tandem.answer import message_to_dict
from tandem.cli.errors import readable_errors
from tandem.cli.options import examples, json_option, key_option, router_option, tls_option
from tandem.client import Client
from tandem.tables import audit_problems, audit_table, print_table, router_line, status_table


@click.command(
    short_help="Show the queue and every worker.",
    epilog=examples("watch tandem status", "tandem status --json | jq '.workers[].record.load'"),
)
@json_option
@router_option
@key_option
@tls_option
def status(is_json: bool, address: str, api_key: str, tls: ClientTLS | None) -> None:
    """Show the router's queue and every worker: what it runs, its KV pool, its prefix hits.

    The pool is shown as free/cached/used of all blocks; a cached block holds a prefix and can be taken at any time.
    """
    with readable_errors(address), Client(address, api_key=api_key, tls=tls) as client:
        answer = client.status()
    if is_json:
        click.echo(json.dumps(message_to_dict(answer), indent=2))
        return
    click.echo(router_line(answer, address))
    print_table(status_table(answer))
    for line in answer.unreachable:
        click.echo(f"unreachable: {line}")
    for line in answer.unused:
        click.echo(f"not used: {line}")


@click.command(
    short_help="Recount every KV block, by owner.", epilog=examples("tandem audit && echo every block has one owner")
)
@json_option
@router_option
@key_option
@tls_option
def audit(is_json: bool, address: str, api_key: str, tls: ClientTLS | None) -> None:
    """Recount every KV block of every worker, by owner. Exits with 1 if the owners do not sum up to the pool.

    free: no content. cached: a prefix, may be evicted. sequence: a running request's. grant: reserved for an incoming
    transfer. held: kept until an outgoing transfer is acknowledged.
    """
    with readable_errors(address), Client(address, api_key=api_key, tls=tls) as client:
        answer = client.audit()
    problems = audit_problems(answer)
    if is_json:
        click.echo(json.dumps(message_to_dict(answer) | {"problems": problems}, indent=2))
    else:
        print_table(audit_table(answer))
    for problem in problems:
        click.echo(f"Error: {problem}", err=True)
    if problems:
        sys.exit(1)
