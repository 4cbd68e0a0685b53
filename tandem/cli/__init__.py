"""The `tandem` command. Each sub-command lives in a module of its own; `main` only lists them.

Everything meant for a program goes to stdout, everything meant for a person while waiting to stderr.
Exit codes: 0 done, 1 failed (one line on stderr says why and what to do), 2 wrong usage, 130 ended by Ctrl-C or
SIGTERM.
"""

from __future__ import annotations

import os

# At INFO, gRPC's core logs to stderr what its connections do. It reads this variable when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import gc
import importlib
import sys
from io import TextIOWrapper
from typing import Any

import click

import tandem
from tandem import interrupts
from tandem.cli.stdout import give_up_stdout
from tandem.stderr import tell

COMMANDS = {
    "demo": "tandem.cli.demo",
    "up": "tandem.cli.up",
    "generate": "tandem.cli.generate",
    "chat": "tandem.cli.chat",
    "status": "tandem.cli.status",
    "top": "tandem.cli.top",
    "audit": "tandem.cli.status",
    "profile": "tandem.cli.profile",
    "drain": "tandem.cli.drain",
    "bench": "tandem.cli.bench",
    "run-batch": "tandem.cli.run_batch",
    "fetch": "tandem.cli.fetch",
    "chaos": "tandem.cli.chaos",
}
"""Name of each sub-command (and of its function) -> its module."""
ELSEWHERE = {
    "serve": "tandem up --model MODEL",
    "complete": "tandem generate TEXT",
}
"""vLLM's commands -> what does that here."""


def command(name: str) -> click.Command:
    """The sub-command of that name. Importing its module takes up to half a second, and a fifth less with the garbage
    collector off; imports make no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        found: click.Command = getattr(importlib.import_module(COMMANDS[name]), name.replace("-", "_"))
    finally:
        if was_enabled:
            gc.enable()
    return found


class _Commands(click.Group):
    """Imports only the command that is run; all of them for the list of commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Resolve the command. For a wrong name, load all commands first: click looks for similar names in
        `commands`."""
        if args and args[0] in ELSEWHERE:
            ctx.fail(f"No such command {args[0]!r}. In Tandem, use: {ELSEWHERE[args[0]]}")
        if args and args[0] not in COMMANDS:
            self.commands = {name: command(name) for name in COMMANDS}
        found = super().resolve_command(ctx, args)
        interrupts.raise_again()
        return found

    def main(self, *args: Any, **extra: Any) -> Any:
        """Handle errors of printing help and version, which click does before it invokes a command."""
        try:
            return super().main(*args, **extra)
        except OSError as error:  # except for a closed pipe, which click handles silently
            give_up_stdout()
            tell(f"Error: {error}")
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Handle Ctrl-C for commands that do not do so themselves: click's own exit code would be 1."""
        try:
            result = super().invoke(ctx)
            if sys.stdout:
                sys.stdout.flush()  # here, an error of it can still be reported
            return result
        except KeyboardInterrupt:
            tell("cancelled")
            sys.exit(interrupts.INTERRUPTED)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nFirst steps:\n"
    "  tandem demo                                                # a short tour\n"
    "  tandem up                                                  # and then, in another terminal:\n"
    "  tandem generate --chat 'What is the capital of France?'",
)
@click.version_option(tandem.__version__, prog_name="tandem")
def main() -> None:
    """Serve large language models with prefill and decode on different machines."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 cannot show all characters
