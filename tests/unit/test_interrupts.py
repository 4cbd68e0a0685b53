"""Ctrl-C while a command is still importing its modules: no traceback, and the exit code of an interrupted command."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tandem import interrupts
from tandem.cli import main


def started(where: str, *args: str, how: str = "heard") -> subprocess.CompletedProcess[str]:
    """`python -m tandem ARGS`, which gets a SIGINT when it first imports `where`."""
    code = f"""
import builtins, os, runpy, signal, sys

import_of_python, waits = builtins.__import__, [{where!r}]

def import_it(name, *args, **more):
    if name in waits:
        waits.clear()
        os.kill(os.getpid(), signal.SIGINT)
    return import_of_python(name, *args, **more)

if {how == "ignored"}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
builtins.__import__ = import_it
sys.argv = ["tandem", *{args!r}]
runpy.run_module("tandem", run_name="__main__", alter_sys=True)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("where", ["tandem.cli", "click", "tandem.bench.args"])
def test_while_it_imports_it_ends_there_and_then(where: str) -> None:
    done = started(where, "bench", "--address", "127.0.0.1:1")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_list_of_all_commands_imports_them_and_ends_alike() -> None:
    done = started("tandem.bench.args", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_command_that_has_begun_says_so() -> None:
    done = started("tandem.bench.curve", "bench", "--address", "127.0.0.1:1")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "cancelled\n")


def test_where_it_is_ignored_it_stays_ignored() -> None:
    done = started("click", "bench", "--address", "127.0.0.1:1", how="ignored")
    assert done.returncode == 1
    assert "no router answers at 127.0.0.1:1" in done.stderr


def test_little_is_imported_before_it_can_take_ctrl_c() -> None:
    """Until then Ctrl-C causes Python's traceback. When `typing` was imported before, that took most of this time."""
    code = "import sys, tandem.interrupts; print({'typing', 're', 'click'} & sys.modules.keys())"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout == "set()\n"


def test_the_command_that_is_installed_begins_there() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    script = EntryPoint("tandem", project["scripts"]["tandem"], "console_scripts")
    try:
        assert (script.module, script.load()) == ("tandem.__main__", main)
    finally:
        interrupts.raise_again()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
