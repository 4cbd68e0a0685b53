"""What a history proves. Pure: what clients saw and what a run without faults gives in, findings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.chaos.load import Asked, Ending

MAX_FINDINGS = 20
ROUTER_RETURNS_S = 15.0
"""How long after its death the router may refuse: it is started again, and finds its workers again."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one soak. It has passed if `findings` is empty."""

    num_by_ending: Mapping[str, int]
    num_tokens_checked: int
    num_lost: int
    """Requests without an end, and answers that lack tokens."""
    num_repeated: int
    """Streams that a client refused for a gap or a repetition."""
    num_wrong: int
    """Answers with other tokens than without faults, or that ended by an error that no fault excuses."""
    num_retried: int
    """Answers that took more than one attempt."""
    num_resumed: int
    """Streams that outlived their router."""
    findings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "requests": dict(self.num_by_ending),
            "tokens_checked": self.num_tokens_checked,
            "lost": self.num_lost,
            "repeated": self.num_repeated,
            "wrong": self.num_wrong,
            "retried": self.num_retried,
            "resumed": self.num_resumed,
            "findings": self.findings,
        }


def needs_check(asked: Asked) -> bool:
    """Whether anything came that can be compared."""
    return asked.num_tokens > 0


def judge(
    history: Iterable[Asked], expected: Mapping[int, list[list[int]]], router_deaths_s: Sequence[float]
) -> Verdict:
    """`expected`: by number, the tokens of each answer in a run without faults, for every request that `needs_check`.

    No stream may break off. A client may have to ask for the rest of one, and a request be refused with nobody to
    serve, only by a death of the router (`router_deaths_s`, on the history's clock): of each kind of worker one is
    whole at any moment.
    """
    by_ending: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    findings: list[str] = []
    for asked in history:
        by_ending[asked.ending.value if asked.ending else "without an end"] += 1
        counts["retried"] += asked.num_attempts > 1
        counts["resumed"] += asked.num_resumed > 0
        if needs_check(asked):
            counts["checked"] += asked.num_tokens
        wanted = expected[asked.number] if needs_check(asked) else []
        if fault := _fault_of(asked, wanted, router_deaths_s):
            what, why = fault
            counts[what] += 1
            findings.append(f"request {asked.number}, {asked.num_tokens} tokens: {why}")
    return Verdict(
        num_by_ending=by_ending,
        num_tokens_checked=counts["checked"],
        num_lost=counts["lost"],
        num_repeated=counts["repeated"],
        num_wrong=counts["wrong"],
        num_retried=counts["retried"],
        num_resumed=counts["resumed"],
        findings=findings[:MAX_FINDINGS],
    )


def _fault_of(asked: Asked, wanted: list[list[int]], router_deaths_s: Sequence[float]) -> tuple[str, str] | None:
    """Of which kind, and in words, is what is wrong with one request, if anything is."""
    match asked.ending:
        case None:
            return "lost", "it never ended"
        case Ending.HUNG | Ending.GIVEN_UP | Ending.BROKEN:
            return "lost", asked.error
        case Ending.UNAVAILABLE if not any(
            0 <= asked.ended_s - death_s < ROUTER_RETURNS_S for death_s in router_deaths_s
        ):
            return "lost", asked.error
        case Ending.WRONG:
            return "repeated" if asked.error.startswith("StreamBroken") else "wrong", asked.error
    num_deaths = sum(asked.began_s <= death_s <= asked.ended_s for death_s in router_deaths_s)
    if asked.num_resumed and not num_deaths:
        return "lost", "its stream broke, though its router lived"
    for sequence, whole in enumerate(wanted):
        token_ids = asked.answers.get(sequence, [])
        if token_ids != whole[: len(token_ids)]:
            return "wrong", _first_difference(token_ids, whole)
        if asked.ending is Ending.ANSWERED and len(token_ids) < len(whole):
            return "lost", f"of answer {sequence} there are {len(token_ids)}, without faults {len(whole)}"
    return None


def _first_difference(token_ids: list[int], wanted: list[int]) -> str:
    position = next((i for i, (a, b) in enumerate(zip(token_ids, wanted, strict=False)) if a != b), len(wanted))
    there = wanted[position] if position < len(wanted) else "the end"
    return f"token {position} is {token_ids[position]}, without faults {there}"
