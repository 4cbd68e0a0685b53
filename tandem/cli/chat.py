"""`tandem chat`: a conversation with the model.

    a line is read ──> asked, with all that was said before ──> the answer, as it comes ──> facts about it ──┐
          ^──────────────────────────────────────────────────────────────────────────────────────────────────┘

Owns what was said. At a terminal, Ctrl-C ends an answer, and an error only the message that it concerns. If messages
come from elsewhere (a pipe, a file), either ends the command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click

from protos.tandem_inference_pb2 import FINISH_REASON_LENGTH, GenerateResponse
from rpc.errors import InvalidRequest, TandemError
from rpc.tls import ClientTLS
from tandem.answer import StreamBroken
from tandem.cli.errors import explain, readable_errors, told_of_broken
from tandem.cli.options import examples, key_option, model_option, router_option, template_kwargs_option, tls_option
from tandem.cli.printed import PrintedAnswer
from tandem.client import Client
from tandem.interrupts import INTERRUPTED, is_told_to_end
from tandem.requests import Sampling
from tandem.stderr import tell
from tandem.tables import mode_text

NEW = "/new"
PROMPT = "> "


@click.command(
    short_help="Talk with the model.",
    epilog=examples(
        "tandem chat",
        "tandem chat --system 'Answer in one sentence.' --temperature 0",
        "tandem chat --model sql --max-tokens 400",
        "printf 'My name is Ada.\\nWhat is my name?\\n' | tandem chat",
    ),
)
@model_option
@click.option("--system", help="System message.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 2**32 - 1),
    default=1024,
    show_default=True,
    help="Maximum length of each answer, in tokens. Less if the model's context has less room.",
)
@click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy. Default: the model's.")
@click.option(
    "--seed",
    type=click.IntRange(-(2**63), 2**63 - 1),
    help="Seed for sampling: the same conversation then has the same answers. Default: a new one for each answer.",
)
@template_kwargs_option()
@router_option
@key_option
@tls_option
def chat(model: str, system: str | None, address: str, api_key: str, tls: ClientTLS | None, **options: Any) -> None:
    """Talk with the model: each line is a message, and its answer is streamed to stdout. The model's reasoning, and a
    line about each answer, go to stderr.

    At a terminal, Ctrl-C ends an answer, /new begins another conversation, and Ctrl-D leaves.
    """
    is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    sampling: Sampling = {name: value for name, value in options.items() if value is not None}  # type: ignore[assignment]
    with (
        readable_errors(address),
        Client(address, api_key=api_key, tls=tls, on_broken=told_of_broken(address)) as client,
    ):
        name = client.model_info().model
        conversation = Conversation(client, model, system, sampling | {"is_max_tokens_target": True})
        if is_terminal:
            tell(f"{model or name}. Ctrl-C ends an answer, {NEW} begins another conversation, Ctrl-D leaves.")
        for line in _lines(is_terminal):
            if line.strip() == NEW:
                conversation.begin()
            elif line.strip() and is_terminal:
                _ask_on(conversation, line, address)
            elif line.strip():
                conversation.ask(line)


class Conversation:
    """What was said so far, and how it goes on."""

    def __init__(self, client: Client, model: str, system: str | None, sampling: Sampling) -> None:
        self._client = client
        self._model = model
        self._system = system
        self._sampling = sampling
        self.messages: list[dict[str, str]] = []
        self.begin()

    def begin(self) -> None:
        """Forget what was said."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def ask(self, text: str) -> None:
        """Say `text`, and print the answer. If it breaks off, its beginning counts as said; if nothing came, neither
        does `text`."""
        asked = {"role": "user", "content": text}
        said, last, printed = "", None, PrintedAnswer()
        try:
            for message in self._client.stream([*self.messages, asked], model=self._model, **self._sampling):
                printed.accept(message)
                said, last = said + message.text, message
        finally:
            printed.end()
            if said:
                self.messages += [asked, {"role": "assistant", "content": said}]
        if last is not None:
            click.secho(facts(last), dim=True, err=True)


def facts(last: GenerateResponse) -> str:
    """One line about an answer, from its last message."""
    usage, timings = last.usage, last.timings
    parts = [
        mode_text(timings),
        f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens cached",
        f"first token after {timings.time_to_first_token_ms:.0f} ms",
    ]
    if timings.time_per_output_token_ms:
        parts.append(f"{1e3 / timings.time_per_output_token_ms:.0f} tokens/s")
    if last.finish_reason == FINISH_REASON_LENGTH:
        parts.append(f"cut off after {usage.completion_tokens:,} tokens")
    return f"[{'; '.join(parts)}]"


def _ask_on(conversation: Conversation, text: str, address: str) -> None:
    """Ask at a terminal: the conversation goes on whatever becomes of the answer."""
    try:
        conversation.ask(text)
    except KeyboardInterrupt:
        if is_told_to_end():
            sys.exit(INTERRUPTED)
        tell("[ended]")
    except TandemError as error:
        is_of_chat = isinstance(error, InvalidRequest) and any(each.field == "chat" for each in error.violations)
        is_too_long = is_of_chat and len(conversation.messages) > 1
        what_to_do = f". {NEW} begins another conversation." if is_too_long else ""
        tell(f"Error: {explain(error, address)}{what_to_do}")
    except StreamBroken as error:
        tell(f"Error: {error}. The printed answer is incomplete.")


def _lines(is_terminal: bool) -> Iterator[str]:
    if not is_terminal:
        yield from (line.rstrip("\n") for line in sys.stdin or ())
        return
    with suppress(ImportError):  # some builds of Python have none; then lines cannot be edited
        import readline  # noqa: F401 - input() uses it
    while True:
        try:
            line = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            tell("")
            return
        yield line
