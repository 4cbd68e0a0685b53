"""Options that several commands share."""

from __future__ import annotations

import math

import click

from rpc.keys import first_key
from rpc.tls import ClientTLS
from tandem.client import DEFAULT_ADDRESS
from tandem.client_base import checked_address


def _router_of(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        return checked_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


router_option = click.option(
    "--router",
    "address",
    default=DEFAULT_ADDRESS,
    envvar="TANDEM_ROUTER",
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
    callback=_router_of,
    help="The router to talk to.",
)


def _key_of(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        return first_key("the key", value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


key_option = click.option(
    "--api-key",
    "api_key",
    default="",
    envvar="TANDEM_API_KEY",
    show_envvar=True,
    metavar="KEY",
    callback=_key_of,
    help="The router's key, if it requires one. Of several, separated by spaces, the first is used.",
)


def _tls_of(context: click.Context, parameter: click.Parameter, value: str) -> ClientTLS | None:
    try:
        return ClientTLS.of_files(ca=value) if value else None
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


tls_option = click.option(
    "--ssl-ca-certs",
    "tls",
    default="",
    envvar="TANDEM_SSL_CA_CERTS",
    show_envvar=True,
    metavar="FILE",
    callback=_tls_of,
    help="PEM file of the CA that signed the router's certificate. With it, the router is called over TLS.",
)

json_option = click.option("--json", "is_json", is_flag=True, help="Print one JSON object to stdout, for programs.")


def examples(*lines: str) -> str:
    """A command's epilog: one example per line, as they are typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def no_nan(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """A range lets NaN through: it is neither below nor above."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number")
    return value
