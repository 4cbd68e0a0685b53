"""Nothing waits for a rank that has ended, or uses what a device computed without it. The device is a lock here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection, Pipe

import pytest

from engine.running.executor import RankLost
from engine.tensor_parallel import rank_watch
from engine.tensor_parallel.rank_watch import RankWatch

END_S = 60.0


class Ranks:
    """Processes that live until their connections end, or until they are killed."""

    def __init__(self, num_ranks: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection[bytes, bytes]] = []
        for _ in range(1, num_ranks):
            ours, theirs = Pipe()
            with theirs:
                command = [sys.executable, "-c", f"import os; os.read({theirs.fileno()}, 1)"]
                self.processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
            self.connections.append(ours)

    def kill(self, rank: int) -> None:
        self.processes[rank - 1].kill()

    def close(self) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            connection.close()
            process.wait(END_S)


class Device:
    """Waits for a lost rank until it is aborted."""

    def __init__(self) -> None:
        self.is_aborted = threading.Event()
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1
        self.is_aborted.set()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with closing(Ranks(3)) as ranks:
        yield ranks


@pytest.fixture
def watch(ranks: Ranks, device: Device) -> Iterator[RankWatch]:
    with closing(RankWatch(ranks.processes, ranks.connections, device.abort)) as watch:
        yield watch


@pytest.fixture
def device() -> Device:
    return Device()


def take(watch: RankWatch, ranks: Ranks, device: Device) -> None:
    with watch.taking():
        ranks.kill(2)
        assert device.is_aborted.wait(END_S), "the device waits on"


def launch(watch: RankWatch, ranks: Ranks, device: Device) -> None:
    """Launch into a full queue."""
    with watch.launching():
        ranks.kill(2)
        assert device.is_aborted.wait(END_S), "the device waits on"


@pytest.mark.parametrize("call", [take, launch])
def test_a_wait_for_a_rank_that_ends_is_aborted(
    call: Callable[[RankWatch, Ranks, Device], None], watch: RankWatch, ranks: Ranks, device: Device
) -> None:
    """The wait itself ends without an error, as a device's does. The watch keeps its result from being used."""
    with pytest.raises(RankLost, match=r"^rank 2 of the engine has ended with SIGKILL; see its output above$"):
        call(watch, ranks, device)
    for _ in range(2):
        with pytest.raises(RankLost, match=r"^rank 2 "), watch.launching():
            pytest.fail("nothing is launched any more")
        with pytest.raises(RankLost, match=r"^rank 2 "), watch.taking():
            pytest.fail("no tokens are taken any more")
    assert device.num_aborts == 1


def test_what_is_being_launched_is_let_finish(
    watch: RankWatch, ranks: Ranks, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls on this thread use what an abort on another thread would free."""
    monkeypatch.setattr(rank_watch, "LAUNCH_S", END_S)
    with pytest.raises(RankLost), watch.launching():  # noqa: PT012
        ranks.kill(2)
        assert watch._is_lost.wait(END_S)
        assert not device.is_aborted.wait(0.2)
    assert device.is_aborted.wait(END_S)


def test_what_breaks_meanwhile_names_who_ended_first(watch: RankWatch, ranks: Ranks) -> None:
    """Afterwards another rank fails, too, and so do connections."""
    broken = RuntimeError("Connection closed by peer")
    with pytest.raises(RankLost, match=r"^rank 2 ") as caught, watch.launching():  # noqa: PT012
        ranks.kill(2)
        assert watch._is_lost.wait(END_S)
        ranks.kill(1)
        raise broken
    assert caught.value.__cause__ is broken


def test_an_error_of_its_own_stays_what_it_is(watch: RankWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "STATUS_S", 0.001)
    with pytest.raises(RuntimeError, match="out of memory") as caught, watch.launching():
        raise RuntimeError("out of memory")
    assert type(caught.value) is RuntimeError
    with watch.taking():
        pass


def test_ranks_that_are_let_go_of_are_not_lost(ranks: Ranks, device: Device) -> None:
    """The watch does not watch their ends. A process forked meanwhile keeps copies of this process' files open."""
    watch = RankWatch(ranks.processes, ranks.connections, device.abort)
    [thread] = [each for each in threading.enumerate() if each.name == "rank-watch"]
    forked = os.dup(watch._wakes.fileno())
    watch.close()
    os.close(forked)
    assert not thread.is_alive()
    ranks.close()
    assert device.num_aborts == 0


def test_a_device_that_cannot_be_woken_ends_with_its_process() -> None:
    script = textwrap.dedent(
        """
        import os, subprocess, sys, threading
        from multiprocessing.connection import Pipe
        from engine.tensor_parallel import rank_watch

        rank_watch.NOTICE_S = 0.05
        ours, theirs = Pipe()
        with theirs:
            rank = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], pass_fds=[theirs.fileno()])
        watch = rank_watch.RankWatch([rank], [ours], lambda: threading.Event().wait())
        with watch.taking():
            threading.Event().wait()
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=END_S)
    expected = "tandem: rank 1 of the engine has ended with 3; see its output above; exiting\n"
    assert (done.returncode, done.stderr) == (1, expected)


class Left(threading.Event):
    """An event that says when a thread waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_waited_for.set()
        return super().wait(timeout)


def test_whoever_has_heard_of_it_lives_on(watch: RankWatch, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    exited: list[int] = []
    monkeypatch.setattr(os, "_exit", exited.append)
    monkeypatch.setattr(rank_watch, "NOTICE_S", END_S)
    left = watch._is_left = Left()
    [thread] = [each for each in threading.enumerate() if each.name == "rank-watch"]
    with pytest.raises(RankLost), watch.taking():  # noqa: PT012
        ranks.kill(2)
        assert left.is_waited_for.wait(END_S)
    thread.join(END_S / 2)
    assert not thread.is_alive()
    assert not exited


def test_between_steps_nothing_is_waited_for(
    watch: RankWatch, ranks: Ranks, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    exited: list[int] = []
    monkeypatch.setattr(os, "_exit", exited.append)
    monkeypatch.setattr(rank_watch, "NOTICE_S", 0.0)
    os.kill(ranks.processes[0].pid, signal.SIGTERM)
    assert device.is_aborted.wait(END_S)
    with pytest.raises(RankLost, match=r"^rank 1 of the engine has ended with SIGTERM"), watch.launching():
        pytest.fail("nothing is launched any more")
    assert not exited
