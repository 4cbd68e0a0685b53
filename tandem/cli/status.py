"""`tandem status` and `tandem audit`: what the workers do, and who owns their memory."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from rpc.tls import ClientTLS
from tandem.answer import message_to_dict
from tandem.cli.errors import readable_errors
from tandem.cli.options import examples, json_option, key_option, router_option, tls_option
from tandem.cli.routers import Answers, all_routers
from tandem.tables import (
    adapter_lines,
    audit_problems,
    audit_table,
    print_table,
    router_line,
    seen_by_all,
    status_table,
    version_line,
)


@click.command(
    short_help="Show the queue and every worker.",
    epilog=examples("watch tandem status", "tandem status --json | jq '.workers[].record.load'"),
)
@json_option
@router_option
@key_option
@tls_option
def status(is_json: bool, address: str, api_key: str, tls: ClientTLS | None) -> None:
    """Show the router's queue, and of every worker the running requests, the KV pool and the prefix cache hits.

    A router knows only its own requests: if there are several routers, list them all, as in --router
    ipv4:127.0.0.1:50051,127.0.0.1:50052.

    The pool is shown as free/cached/used of all blocks; a cached block holds a prefix and can be evicted at any time.
    """
    with readable_errors(address), all_routers(address, api_key, tls) as routers:
        answers = routers.ask(lambda client: client.status())
    if is_json:
        click.echo(json.dumps(_as_json(answers), indent=2))
        return
    for line in [router_line(answer, each) for each, answer in answers.by_address.items()] + answers.away:
        click.echo(line)
    if version := version_line(list(answers.by_address.values())):
        click.echo(version)
    seen = seen_by_all(list(answers.by_address.values()))
    print_table(status_table(seen))
    for line in adapter_lines(seen):
        click.echo(line)
    for line in seen.unreachable:
        click.echo(f"unreachable: {line}")
    for line in seen.unused:
        click.echo(f"not used: {line}")


def _as_json(answers: Answers[Any]) -> dict[str, Any]:
    """The answer, if one router was asked; otherwise a list of all answers."""
    told = [{"address": address, **message_to_dict(answer)} for address, answer in answers.by_address.items()]
    if len(told) == 1 and not answers.away:
        return message_to_dict(*answers.by_address.values())
    return {"routers": told, "away": answers.away}


@click.command(
    short_help="Check that every KV block has one owner.",
    epilog=examples("tandem audit && echo every block has one owner"),
)
@json_option
@router_option
@key_option
@tls_option
def audit(is_json: bool, address: str, api_key: str, tls: ClientTLS | None) -> None:
    """Count the KV blocks of every worker by owner, and check them. Exits with 1 if the owners do not sum up to the
    pool, or if a router of --router (which may list several) has reserved resources that none of its requests needs.

    free: empty. cached: holds a prefix, may be evicted. sequence: in use by a running request. grant: reserved for an
    incoming transfer. held: kept until an outgoing transfer is acknowledged.
    """
    with readable_errors(address), all_routers(address, api_key, tls) as routers:
        answers = routers.ask(lambda client: client.audit())
    audits = list(answers.by_address.values())
    problems = list(dict.fromkeys(problem for audit in audits for problem in audit_problems(audit))) + answers.away
    if is_json:
        click.echo(json.dumps(_as_json(answers) | {"problems": problems}, indent=2))
    else:
        print_table(audit_table(max(audits, key=lambda audit: len(audit.workers))))
    for problem in problems:
        click.echo(f"Error: {problem}", err=True)
    if problems:
        sys.exit(1)
