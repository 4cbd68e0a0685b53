"""The outcome of each request, and the progress of a run. Times are in seconds since the run's start."""

from __future__ import annotations

from dataclasses import dataclass, field

BROKEN_STREAM = "broken stream"
"""Code of an answer whose stream was not exact: a bug of the server."""
WRONG_LENGTH = "wrong length"
"""Code of an answer with more or fewer tokens than requested although the end of sequence is ignored."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one request, as the server counted."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """Cached tokens of the prompt; None if the server does not report them."""


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Latencies count from the moment when it was due, so that a client that sends late
    does not make the server look faster."""

    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    arrived_s: list[float] = field(default_factory=list)
    """When each message with tokens arrived."""
    num_tokens: int = 0
    usage: Usage | None = None
    code: str = ""
    """Empty: answered. Otherwise a status ("RESOURCE_EXHAUSTED", "429") or another error."""
    message: str = ""
    is_refused: bool = False
    """The server had no room, and refused the request before it sent anything."""

    @property
    def is_answered(self) -> bool:
        return not self.code

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.arrived_s[0] - self.due_s)

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first one; 0 for an answer of one token."""
        return 1e3 * (self.arrived_s[-1] - self.arrived_s[0]) / max(1, self.num_tokens - 1)

    @property
    def itl_ms(self) -> list[float]:
        """Times between one message and the next."""
        return [1e3 * (b - a) for a, b in zip(self.arrived_s, self.arrived_s[1:], strict=False)]

    @property
    def e2el_ms(self) -> float:
        return 1e3 * (self.arrived_s[-1] - self.due_s)


@dataclass(slots=True)
class Progress:
    """The progress of a run that is under way."""

    num_requests: int
    num_sent: int = 0
    num_answered: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    last_error: str = ""
    ended: list[Outcome] = field(default_factory=list)

    @property
    def num_running(self) -> int:
        return self.num_sent - self.num_answered - self.num_refused - self.num_failed

    def count(self, outcome: Outcome) -> None:
        """Count a request that has ended."""
        self.ended.append(outcome)
        if outcome.is_answered:
            self.num_answered += 1
        elif outcome.is_refused:
            self.num_refused += 1
        else:
            self.num_failed += 1
            self.last_error = f"{outcome.code}: {outcome.message}".rstrip(": ")
