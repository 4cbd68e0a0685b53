"""`tandem fetch`: prepares a model's folder and prints its path."""

from __future__ import annotations

import click

from engine.engine_args import EngineArgs
from engine.model_loader import resolve_model
from tandem.cli.options import examples


@click.command(
    short_help="Download or convert a model and print its folder.",
    epilog=examples("tandem fetch", "tandem up --model $(tandem fetch ~/Downloads/model.gguf)"),
)
@click.argument("model", default=EngineArgs.model)
def fetch(model: str) -> None:
    """Download or convert MODEL, unless that is done already, and print the folder it is in.

    MODEL is a folder in Hugging Face's format, a GGUF file, a Hugging Face hub id, or the default model's name.
    Progress goes to stderr. Models are kept in ~/.cache/tandem.
    """
    try:
        folder = resolve_model(model)
    except (ValueError, OSError, RuntimeError) as error:
        raise click.ClickException(" ".join(str(error).split()) or type(error).__name__) from error
    click.echo(folder)
