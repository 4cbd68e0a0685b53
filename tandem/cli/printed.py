"""Prints an answer while it comes: its text to stdout, the model's reasoning to stderr, dimmed."""

from __future__ import annotations

import click

from protos.tandem_inference_pb2 import GenerateResponse


class PrintedAnswer:
    """One answer. Call `end` whatever happens: what follows then begins on a new line."""

    def __init__(self) -> None:
        self.has_text = self.has_reasoning = False

    def accept(self, message: GenerateResponse) -> None:
        if message.reasoning:
            click.secho(message.reasoning, dim=True, nl=False, err=True)
            self.has_reasoning = True
        if message.text and self.has_reasoning and not self.has_text:
            click.echo("\n", err=True)
        click.echo(message.text, nl=False)
        self.has_text = self.has_text or bool(message.text)

    def end(self) -> None:
        if self.has_text:
            click.echo()
        elif self.has_reasoning:
            click.echo(err=True)
