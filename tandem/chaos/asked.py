"""One request of a soak, and what its client saw: what was asked and how, what came, how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from protos.tandem_inference_pb2 import TokenLogprobs
from tandem.answer import Answer
from tandem.requests import Prompt

DEADLINE_S = 60.0
"""Of every request. None may meet it: waiting that long is hanging."""


class Way(Enum):
    """How a request is asked. The value is how a report names it."""

    GRPC = "gRPC"
    COMPLETIONS = "completions"
    CHATS = "chats"
    """These two over HTTP, as OpenAI's API has them, through the gateway."""


class Ending(Enum):
    """How a client saw its request end. The value is how a report names it."""

    ANSWERED = "answered"
    LEFT = "left by their clients"
    OVERLOADED = "refused: overload"
    UNAVAILABLE = "refused: nobody to serve"
    NO_GATEWAY = "refused: no gateway there"
    """Nobody listens where it was."""
    BROKEN = "broken off"
    """After some tokens, since no router was there any more."""
    CUT = "cut off with their gateway"
    """An HTTP connection that ended before the answer did, maybe before it began: nobody can go on with it."""
    GIVEN_UP = "given up"
    """After some tokens, by the router: nobody was left to go on with it. Or by a gateway that leaves."""
    HUNG = "hung"
    WRONG = "ended wrongly"
    """By an error that nothing of this excuses, or a stream with a gap or a repetition."""


@dataclass(slots=True)
class Heard:
    """Of one answer, what has come."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple[float, int]] = field(default_factory=list)
    """Of each token, where they were asked for: its number, and where in the text it begins."""
    finish_reason: str = ""
    """Empty: it goes on, or it broke off."""

    @classmethod
    def of_answer(cls, answer: Answer) -> Heard:
        return cls(answer.token_ids, answer.text, numbers_of(answer.logprobs), answer.finish_reason)


def numbers_of(logprobs: Iterable[TokenLogprobs]) -> list[tuple[float, int]]:
    """As `Heard` has them."""
    return [(each.sampled.logprob, each.text_offset) for each in logprobs]


@dataclass(slots=True)
class Asked:
    """One request, on the wire "soak-" and its number."""

    number: int
    prompt: Prompt
    sampling: dict[str, Any]
    n: int = 1
    way: Way = Way.GRPC
    model: str = ""
    """An adapter. Empty: the model itself."""
    answers: dict[int, Heard] = field(default_factory=dict)
    """Those of its `n` answers that have begun."""
    ending: Ending | None = None
    """None: it has none, which is worse than any."""
    error: str = ""
    num_attempts: int = 0
    """As the last messages say, at most."""
    num_resumed: int = 0
    """How often the client asked for the rest of an answer, since the stream broke. Over HTTP the gateway does so,
    and does not tell."""
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0

    @property
    def request_id(self) -> str:
        return f"soak-{self.number}"

    @property
    def num_tokens(self) -> int:
        """Of all that has come."""
        return sum(len(heard.token_ids) for heard in self.answers.values())

    def heard(self, sequence: int) -> Heard:
        """Of one of its answers, which begins with this if it has not yet."""
        return self.answers.setdefault(sequence, Heard())


class EndedAs(Exception):  # noqa: N818 - how it ended may be as it should
    """A request has ended otherwise than with its whole answer."""

    def __init__(self, ending: Ending, why: str) -> None:
        super().__init__(f"{ending.value}: {why}")
        self.ending = ending
        self.why = why
