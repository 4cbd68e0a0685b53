"""Decides which workers, and which pairs of them, are left out because they fail again and again, and when each is
tried again. Pure: times are passed in, nothing is sent.

    IN USE ──3 failures in a row──> EJECTED ──its pause is over──> PROBATION ──a success──> IN USE
      │ ^                           ^  1, 2, 4 ... 30 s                │ one request at a time, as a probe
      └─┘ a success: none in a row  └──────────── a failure ───────────┘

- A worker is identified by its id, not by its process: one that dies, is restarted and dies again is the same worker. A
  pair is a prefill and a decode worker between which transfers fail. The router cannot tell which of the two is to
  blame, so it keeps them apart, and both serve with others. What this list says about a worker applies to a pair, too.
- A failure is the worker's own fault: an attempt that it failed, a broken protocol, a session lost with requests on it,
  an engine that is stalled with requests in it. The callers decide what counts (`RequestState`, `KnownWorkers`).
- One event counts once. Attempts that were under way when a failure was counted may fail by the same cause, so their
  failures do not count. A lost session is one failure, however many requests it had.
- A success is a prompt computed and handed over, or an answer completed. The success of an attempt that began before
  the ejection says nothing about its cause, so it does not readmit the worker.
- If no other worker is left, ejected ones are used all the same (`WorkerPool.choose`). Failures during the pause do not
  count; a success does, and readmits.

Ejection after failures in a row, for a time that grows with each ejection up to a bound, is Envoy's outlier detection.
There the time grows linearly and a host returns to full use at once; here it doubles, and a probe goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES_TO_EJECT = 3
"""Failures in a row that eject a worker."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
PROBE_S = 5.0
"""If a probe takes longer than this, another one may start beside it, since an answer may take minutes."""
FORGET_S = 600.0
"""Failures older than this are forgotten, since worker ids may come and go for years."""


@dataclass(slots=True)
class _Trouble:
    """The failures of one worker."""

    num_in_row: int = 0
    num_ejections: int = 0
    """Ejections in a row. 0: the worker is in use."""
    failure: int = 0
    """Number of its last failure, counted over all workers."""
    failed_s: float = 0.0
    paused_until_s: float = 0.0
    probe: Trial | None = None
    probe_until_s: float = 0.0


class Ejections:
    """One per router. Workers without failures are not kept."""

    def __init__(self) -> None:
        self.troubles: dict[str, _Trouble] = {}
        """By name: a worker's id, or the name of a pair."""
        self._num_failures = 0
        """Failures of all workers so far: tells whether an attempt began before a failure."""

    def is_ejected(self, name: str) -> bool:
        """Whether the worker is ejected, including when it is on probation."""
        trouble = self.troubles.get(name)
        return trouble is not None and trouble.num_ejections > 0

    def is_left_out(self, name: str, now_s: float) -> bool:
        """Whether requests must not use the worker now. False if the next request would be its probe."""
        trouble = self.troubles.get(name)
        if trouble is None or not trouble.num_ejections:
            return False
        is_being_probed = trouble.probe is not None and now_s < trouble.probe_until_s
        return now_s < trouble.paused_until_s or is_being_probed

    def begin(self, name: str, now_s: float) -> Trial:
        """An attempt is planned on the worker. If the worker is on probation and has no probe, the attempt is its
        probe."""
        trial = Trial(self, name, self._num_failures)
        if self.is_ejected(name) and not self.is_left_out(name, now_s):
            trouble = self.troubles[name]
            trouble.probe = trial
            trouble.probe_until_s = now_s + PROBE_S
        return trial

    def count_failure(self, name: str, now_s: float) -> float | None:
        """Count one failure: of an attempt (`Trial.fail`), a lost session, or a stalled engine. Returns for how many
        seconds this ejects the worker; None: it does not."""
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
    """One attempt on one worker. Created by `Ejections.begin`; the caller must `end` it in any case."""

    ejections: Ejections
    name: str
    num_failures_before: int
    """Failures of all workers that were counted before the attempt began."""

    def end(self) -> None:
        """The attempt is over. If it was a probe without a verdict, the next attempt is the probe. May be repeated."""
        trouble = self._trouble
        if trouble is not None and trouble.probe is self:
            trouble.probe = None

    def succeed(self) -> bool:
        """The worker did its part. Returns whether this readmits it."""
        trouble = self._trouble
        if trouble is None or (trouble.num_ejections and self._is_older_than(trouble)):
            return False
        del self.ejections.troubles[self.name]
        return trouble.num_ejections > 0

    def fail(self, now_s: float) -> float | None:
        """The worker failed the attempt. Returns for how many seconds this ejects it; None: it does not."""
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
    """Seconds that the last of `num_ejections` ejections in a row lasts."""
    num_doublings = min(num_ejections - 1, 16)  # far beyond the bound, and no number grows forever
    return min(FIRST_PAUSE_S * 2.0**num_doublings, MAX_PAUSE_S)
