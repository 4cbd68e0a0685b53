"""Which workers are left out, and for how long, by a clock that the test sets. No network."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.ejection import FAILURES_TO_EJECT, FORGET_S, MAX_PAUSE_S, PROBE_S, Ejections, Trial, pause_of


class Clock:
    """One worker's ejections, and the time."""

    def __init__(self) -> None:
        self.ejections = Ejections()
        self.now_s = 100.0

    @property
    def is_left_out(self) -> bool:
        return self.ejections.is_left_out("w", self.now_s)

    def begin(self, worker_id: str = "w") -> Trial:
        return self.ejections.begin(worker_id, self.now_s)

    def fail(self, worker_id: str = "w") -> float | None:
        """Begin an attempt that fails."""
        trial = self.begin(worker_id)
        pause_s = trial.fail(self.now_s)
        trial.end()
        return pause_s

    def eject(self) -> None:
        assert [self.fail() for _ in range(FAILURES_TO_EJECT)] == [None] * (FAILURES_TO_EJECT - 1) + [pause_of(1)]


def test_three_failures_in_a_row_eject() -> None:
    clock = Clock()
    assert clock.fail() is None
    assert clock.fail() is None
    assert not clock.begin().succeed()
    assert clock.fail() is None
    assert clock.fail() is None
    assert not clock.is_left_out
    assert clock.fail() == pause_of(1)
    assert clock.is_left_out
    assert clock.ejections.is_ejected("w")


def test_other_workers_are_not_concerned() -> None:
    clock = Clock()
    clock.fail("other")
    clock.eject()
    assert not clock.ejections.is_left_out("other", clock.now_s)
    assert not clock.ejections.is_ejected("nobody has heard of it")


def test_after_the_pause_one_request_goes_and_its_success_readmits() -> None:
    clock = Clock()
    clock.eject()
    clock.now_s += pause_of(1) - 0.01
    assert clock.is_left_out
    clock.now_s += 0.01
    assert not clock.is_left_out
    probe = clock.begin()
    assert clock.is_left_out
    assert probe.succeed()
    probe.end()
    assert not clock.is_left_out
    assert not clock.ejections.is_ejected("w")


def test_a_probe_that_fails_ejects_for_twice_as_long_up_to_a_bound() -> None:
    clock = Clock()
    clock.eject()
    pauses = [pause_of(1)]
    for _ in range(7):
        clock.now_s += pauses[-1]
        pause_s = clock.fail()
        assert pause_s is not None
        pauses.append(pause_s)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert pause_of(10**6) == MAX_PAUSE_S
    clock.now_s += pauses[-1]
    assert clock.begin().succeed()
    clock.eject()  # starts again from the shortest pause


@pytest.mark.parametrize("verdict", ["none", "none in time"])
def test_a_probe_that_says_nothing_makes_room_for_another(verdict: str) -> None:
    clock = Clock()
    clock.eject()
    clock.now_s += pause_of(1)
    probe = clock.begin()
    beside = clock.begin()  # as when no other worker is left
    beside.end()
    assert clock.is_left_out
    if verdict == "none":
        probe.end()
        probe.end()
    else:
        clock.now_s += PROBE_S
    assert not clock.is_left_out
    clock.begin()
    assert clock.is_left_out
    probe.end()  # a late end of the old probe
    assert clock.is_left_out


def test_what_was_under_way_when_a_failure_counted_is_not_another_failure() -> None:
    clock = Clock()
    trials = [clock.begin() for _ in range(100)]
    assert [trial.fail(clock.now_s) for trial in trials] == [None] * 100
    assert clock.fail() is None
    assert clock.fail() == pause_of(1)


def test_what_began_before_the_ejection_does_not_readmit_but_what_began_since_does() -> None:
    clock = Clock()
    old = clock.begin()
    clock.eject()
    assert not old.succeed()
    assert clock.is_left_out
    assert clock.begin().succeed()
    assert not clock.is_left_out


def test_failures_during_the_pause_are_no_news() -> None:
    clock = Clock()
    clock.eject()
    for _ in range(10):
        assert clock.fail() is None
    clock.now_s += pause_of(1)
    assert not clock.is_left_out
    assert clock.fail() == pause_of(2)


def test_a_lost_session_is_one_failure_and_what_it_took_along_is_none() -> None:
    clock = Clock()
    for _ in range(FAILURES_TO_EJECT - 1):
        trials = [clock.begin() for _ in range(100)]
        assert clock.ejections.count_failure("w", clock.now_s) is None
        assert [trial.fail(clock.now_s) for trial in trials] == [None] * 100
    assert clock.ejections.count_failure("w", clock.now_s) == pause_of(1)


def test_failures_are_forgotten_and_so_are_workers() -> None:
    clock = Clock()
    for index in range(1000):
        clock.fail(f"worker-{index}")
        clock.now_s += FORGET_S / 10
    assert len(clock.ejections.troubles) <= 11


OPERATIONS = st.lists(
    st.one_of(
        st.just("begin"),
        st.just("lose session"),
        st.tuples(st.sampled_from(["succeed", "fail", "end"]), st.integers(0, 5)),
        st.sampled_from([0.3, 1.0, 2.0, 8.0, 30.0]),
    ),
    max_size=60,
)


@settings(max_examples=400, derandomize=True)
@given(OPERATIONS)
def test_whatever_happens(operations: list[object]) -> None:
    """A worker is not ejected before three failures, not used during a pause, probed once at a time, never lost for
    good."""
    clock, trials = Clock(), list[Trial]()
    num_counted = 0  # failures since the last success while in use: an upper bound of those in a row
    paused_until_s, probes = 0.0, list[tuple[Trial, float]]()
    for operation in operations:
        was_ejected, was_left_out = clock.ejections.is_ejected("w"), clock.is_left_out
        pause_s: float | None = None
        match operation:
            case "begin":
                trials.append(clock.begin())
                if was_ejected and not was_left_out:
                    assert clock.now_s >= paused_until_s
                    assert all(clock.now_s >= until_s for _, until_s in probes), "two probes at a time"
                    probes.append((trials[-1], clock.now_s + PROBE_S))
                    assert clock.is_left_out
            case "lose session":
                num_counted += 1
                pause_s = clock.ejections.count_failure("w", clock.now_s)
            case (str(verdict), int(index)) if index < len(trials):
                trial = trials[index]
                if verdict == "succeed":
                    is_readmitted = trial.succeed()
                    assert is_readmitted == (was_ejected and not clock.ejections.is_ejected("w"))
                    if not was_ejected or is_readmitted:
                        num_counted, probes = 0, []
                elif verdict == "fail":
                    num_counted += 1
                    pause_s = trial.fail(clock.now_s)
                else:
                    trial.end()
                    probes = [(probe, until_s) for probe, until_s in probes if probe is not trial]
            case float(seconds):
                clock.now_s += seconds
        if pause_s is not None:
            assert num_counted >= FAILURES_TO_EJECT
            assert clock.now_s >= paused_until_s
            paused_until_s, probes = clock.now_s + pause_s, []
        if clock.ejections.is_ejected("w") and clock.now_s < paused_until_s:
            assert clock.is_left_out
        if not clock.ejections.is_ejected("w"):
            assert not clock.is_left_out
        assert clock.ejections.is_ejected("w") == was_ejected or pause_s or operation != "begin"
    clock.now_s += MAX_PAUSE_S + PROBE_S
    assert not clock.is_left_out, "left out for ever"
