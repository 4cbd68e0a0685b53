"""The `tandem` command. Each sub-command lives in a module of its own; `main` only lists them.

Everything meant for a program goes to stdout, everything meant for a person while waiting to stderr.
Exit codes: 0 done, 1 failed (one line on stderr says why and what to do), 2 wrong usage, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import os

# gRPC's core says on stderr, at INFO, what its connections do; it reads this when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import click

import tandem
from tandem.cli.bench import bench
from tandem.cli.chaos import chaos
from tandem.cli.demo import demo
from tandem.cli.fetch import fetch
from tandem.cli.generate import generate
from tandem.cli.profile import profile
from tandem.cli.status import audit, status
from tandem.cli.top import top
from tandem.cli.up import up


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nFirst steps:\n"
    "  tandem demo                                                # everything once, explained\n"
    "  tandem up                                                  # and then, in another terminal:\n"
    "  tandem generate --chat 'What is the capital of France?'",
)
@click.version_option(tandem.__version__, prog_name="tandem")
def main() -> None:
    """Serve large language models with prefill and decode on different machines."""


for _command in (demo, up, generate, status, top, audit, profile, bench, fetch, chaos):
    main.add_command(_command)
