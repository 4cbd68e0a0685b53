"""`tandem bench` ended by Ctrl-C or SIGTERM: which results it keeps, and what it prints."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import grpc
import pytest
from scripted_router import EXACT, Scripted, scripted_router

from protos import tandem_inference_pb2 as pb
from tandem.bench.args import BenchArgs
from tandem.bench.curve import run_bench
from tandem.bench.outcome import Progress
from tandem.bench.report import Report, summary_csv, to_dict


class Stuck:
    """Answers the first `num_answered` requests, and no further one."""

    def __init__(self, scripted: Scripted, num_answered: int) -> None:
        self._scripted = scripted
        self._num_answered = num_answered
        self._numbers = count()
        self.is_stuck = threading.Event()

    def __call__(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if next(self._numbers) < self._num_answered:
            yield from EXACT
            return
        self.is_stuck.set()
        yield from self._scripted.endless(request, context)


@pytest.fixture
def server() -> Iterator[tuple[str, Scripted]]:
    with scripted_router() as served:
        yield served


async def test_what_had_ended_is_reported_and_the_rest_is_counted(server: tuple[str, Scripted]) -> None:
    address, scripted = server
    scripted.script = Stuck(scripted, num_answered=5)
    args = BenchArgs(
        address=address, request_rate="90,100", num_prompts=3, num_warmups=0, random_output_len=3, goodput="e2el:60000"
    )
    seen: list[Progress] = []
    reports: list[Report] = []

    @asynccontextmanager
    async def watch(_: str, progress: Progress) -> AsyncIterator[None]:
        seen.append(progress)
        yield

    running = asyncio.create_task(run_bench(args, watch=watch, on_interrupt=reports.append))
    async with asyncio.timeout(30):
        while len(seen) < 2 or seen[1].num_answered < 2:  # noqa: ASYNC110 - a run tells nobody
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (report,) = reports
    assert [(run.summary.completed, run.num_unfinished) for run in report.runs] == [(3, 0), (2, 1)]
    assert [result["unfinished"] for result in to_dict(report)["results"]] == [0, 1]
    assert summary_csv(report).splitlines()[0].endswith(",unfinished")
    assert report.problem == "interrupted (requests/s: 100): 2 of 3 had ended, only these count"
    assert report.good_rate == 90, "of the rates that were tried to the end"


def bench(address: str, *more: str) -> list[str]:
    """The command line: three requests at once, then three more at a rate."""
    return [
        sys.executable, "-m", "tandem", "bench", "--address", address, "--request-rate", "inf,50", "--num-prompts", "3",
        "--num-warmups", "0", "--random-output-len", "3", *more,
    ]  # fmt: skip


def kept_in(folder: Path) -> tuple[str, ...]:
    return "--save-result", "--result-dir", str(folder), "--result-filename", "r.json"


@pytest.mark.parametrize(
    ("num_answered", "signals"), [(0, [signal.SIGINT]), (3, [signal.SIGTERM] * 2)], ids=["Ctrl-C", "timeout(1)"]
)
def test_what_ends_it_shows_and_keeps_what_there_is(
    server: tuple[str, Scripted], tmp_path: Path, num_answered: int, signals: list[int]
) -> None:
    address, scripted = server
    scripted.script = stuck = Stuck(scripted, num_answered)
    command = bench(address, *kept_in(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert stuck.is_stuck.wait(60)
        for number in signals:
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    said = err.splitlines()
    if not num_answered:
        assert (out, said[-1]) == ("", "cancelled")
        assert list(tmp_path.iterdir()) == []
        return
    shown = [line.split() for line in out.splitlines()]
    assert shown[0][-4:] == ["all", "at", "once", "50"]
    assert [shown[1], shown[4]] == [["answered", "3", "0"], ["unfinished", "0", "3"]]
    assert said[-3] == "cancelled"
    assert said[-2].startswith(f"kept in {tmp_path}: r.json, r.csv, ")
    assert said[-1] == "interrupted (requests/s: 50): 0 of 3 had ended, only these count"
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [(result["completed"], result["unfinished"]) for result in results] == [(3, 0), (0, 3)]
    assert said[-1] in (tmp_path / "r.html").read_text()


def test_ctrl_c_keeps_what_there_is_though_nobody_reads_what_it_says(
    server: tuple[str, Scripted], tmp_path: Path
) -> None:
    """As in `tandem bench 2>&1 | tee log`, where Ctrl-C ends tee as well, and sooner."""
    address, scripted = server
    scripted.script = stuck = Stuck(scripted, num_answered=3)
    command = bench(address, "--json", *kept_in(tmp_path))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert stuck.is_stuck.wait(60)
        process.stdout.close()
        process.stderr.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [(result["completed"], result["unfinished"]) for result in results] == [(3, 0), (0, 3)]
