"""`tandem chaos` that ends without a verdict: it names the log of its processes, and prints no traceback."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from llama_folders import LLAMA
from lora_folders import write_adapter
from transformers_cases import GEMMA2, LFM2

from rpc.errors import NoWorker, Unreachable
from tandem.chaos import harm, soak
from tandem.chaos.exchanged import ExchangedAdapters
from tandem.chaos.faults import Fault, FaultKind
from tandem.chaos.soak import _what_is_not_at_rest
from tandem.chaos.verdict import Verdict
from tandem.cli import main
from tandem.cli.chaos import describe
from tandem.cluster import ClusterError
from tandem.cluster_args import ClusterArgs
from tandem.process_run import ProcessSpec
from tandem.supervision import SupervisedProcess

NO_ADAPTERS = ExchangedAdapters({}, "")


def chaos_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raises: BaseException) -> tuple[Result, str]:
    """The command's result, and the text of the log that it names."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def run_soak(_: Any, *, say: Any, on_line: Any) -> None:
        on_line("router", "a line")
        raise raises

    monkeypatch.setattr(soak, "run_soak", run_soak)
    result = CliRunner().invoke(main, ["chaos"])
    named = re.search(r"^the log of all processes is in (\S+)$", result.stderr, re.MULTILINE)
    assert named, result.stderr
    return result, Path(named[1]).read_text()


def test_workers_have_the_settings_that_are_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[soak.SoakArgs] = []

    async def run_soak(args: soak.SoakArgs, **_: Any) -> None:
        found.append(args)
        raise ClusterError("enough")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(soak, "run_soak", run_soak)
    flags = ("--quantization", "int8", "--num-kv-blocks", "99", "--batch-invariant", "--seed", "7", "--decode", "3")
    CliRunner().invoke(main, ["chaos", *flags])
    CliRunner().invoke(main, ["chaos"])
    asked, plain = found
    engine = asked.engine
    assert (engine.quantization, engine.num_kv_blocks, engine.batch_invariant) == ("int8", 99, True)
    assert (asked.seed, asked.num_decode, engine.max_model_len) == (7, 3, 2048)
    assert plain == soak.SoakArgs()
    wrong = CliRunner().invoke(main, ["chaos", "--quantization", "int9"])
    assert wrong.exit_code == 2
    assert "--quantization must be one of" in wrong.stderr


@pytest.mark.parametrize(
    ("config", "flags", "size"),
    [
        (LFM2, (), 0.0),
        (LLAMA, (), 0.2),
        pytest.param(LFM2, ("--kv-offloading-size", "0.2"), 0.2, marks=pytest.mark.slow),
        pytest.param(GEMMA2, (), 0.2, marks=pytest.mark.slow),
    ],
)
def test_layers_with_a_state_go_without_host_memory_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any], flags: tuple[str, ...], size: float
) -> None:
    started: list[ClusterArgs] = []

    def cluster(args: ClusterArgs, **_: Any) -> None:
        started.append(args)
        raise ClusterError("enough")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(soak, "Cluster", cluster)
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(main, ["chaos", "--model", str(tmp_path), *flags])
    (args,) = started
    assert args.engine.kv_offloading_size == size
    said = "--kv-offloading-size is 0: the model has layers that keep a state"
    assert (said in result.stderr) == (size == 0)


def test_ctrl_c_names_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, log = chaos_that(monkeypatch, tmp_path, KeyboardInterrupt())
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (130, "cancelled")
    assert log == "router     | a line\n"


@pytest.mark.parametrize("error", [ClusterError("redis is away"), NoWorker("nobody is left")])
def test_what_ends_it_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception) -> None:
    result, _ = chaos_that(monkeypatch, tmp_path, error)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, f"Error: {error}")


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        ("sql=/nowhere", "--lora-modules: adapter 'sql': there is no folder /nowhere"),
        ("sql", "--lora-modules must name each adapter's folder, as in sql=/models/sql-adapter, is 'sql'"),
    ],
)
def test_adapters_that_are_not_there_are_said_before_anything_starts(modules: str, why: str) -> None:
    result = CliRunner().invoke(main, ["chaos", "--lora-modules", modules])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"Error: {why}")


def test_an_adapter_stays_or_is_exchanged(tmp_path: Path) -> None:
    for name in "ab":
        write_adapter(tmp_path / name)
    flags = ("--lora-dir", str(tmp_path), "--lora-modules", f"b={tmp_path / 'b'}")
    result = CliRunner().invoke(main, ["chaos", *flags])
    why = "--lora-dir and --lora-modules must not have the same name; both have 'b'"
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"Error: {why}")


def test_adapters_need_room_to_be_exchanged_while_requests_ask_for_them(tmp_path: Path) -> None:
    for name in "ab":
        write_adapter(tmp_path / name)
    result = CliRunner().invoke(main, ["chaos", "--lora-dir", str(tmp_path), "--max-loras", "2"])
    why = "--max-loras must be at least 6, to exchange 2 adapters without refusing requests for them, or left out; is 2"
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"Error: {why}")


def test_a_report_says_over_what_requests_came_and_for_whom() -> None:
    endings = {"answered": 5, "cut off with their gateway": 1}
    verdict = Verdict(
        num_by_ending=endings, num_by_way={"gRPC": 4, "chats": 2}, num_by_model={"": 1, "sql": 5},
        num_tokens_checked=90, num_lost=0, num_repeated=0, num_wrong=0, num_retried=2, num_resumed=1, num_moved=3,
    )  # fmt: skip
    report = soak.Report(args=soak.SoakArgs(), num_faults={"killed": 1, "muted": 2}, verdict=verdict, rest_s=0.1)
    lines = describe(report.to_dict()).splitlines()
    assert lines[:3] == [
        "faults    3 in 60 s (seed 1): 2 muted, 1 killed",
        "requests  6: 5 answered, 1 cut off with their gateway",
        "          4 gRPC, 2 chats; of 5 sql, 1 the model itself",
    ]
    assert lines[3].split(", ") == [
        "          2 answers took more than one attempt",
        "1 survived their router",
        "3 moved to a worker with less to do",
    ]
    assert lines[-1] == "passed"


def test_a_soak_in_which_nobody_was_answered_proves_nothing() -> None:
    verdict = Verdict(
        num_by_ending={"refused: overload": 6}, num_by_way={"gRPC": 6}, num_by_model={"": 6}, num_tokens_checked=0,
        num_lost=0, num_repeated=0, num_wrong=0, num_retried=0, num_resumed=0, num_moved=0,
    )  # fmt: skip
    report = soak.Report(args=soak.SoakArgs(), num_faults={"killed": 1}, verdict=verdict, rest_s=0.1)
    lines = describe(report.to_dict()).splitlines()
    assert lines[-2:] == ["FOUND     no answer came that could be compared", "FAILED"]
    assert not report.has_passed


async def test_a_process_that_was_stopped_goes_on_when_the_soak_is_cancelled() -> None:
    """Otherwise its cluster would wait for it as long as it ever waits, and then kill it."""
    # Without a handler: with one, a signal that comes just before the process begins to wait would leave it waiting.
    blocks, waits = "signal.pthread_sigmask(signal.SIG_BLOCK, its)", "signal.sigwait(its)"
    leaves = f"import signal; its = [signal.SIGTERM]; {blocks}; print(flush=True); {waits}; exit(7)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", leaves, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    cluster = SimpleNamespace(pids={"decode-1": process.pid}, args=ClusterArgs())
    hurt = harm.Harm(soak.SoakArgs(), cluster, {}, None, lambda _: None, harm.Exits(), NO_ADAPTERS)  # type: ignore[arg-type]
    stopped = asyncio.create_task(hurt._inflict(Fault(0.0, FaultKind.STOP, "decode-1", 60.0), 0.0))
    await asyncio.sleep(0)
    stopped.cancel()
    await asyncio.wait([stopped])
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) == 7


async def test_a_router_that_is_not_back_yet_is_waited_for() -> None:
    class Away:
        async def audit(self) -> None:
            raise Unreachable("connection refused")

    assert await _what_is_not_at_rest(Away(), 4) == [  # type: ignore[arg-type]
        "the router does not answer: Unreachable('connection refused')"
    ]


@pytest.mark.parametrize(
    ("on_sigterm", "found"),
    [
        ("exit(0)", []),
        ("exit(3)", ["gateway was told to leave, and ended with exit code 3"]),
        ("os.abort()", ["gateway was told to leave, and ended with SIGABRT"]),
        ("None", ["gateway was told to leave, and had not after 0.3 s"]),
    ],
)
async def test_one_that_is_told_to_leave_does_so_as_it_should(
    monkeypatch: pytest.MonkeyPatch, on_sigterm: str, found: list[str]
) -> None:
    monkeypatch.setattr(harm, "LEAVES_S", 0.3 if on_sigterm == "None" else 30.0)
    script = (
        "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('ready at 1', flush=True)\n"
        f"while signal.sigwait([signal.SIGTERM]): {on_sigterm}"
    )
    exits = harm.Exits()
    process = SupervisedProcess(
        ProcessSpec(name="gateway", command=lambda _: [sys.executable, "-c", script], ready_pattern=r"ready at (\d)"),
        on_line=lambda name, line: None,
        on_event=exits.note,
    )
    process.start()
    pid = await process.wait_running()
    cluster = SimpleNamespace(pids={"gateway": pid}, args=ClusterArgs(http_port=0))
    hurt = harm.Harm(soak.SoakArgs(), cluster, {}, None, lambda _: None, exits, NO_ADAPTERS)  # type: ignore[arg-type]
    await hurt._inflict(Fault(0.0, FaultKind.LEAVE, "gateway", 17.0), 0.0)
    assert await process.wait_running(unlike_pid=pid), "it is started again"
    await process.stop(0.0)
    assert hurt.wrong_exits == found
    [absence] = hurt._absences["gateway"]
    assert absence.was_told
    assert absence.grace_s == harm.GRACE_S
