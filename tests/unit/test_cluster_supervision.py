"""`tandem.supervision` with real processes: small Python programs that stand in for services."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.local_redis import MAX_SOCKET_PATH_BYTES, LocalRedis
from tandem.process_run import MAX_LINE_BYTES, ProcessSpec
from tandem.supervision import (
    ProcessError,
    ProcessEvent,
    ProcessState,
    RestartPolicy,
    SupervisedProcess,
)

SERVE = "import signal, time; print('listening grpc=' + address, flush=True); signal.pause()"
SERVE_AND_EXIT_CLEANLY = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " + SERVE
IMPATIENT = RestartPolicy(first_delay_s=0.01, max_delay_s=0.04, max_quick_deaths=3)

Make = Callable[..., SupervisedProcess]


def program(source: str, **spec: Any) -> ProcessSpec:
    """A process that runs `source`, in which `address` is derived from what the last run announced, or is "first"."""

    def command(announced: str) -> list[str]:
        address = announced + "+" if announced else "first"
        return [sys.executable, "-S", "-c", f"import signal, sys; address = {address!r}; {source}"]

    return replace(ProcessSpec(name="worker", command=command, ready_pattern=r"^listening grpc=(\S+)$"), **spec)


class Heard:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[ProcessEvent] = []
        self._news = asyncio.Event()

    def on_line(self, _: str, line: str) -> None:
        self.lines.append(line)
        self._news.set()

    def on_event(self, event: ProcessEvent) -> None:
        self.events.append(event)
        self._news.set()

    async def until(self, is_so: Callable[[], Any]) -> None:
        while not is_so():
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 10)

    @property
    def deaths(self) -> list[ProcessEvent]:
        return [event for event in self.events if "ended with" in event.what]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
async def supervise(heard: Heard) -> AsyncIterator[Make]:
    started: list[SupervisedProcess] = []

    def make(source: str, *, policy: RestartPolicy = IMPATIENT, **spec: Any) -> SupervisedProcess:
        process = SupervisedProcess(
            program(source, **spec),
            on_line=heard.on_line,
            on_event=heard.on_event,
            policy=policy,
        )
        started.append(process)
        process.start()
        return process

    yield make
    for process in started:
        await process.stop(0)


async def within(seconds: float, awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await awaitable


async def test_of_one_that_left_in_order_nobody_need_read_the_last_lines(supervise: Make, heard: Heard) -> None:
    process = supervise(SERVE_AND_EXIT_CLEANLY)
    pid = await within(10, process.wait_running())
    os.kill(pid, signal.SIGTERM)
    await within(10, process.wait_running(unlike_pid=pid))
    assert [(death.what, death.tail) for death in heard.deaths] == [
        ("ended with exit code 0; starting it again in 0.0 s", ())
    ]


async def test_is_running_once_it_has_announced_its_address(supervise: Make, heard: Heard) -> None:
    process = supervise("print('loading', file=sys.stderr); " + SERVE)
    pid = await within(10, process.wait_running())
    assert (process.state, process.announced, process.pid) == (ProcessState.RUNNING, "first", pid)
    assert os.getsid(pid) == pid, "Ctrl-C of our terminal must not reach it"
    assert "listening grpc=first" in heard.lines
    assert any("is up" in event.what for event in heard.events)


async def test_a_killed_process_runs_again_and_learns_what_it_announced(supervise: Make, heard: Heard) -> None:
    process = supervise("print('last words', file=sys.stderr, flush=True); " + SERVE)
    pid = await within(10, process.wait_running())
    os.kill(pid, signal.SIGKILL)
    new_pid = await within(10, process.wait_running(unlike_pid=pid))
    assert new_pid != pid
    assert process.announced == "first+"
    (death,) = heard.deaths
    assert death.is_bad
    assert "SIGKILL" in death.what
    assert "last words" in death.tail


async def test_is_given_up_after_quick_deaths_with_its_last_lines(supervise: Make, heard: Heard) -> None:
    process = supervise("sys.exit('no such GPU')")
    with pytest.raises(ProcessError, match=r"died 3 times in a row(.|\n)*exit code 1(.|\n)*no such GPU"):
        await within(20, process.wait_running())
    with pytest.raises(ProcessError, match="no such GPU"):
        await process.wait_failed()
    assert len(heard.deaths) == 2, "the third death ends it"


async def test_a_usage_error_ends_it_at_once(supervise: Make, heard: Heard) -> None:
    process = supervise("print('--dtype must be one of', file=sys.stderr); sys.exit(2)")
    with pytest.raises(ProcessError, match=r"rejects its settings(.|\n)*--dtype must be one of"):
        await within(10, process.wait_running())
    assert heard.deaths == []


async def test_exit_code_2_after_it_ran_is_a_death_like_any_other(supervise: Make, heard: Heard) -> None:
    process = supervise("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(2)); " + SERVE)
    pid = await within(10, process.wait_running())
    os.kill(pid, signal.SIGUSR1)
    await within(10, process.wait_running(unlike_pid=pid))
    assert "exit code 2" in heard.deaths[0].what


async def test_what_must_start_is_not_tried_again(supervise: Make, heard: Heard) -> None:
    process = supervise("sys.exit('port is busy')", must_start=True)
    with pytest.raises(ProcessError, match=r"did not start \(exit code 1\)(.|\n)*port is busy"):
        await within(10, process.wait_running())
    assert heard.deaths == []


async def test_a_process_that_does_not_answer_is_killed_and_started_again(supervise: Make, heard: Heard) -> None:
    answers = iter([OSError("no PONG"), None])

    async def confirm() -> None:
        if error := next(answers):
            raise error

    process = supervise(SERVE, confirm=confirm)
    await within(10, process.wait_running())
    assert any("no PONG" in event.what for event in heard.events)
    assert "SIGKILL" in heard.deaths[0].what


async def test_stop_sends_sigterm_and_a_clean_end_is_no_problem(supervise: Make, heard: Heard) -> None:
    process = supervise(SERVE_AND_EXIT_CLEANLY)
    await within(10, process.wait_running())
    assert await within(10, process.stop(grace_s=9)) == ""
    assert process.state is ProcessState.STOPPED
    assert heard.deaths == [], "a wanted end is not reported as a death"


async def test_stop_kills_after_the_grace(supervise: Make) -> None:
    process = supervise("signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SERVE)
    await within(10, process.wait_running())
    assert "had not exited after 0.2 s" in await within(5, process.stop(grace_s=0.2))


async def test_kill_ends_the_grace(supervise: Make) -> None:
    process = supervise("signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SERVE)
    await within(10, process.wait_running())
    stopping = asyncio.create_task(process.stop(grace_s=60))
    process.kill()
    assert "did not get time to finish" in await within(5, stopping)


async def test_a_bad_exit_code_on_stop_is_a_problem(supervise: Make) -> None:
    process = supervise("signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); " + SERVE)
    await within(10, process.wait_running())
    assert await within(10, process.stop(grace_s=9)) == "worker ended with exit code 3 when told to stop"


async def test_stop_before_it_is_ready_is_clean(supervise: Make, heard: Heard) -> None:
    process = supervise("print('loading', flush=True); signal.pause()")
    await heard.until(lambda: "loading" in heard.lines)
    assert await within(10, process.stop(grace_s=9)) == ""


async def test_stop_does_not_wait_for_the_next_start(supervise: Make, heard: Heard) -> None:
    process = supervise("sys.exit(1)", policy=RestartPolicy(first_delay_s=60, max_delay_s=60))
    await heard.until(lambda: heard.deaths)
    assert await within(2, process.stop(grace_s=9)) == ""
    with pytest.raises(ProcessError, match="was stopped"):
        await process.wait_running()


async def test_lines_of_any_length_and_bytes_are_heard(supervise: Make, heard: Heard) -> None:
    size = 3 * MAX_LINE_BYTES
    process = supervise(f"sys.stdout.buffer.write(b'x' * {size} + b'\\n\\xff\\n'); sys.stdout.flush(); " + SERVE)
    await within(10, process.wait_running())
    assert sum(line.count("x") for line in heard.lines) == size
    assert "\ufffd" in heard.lines


async def test_a_chatty_process_is_heard_only_when_it_dies(supervise: Make, heard: Heard) -> None:
    process = supervise("print('chatter', flush=True); " + SERVE, is_chatty=True)
    pid = await within(10, process.wait_running())
    assert heard.lines == []
    os.kill(pid, signal.SIGKILL)
    await within(10, process.wait_running(unlike_pid=pid))
    assert "chatter" in heard.deaths[0].tail


async def test_whoever_hears_of_it_and_fails_ends_nothing(supervise: Make, heard: Heard) -> None:
    """If the callbacks' errors ended the reading of its pipe, the process would block as soon as the pipe is full."""
    failures: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["message"]))

    def fail(*_: object) -> None:
        raise OSError("no space left")

    heard.on_line = heard.on_event = fail  # type: ignore[method-assign]
    process = supervise(f"print('x' * {16 * MAX_LINE_BYTES}); {SERVE_AND_EXIT_CLEANLY}")
    pid = await within(10, process.wait_running())
    os.kill(pid, signal.SIGKILL)
    await within(10, process.wait_running(unlike_pid=pid))
    assert await within(10, process.stop(9)) == ""
    assert set(failures) == {"on_line of worker failed", "on_event of worker failed"}


def test_delays_grow_to_a_bound_and_start_at_none() -> None:
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=3)
    assert [policy.delay_s(n) for n in range(6)] == [0, 0.5, 1, 2, 3, 3]


async def test_a_process_that_ran_well_is_started_at_once(supervise: Make, heard: Heard) -> None:
    process = supervise(SERVE, policy=RestartPolicy(quick_death_s=0, first_delay_s=60, max_delay_s=60))
    pid = await within(10, process.wait_running())
    os.kill(pid, signal.SIGKILL)
    await within(10, process.wait_running(unlike_pid=pid))
    assert "at once" in heard.deaths[0].what


async def test_a_process_whose_child_holds_its_pipes_is_started_again_all_the_same(supervise: Make) -> None:
    """A rank that hangs on its device may outlive its worker. The supervisor still closes its own ends of the pipes."""
    process = supervise(
        "import subprocess; child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']);"
        "print(f'listening grpc={child.pid}', flush=True); signal.pause()"
    )
    children = []
    try:
        pid = await within(10, process.wait_running())
        children.append(int(process.announced))
        gc.collect()  # close what other tests have left, before counting
        num_open = len(os.listdir("/dev/fd"))
        os.kill(pid, signal.SIGKILL)
        await within(10, process.wait_running(unlike_pid=pid))
        children.append(int(process.announced))
        assert len(os.listdir("/dev/fd")) <= num_open
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_no_orphan_survives_a_sigkill_of_its_supervisor() -> None:
    source = textwrap.dedent("""
        import asyncio, sys
        from tandem.process_run import ProcessSpec
        from tandem.supervision import SupervisedProcess

        async def main():
            spec = ProcessSpec(
                name="child",
                command=lambda _: [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"],
                ready_pattern="^up$",
            )
            process = SupervisedProcess(spec, on_line=lambda *_: None, on_event=lambda _: None)
            process.start()
            print(await process.wait_running(), flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """)
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, cwd=root)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        assert select.select([child], [], [], 0) == ([], [], []), "the child runs"
        parent.kill()
        assert select.select([child], [], [], 10)[0] == [child], "the child outlived its supervisor"
    finally:
        os.close(child)
        parent.kill()
        parent.wait()
        parent.stdout.close()


# -- Redis ------------------------------------------------------------------------------------------------------


async def test_redis_answers_and_comes_back_on_its_socket() -> None:
    redis = LocalRedis()
    process = SupervisedProcess(redis.spec(), on_line=lambda *_: None, on_event=lambda _: None, policy=IMPATIENT)
    process.start()
    try:
        pid = await within(10, process.wait_running())
        await redis.ping()
        assert redis.socket_path.stat().st_mode & 0o077 == 0, "nobody else may connect"
        os.kill(pid, signal.SIGKILL)
        await within(10, process.wait_running(unlike_pid=pid))
        await redis.ping()
    finally:
        assert await process.stop(grace_s=5) == ""
        redis.remove()
    assert not redis.folder.exists()


def test_the_folder_of_a_redis_whose_owner_was_killed_goes_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short, so that LocalRedis makes its folder there
        folder = Path(name)
        monkeypatch.setattr("tempfile.tempdir", name)
        script = (
            "import signal; from tandem.local_redis import LocalRedis; LocalRedis(); print(flush=True); signal.pause()"
        )
        environment = os.environ | {"TMPDIR": name}
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as owner:
            try:
                assert owner.stdout is not None
                assert owner.stdout.readline()
                beside = LocalRedis()
                assert len(list(folder.iterdir())) == 2, "the other's owner lives"
            finally:
                owner.kill()
        after = LocalRedis()
        assert sorted(folder.iterdir()) == sorted([beside.folder, after.folder])
        beside.remove()
        after.remove()
        assert list(folder.iterdir()) == []


def test_redis_gets_a_path_that_fits_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    redis = LocalRedis()
    try:
        assert len(str(redis.socket_path)) <= MAX_SOCKET_PATH_BYTES
        assert list(long.iterdir()) == []
    finally:
        redis.remove()
