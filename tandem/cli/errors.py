"""Errors for people at a terminal: one line that names the field and says what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from rpc.errors import (
    DeadlinePassed,
    Draining,
    InvalidRequest,
    NoWorker,
    Overloaded,
    TandemError,
    Unauthenticated,
    Unreachable,
)
from tandem.answer import StreamBroken
from tandem.resume import OnBroken
from tandem.stderr import tell

SAMPLING_PREFIX = "sampling_params."
FLAGS = {"model": "--model", "cache_salt": "--cache-salt", "chat.template_kwargs": "--chat-template-kwargs"}
"""Flags of fields that are no sampling parameters."""


def explain(error: TandemError, address: str) -> str:
    """One line about an error of a call to the router at `address`."""
    if isinstance(error, InvalidRequest) and error.violations:
        return "; ".join(f"{_flag(v.field)}: {v.description}" for v in error.violations)
    if isinstance(error, Unreachable):
        return (
            f"no router answers at {address}, or it stopped ({error.message}). Start one with `tandem up`, or give its "
            "address with --router HOST:PORT or TANDEM_ROUTER; if it serves TLS, also give --ssl-ca-certs FILE."
        )
    if isinstance(error, Unauthenticated):
        return (
            f"the router at {address} requires an API key, and got none or a wrong one: give it with --api-key KEY or "
            "TANDEM_API_KEY."
        )
    if isinstance(error, DeadlinePassed):
        return "the answer was not complete in time: allow more with --timeout-s, or ask for fewer tokens."
    line = " ".join(error.message.split()) or type(error).__name__
    if error.retry_after_s is not None:
        return f"{line.rstrip('.')}. Try again in {error.retry_after_s:.1f} s."
    if isinstance(error, (Overloaded, NoWorker, Draining)):
        return f"{line.rstrip('.')}. Try again in a moment."
    return line


def _flag(field: str) -> str:
    """The flag that sets a field of the wire."""
    if field in FLAGS:
        return FLAGS[field]
    if field.startswith(SAMPLING_PREFIX):
        name = field.removeprefix(SAMPLING_PREFIX).split("[")[0]
        return "--json-schema" if name == "structured_outputs" else "--" + name.replace("_", "-")
    if field.startswith("chat.tool"):
        return "--tools" + field.removeprefix("chat.tools") if field.startswith("chat.tools") else "--tool-choice"
    return "PROMPT" if field.split(".")[0] in ("text", "chat", "prompt") else field


def told_of_broken(address: str, *, is_in_line: bool = True) -> OnBroken:
    """An `on_broken` that tells the user why the answer has stopped. `is_in_line`: the answer is printed as it comes,
    and may be in the middle of a line."""

    def on_broken(error: TandemError, left_s: float) -> None:
        if is_in_line and sys.stdout and sys.stdout.isatty():
            tell("")
        what = f"waiting up to {left_s:.0f} s for a router that goes on"
        tell(f"the router at {address} stopped answering ({error.message}): {what}")

    return on_broken


@contextmanager
def readable_errors(address: str) -> Iterator[None]:
    """Wraps calls to the router at `address`: an error ends the command with one line and exit code 1."""
    try:
        yield
    except TandemError as error:
        raise click.ClickException(explain(error, address)) from error
    except StreamBroken as error:
        raise click.ClickException(f"{error}. The printed answer is incomplete.") from error
