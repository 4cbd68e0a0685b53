"""One request of a soak, as its client saw it: what was sent and how, what came, and how it ended."""

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
"""The default deadline of requests. A request that reaches it has hung, which must not happen; or the machine is too
slow for the load."""


class Way(Enum):
    """How a request is sent. The values are the names in reports."""

    GRPC = "gRPC"
    COMPLETIONS = "completions"
    CHATS = "chats"
    """This and the previous one: over HTTP through the gateway, with OpenAI's API."""


class Ending(Enum):
    """How a client saw its request end. The values are the names in reports."""

    ANSWERED = "answered"
    LEFT = "left by their clients"
    OVERLOADED = "refused: overload"
    UNAVAILABLE = "refused: nobody to serve"
    NO_GATEWAY = "refused: no gateway there"
    """No process listened on the gateway's port."""
    BROKEN = "broken off"
    """The stream broke after some tokens, since no router was there any more."""
    CUT = "cut off with their gateway"
    """The HTTP connection ended before the answer did, perhaps before it began: the answer cannot be continued."""
    GIVEN_UP = "given up"
    """The router gave up after some tokens, since no worker could continue; or a gateway that was leaving gave up."""
    HUNG = "hung"
    WRONG = "ended wrongly"
    """An error that none of the above excuses, or a stream with a gap or a repetition."""


@dataclass(slots=True)
class Heard:
    """What has come of one answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple[float, int]] = field(default_factory=list)
    """If requested, for each token: its logprob, and where in the text it begins."""
    finish_reason: str = ""
    """Empty: the answer is not complete, or broke off."""

    @classmethod
    def of_answer(cls, answer: Answer) -> Heard:
        return cls(answer.token_ids, answer.text, numbers_of(answer.logprobs), answer.finish_reason)


def numbers_of(logprobs: Iterable[TokenLogprobs]) -> list[tuple[float, int]]:
    """Logprobs in the form of `Heard.logprobs`."""
    return [(each.sampled.logprob, each.text_offset) for each in logprobs]


@dataclass(slots=True)
class Asked:
    """One request. Its id on the wire is "soak-" and its number."""

    number: int
    prompt: Prompt
    sampling: dict[str, Any]
    n: int = 1
    way: Way = Way.GRPC
    model: str = ""
    """An adapter. Empty: the model itself."""
    deadline_s: float = DEADLINE_S
    answers: dict[int, Heard] = field(default_factory=dict)
    """Those of its `n` answers that have begun, by sequence."""
    ending: Ending | None = None
    """None: the request never ended, which is the worst case."""
    error: str = ""
    num_attempts: int = 0
    """The largest number of attempts that the answers' last messages report."""
    num_moves: int = 0
    """How many of the answers moved to another worker as they ran, without a fault."""
    num_resumed: int = 0
    """How often the client resumed an answer because its stream broke. Over HTTP, the gateway does so without telling
    the client."""
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    heard_s: float = 0.0
    """When something came last; 0: nothing has."""

    @property
    def request_id(self) -> str:
        return f"soak-{self.number}"

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(len(heard.token_ids) for heard in self.answers.values())

    def heard(self, sequence: int) -> Heard:
        """What has come of one answer, to add to it what has come now."""
        self.heard_s = time.monotonic()
        return self.answers.setdefault(sequence, Heard())


class EndedAs(Exception):  # noqa: N818 - how it ended may be as it should
    """A request has ended without its whole answer."""

    def __init__(self, ending: Ending, why: str) -> None:
        super().__init__(f"{ending.value}: {why}")
        self.ending = ending
        self.why = why
