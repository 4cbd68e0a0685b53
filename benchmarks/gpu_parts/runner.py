"""Parts in turn, each in a process of its own and within its time: what one breaks or holds is gone with it.

    run_parts ──> for each part: enough of the budget left? ── no ──> "not run: out of time"
                                        │ yes
                                        v
                  a process (own session) ──rows, as they are measured──> kept
                       ended, raised, died, took too long ──> "", "failed: why", "not run: why"; its session is killed

An illegal access of one kernel takes down all of a process' work on a GPU, and a hang never ends by itself.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.shapes import FULL, TINY, Sizes

OUT_OF_TIME = "not run: out of time"
MIN_SHARE = 1 / 3
"""Of a part's time: with less of the budget left it is not begun. Most need a tenth of it to begin at all."""
EXIT_S = 5.0
"""How long a part's process may take to end after its last word."""


class NotRun(Exception):  # noqa: N818 - named for what happened
    """A part cannot run here, and that is no failure. The message is a clause that says why."""


class OutOfTime(Exception):  # noqa: N818 - named for what happened
    """A part has ended its work itself, with its time, to say in its rows how far it came."""


def require(*modules: str) -> None:
    """Raises `NotRun` where some of `modules` are not installed."""
    missing = [name for name in modules if not is_installed(name)]
    if missing:
        raise NotRun(f"not installed: {', '.join(missing)} (docs/gpu.md says what to carry)")


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every part is told."""

    device: str
    """ "cuda" or "cpu" """
    is_tiny: bool
    results: Path
    """Folder for what is to be kept beside the table: logs."""
    known: Mapping[str, float] = field(default_factory=dict)
    """Numbers of parts before, by the names of their rows: what the device can do, above all (`floors.py`)."""
    parts_before: tuple[str, ...] = ()
    """Of this run: what they could not measure is not in `known`, either."""
    limit_s: float = math.inf
    """What is left to the part, from its beginning."""

    @property
    def sizes(self) -> Sizes:
        return TINY if self.is_tiny else FULL


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    about: str
    measure: Callable[[Setting], Iterator[Row]]
    """Of a module's top level: another process finds it by its name. Raises `NotRun`, `OutOfTime`, and whatever else
    goes wrong."""
    limit_s: float
    """It is ended after so long."""


@dataclass(frozen=True, kw_only=True)
class PartResult:
    name: str
    rows: list[Row]
    seconds: float
    problem: str = ""
    """ "failed: why" or "not run: why"; empty: it ran to its end."""

    @property
    def is_bad(self) -> bool:
        """What it found, or did not, makes the run fail. What a machine cannot run at all does not."""
        is_unfinished = self.problem.startswith("failed") or self.problem == OUT_OF_TIME
        return is_unfinished or any(row.is_wrong for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() for row in self.rows]
        return {"part": self.name, "seconds": round(self.seconds, 1), "problem": self.problem, "rows": rows}


RunPart = Callable[[Part, Setting, float, Callable[[Row], None]], str]
"""(part, setting, seconds it may take, what is told of each row) -> its problem"""


def in_process(part: Part, setting: Setting, limit_s: float, on_row: Callable[[Row], None]) -> str:
    """Run a part in a process of its own. Returns its problem, "" if there is none."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    setting = replace(setting, limit_s=limit_s)
    process = context.Process(target=_serve, args=(theirs, part, setting), name=part.name)
    process.start()
    theirs.close()
    deadline_s = time.monotonic() + limit_s
    try:
        while ours.poll(max(0.0, deadline_s - time.monotonic())):
            try:
                message = ours.recv()
            except EOFError:
                process.join(EXIT_S)
                return f"failed: its process ended with {process.exitcode}"
            if not isinstance(message, Row):
                process.join(EXIT_S)
                return str(message)
            on_row(message)
        return _too_long(part, limit_s)
    finally:
        _kill_session(process)
        ours.close()


def _too_long(part: Part, limit_s: float) -> str:
    if limit_s < part.limit_s:
        return f"failed: the budget ended {limit_s:.0f} s after its beginning"
    return f"failed: took more than {limit_s:.0f} s"


def _serve(pipe: Connection, part: Part, setting: Setting) -> None:
    """In the part's process: rows, then its problem."""
    os.setsid()
    try:
        for row in part.measure(setting):
            pipe.send(row)
    except NotRun as why:
        pipe.send(f"not run: {why}")
    except OutOfTime:
        pipe.send(_too_long(part, setting.limit_s))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    else:
        pipe.send("")


def _kill_session(process: BaseProcess) -> None:
    """The part's process, and what it started and left."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()  # it has no session yet, or is gone
    process.join()


def run_parts(
    parts: Sequence[Part],
    setting: Setting,
    *,
    budget_s: float,
    say: Callable[[str], None],
    on_result: Callable[[PartResult], None],
    run_part: RunPart = in_process,
    known_of: Callable[[Sequence[Row]], Mapping[str, float]] = lambda _: {},
    clock: Callable[[], float] = time.monotonic,
) -> list[PartResult]:
    """One result for each part, in order. `on_result` hears of each at once; `known_of` finds in a part's rows what
    later ones need."""
    begun_s = clock()
    results = []
    for part in parts:
        start_s = clock()
        left_s = budget_s - (start_s - begun_s)
        rows: list[Row] = []
        if left_s < MIN_SHARE * part.limit_s:
            problem = OUT_OF_TIME
        else:
            say(f"{part.name}: {part.about}")
            problem = run_part(part, setting, min(part.limit_s, left_s), rows.append)
        result = PartResult(name=part.name, rows=rows, seconds=clock() - start_s, problem=problem)
        say(f"{part.name}: {_said_of(result)}")
        results.append(result)
        on_result(result)
        known = {**setting.known, **known_of(rows)}
        setting = replace(setting, known=known, parts_before=(*setting.parts_before, part.name))
    return results


def _said_of(result: PartResult) -> str:
    num_wrong = sum(row.is_wrong for row in result.rows)
    parts = [result.problem or "done", f"{len(result.rows)} rows"]
    if num_wrong:
        parts.append(f"{num_wrong} WRONG")
    return f"{', '.join(parts)}, {result.seconds:.1f} s"
