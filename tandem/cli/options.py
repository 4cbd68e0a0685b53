"""Options that several commands share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rpc.keys import first_key
from rpc.tls import ClientTLS
from tandem.client import DEFAULT_ADDRESS
from tandem.client_base import checked_address

if TYPE_CHECKING:
    from router.policy import PolicyConfig

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _read_by(read: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str], T]:
    """A callback for an option: returns `read(value)`, and reports its `ValueError` as an error of the option, without
    the name that the field has in Python."""

    def callback(context: click.Context, parameter: click.Parameter, value: str) -> T:
        try:
            return read(value)
        except ValueError as error:
            raise click.BadParameter(re.sub(r"^(address|ssl_ca_certs|the key):? ", "", str(error))) from error

    return callback


router_option = click.option(
    "--router",
    "address",
    default=DEFAULT_ADDRESS,
    envvar="TANDEM_ROUTER",
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
    callback=_read_by(checked_address),
    help="Router to call. For several routers: ipv4:HOST:PORT,HOST:PORT, as `tandem up` prints them.",
)

key_option = click.option(
    "--api-key",
    "api_key",
    default="",
    envvar="TANDEM_API_KEY",
    show_envvar=True,
    metavar="KEY",
    callback=_read_by(partial(first_key, "the key")),
    help="API key, if the router requires one. If several are given, separated by spaces, the first is used.",
)

tls_option = click.option(
    "--ssl-ca-certs",
    "tls",
    default="",
    envvar="TANDEM_SSL_CA_CERTS",
    show_envvar=True,
    metavar="FILE",
    callback=_read_by(lambda path: ClientTLS.of_files(ca=path) if path else None),
    help="PEM file of the CA that signed the router's certificate. If given, the router is called over TLS.",
)


def template_kwargs_option(also: str = "") -> Callable[[F], F]:
    """`also`: what else its help should say."""
    return click.option(
        "--chat-template-kwargs",
        metavar="JSON",
        callback=_read_template_kwargs,
        help=f"Variables for the model's chat template, such as '{{\"enable_thinking\": false}}'. {also}".rstrip(),
    )


def _read_template_kwargs(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        variables = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--chat-template-kwargs: is not JSON: {error}") from error
    if not isinstance(variables, dict):
        raise click.UsageError(f"--chat-template-kwargs: must be a JSON object, is {text:.60}")
    return variables


model_option = click.option(
    "--model", default="", help="Name of the model, or of a LoRA adapter (--lora-modules). Default: the model."
)

json_option = click.option("--json", "is_json", is_flag=True, help="Print one JSON object to stdout, for programs.")


def examples(*lines: str) -> str:
    """A command's epilog: one example per line, as typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def is_given(context: click.Context, name: str) -> bool:
    """Whether the option was given, on the command line or in the environment."""
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def check_rebalance(context: click.Context, policy: PolicyConfig) -> None:
    """Refuse a --rebalance that is given but would do nothing."""
    if policy.rebalance and not policy.learn_costs and is_given(context, "rebalance"):
        raise click.UsageError("--rebalance needs --learn-costs: without them no stream is moved")


def no_nan(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """A callback that refuses NaN, which click's ranges accept."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number")
    return value
