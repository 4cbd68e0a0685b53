"""Options that several commands share."""

from __future__ import annotations

import click

from tandem.client import DEFAULT_ADDRESS

router_option = click.option(
    "--router",
    "address",
    default=DEFAULT_ADDRESS,
    envvar="TANDEM_ROUTER",
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
    help="The router to talk to.",
)

json_option = click.option("--json", "is_json", is_flag=True, help="One JSON object on stdout, for programs.")


def examples(*lines: str) -> str:
    """A command's epilog: one example per line, as they are typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
