"""docs/configuration.md, made from the programs' own flags: `python -m tandem.reference > docs/configuration.md`.

Pure: click commands in, Markdown out. A test holds the page against what this makes.
"""

from __future__ import annotations

import importlib
import re

import click

PROGRAMS = {
    "tandem up": ("tandem.cli.up", "up"),
    "python -m router": ("router.__main__", "main"),
    "python -m prefill_service": ("prefill_service.__main__", "main"),
    "python -m decode_service": ("decode_service.__main__", "main"),
    "python -m gateway": ("gateway.__main__", "main"),
}
"""Command line -> module and name of its click command."""

INTRODUCTION = """\
# Configuration

Every flag of `tandem up` and of the processes that it starts, generated from the programs themselves (`make docs`);
`--help` shows the same, and that of other commands their flags. A flag can also be set by its environment variable; the
flag wins. `tandem up` passes all settings on as flags, and those that may hold a password (keys, Redis' URL) as
environment variables. So the environment in which it is started changes none of its processes unnoticed.
"""


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, (module, attribute) in PROGRAMS.items():
        command: click.Command = getattr(importlib.import_module(module), attribute)
        parts.append(_section(name, command))
    return "\n".join(parts)


def _section(name: str, command: click.Command) -> str:
    context = click.Context(command)
    summary = command.get_short_help_str(limit=200)
    rows = [_row(option, context) for option in command.params if isinstance(option, click.Option)]
    head = ["| flag | default | environment | |", "|---|---|---|---|"]
    return "\n".join([f"## {name}", "", summary, "", *head, *rows, ""])


def _row(option: click.Option, context: click.Context) -> str:
    flags = "/".join([*option.opts, *option.secondary_opts])
    if not option.is_flag and (metavar := option.make_metavar(context)):
        flags += f" {metavar}"
    envvar = option.envvar if isinstance(option.envvar, str) else ", ".join(option.envvar or ())
    default = "required" if option.required else _plain(option.get_default(context))
    return f"| `{_cell(flags)}` | {default} | {envvar} | {_cell(option.help or '')} |"


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        value = " ".join(value)
    return "" if value is None or value is False or value == "" or callable(value) else f"`{value}`"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


if __name__ == "__main__":
    click.echo(reference(), nl=False)
