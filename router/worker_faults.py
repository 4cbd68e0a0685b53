"""What is held against workers, and against pairs of them between which transfers fail. `ejection` decides, by names;
this gives them, and tells the log.
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
    """Of one router."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._ejections = Ejections()
        self._pairs: dict[str, WorkerPair] = {}
        """By name, those that have failed."""

    def is_ejected(self, who: Who) -> bool:
        """Whether it is not in use, or only to try."""
        return self._ejections.is_ejected(_name_of(who))

    def ejected_pairs(self) -> list[WorkerPair]:
        """All that are not in use, or only to try. There are too many pairs to ask of each."""
        self._pairs = {name: pair for name, pair in self._pairs.items() if name in self._ejections.troubles}
        return [pair for pair in self._pairs.values() if self.is_ejected(pair)]

    def is_set_aside(self, who: Who, now_s: float) -> bool:
        """Whether requests are to go elsewhere now."""
        return bool(self._ejections.troubles) and self._ejections.is_set_aside(_name_of(who), now_s)

    def begin(self, plan: Plan, now_s: float) -> list[Trial]:
        """An attempt is planned: each of its workers is on trial, and the two together."""
        on_trial = [who for who in (plan.decode, plan.prefill, plan.pair) if who is not None]
        return [self._ejections.begin(_name_of(who), now_s) for who in on_trial]

    def note_success(self, who: Who, trials: Sequence[Trial]) -> None:
        """It did its part of the attempt whose `trials` these are."""
        for trial in _those_of(who, trials):
            if trial.succeed():
                _log.info("worker readmitted" if isinstance(who, WorkerKey) else "pair readmitted", extra=_extra(who))

    def note_fault(self, who: Who, trials: Sequence[Trial]) -> None:
        """The attempt whose `trials` these are failed, and that is its own fault."""
        if isinstance(who, WorkerPair):
            self._pairs[_name_of(who)] = who
        for trial in _those_of(who, trials):
            self._log_ejection(who, trial.fail(self._now_s()))

    def count(self, worker: WorkerKey) -> None:
        """A failure of the worker itself, whatever it was doing."""
        self._log_ejection(worker, self._ejections.count_failure(_name_of(worker), self._now_s()))

    def _log_ejection(self, who: Who, pause_s: float | None) -> None:
        if pause_s is not None:
            message = "worker ejected" if isinstance(who, WorkerKey) else "pair kept apart, transfers fail"
            _log.warning(message, extra={**_extra(who), "pause_s": pause_s})


def keys_of(who: Who) -> list[WorkerKey]:
    return [who] if isinstance(who, WorkerKey) else [who.prefill, who.decode]


def _name_of(who: Who) -> str:
    """A worker that is restarted is the same, a pair is another: it may be what the restart was for."""
    if isinstance(who, WorkerKey):
        return who.worker_id
    return " to ".join(f"{key.worker_id}/{key.incarnation}" for key in keys_of(who))


def _those_of(who: Who, trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.name == _name_of(who)]


def _extra(who: Who) -> dict[str, str]:
    """For the log."""
    names = [key.worker_id for key in keys_of(who)]
    return {"worker": names[0]} if isinstance(who, WorkerKey) else {"prefill": names[0], "decode": names[1]}
