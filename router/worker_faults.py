"""Counts the faults of workers, and of pairs of workers between which transfers fail. `ejection` decides, by names;
this module names workers and pairs, and writes the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from router.ejection import Ejections, Trial
from router.request_events import Plan, WorkerKey, WorkerPair

_log = logging.getLogger(__name__)

Who: TypeAlias = WorkerKey | WorkerPair


class WorkerFaults:
    """The faults that one router has counted."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._ejections = Ejections()
        self._pairs: dict[str, WorkerPair] = {}
        """By name: the pairs that have failed."""

    def is_ejected(self, who: Who) -> bool:
        """Whether the worker or pair is left out or on probation."""
        return self._ejections.is_ejected(_name_of(who))

    def ejected_pairs(self) -> list[WorkerPair]:
        """All pairs that are left out or on probation. (There are too many pairs to ask for each.)"""
        self._pairs = {name: pair for name, pair in self._pairs.items() if name in self._ejections.troubles}
        return [pair for pair in self._pairs.values() if self.is_ejected(pair)]

    def is_left_out(self, who: Who, now_s: float) -> bool:
        """Whether requests must not use the worker or pair now."""
        return bool(self._ejections.troubles) and self._ejections.is_left_out(_name_of(who), now_s)

    def begin(self, plan: Plan, now_s: float) -> list[Trial]:
        """An attempt is planned: begin a trial of each of its workers, and of the pair."""
        on_trial = [who for who in (plan.decode, plan.prefill, plan.pair) if who is not None]
        return [self._ejections.begin(_name_of(who), now_s) for who in on_trial]

    def note_success(self, who: Who, trials: Sequence[Trial]) -> None:
        """The worker or pair did its part of the attempt to which `trials` belong."""
        for trial in _those_of(who, trials):
            if trial.succeed():
                _log.info("worker readmitted" if isinstance(who, WorkerKey) else "pair readmitted", extra=_extra(who))

    def note_fault(self, who: Who, trials: Sequence[Trial]) -> None:
        """The attempt to which `trials` belong failed by the fault of the worker or pair."""
        if isinstance(who, WorkerPair):
            self._pairs[_name_of(who)] = who
        for trial in _those_of(who, trials):
            self._log_ejection(who, trial.fail(self._now_s()))

    def count(self, worker: WorkerKey) -> None:
        """Count a failure of the worker that belongs to no single attempt."""
        self._log_ejection(worker, self._ejections.count_failure(_name_of(worker), self._now_s()))

    def _log_ejection(self, who: Who, pause_s: float | None) -> None:
        if pause_s is not None:
            message = "worker ejected" if isinstance(who, WorkerKey) else "worker pair not used: transfers fail"
            _log.warning(message, extra={**_extra(who), "pause_s": pause_s})


def keys_of(who: Who) -> list[WorkerKey]:
    return [who] if isinstance(who, WorkerKey) else [who.prefill, who.decode]


def _name_of(who: Who) -> str:
    """A restarted worker keeps its name. A pair with a restarted worker gets a new one: the restart may have repaired
    the transfers."""
    if isinstance(who, WorkerKey):
        return who.worker_id
    return " to ".join(f"{key.worker_id}/{key.incarnation}" for key in keys_of(who))


def _those_of(who: Who, trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.name == _name_of(who)]


def _extra(who: Who) -> dict[str, str]:
    """For the log."""
    names = [key.worker_id for key in keys_of(who)]
    return {"worker": names[0]} if isinstance(who, WorkerKey) else {"prefill": names[0], "decode": names[1]}
