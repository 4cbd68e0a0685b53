"""Judges the history of a soak. Pure: what clients saw, and the answers of a run without faults in; findings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from tandem.chaos.asked import Asked, Ending, Heard, Way

MAX_FINDINGS = 20
RETURNS_S = 15.0
"""How long after its end a router may refuse requests: it must be started again and find its workers again. For the
same time, a gateway's port may be closed."""
DYING_S = 1.0
"""After a gateway was killed, its sockets may still accept connections for this time, until its memory is freed."""

LOGPROB_SLACK = 1e-3
"""On a GPU, a token's logprob may differ in its last bits in another batch, even if the token is the same."""


@dataclass(frozen=True, slots=True)
class Absence:
    """The absence of a process that was killed or told to leave, on the history's clock."""

    since_s: float
    """From then on, the process takes nothing new."""
    gone_s: float
    """When the process was gone; a killed one is gone at once."""
    grace_s: float = 0.0
    """Running requests may go on for this time after `since_s`."""

    @property
    def was_told(self) -> bool:
        """Whether the process was told to leave, and not killed."""
        return self.gone_s > self.since_s

    def is_within(self, asked: Asked) -> bool:
        """Whether the process was leaving, or ended, while the request ran."""
        return self.since_s <= asked.ended_s and asked.began_s <= self.gone_s

    def is_behind(self, asked: Asked) -> bool:
        """Whether the absence may be the reason why the request ended without finding the process."""
        return self.since_s <= asked.ended_s < self.gone_s + RETURNS_S

    def may_have_cut(self, asked: Asked) -> bool:
        """Whether the request's connection to the process may have ended with it. A process that leaves finishes its
        requests, or says that it cannot; but a connection that it has not accepted yet ends."""
        if self.was_told:
            return not asked.answers and abs(asked.began_s - self.since_s) <= DYING_S
        return asked.began_s - DYING_S <= self.gone_s <= asked.ended_s

    def may_have_said_so(self, asked: Asked) -> bool:
        """Whether the process may have told the request that its grace period is over. A process that has gone before
        that tells nothing."""
        over_s = self.since_s + self.grace_s
        return self.was_told and asked.began_s <= over_s <= min(asked.ended_s, self.gone_s)


@dataclass(frozen=True, slots=True)
class Absences:
    """The absences of each router, and of each gateway."""

    routers: Sequence[Sequence[Absence]] = ((),)
    gateways: Sequence[Sequence[Absence]] = ((),)


def _has_none(absences: Sequence[Sequence[Absence]], asked: Asked) -> bool:
    """Whether the request may have found none of these processes (all routers, or all gateways)."""
    return all(any(each.is_behind(asked) for each in of_one) for of_one in absences)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one soak, which has passed if `findings` is empty."""

    num_by_ending: Mapping[str, int]
    num_by_way: Mapping[str, int]
    num_by_model: Mapping[str, int]
    """Requests by adapter; empty name: the model itself."""
    num_tokens_checked: int
    num_lost: int
    """Requests without an end, and answers that lack tokens."""
    num_repeated: int
    """Streams that a client refused for a gap or a repetition."""
    num_wrong: int
    """Answers that differ from those without faults, or that ended with an error that no fault excuses."""
    num_retried: int
    """Answers that took more than one attempt."""
    num_resumed: int
    """Streams that outlived their router."""
    num_moved: int
    """Requests of whose answers some moved to a worker with less to do, as they ran."""
    findings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "requests": dict(self.num_by_ending),
            "ways": dict(self.num_by_way),
            "models": dict(self.num_by_model),
            "tokens_checked": self.num_tokens_checked,
            "lost": self.num_lost,
            "repeated": self.num_repeated,
            "wrong": self.num_wrong,
            "retried": self.num_retried,
            "resumed": self.num_resumed,
            "moved": self.num_moved,
            "findings": self.findings,
        }


def needs_check(asked: Asked) -> bool:
    """Whether something came that can be compared, or the answer counts as complete."""
    return asked.num_tokens > 0 or asked.ending is Ending.ANSWERED


def judge(
    history: Sequence[Asked],
    expected: Mapping[int, list[Heard]],
    absences: Absences,
    of_model: Mapping[int, list[Heard]] | None = None,
    of_others: Mapping[int, Sequence[list[Heard]]] | None = None,
) -> Verdict:
    """
    expected: by request number, the answers in a run without faults, for every request that `needs_check`.
    of_model: the model's own answers to some requests for adapters.
    of_others: the answers of other adapters whose files are, or were, under the requested name; all answers to a
        request must be one adapter's.

    No stream may break off, except over HTTP if its gateway is killed, or leaves and can wait no longer. A client may
    have to resume a stream only because of an absence of a router, and a request may be refused as unavailable only
    because of absences of all routers: at any moment, one worker of each role has no fault, and a gateway that is back
    serves at once.
    """
    by_ending: Counter[str] = Counter()
    by_way: Counter[str] = Counter()
    by_model: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    findings: list[str] = []
    for asked in history:
        by_ending[asked.ending.value if asked.ending else "without an end"] += 1
        by_way[asked.way.value] += 1
        by_model[asked.model] += 1
        counts["retried"] += asked.num_attempts > 1
        counts["resumed"] += asked.num_resumed > 0
        counts["moved"] += asked.num_moves > 0
        if needs_check(asked):
            counts["checked"] += asked.num_tokens
        wanted = [expected[asked.number], *(of_others or {}).get(asked.number, ())] if needs_check(asked) else [[]]
        faults = [_fault_of(asked, each, absences) for each in wanted]
        if fault := faults[0] if all(faults) else None:
            what, why = fault
            counts[what] += 1
            to_whom = f" to {asked.model}" if asked.model else ""
            findings.append(f"request {asked.number}{to_whom} ({asked.way.value}), {asked.num_tokens} tokens: {why}")
    findings += _not_told_apart(history, expected, of_model or {})
    return Verdict(
        num_by_ending=by_ending,
        num_by_way=by_way,
        num_by_model=by_model,
        num_tokens_checked=counts["checked"],
        num_lost=counts["lost"],
        num_repeated=counts["repeated"],
        num_wrong=counts["wrong"],
        num_retried=counts["retried"],
        num_resumed=counts["resumed"],
        num_moved=counts["moved"],
        findings=findings[:MAX_FINDINGS],
    )


def _fault_of(asked: Asked, wanted: list[Heard], absences: Absences) -> tuple[str, str] | None:
    """What is wrong with one request, if anything: the kind ("lost", "repeated", "wrong"), and why."""
    of_gateways = [*chain(*absences.gateways)]
    was_told = asked.way is not Way.GRPC and any(each.may_have_said_so(asked) for each in of_gateways)
    match asked.ending:
        case None:
            return "lost", "it never ended"
        case Ending.HUNG:
            return "lost", f"{asked.error}; {_last_of(asked)}"
        case Ending.BROKEN:
            return "lost", asked.error
        case Ending.GIVEN_UP if not was_told:
            return "lost", asked.error
        case Ending.UNAVAILABLE if not (was_told or _has_none(absences.routers, asked)):
            return "lost", asked.error
        case Ending.NO_GATEWAY if not _has_none(absences.gateways, asked):
            return "lost", asked.error
        case Ending.CUT if not any(each.may_have_cut(asked) for each in of_gateways):
            return "lost", f"its gateway lived: {asked.error}"
        case Ending.WRONG:
            return "repeated" if asked.error.startswith("StreamBroken") else "wrong", asked.error
    if asked.num_resumed and not any(each.is_within(asked) for each in chain(*absences.routers)):
        return "lost", "its stream broke, though all routers lived"
    is_whole = asked.ending is Ending.ANSWERED
    for sequence, whole in enumerate(wanted):
        if fault := _difference(asked.answers.get(sequence, Heard()), whole, is_whole=is_whole):
            what, why = fault
            return what, f"answer {sequence}: {why}"
    return None


def _last_of(asked: Asked) -> str:
    """When its last tokens came: shortly before the deadline, if only the machine is slow."""
    if not asked.heard_s:
        return "nothing has come of it"
    before_s = asked.ended_s - asked.heard_s
    return f"the last tokens came {before_s:.1f} s before (if this machine is too slow for the load: --deadline-s)"


def _difference(heard: Heard, whole: Heard, *, is_whole: bool) -> tuple[str, str] | None:
    """How `heard` differs from the answer without faults: it must be its beginning, or equal to it if it `is_whole`."""
    parts: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("token", heard.token_ids, whole.token_ids),
        ("character", heard.text, whole.text),
        ("logprob", heard.logprobs, whole.logprobs),
    ]
    for name, came, wanted in parts:
        if not all(_is_same(a, b) for a, b in zip(came, wanted, strict=False)) or len(came) > len(wanted):
            return "wrong", _first_difference(name, came, wanted)
        if is_whole and len(came) < len(wanted):
            return "lost", f"there are {len(came)} {name}s, without faults {len(wanted)}"
    if is_whole and heard.finish_reason != whole.finish_reason:
        return "wrong", f"it ended by {heard.finish_reason!r}, without faults by {whole.finish_reason!r}"
    return None


def _is_same(a: Any, b: Any) -> bool:
    """Whether two tokens, characters or logprobs are the same. Logprobs may differ by `LOGPROB_SLACK`, but not in where
    the token's text begins."""
    return a[1] == b[1] and abs(a[0] - b[0]) <= LOGPROB_SLACK if isinstance(a, tuple) else bool(a == b)


def _first_difference(name: str, came: Sequence[Any], wanted: Sequence[Any]) -> str:
    differing = (i for i, (a, b) in enumerate(zip(came, wanted, strict=False)) if not _is_same(a, b))
    position = next(differing, len(wanted))
    there = repr(wanted[position]) if position < len(wanted) else "the end"
    return f"{name} {position} is {came[position]!r}, without faults {there}"


def _not_told_apart(
    history: Sequence[Asked], expected: Mapping[int, list[Heard]], of_model: Mapping[int, list[Heard]]
) -> list[str]:
    """Findings about adapters whose answers are all equal to the model's own: they do not show that the adapter was
    used."""
    is_other: dict[str, bool] = {}
    for asked in history:
        if asked.number in of_model:
            # Compare tokens only: on some devices, logprobs differ in their last bits in another batch.
            said, of_itself = ([heard.token_ids for heard in answers[asked.number]] for answers in (expected, of_model))
            differs = said != of_itself
            is_other[asked.model] = is_other.get(asked.model, False) or differs
    return [f"adapter {name}: it answers as the model itself does" for name, other in is_other.items() if not other]
