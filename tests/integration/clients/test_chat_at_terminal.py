"""`tandem chat`: what it sends and prints, from a pipe and at a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from clusters import RunningCluster, wait_until
from openai_cases import MESSAGES

from tandem.client import Client

GREEDY = ("--temperature", "0")
QUESTION = "What is the capital of France?"
LONG = "Tell me a very long story."


@pytest.fixture
def cluster(real_cluster: RunningCluster) -> RunningCluster:
    return real_cluster


def chat(cluster: RunningCluster, *arguments: str, stdin: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem", "chat", *arguments, "--router", cluster.address]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_each_line_is_a_message_after_all_before_it(cluster: RunningCluster) -> None:
    with Client(cluster.address) as client:
        messages = [{"role": "user", "content": QUESTION}]
        first = client.generate(messages, max_tokens=24, temperature=0)
        again = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Are you sure?"}]
        second = client.generate(again, max_tokens=24, temperature=0)
        alone = client.generate([again[-1]], max_tokens=24, temperature=0)
    assert second.text != alone.text
    lines = (QUESTION, "", "Are you sure?", "/new", "Are you sure?")
    done = chat(cluster, *GREEDY, "--max-tokens", "24", stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{answer.text}\n" for answer in (first, second, alone))
    told = re.findall(
        r"\[(.*); [\d,]+ of (\d+) prompt tokens cached; first token after \d+ ms; \d+ tokens/s.*\]", done.stderr
    )
    assert [int(num_tokens) for _, num_tokens in told] == [
        answer.usage.prompt_tokens for answer in (first, second, alone)
    ]
    assert all(re.fullmatch(r"prefill-1 -> decode-1|(local|stay): \w+-1 alone", mode) for mode, _ in told)


def test_an_answer_that_was_cut_off_says_so_and_a_system_message_counts(cluster: RunningCluster) -> None:
    with Client(cluster.address) as client:
        messages = [{"role": "system", "content": "You are a pirate."}, *MESSAGES[-1:]]
        expected = client.generate(messages, max_tokens=3, temperature=0)
    done = chat(
        cluster, *GREEDY, "--system", "You are a pirate.", "--max-tokens", "3", stdin=str(MESSAGES[-1]["content"])
    )
    assert (done.returncode, done.stdout) == (0, expected.text + "\n")
    assert "; cut off after 3 tokens]" in done.stderr


def test_from_a_pipe_an_error_ends_it(cluster: RunningCluster) -> None:
    done = chat(cluster, "--model", "other", stdin=f"{QUESTION}\n{QUESTION}\n")
    assert (done.returncode, done.stdout) == (1, "")
    (error,) = done.stderr.splitlines()
    assert error.startswith("Error: --model: ")


class Terminal:
    """`tandem chat` at a terminal."""

    def __init__(self, address: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "tandem", "chat", *arguments, "--router", address]
        self.process_id, self._fd = pty.fork()
        if not self.process_id:
            os.execv(command[0], command)
        self._seen = b""
        self._exit: int | None = None

    def wait_for(self, pattern: str, timeout_s: float = 30.0) -> str:
        """Return what comes up to and including what matches `pattern`."""
        deadline_s = time.monotonic() + timeout_s
        while (found := re.search(pattern.encode(), self._seen)) is None:
            assert time.monotonic() < deadline_s, f"no {pattern!r} within {timeout_s} s: {self._seen.decode()}"
            if select.select([self._fd], [], [], 0.1)[0]:
                self._seen += os.read(self._fd, 4096)
        before, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return before.decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def exit_code(self) -> int:
        if self._exit is None:
            wait_until(self._has_ended, 20, "it ends")
        assert self._exit is not None
        return self._exit

    def close(self) -> None:
        if not self._has_ended():
            os.kill(self.process_id, signal.SIGKILL)
            self.exit_code()
        os.close(self._fd)

    def _has_ended(self) -> bool:
        if self._exit is None:
            ended, status = os.waitpid(self.process_id, os.WNOHANG)
            self._exit = os.waitstatus_to_exitcode(status) if ended else None
        return self._exit is not None


@contextmanager
def at_terminal(cluster: RunningCluster, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(cluster.address, *arguments)
    try:
        terminal.wait_for("> ")
        yield terminal
    finally:
        terminal.close()


@pytest.fixture
def terminal(cluster: RunningCluster) -> Iterator[Terminal]:
    with at_terminal(cluster, *GREEDY) as terminal:
        yield terminal


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation(terminal: Terminal, cluster: RunningCluster) -> None:
    terminal.type(f"{LONG}\n")
    terminal.wait_for(LONG)  # as typed
    terminal.wait_for("story")
    terminal.type("\x03")
    terminal.wait_for(re.escape("[ended]"))
    terminal.wait_for("> ")
    terminal.type("Go on.\n")  # the beginning of the answer counts as said
    facts = terminal.wait_for(" prompt tokens cached")
    assert (found := re.search(r"of (\d+) prompt", facts))
    assert int(found[1]) > 50
    terminal.wait_for("> ")
    terminal.type("/new\n")
    terminal.wait_for("> ")
    terminal.type(f"{QUESTION}\n")
    facts = terminal.wait_for(" prompt tokens cached")
    assert "Paris" in facts
    assert (found := re.search(r"of (\d+) prompt", facts))
    assert int(found[1]) < 50
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


@pytest.mark.slow
def test_an_error_at_a_terminal_ends_only_its_message(cluster: RunningCluster) -> None:
    with at_terminal(cluster, *GREEDY, "--max-tokens", "8") as terminal:
        told = ""
        while "Error" not in told:  # the conversation grows until it is too long
            terminal.type("six " * 200 + "\n")
            told = terminal.wait_for("(prompt tokens cached|Error: ).*\n")
        assert re.search(r"must be at most 2047 tokens.*\. /new begins another conversation\.", told)
        terminal.type("/new\n")
        terminal.type(f"{QUESTION}\n")
        assert "Paris" in terminal.wait_for("prompt tokens cached")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_leaves_when_it_is_told_to_in_the_middle_of_an_answer(terminal: Terminal, number: signal.Signals) -> None:
    terminal.type(f"{LONG}\n")
    terminal.wait_for(LONG)
    terminal.wait_for("story")
    os.kill(terminal.process_id, number)
    assert terminal.exit_code() == 130
