"""If a process waits for a rank that has ended, for example because its device does, the process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import pytest
from clusters import wait_until

from engine.tensor_parallel import rank_processes
from engine.tensor_parallel.rank_processes import ending_with


def test_whoever_waits_for_a_rank_that_has_ended_ends_with_it() -> None:
    script = textwrap.dedent(
        """
        import subprocess, sys, threading
        from engine.tensor_parallel import rank_processes

        rank_processes.NOTICE_S = rank_processes.WATCH_S = 0.05
        codes = "import sys; sys.stdin.read()", "raise SystemExit(3)"
        ranks = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
        with rank_processes.ending_with(ranks):
            threading.Event().wait()
        """
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.wait(60.0) == 1
        _, said = process.communicate()  # the other rank lives as long as its pipe is open
    expected = "tandem: rank 2 of the engine has ended with 3; see its output above; exiting\n"
    assert said == expected


def test_whoever_has_noticed_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    exited: list[int] = []
    monkeypatch.setattr(rank_processes, "WATCH_S", 0.001)
    monkeypatch.setattr(rank_processes, "NOTICE_S", 60.0)
    monkeypatch.setattr(os, "_exit", exited.append)
    rank = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])
    with ending_with([rank]):
        wait_until(lambda: rank.returncode is not None, 60.0, "the rank's end is seen")  # this process sees it as well
    for watch in [thread for thread in threading.enumerate() if thread.name == "rank-watch"]:
        watch.join(60.0)
    assert not exited
