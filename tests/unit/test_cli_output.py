"""What `tandem` prints: JSON, help and errors (tables: test_tables.py). None of it needs a cluster."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from prometheus_client import make_asgi_app
from scripted_router import EXACT, breaking, last, scripted_router, tokens

from protos import tandem_inference_pb2 as pb
from protos import tandem_worker_pb2 as worker_pb
from rpc.errors import DeadlinePassed, InvalidRequest, NoWorker, Overloaded, Unreachable
from rpc.http import HttpServer
from tandem.answer import Answer, message_to_dict
from tandem.cli import COMMANDS, command, main
from tandem.cli.errors import explain
from tandem.client import Client
from tandem.demo import describe
from tandem.tables import (
    Table,
    print_table,
)

ADDRESS = "127.0.0.1:50051"


# -- JSON -------------------------------------------------------------------------------------------------------


def test_json_has_every_field_and_numbers_stay_numbers() -> None:
    status = worker_pb.ClusterStatus(
        num_queued_tokens=2**40,
        workers=[
            worker_pb.WorkerStatus(record=worker_pb.WorkerRecord(role=worker_pb.ROLE_DECODE, prefix_key=b"\x01\xff"))
        ],
    )
    out = json.loads(json.dumps(message_to_dict(status)))
    assert set(out) == {field.name for field in worker_pb.ClusterStatus.DESCRIPTOR.fields}
    assert out["num_queued_tokens"] == 2**40
    assert out["is_registry_reachable"] is False
    record = out["workers"][0]["record"]
    assert (record["role"], record["prefix_key"], record["load"], record["pid"]) == ("decode", "01ff", None, 0)


def test_json_of_maps_and_absent_fields() -> None:
    out = message_to_dict(pb.SamplingParams(temperature=0, logit_bias={5: 1.5}))
    assert (out["temperature"], out["top_p"], out["logit_bias"], out["stop"]) == (0.0, None, {5: 1.5}, [])


# -- errors -----------------------------------------------------------------------------------------------------


def test_wrong_fields_are_named_as_the_flags_that_set_them() -> None:
    error = InvalidRequest(
        [
            ("sampling_params.top_p", "must be in (0, 1], is 3"),
            ("sampling_params.stop[2]", "is long"),
            ("text", "is empty"),
        ]
    )
    assert explain(error, ADDRESS) == "--top-p: must be in (0, 1], is 3; --stop: is long; PROMPT: is empty"
    of_tools = [("chat.tools[1].name", "is wrong"), ("chat.tool_name", "is none"), ("chat.tool_choice", "is 9")]
    said = "--tools[1].name: is wrong; --tool-choice: is none; --tool-choice: is 9"
    assert explain(InvalidRequest(of_tools), ADDRESS) == said
    others = [("model", "is none"), ("cache_salt", "is long"), ("chat.template_kwargs", "is wrong"), ("chat", "is it")]
    said = "--model: is none; --cache-salt: is long; --chat-template-kwargs: is wrong; PROMPT: is it"
    assert explain(InvalidRequest(others), ADDRESS) == said


def test_errors_say_what_to_do() -> None:
    assert (
        explain(Overloaded("the queue is full", retry_after_s=1.5), ADDRESS) == "the queue is full. Try again in 1.5 s."
    )
    assert "--timeout-s" in explain(DeadlinePassed("Deadline Exceeded"), ADDRESS)
    assert explain(NoWorker("no decode worker."), ADDRESS) == "no decode worker. Try again in a moment."
    unreachable = explain(Unreachable("Connection refused"), ADDRESS)
    for part in (ADDRESS, "tandem up", "--router", "TANDEM_ROUTER"):
        assert part in unreachable


@pytest.mark.parametrize("command", [["generate", "hello"], ["generate", "hello", "--json"], ["status"], ["audit"]])
def test_without_a_router_there_is_one_readable_line(command: list[str]) -> None:
    with socket.socket() as taken:  # bound, not listening: it refuses connections, and no one gets the port
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = CliRunner().invoke(main, [*command, "--router", address])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert f"no router answers at {address}" in result.stderr


def test_a_stream_that_breaks_says_what_it_waits_for() -> None:
    with scripted_router() as (address, scripted):
        scripted.script = breaking
        result = CliRunner().invoke(main, ["generate", "hi", "--router", address, "--timeout-s", "9"])
    assert (result.exit_code, result.stdout) == (0, "abcd\n")
    line = rf"the router at {address} stopped answering \(gone\): waiting up to [89] s for a router that goes on"
    assert re.fullmatch(f"{line}\n{line}\n", result.stderr)


@pytest.mark.parametrize("command", [["generate", "hello"], ["status"], ["bench", "--num-prompts", "1"]])
async def test_a_port_of_http_is_told_from_a_router(command: list[str]) -> None:
    server = HttpServer(make_asgi_app())
    address = server.start("127.0.0.1:0", flag="--listen")
    result = await asyncio.to_thread(CliRunner().invoke, main, [*command, "--router", address])
    await server.close()
    assert result.exit_code == 1
    assert "an HTTP server answers there, not a router: the router's gRPC port is another one" in result.stderr


BATCH = ("run-batch", "-i", "in.jsonl", "-o", "out.jsonl")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate"], "Missing argument 'PROMPT'"),
        (["generate", "x", "--max-tokens", "many"], "'many' is not a valid integer"),
        (["generate", "x", "--max-tokens", "0"], "'--max-tokens': 0 is not in the range"),
        (["generate", "x", "--max-tokens", "-3"], "'--max-tokens': -3 is not in the range"),
        (["generate", "x", "--seed", "9" * 30], "'--seed': 9999"),
        (["generate", "x", "--timeout-s", "0"], "--timeout-s"),
        (["generate", "", "--router", "127.0.0.1:1"], "PROMPT: must not be empty"),
        (["generate", "-", "--router", "127.0.0.1:1"], "PROMPT: must not be empty"),
        (["generate", "-", "--json-schema", "-"], "--json-schema: stdin is already read as PROMPT"),
        (["generate", "x", "--timeout-s", "nan"], "'--timeout-s': nan is not a number"),
        (["generate", "x", "--chat-template-kwargs", "{"], "--chat-template-kwargs: is not JSON"),
        (["generate", "x", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs: must be a JSON object, is [1]"),
        (
            ["up", "--reasoning-parser", "r1"],
            "--reasoning-parser must be one of auto, qwen3, deepseek_r1, deepseek_v3, glm45, glm47, minimax_m2, "
            "nemotron_v3, olmo3, ernie45, hunyuan_a13b, kimi_k2, seed_oss, mistral, gemma4, granite, openai_gptoss, "
            "none, is",
        ),
        (["up", "--decode", "0"], "--decode must be in [1, 64], is 0"),
        (["up", "--decode", "1000000"], "--decode must be in [1, 64], is 1000000"),
        (["up", "--prefill", "1000000"], "--prefill must be at most 64, is 1000000"),
        (["up", "--aggregated", "--prefill", "2"], "--aggregated starts no prefill workers"),
        (["up", "--no-http", "--http-port", "8001"], "--http-port needs HTTP"),
        (["up", "--no-http", "--allowed-origins", "[]"], "--allowed-origins needs HTTP"),
        (["up", "--no-http", "--gateways", "2"], "--gateways needs HTTP"),
        (["up", "--rebalance", "--no-learn-costs"], "--rebalance needs --learn-costs"),
        (["chaos", "--rebalance"], "--rebalance needs --learn-costs"),
        (["up", "--api-server-count", "2"], ": use --gateways"),
        (["up", "--max-model-len", "1"], "--max-model-len must be at least 2"),
        (["up", "--load-format", "gguf"], "--load-format gguf needs a .gguf file"),
        (["up", "--seed", "9" * 20], "--seed must be in"),
        (["up", "--drain-grace-s", "nan"], "--drain-grace-s must be at least 0 and finite, is nan"),
        (["up", "--block-size", "17"], "--block-size must be a power of two"),
        (["up", "--local-max-uncached-tokens", "-1"], "--local-max-uncached-tokens must be at least 0, is -1"),
        (["up", "--kv-cache-gib", "inf"], "--kv-cache-gib must be at least 0 and finite, is inf"),
        (["up", "--num-threads", "100000"], "--num-threads must be in [0, 1024], is 100000"),
        (["up", "--dtype", "int8"], "--dtype must be one of"),
        (["up", "--transport", "tcp"], "--transport must be one of auto, grpc, ipc, nixl, is 'tcp'"),
        (["up", "--chat-template", "nowhere"], "--chat-template must be a file with a chat template, is 'nowhere'"),
        (["up", "--listen", "here"], "--listen: must be HOST:PORT"),
        (["up", "--allowed-origins", "x"], "--allowed-origins must be a JSON list of origins"),
        (["up", "--api-key", "\u00e9"], "--api-key must consist of visible ASCII characters"),
        (
            ["up", "--api-key", ""],
            "--api-key must not be empty; leave it out to accept requests without a key",
        ),
        (["bench", "--dataset-name", "trace"], "--dataset-path must name the file of --dataset-name trace"),
        (["bench", "--dataset-path", "t.csv"], "--dataset-path needs --dataset-name trace"),
        (["bench", "--num-prompts", "0"], "--num-prompts must be at least 1, is 0"),
        (["top", "--interval-s", "nan"], "'--interval-s': nan is not a number"),
        (["status", "--wrong"], "No such option"),
        (["up", "--host", "0.0.0.0"], "No such option '--host': use --listen HOST:PORT"),
        (["up", "--num-gpu-blocks-override", "5"], ": use --num-kv-blocks instead"),
        (["up", "--wrong"], "No such option '--wrong'."),
        (
            [*BATCH, "--model", "m"],
            "No such option '--model': the requests go to a server that runs. Give --model to its `tandem up`, and "
            "here only --base-url",
        ),
        ([*BATCH, "--max-model-len=99"], "'--max-model-len': the requests go to a server that runs. Give"),
        ([*BATCH, "--wrong"], "No such option '--wrong'."),
        (["up", "Qwen/Qwen3-0.6B"], "A model is named with --model"),
        (["up", "--served-model-name", "a", "b"], "several values of a flag have commas between them: a,b"),
        (["up", "--lora-modules", "a=/a", "b=/b", "c=/c"], "several values of a flag have commas between them: a,b"),
        (["up", "--enable-prompt-tokens-details"], ": usage always has cached_tokens"),
        (["up", "--ssl-certfile", "x"], ": start the processes separately"),
        (["status", "--router", "127.0.0.1:99999"], "with a port from 0 to 65535, is '127.0.0.1:99999'"),
        (["status", "--router", "ipv4:127.0.0.1:1,127.0.0.1:x"], "with a port from 0 to 65535, is '127.0.0.1:x'"),
        (["status", "--router", "http://127.0.0.1:80"], "HOST:PORT, without a scheme such as http://, is 'http://127"),
        (["status", "--router", "here"], "'TANDEM_ROUTER'): must be HOST:PORT with a port from 0 to 65535, is 'here'"),
        (["status", "--ssl-ca-certs", "/no"], "'TANDEM_SSL_CA_CERTS'): /no cannot be read: there is no such file"),
        (["status", "--api-key", "\u00e9"], "'TANDEM_API_KEY'): must consist of visible ASCII characters"),
        (["generate", "x", "--cache-salt", ""], "Error: --cache-salt: must not be empty; without one, leave it out"),
        (["bench", "--router", "http://127.0.0.1:80"], "--address: must be HOST:PORT, without a scheme"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_flag(command: list[str], message: str) -> None:
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert message in result.stderr


def test_stdin_and_stdout_that_are_closed_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `tandem … <&- >&-`, where Python's sys.stdin and sys.stdout are None."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(click.UsageError, match="PROMPT: must not be empty"):
        main(["generate", "-"], standalone_mode=False)
    monkeypatch.setattr(sys, "stdout", None)
    print_table(Table(headers=("a",), rows=[("b",)]))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full")
@pytest.mark.parametrize("command", [["generate", "hi"], ["--version"]], ids=["an answer", "what click itself says"])
def test_what_cannot_be_written_is_one_line(command: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with scripted_router() as (address, scripted), open("/dev/full", "w") as full:
        scripted.script = lambda request, context: iter(EXACT)
        environment["TANDEM_ROUTER"] = address
        done = subprocess.run(
            [sys.executable, "-m", "tandem", *command],
            stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "Error: [Errno 28] No space left on device\n")


def test_what_a_terminal_has_no_letters_for_is_no_error() -> None:
    with scripted_router() as (address, scripted):
        scripted.script = lambda request, context: iter([tokens(0, 1, text="caf\xe9 \u2615"), last(1, 1)])
        result = CliRunner(charset="latin-1").invoke(main, ["generate", "hi", "--router", address])
        as_json = CliRunner(charset="latin-1").invoke(main, ["generate", "hi", "--json", "--router", address])
    assert (result.exit_code, result.stdout) == (0, "caf\xe9 ?\n"), result.exception
    assert json.loads(as_json.stdout)["text"] == "caf\xe9 \u2615", "a program is told it whole"


def test_stdin_that_is_no_text_is_refused_with_the_place() -> None:
    result = CliRunner().invoke(main, ["generate", "-"], input=b"text \xff\xfe")
    assert result.exit_code == 2
    assert "PROMPT: what stdin gives is not UTF-8 text: byte 0xff at position 5" in result.stderr


def test_a_prompt_that_cannot_be_sent_is_named() -> None:
    result = CliRunner().invoke(main, ["generate", "-", "--router", "127.0.0.1:1"], input="x" * (17 << 20))
    assert result.exit_code == 2
    assert re.search(r"PROMPT: is too long: the request has \d+ bytes, the maximum is 16777216", result.stderr)


def test_a_schema_may_begin_with_a_mark_of_its_bytes_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Editors on Windows write it."""
    asked: list[Any] = []

    def look(prompt: object, **sampling: Any) -> None:
        asked.append(sampling["structured_outputs"])
        raise ValueError("seen")

    monkeypatch.setattr(importlib.import_module("tandem.cli.generate"), "generate_request", look)
    (tmp_path / "schema.json").write_text('{"type": "null"}', encoding="utf-8-sig")
    CliRunner().invoke(main, ["generate", "hi", "--json-schema", str(tmp_path / "schema.json")])
    assert asked == [{"json": '{"type": "null"}'}]


@pytest.mark.parametrize(("text", "shown"), [("Two.", "So then.\n\n"), ("", "So then.\n")])
def test_what_is_thought_is_shown_and_is_no_output(monkeypatch: pytest.MonkeyPatch, text: str, shown: str) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = []

    class Answering(Client):
        def stream(self, prompt: Any, **sampling: Any) -> Any:
            asked.append((prompt, sampling))
            yield pb.GenerateResponse(reasoning="So")
            yield pb.GenerateResponse(reasoning=" then.", text=text[:1])
            yield pb.GenerateResponse(text=text[1:])

    monkeypatch.setattr(importlib.import_module("tandem.cli.generate"), "Client", Answering)
    command = ["generate", "1+1?", "--chat-template-kwargs", '{"enable_thinking": true}']
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, result.stdout) == (0, f"{text}\n" if text else "")
    assert result.stderr == shown, "plain where it is no terminal"
    ((prompt, sampling),) = asked
    assert prompt == [{"role": "user", "content": "1+1?"}]
    assert sampling["chat_template_kwargs"] == {"enable_thinking": True}
    coloured = CliRunner().invoke(main, command, color=True)
    assert coloured.stderr.startswith("\x1b[2mSo\x1b[0m")


def test_settings_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BLOCK_SIZE", "17")
    result = CliRunner().invoke(main, ["up"])
    assert "--block-size must be a power of two from 1 to 256, is 17" in result.stderr


# -- help -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_teaches_with_an_example(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert f"  tandem {name}" in result.output.split("Examples:")[1]
    for parameter in command(name).params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"tandem {name} {parameter.opts[0]} has no help"


def test_every_flag_of_up_names_its_environment_variable() -> None:
    for parameter in command("up").params:
        assert isinstance(parameter, click.Option)
        assert parameter.show_envvar
        expected = (
            "REDIS_URL" if "--redis" in parameter.opts else "TANDEM_" + parameter.opts[0][2:].replace("-", "_").upper()
        )
        assert parameter.envvar == expected


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_flags_of_the_examples_exist(name: str) -> None:
    epilog = command(name).epilog or ""
    for line in epilog.splitlines():
        match = re.match(r"\s*tandem ([\w-]+)(.*)", line)
        if match:
            known = {opt for parameter in command(match[1]).params for opt in parameter.opts}
            flags = set(re.findall(r"(?<=\s)--[a-z-]+", match[2].split(" | ")[0]))
            assert flags <= known, line


def test_the_summary_of_each_command_fits_the_list() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert "..." not in result.output.split("Commands:")[1].split("First steps")[0]


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert re.fullmatch(r"tandem, version \S+\n", result.output)


# -- the demo's report ------------------------------------------------------------------------------------------


def test_the_demo_accounts_for_every_prompt_token_and_millisecond() -> None:
    timings = pb.Timings(
        queue_ms=1, prefill_ms=20, transfer_ms=0.5, decode_ms=100, total_ms=121.5, time_to_first_token_ms=21,
        time_per_output_token_ms=5, mode=pb.MODE_DISAGGREGATED, prefill_worker="prefill-1", decode_worker="decode-1",
        kv_transfer=pb.KVTransferStats(transport="grpc", num_bytes=1_474_560, num_blocks=4, num_cached_blocks=2),
    )  # fmt: skip
    usage = pb.Usage(prompt_tokens=49, cached_tokens=16, completion_tokens=22)
    answer = Answer(request_id="r", text="", token_ids=[], finish_reason="stop", usage=usage, timings=timings)
    lines = dict(describe(answer))
    assert lines["mode"] == "prefill-1 -> decode-1"
    assert (lines["  found in cache"], lines["  computed"]) == ("16 tokens", "33 tokens")
    assert lines["KV moved"] == "1,474,560 bytes over grpc"
    assert lines["time"] == "121.5 ms"
    local = pb.Timings(mode=pb.MODE_LOCAL, decode_worker="decode-1")
    lines = dict(
        describe(Answer(request_id="r", text="", token_ids=[], finish_reason="stop", usage=usage, timings=local))
    )
    assert (lines["mode"], lines["KV moved"]) == ("local: decode-1 alone", "none")


@pytest.mark.parametrize(("name", "here"), [("serve", "tandem up --model MODEL"), ("upp", "Did you mean 'up'?")])
def test_a_command_of_vllms_and_a_misspelt_one(name: str, here: str) -> None:
    result = CliRunner().invoke(main, [name, "some-model"])
    assert result.exit_code == 2
    assert f"No such command '{name}'" in result.output
    assert here in result.output
