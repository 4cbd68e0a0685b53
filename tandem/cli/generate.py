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
from rpc.errors import TandemError
from rpc.tls import ClientTLS
from tandem.cli.errors import readable_errors
from tandem.cli.options import examples, json_option, key_option, no_nan, router_option, tls_option
from tandem.client import Client
from tandem.interrupts import INTERRUPTED
from tandem.requests import Prompt, Sampling, generate_request
from tandem.resume import OnBroken
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
@click.option(
    "--model", default="", help="Name of the model, or of a LoRA adapter (--lora-modules). Default: the model."
)
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
@click.option(
    "--chat-template-kwargs",
    metavar="JSON",
    help="Variables for the model's chat template, such as '{\"enable_thinking\": false}'. Implies --chat.",
)
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
    try:
        with (
            readable_errors(address),
            Client(address, api_key=api_key, tls=tls, on_broken=_said(address, is_json)) as client,
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
    chat_template_kwargs: str | None,
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
    if chat_template_kwargs is not None:
        sampling["chat_template_kwargs"] = _read_template_kwargs(chat_template_kwargs)
    return sampling


def _check_can_be_sent(prompt: Prompt, sampling: Sampling) -> None:
    try:
        num_bytes = generate_request(prompt, **sampling).ByteSize()
    except ValueError as error:
        raise click.UsageError(with_flags(str(error), sampling)) from error
    if num_bytes > (most := DEFAULT_MAX_MESSAGE_BYTES):
        bound = f"the request has {num_bytes} bytes, the maximum is {most}"
        raise click.UsageError(f"PROMPT: is too long: {bound}")


def _said(address: str, is_json: bool) -> OnBroken:
    """An `on_broken` that tells the user why the answer has stopped."""

    def on_broken(error: TandemError, left_s: float) -> None:
        if not is_json and sys.stdout and sys.stdout.isatty():  # the answer may be in the middle of a line
            tell("")
        what = f"waiting up to {left_s:.0f} s for a router that goes on"
        tell(f"the router at {address} stopped answering ({error.message}): {what}")

    return on_broken


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


def _read_template_kwargs(text: str) -> dict[str, Any]:
    try:
        variables = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--chat-template-kwargs: is not JSON: {error}") from error
    if not isinstance(variables, dict):
        raise click.UsageError(f"--chat-template-kwargs: must be a JSON object, is {text:.60}")
    return variables


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
    has_printed = has_thought = False
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    calls = CallsStream()
    try:
        for message in client.stream(prompt, model=model, timeout_s=timeout_s, **sampling):
            if message.reasoning:
                click.secho(message.reasoning, dim=True, nl=False, err=True)
                has_thought = True
            if message.text and has_thought and not has_printed:
                click.echo("\n", err=True)
            click.echo(message.text, nl=False)
            has_printed = has_printed or bool(message.text)
            logprobs += message.logprobs
            calls.accept(message.tool_calls)
            prompt_logprobs += message.prompt_logprobs
    finally:
        if has_printed:  # so that an error starts on a new line
            click.echo()
        elif has_thought:
            click.echo(err=True)
    for call in calls.calls():
        click.echo(f"{call.name}({call.arguments})")
    if prompt_logprobs:
        click.echo()
        print_table(logprobs_table(prompt_logprobs, "token of the prompt"))
    if logprobs:
        click.echo()
        print_table(logprobs_table(logprobs))
