"""Runs parts in turn, each in a separate process and within its time limit: damage and held resources end with the
process.

    run_parts ──> for each part: enough of the budget left? ── no ──> "not run: out of time"
                                        │ yes
                                        v
                  a process (own session) ──rows, as they are measured──> kept
                       ended, raised, died, took too long ──> "", "failed: why", "not run: why"; its session is killed

An illegal access by one kernel ends all work of its process on a GPU, and a hang never ends by itself. Consecutive
parts that do not measure times run in parallel. Processes are forked from one that has imported the modules given to
`import_before`, such as torch: an import takes as long as some parts do.
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
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.shapes import FULL, TINY, Sizes

OUT_OF_TIME = "not run: out of time"
MIN_SHARE = 1 / 3
"""A part is not started if less than this share of its time limit is left in the budget. Most parts need a tenth to
start."""
EXIT_S = 5.0
"""How long a part's process may take to exit after its last message."""


class NotRun(Exception):  # noqa: N818 - named for what happened
    """A part cannot run here, which is not a failure. The message is a clause with the reason."""


class OutOfTime(Exception):  # noqa: N818 - named for what happened
    """A part stopped by itself when its time ran out, to report in its rows how far it came."""


def require(*modules: str) -> None:
    """Raises `NotRun` if any of `modules` is not installed."""
    missing = [name for name in modules if not is_installed(name)]
    if missing:
        raise NotRun(f"not installed: {', '.join(missing)} (docs/gpu.md says what to carry)")


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The arguments of every part."""

    device: str
    """ "cuda" or "cpu" """
    is_tiny: bool
    results: Path
    """Folder for logs, which are kept beside the table."""
    known: Mapping[str, float] = field(default_factory=dict)
    """Numbers from earlier parts, by the names of their rows: above all the device's limits (`floors.py`)."""
    parts_before: tuple[str, ...] = ()
    """Names of the earlier parts in this run: numbers that they could not measure are missing in `known`."""
    limit_s: float = math.inf
    """The part's time limit, from its start."""

    @property
    def sizes(self) -> Sizes:
        return TINY if self.is_tiny else FULL


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    about: str
    measure: Callable[[Setting], Iterator[Row]]
    """A top-level function of a module, because another process finds it by name. Raises `NotRun`, `OutOfTime`, and any
    other error."""
    limit_s: float
    """The part is stopped after this time."""
    is_timed: bool = True
    """False: it measures no times, and runs in parallel with adjacent parts of this kind."""
    is_default: bool = True
    """False: it runs only if named in --only."""


@dataclass(frozen=True, kw_only=True)
class PartResult:
    name: str
    rows: list[Row]
    seconds: float
    problem: str = ""
    """ "failed: why" or "not run: why"; empty: it ran to its end."""

    @property
    def is_bad(self) -> bool:
        """Whether the run fails because of this part. A part that cannot run on this machine is not bad."""
        is_unfinished = self.problem.startswith("failed") or self.problem == OUT_OF_TIME
        return is_unfinished or any(row.is_wrong for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() for row in self.rows]
        return {"part": self.name, "seconds": round(self.seconds, 1), "problem": self.problem, "rows": rows}


class _Running:
    """A part in a separate process. `end` must be called."""

    def __init__(self, part: Part, setting: Setting) -> None:
        context = multiprocessing.get_context("forkserver")
        self.part = part
        self.pipe, theirs = context.Pipe(duplex=False)
        self._limit_s = setting.limit_s
        self._process = context.Process(target=_serve, args=(theirs, part, setting), name=part.name)
        self._process.start()
        theirs.close()
        self.deadline_s = time.monotonic() + setting.limit_s
        self.problem: str | None = None
        """None while it runs."""

    def hear(self, on_row: OnRow) -> None:
        """Handle the next message of the process: a row, its problem, or its death."""
        try:
            message = self.pipe.recv()
        except EOFError:
            self._process.join(EXIT_S)
            self.problem = f"failed: its process ended with {self._process.exitcode}"
            return
        if isinstance(message, Row):
            on_row(self.part, message)
        else:
            self._process.join(EXIT_S)
            self.problem = str(message)

    def give_up(self) -> None:
        self.problem = _too_long(self.part, self._limit_s)

    def end(self) -> None:
        _kill_session(self._process)
        self.pipe.close()


OnRow = Callable[[Part, Row], None]
OnEnd = Callable[[Part, str], None]
"""(part, its problem: "" if there is none)"""
RunGroup = Callable[[Sequence[Part], Setting, Sequence[float], OnRow, OnEnd], None]
"""(parts, setting, time limit of each part, callback for each row, callback for each part's end)"""


def import_before(*modules: str) -> None:
    """Import modules in the process from which parts are forked. Must be called before the first part."""
    multiprocessing.set_forkserver_preload(list(modules))


def side_by_side(
    parts: Sequence[Part], setting: Setting, limits_s: Sequence[float], on_row: OnRow, on_end: OnEnd
) -> None:
    """Run parts in parallel, each in a separate process."""
    running: list[_Running] = []
    try:
        for part, limit_s in zip(parts, limits_s, strict=True):
            running.append(_Running(part, replace(setting, limit_s=limit_s)))
        while running:
            left_s = min(one.deadline_s for one in running) - time.monotonic()
            ready = wait([one.pipe for one in running], max(0.0, left_s))
            for one in list(running):
                if one.pipe in ready:
                    one.hear(on_row)
                elif time.monotonic() >= one.deadline_s:
                    one.give_up()
                if one.problem is not None:
                    running.remove(one)
                    one.end()
                    on_end(one.part, one.problem)
    finally:
        for one in running:
            one.end()


def _too_long(part: Part, limit_s: float) -> str:
    if limit_s < part.limit_s:
        return f"failed: the budget ended {limit_s:.0f} s after its beginning"
    return f"failed: took more than {limit_s:.0f} s"


def _serve(pipe: Connection, part: Part, setting: Setting) -> None:
    """Runs in the part's process: sends rows, then the problem."""
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
    """Kill the part's process, and all processes that it has left."""
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
    run_group: RunGroup = side_by_side,
    known_of: Callable[[Sequence[Row]], Mapping[str, float]] = lambda _: {},
    clock: Callable[[], float] = time.monotonic,
) -> list[PartResult]:
    """One result for each part, in the order in which they end. `on_result` is called with each at once; `known_of`
    picks from the rows the numbers that later parts need."""
    begun_s = clock()
    results: list[PartResult] = []
    for group in groups_of(parts):
        start_s = clock()
        left_s = budget_s - (start_s - begun_s)
        rows: dict[str, list[Row]] = {part.name: [] for part in group}

        def on_end(part: Part, problem: str, rows: Any = rows, start_s: float = start_s) -> None:
            result = PartResult(name=part.name, rows=rows[part.name], seconds=clock() - start_s, problem=problem)
            say(f"{part.name}: {_said_of(result)}")
            results.append(result)
            on_result(result)

        begun = [part for part in group if left_s >= MIN_SHARE * part.limit_s]
        for part in group:
            if part in begun:
                say(f"{part.name}: {part.about}")
            else:
                on_end(part, OUT_OF_TIME)
        limits_s = [min(part.limit_s, left_s) for part in begun]
        run_group(begun, setting, limits_s, lambda part, row, rows=rows: rows[part.name].append(row), on_end)
        known = {**setting.known, **known_of([row for each in rows.values() for row in each])}
        setting = replace(setting, known=known, parts_before=(*setting.parts_before, *rows))
    return results


def groups_of(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Groups of parts to run in parallel: consecutive ones that measure no times. Any other part runs alone."""
    for is_timed, neighbours in groupby(parts, lambda part: part.is_timed):
        if is_timed:
            yield from ([part] for part in neighbours)
        else:
            yield list(neighbours)


def _said_of(result: PartResult) -> str:
    num_wrong = sum(row.is_wrong for row in result.rows)
    parts = [result.problem or "done", f"{len(result.rows)} rows"]
    if num_wrong:
        parts.append(f"{num_wrong} WRONG")
    return f"{', '.join(parts)}, {result.seconds:.1f} s"
