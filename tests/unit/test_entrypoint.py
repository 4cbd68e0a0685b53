"""Entry points: flags from dataclasses, log lines, signals."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import click
import pytest
from click.testing import CliRunner, Result

from engine.engine_args import EngineArgs
from rpc.entrypoint import (
    ServiceArgs,
    build,
    options_of,
    run_until_signal,
    stop_signals,
    with_flags,
)
from rpc.logs import JsonFormatter, LineFormatter

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Args:
    needed: str = field(metadata={"help": "No default."})
    batch_size: int = field(default=4, metadata={"help": "How many."})
    share: float = field(default=0.5, metadata={"help": "Of all."})
    is_eager: bool = field(default=True, metadata={"help": "At once."})
    names: tuple[str, ...] = field(default=(), metadata={"help": "Any number."})

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, is {self.batch_size}")


def invoke(*arguments: str, env: dict[str, str] | None = None) -> Result:
    @click.command()
    @options_of(Args)
    @options_of(ServiceArgs, defaults={"listen": "127.0.0.1:50051"})
    def command(**options: Any) -> None:
        made = build(Args, options), build(ServiceArgs, options)
        click.echo(json.dumps([vars(each) for each in made]))

    return CliRunner().invoke(command, list(arguments), env=env)


def values(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)
    return {**first, **second}


def test_defaults_flags_and_environment() -> None:
    assert values(invoke("--needed", "x")) == {
        "needed": "x",
        "batch_size": 4,
        "share": 0.5,
        "is_eager": True,
        "names": [],
        "listen": "127.0.0.1:50051",
        "redis": "redis://127.0.0.1:6379/0",
        "namespace": "tandem",
        "log_level": "info",
        "log_format": "text",
        "metrics_listen": "",
        "ssl_certfile": "",
        "ssl_keyfile": "",
        "ssl_ca_certs": "",
    }
    given = values(invoke("--needed", "x", "--batch-size", "7", "--share", "1", "--no-is-eager", "--namespace", "b"))
    assert (given["batch_size"], given["share"], given["is_eager"], given["namespace"]) == (7, 1.0, False, "b")
    env = {"TANDEM_NEEDED": "e", "TANDEM_BATCH_SIZE": "9", "TANDEM_IS_EAGER": "false", "REDIS_URL": "unix:///x"}
    given = values(invoke(env=env))
    assert (given["needed"], given["batch_size"], given["is_eager"], given["redis"]) == ("e", 9, False, "unix:///x")
    assert values(invoke("--batch-size", "2", env=env))["batch_size"] == 2  # the flag wins
    assert values(invoke("--needed", "x", "--names", "a", "--names", "b c"))["names"] == ["a", "b c"]
    assert values(invoke(env=env | {"TANDEM_NAMES": "a b\n"}))["names"] == ["a", "b"]
    assert values(invoke(env=env | {"TANDEM_NAMES": ""}))["names"] == []
    assert values(invoke(env=env | {"TANDEM_NAMES": " \n"}))["names"] == [""], "a file of keys without one is a mistake"


@pytest.mark.parametrize(
    ("given", "number"),
    [("32k", 32_000), ("32K", 32_768), ("2m", 2_000_000), ("1M", 1 << 20), ("1g", 10**9), ("1G", 1 << 30),
     ("25.6k", 25_600), ("007", 7)],
)  # fmt: skip
def test_numbers_may_have_a_unit(given: str, number: int) -> None:
    """As vLLM's: small letters count in thousands, capital ones in 1024s."""
    assert values(invoke("--needed", "x", "--batch-size", given))["batch_size"] == number
    assert values(invoke("--needed", "x", env={"TANDEM_BATCH_SIZE": given}))["batch_size"] == number


@pytest.mark.parametrize("given", ["k", "1.5K", "1.0001k", "32kb", "-1k", "1 k", "1e3", "9" * 5000 + "g", "1t"])
def test_other_units_are_no_numbers(given: str) -> None:
    result = invoke("--needed", "x", "--batch-size", given)
    assert result.exit_code == 2
    assert "is not a valid integer" in result.stderr


def test_help_shows_everything_in_order() -> None:
    text = "".join(invoke("--help").output.split())  # however the text is wrapped
    for expected in (
        "--needed TEXT No default. [env var: TANDEM_NEEDED; required]",
        "--batch-size INTEGER How many. [env var: TANDEM_BATCH_SIZE; default: 4]",
        "--is-eager / --no-is-eager At once. [env var: TANDEM_IS_EAGER; default: is-eager]",
        "[env var: REDIS_URL; default: redis://127.0.0.1:6379/0]",
        "default: 127.0.0.1:50051",
    ):
        assert expected.replace(" ", "") in text
    assert text.index("--needed") < text.index("--batch-size") < text.index("--share") < text.index("--listen")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--needed", "x", "--batch-size", "0"], "Error: --batch-size must be at least 1, is 0"),
        (["--needed", "x", "--batch-size", "many"], "Invalid value for '--batch-size'"),
        (["--needed", "x", "--listen", "50051"], "Error: --listen: must be HOST:PORT"),
        (["--needed", "x", "--listen", "::1:50051"], "host in brackets"),
        (["--needed", "x", "--redis", "localhost"], "Error: --redis must be a redis://"),
        (["--needed", "x", "--redis", "redis://me:secret@h:1x"], "Error: --redis: Port could not be"),
        (["--needed", "x", "--redis", "redis://h:65536"], "Error: --redis: Port out of range 0-65535"),
        (["--needed", "x", "--redis", "redis://[::1"], "Error: --redis: Invalid IPv6 URL"),
        (["--needed", "x", "--namespace", "a:b"], "Error: --namespace must be"),
        (["--needed", "x", "--log-level", "loud"], "Error: --log-level must be one of debug"),
        ([], "Missing option '--needed'"),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.output


def test_fields_are_named_by_their_flags_wherever_a_sentence_names_them() -> None:
    names = ["model", "dtype", "max_num_seqs", "num_kv_blocks", "enable_prefix_caching"]
    for sentence, expected in (
        ("model 'x' has a dtype", "--model 'x' has a dtype"),
        ("num_kv_blocks must be at least max_num_seqs=8", "--num-kv-blocks must be at least --max-num-seqs=8"),
        ("it is 0 without enable_prefix_caching, or with it.", "it is 0 without --enable-prefix-caching, or with it."),
        (
            "model: no folder /a/max_num_seqs/b, 'num_kv_blocks'",
            "--model: no folder /a/max_num_seqs/b, 'num_kv_blocks'",
        ),
        ("num_kv_blocks is in max_num_seqs.json.", "--num-kv-blocks is in max_num_seqs.json."),
        ("the model's max_num_seqs_of_it and num_layers", "the model's max_num_seqs_of_it and num_layers"),
    ):
        assert with_flags(sentence, names) == expected


@pytest.mark.parametrize("url", ["reddis://me:secret@h/0", "redis://:secret/@h:1/0", "//:@secret@h"])
def test_what_is_wrong_with_redis_url_is_said_without_its_password(url: str) -> None:
    result = invoke("--needed", "x", "--redis", url)
    assert result.exit_code == 2
    assert "Error: --redis" in result.stderr
    assert "secret" not in result.output


def test_engine_args_have_flags() -> None:
    @click.command()
    @options_of(EngineArgs)
    def command(**options: Any) -> None:
        click.echo(repr(build(EngineArgs, options) == EngineArgs()))

    assert CliRunner().invoke(command).output == "True\n"


def test_log_line() -> None:
    record = logging.makeLogRecord(
        {
            "levelname": "INFO",
            "levelno": 20,
            "msg": "done %s",
            "args": ("now\r\nand then",),
            "created": 0.25,
            "msecs": 250,
        }
    )
    record.request_id, record.total_ms, record.why = "r-1", 1234.56789, "two words"
    line = LineFormatter("router").format(record)
    expected = (
        '1970-01-01T00:00:00.250Z INFO router done now\\r\\nand then request_id=r-1 total_ms=1234.57 why="two words"'
    )
    assert line == expected
    try:
        raise KeyError("k")
    except KeyError:
        record.exc_info = sys.exc_info()
    line = LineFormatter("router").format(record)
    assert "\n" not in line
    assert "KeyError" in line


def test_a_record_as_json() -> None:
    """One object in one line, with values of their own types; what a record is called by cannot be overwritten."""
    record = logging.makeLogRecord(
        {"name": "router.queue", "levelname": "WARNING", "levelno": 30, "msg": "full %s", "args": ("now\nthen",),
         "created": 0.25, "msecs": 250}
    )  # fmt: skip
    given = {"request_id": "é", "total_ms": 1234.56789, "num": 3, "is_last": True, "nan": float("nan"), "of": ["a"],
             "none": None, "level": "mine"}  # fmt: skip
    vars(record).update(given)
    line = JsonFormatter("router-1").format(record)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.250Z", "level": "warning", "service": "router-1", "logger": "router.queue",
        "message": "full now\nthen", "request_id": "é", "total_ms": 1234.57, "num": 3, "is_last": True, "nan": "nan",
        "of": "['a']", "none": None,
    }  # fmt: skip
    try:
        raise KeyError("k")
    except KeyError:
        record.exc_info = sys.exc_info()
    line = JsonFormatter("router").format(record)
    assert "\n" not in line
    assert json.loads(line)["traceback"].endswith("KeyError: 'k'")


def test_afterwards_signals_do_what_they_did_before() -> None:
    async def main(stop: asyncio.Event) -> int:
        assert [signal.getsignal(signum) for signum in stop_signals()] != before
        return 3

    before = [signal.getsignal(signum) for signum in stop_signals()]
    assert run_until_signal(main) == 3
    assert [signal.getsignal(signum) for signum in stop_signals()] == before


SERVICE = """
import asyncio, os, signal, sys, time
from rpc.entrypoint import announce, run_until_signal
from rpc.server import Server

async def main(stop):
    server = Server(sys.argv[2])
    announce(await server.start())
    if sys.argv[1] == "busy":
        while True: time.sleep(0.01)
    if sys.argv[1] in ("hung", "nohup"):
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        return 4 if stop.is_set() else 3
    await stop.wait()
    if sys.argv[1] == "hung up":
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[1] == "stuck":
        print("stopping", flush=True)
        await asyncio.Event().wait()
    await server.drain(1)
    return 3 if sys.argv[1] in ("three", "hung up") else None

sys.exit(run_until_signal(main))
"""


def start(kind: str, listen: str = "127.0.0.1:0", stdout: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVICE, kind, listen]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT)


@pytest.mark.parametrize(
    ("kind", "signum", "code"),
    [("zero", signal.SIGTERM, 0), ("three", signal.SIGINT, 3), ("hung up", signal.SIGHUP, 3)],
)
def test_a_signal_lets_main_end(kind: str, signum: int, code: int) -> None:
    with start(kind) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening grpc=127.0.0.1:")
        process.send_signal(signum)
        assert process.wait(20) == code


def test_a_hangup_is_nothing_to_what_is_told_not_to_mind_it() -> None:
    """As under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # children inherit this
    try:
        process = start("nohup")
    finally:
        signal.signal(signal.SIGHUP, previous)
    with process:
        assert process.wait(20) == 3


def test_a_disk_that_is_full_of_logs_keeps_nobody_from_serving() -> None:
    with open("/dev/full", "w") as full:
        process = start("hung", stdout=full)
    with process:
        assert process.wait(20) == 4
        assert process.stderr is not None
        assert "No space left on device" in process.stderr.read()


@pytest.mark.parametrize("kind", ["stuck", "busy"])
def test_a_second_signal_ends_the_process_at_once(kind: str) -> None:
    with start(kind) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        if kind == "stuck":
            assert process.stdout.readline() == "stopping\n"
        else:
            # The kernel merges two equal signals that are pending at the same time.
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_busy_port_ends_with_a_sentence() -> None:
    with start("zero") as first:
        assert first.stdout is not None
        address = first.stdout.readline().strip().removeprefix("listening grpc=")
        with start("zero", address) as second:
            stdout, stderr = second.communicate(timeout=20)
        assert (second.returncode, stdout) == (1, "")
        assert f"Error: cannot listen on {address}: " in stderr
        assert "Traceback" not in stderr
        first.terminate()
        assert first.wait(20) == 0


STARTED = """
import gc, importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert gc.isenabled(), f"{name} leaves its garbage"
    assert gc.get_stats()[1]["collections"] < 3, f"{name} looks for garbage among what it imports"
    assert gc.get_freeze_count() > 10 * len(gc.get_objects()), f"{name} will look for garbage among what it imported"
"""
TOLD = """
import contextlib, gc, tandem.__main__
assert gc.isenabled()
with contextlib.suppress(SystemExit):
    tandem.__main__.main(["up", "--help"])
assert gc.isenabled()
assert gc.get_stats()[1]["collections"] < 5
"""
PROGRAMS = [
    ["router.__main__", "gateway.__main__"],
    ["engine.tensor_parallel.__main__", "decode_service.__main__"],
    ["worker_service.rank"],
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("command", [*([STARTED, *names] for names in PROGRAMS), [TOLD]])
def test_nobody_looks_for_garbage_while_a_program_imports_what_it_needs(command: list[str]) -> None:
    """There is no garbage then, and looking for it took a third of the start."""
    subprocess.run([sys.executable, "-c", *command], cwd=ROOT, capture_output=True, check=True)


@pytest.mark.parametrize("service", ["router", "gateway", "prefill_service", "decode_service"])
def test_grpc_tells_a_log_of_what_is_wrong_alone(monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    """Otherwise a worker that leaves in order adds a line "Cancelling all calls" to each router's log."""
    file = str(Path(__file__).parents[2] / service / "__main__.py")
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    runpy.run_path(file)
    assert os.environ["GRPC_VERBOSITY"] == "DEBUG", "who asks for more gets it"
    monkeypatch.delenv("GRPC_VERBOSITY")
    runpy.run_path(file)
    assert os.environ["GRPC_VERBOSITY"] == "ERROR"


SWALLOWS = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except BaseException:
    pass
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("service", ["router", "gateway", "prefill_service", "decode_service"])
def test_ctrl_c_while_a_service_imports_what_it_needs_ends_it(service: str, tmp_path: Path) -> None:
    """Even if a module swallows the KeyboardInterrupt, and without a traceback."""
    (tmp_path / "grpc.py").write_text(SWALLOWS)  # all services import it
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", service], cwd=ROOT, env=env, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")
