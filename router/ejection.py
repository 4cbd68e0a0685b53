"""Which workers, and which pairs of them, are set aside because they fail again and again, and when each is tried
again. Pure: times are passed in, nothing is sent.

    IN USE ──3 failures in a row──> EJECTED ──its pause is over──> PROBATION ──a success──> IN USE
      │ ^                           ^  1, 2, 4 ... 30 s                │ one request at a time, as a probe
      └─┘ a success: none in a row  └──────────── a failure ───────────┘

- Workers are known by id, not by process: one that dies, is restarted and dies again is the same. A pair is a prefill
  and a decode worker between which transfers fail: nobody can tell from here which of them is to blame, so they are
  kept apart, and both serve with others. What is said here of a worker goes for a pair.
- A failure is what is the worker's own fault: an attempt that it failed, nonsense that it said, a session lost with
  requests on it, an engine that stands still with requests in it. Whoever calls decides that
  (`RequestState`, `KnownWorkers`).
- One event counts once. Attempts that were under way when a failure was counted may have ended by the same cause: that
  they fail too does not count. A session that is lost is one failure, however many requests it had.
- A success is a prompt computed and handed over, or an answer completed. One that began before the ejection says
  nothing of what ejected the worker; it does not readmit it.
- Where nobody else is left, ejected workers are used all the same (`WorkerPool.choose`). Failures then are no news
  until the pause is over; a success is, and readmits.

Ejection after failures in a row, for a time that grows with each ejection, up to a bound, is Envoy's outlier detection.
There the time grows by its base and a host comes back into full use; here it doubles, and a probe goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES_TO_EJECT = 3
"""In a row."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
PROBE_S = 5.0
"""A probe that takes longer is not waited for: another goes beside it. An answer may take minutes."""
FORGET_S = 600.0
"""Failures longer ago than this are forgotten: worker ids may come and go for years."""


@dataclass(slots=True)
class _Trouble:
    """What is held against one worker."""

    num_in_row: int = 0
    num_ejections: int = 0
    """In a row. 0: it is in use."""
    failure: int = 0
    """Number of its last failure, among those of all workers."""
    failed_s: float = 0.0
    paused_until_s: float = 0.0
    probe: Trial | None = None
    probe_until_s: float = 0.0


class Ejections:
    """One per router. Workers without failures are not kept."""

    def __init__(self) -> None:
        self.troubles: dict[str, _Trouble] = {}
        """By name: a worker's id, or whatever names a pair."""
        self._num_failures = 0
        """Counted ever, of all workers: tells what began before which failure."""

    def is_ejected(self, name: str) -> bool:
        """Whether it is not in use, on probation or not."""
        trouble = self.troubles.get(name)
        return trouble is not None and trouble.num_ejections > 0

    def is_set_aside(self, name: str, now_s: float) -> bool:
        """Whether requests are to go elsewhere now. Not, if the next one would be its probe."""
        trouble = self.troubles.get(name)
        if trouble is None or not trouble.num_ejections:
            return False
        is_being_probed = trouble.probe is not None and now_s < trouble.probe_until_s
        return now_s < trouble.paused_until_s or is_being_probed

    def begin(self, name: str, now_s: float) -> Trial:
        """An attempt is planned on the worker. On probation, it is the probe if there is none."""
        trial = Trial(self, name, self._num_failures)
        if self.is_ejected(name) and not self.is_set_aside(name, now_s):
            trouble = self.troubles[name]
            trouble.probe = trial
            trouble.probe_until_s = now_s + PROBE_S
        return trial

    def count_failure(self, name: str, now_s: float) -> float | None:
        """One failure: an attempt's (`Trial.fail`), or a session lost. Returns for how many seconds that ejects the
        worker, or None."""
        self._forget(now_s)
        trouble = self.troubles.setdefault(name, _Trouble())
        if now_s < trouble.paused_until_s:
            return None
        self._num_failures += 1
        trouble.failure = self._num_failures
        trouble.failed_s = now_s
        trouble.num_in_row += 1
        if not trouble.num_ejections and trouble.num_in_row < FAILURES_TO_EJECT:
            return None
        trouble.num_ejections += 1
        trouble.probe = None
        pause_s = pause_of(trouble.num_ejections)
        trouble.paused_until_s = now_s + pause_s
        return pause_s

    def _forget(self, now_s: float) -> None:
        for name, trouble in list(self.troubles.items()):
            if now_s - trouble.failed_s > FORGET_S:
                del self.troubles[name]


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One attempt on one worker. Made by `Ejections.begin`; to be ended, whatever was said of the worker before."""

    ejections: Ejections
    name: str
    num_failures_before: int
    """Counted until it began, of all workers."""

    def end(self) -> None:
        """The attempt is over. If it was a probe and nothing was said of the worker, the next one is. Repeatable."""
        trouble = self._trouble
        if trouble is not None and trouble.probe is self:
            trouble.probe = None

    def succeed(self) -> bool:
        """The worker did well. Returns whether that readmits it."""
        trouble = self._trouble
        if trouble is None or (trouble.num_ejections and self._is_older_than(trouble)):
            return False
        del self.ejections.troubles[self.name]
        return trouble.num_ejections > 0

    def fail(self, now_s: float) -> float | None:
        """The worker failed the attempt. Returns for how many seconds that ejects it, or None."""
        trouble = self._trouble
        if trouble is not None and self._is_older_than(trouble):
            return None
        return self.ejections.count_failure(self.name, now_s)

    @property
    def _trouble(self) -> _Trouble | None:
        return self.ejections.troubles.get(self.name)

    def _is_older_than(self, trouble: _Trouble) -> bool:
        """Whether the attempt began before the worker's last failure."""
        return self.num_failures_before < trouble.failure


def pause_of(num_ejections: int) -> float:
    """Seconds that the last of `num_ejections` in a row lasts."""
    num_doublings = min(num_ejections - 1, 16)  # far beyond the bound, and no number grows for ever
    return min(FIRST_PAUSE_S * 2.0**num_doublings, MAX_PAUSE_S)
