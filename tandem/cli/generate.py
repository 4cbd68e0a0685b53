"""`tandem generate`: one request to a router, streamed to stdout."""

from __future__ import annotations

import codecs
import json
import sys
from pathlib import Path
from typing import Any

import click

from protos.tandem_inference_pb2 import TokenLogprobs
from rpc.channel import DEFAULT_MAX_MESSAGE_BYTES
from rpc.entrypoint import with_flags
from rpc.tls import ClientTLS
from tandem.cli.errors import readable_errors, told_of_broken
from tandem.cli.options import (
    examples,
    json_option,
    key_option,
    model_option,
    no_nan,
    router_option,
    template_kwargs_option,
    tls_option,
)
from tandem.cli.printed import PrintedAnswer
from tandem.client import Client
from tandem.interrupts import INTERRUPTED
from tandem.requests import Prompt, Sampling, generate_request
from tandem.stderr import tell
from tandem.tables import logprobs_table, print_table
from tandem.tools import CHOICES, CallsStream

MAX_TIMEOUT_S = 30 * 86_400.0


@click.command(
    short_help="Stream an answer to stdout.",
    epilog=examples(
        "tandem generate --chat 'Why is the sky blue?' --temperature 0",
        "tandem generate 'Once upon a time' --seed 7 --max-tokens 100",
        "tandem generate 'The capital of France is' --max-tokens 8 --logprobs 3",
        "tandem generate --chat 'Describe a person.' --json-schema person.json",
        "tandem generate 'Weather in Oslo?' --tools tools.json --tool-choice required",
        "tandem generate - --json < prompt.txt | jq .usage",
    ),
)
@click.argument("prompt")
@model_option
@click.option(
    "--chat", "is_chat", is_flag=True, help="Send PROMPT as a user's message, through the model's chat template."
)
@click.option("--system", help="System message. Implies --chat.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 2**32 - 1),
    default=256,
    show_default=True,
    help="Maximum length of the answer, in tokens.",
)
@click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy. Default: the model's.")
@click.option(
    "--top-p",
    type=float,
    help="Sample only from the most likely tokens whose probabilities add up to this, in (0, 1]; 1 keeps all. Default: "
    "the model's.",
)
@click.option(
    "--top-k",
    type=click.IntRange(-1, 2**31 - 1),
    help="Sample only from this many most likely tokens; 0 or -1 keeps all. Default: the model's.",
)
@click.option(
    "--min-p",
    type=float,
    help="Leave out tokens less likely than this times the most likely one, in [0, 1]; 0 keeps all. Default: the "
    "model's.",
)
@click.option(
    "--seed",
    type=click.IntRange(-(2**63), 2**63 - 1),
    help="Seed for sampling: the same seed gives the same answer. Default: a new one each time.",
)
@click.option("--stop", multiple=True, help="Stop the answer before this text. May be given several times.")
@click.option(
    "--logprobs",
    type=click.IntRange(0, 20),
    help="Show the probability of each token, and of this many most likely tokens.",
)
@click.option(
    "--prompt-logprobs",
    type=click.IntRange(0, 20),
    help="Show the same for the prompt's tokens.",
)
@click.option(
    "--cache-salt", help="Share cached prefixes only with requests that give the same salt. Must not be empty."
)
@click.option(
    "--json-schema",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Constrain the answer to JSON that fits the schema in this file; `-` reads it from stdin.",
)
@click.option(
    "--tools",
    type=click.Path(exists=True, dir_okay=False),
    help="File with a JSON list of tools that the model may call, in OpenAI's format. Implies --chat.",
)
@click.option(
    "--tool-choice",
    metavar="CHOICE",
    help="Whether to call tools: auto, none, required, or the name of the tool to call.",
)
@template_kwargs_option("Implies --chat.")
@click.option(
    "--thinking-token-budget",
    type=int,
    metavar="N",
    help="Maximum tokens of reasoning, within --max-tokens; -1: no further limit, the default. Implies --chat.",
)
@click.option("--ignore-eos", is_flag=True, help="Continue to --max-tokens even if the model ends its answer.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(0, MAX_TIMEOUT_S, min_open=True),
    callback=no_nan,
    help="Cancel the request after this many seconds.",
)
@json_option
@router_option
@key_option
@tls_option
def generate(
    prompt: str,
    model: str,
    is_chat: bool,
    system: str | None,
    is_json: bool,
    address: str,
    api_key: str,
    tls: ClientTLS | None,
    timeout_s: float | None,
    **options: Any,
) -> None:
    """Stream the answer to PROMPT to stdout. PROMPT `-` reads it from stdin. In a chat, the model's reasoning goes to
    stderr.

    Ctrl-C cancels the request on every worker.
    """
    text = _text_of(_stdin(), "PROMPT: what stdin gives") if prompt == "-" else prompt
    sampling = _sampling_of(prompt, **options)
    of_chats = {"tools", "chat_template_kwargs", "thinking_token_budget"}
    is_chat = is_chat or system is not None or not of_chats.isdisjoint(sampling)
    if not is_chat and not text:
        raise click.UsageError("PROMPT: must not be empty")
    asked = _as_chat(text, system) if is_chat else text
    _check_can_be_sent(asked, sampling)
    on_broken = told_of_broken(address, is_in_line=not is_json)
    try:
        with (
            readable_errors(address),
            Client(address, api_key=api_key, tls=tls, on_broken=on_broken) as client,
        ):
            if is_json:
                answer = client.generate(asked, model=model, timeout_s=timeout_s, **sampling)
                has_all_letters = not sys.stdout or codecs.lookup(sys.stdout.encoding).name == "utf-8"
                click.echo(json.dumps(answer.to_dict(), ensure_ascii=not has_all_letters, indent=2))
            else:
                _stream(client, asked, model, timeout_s, sampling)
    except KeyboardInterrupt:
        tell("cancelled")
        sys.exit(INTERRUPTED)


def _sampling_of(
    prompt: str,
    *,
    ignore_eos: bool,
    json_schema: str | None,
    tools: str | None,
    tool_choice: str | None,
    **plain: Any,
) -> Sampling:
    """The sampling parameters from the flags. `plain`: flags whose values are sent as they are."""
    sampling: Sampling = {name: value for name, value in plain.items() if value is not None}  # type: ignore[assignment]
    if ignore_eos:
        sampling["ignore_eos"] = True
    if json_schema is not None:
        if prompt == json_schema == "-":
            raise click.UsageError("--json-schema: stdin is already read as PROMPT; give a file, or PROMPT as text")
        sampling["structured_outputs"] = {"json": _read_schema(json_schema)}
    if tools is not None:
        sampling["tools"] = _read_tools(tools)
        sampling["tool_choice"] = _tool_choice(tool_choice)
    elif tool_choice is not None:
        raise click.UsageError("--tool-choice: needs --tools")
    return sampling


def _check_can_be_sent(prompt: Prompt, sampling: Sampling) -> None:
    try:
        num_bytes = generate_request(prompt, **sampling).ByteSize()
    except ValueError as error:
        raise click.UsageError(with_flags(str(error), sampling)) from error
    if num_bytes > (most := DEFAULT_MAX_MESSAGE_BYTES):
        bound = f"the request has {num_bytes} bytes, the maximum is {most}"
        raise click.UsageError(f"PROMPT: is too long: {bound}")


def _stdin() -> bytes:
    return sys.stdin.buffer.read() if sys.stdin else b""  # None if stdin was closed before the program began


def _read_schema(path: str) -> str:
    data = _stdin() if path == "-" else Path(path).read_bytes()
    return _text_of(data, f"--json-schema: {path}").removeprefix("\ufeff")  # some Windows editors write this mark first


def _read_tools(path: str) -> list[Any]:
    try:
        tools = json.loads(_text_of(Path(path).read_bytes(), f"--tools: {path}").removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--tools: {path} is not JSON: {error}") from error
    if not isinstance(tools, list) or not tools:
        raise click.UsageError(f"--tools: {path} must hold a list of tools, [{{...}}, ...], holds {tools!s:.60}")
    return tools


def _tool_choice(choice: str | None) -> str | dict[str, Any] | None:
    if choice is None or choice in CHOICES:
        return choice
    return {"type": "function", "function": {"name": choice}}


def _text_of(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02x} at position {error.start}"
        raise click.UsageError(f"{what} is not UTF-8 text: {where}") from error


def _as_chat(text: str, system: str | None) -> Prompt:
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _stream(client: Client, prompt: Prompt, model: str, timeout_s: float | None, sampling: Sampling) -> None:
    printed = PrintedAnswer()
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    calls = CallsStream()
    try:
        for message in client.stream(prompt, model=model, timeout_s=timeout_s, **sampling):
            printed.accept(message)
            logprobs += message.logprobs
            calls.accept(message.tool_calls)
            prompt_logprobs += message.prompt_logprobs
    finally:
        printed.end()
    for call in calls.calls():
        click.echo(f"{call.name}({call.arguments})")
    if prompt_logprobs:
        click.echo()
        print_table(logprobs_table(prompt_logprobs, "token of the prompt"))
    if logprobs:
        click.echo()
        print_table(logprobs_table(logprobs))
