"""Workloads: what is sent and when; here, random prompts at random times. Pure: the same seed gives the same requests.

A prompt's tokens depend only on (seed, run, kind, number), so that no two runs share prompts by accident, which a
server's prefix cache would answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_TOKEN_ID = 300
"""Vocabularies keep their special tokens and single bytes below this id."""

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One request, due `at_s` seconds after the run's start."""

    at_s: float
    prompt: Tokens
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All requests of a run, in the order in which they are due."""

    requests: list[Request]
    request_rate: float
    """Offered requests per second; infinite if all are due at once."""
    about: dict[str, Any] = field(default_factory=dict)
    """Facts about the source and its factors, for the results."""


@dataclass(frozen=True, kw_only=True)
class TokenSource:
    """Generates random tokens: ids in [FIRST_TOKEN_ID, vocab_size)."""

    seed: int
    run: int = 0
    """Number of the run: each run has prompts of its own."""
    vocab_size: int = 32_000

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, is {self.seed}")
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise ValueError(f"vocab_size must be more than {FIRST_TOKEN_ID}, is {self.vocab_size}")

    def tokens(self, kind: str, number: int, count: int) -> Tokens:
        """The first `count` tokens of the sequence (kind, number): equal names give equal tokens."""
        generator = np.random.default_rng([self.seed, self.run, *kind.encode(), number])
        return generator.integers(FIRST_TOKEN_ID, self.vocab_size, count, dtype=np.int32)


@dataclass(frozen=True, kw_only=True)
class RandomShape:
    """Lengths of random requests, in tokens."""

    input_len: int
    output_len: int
    prefix_len: int = 0
    """Tokens with which all prompts begin, in addition to `input_len`."""
    range_ratio: float = 0.0
    """Lengths are drawn uniformly from [1 - r, 1 + r] times `input_len` and `output_len`."""


def arrivals_s(rate: float, count: int, seed: int, burstiness: float = 1.0) -> list[float]:
    """When each request is due, in seconds since the start: a Poisson process; all at once if `rate` is infinite.

    `burstiness`: shape of the gaps' gamma distribution, as in vLLM's load client: 1 is Poisson, less comes in bursts,
    more is more even.
    """
    if rate == float("inf"):
        return [0.0] * count
    dice = random.Random(f"arrivals {seed}")
    now_s, due_s = 0.0, []
    for _ in range(count):
        now_s += dice.gammavariate(burstiness, 1 / (rate * burstiness))
        due_s.append(now_s)
    return due_s


def random_workload(
    shape: RandomShape, source: TokenSource, *, rate: float, count: int, burstiness: float = 1.0
) -> Workload:
    """`count` requests with random prompts."""
    dice = random.Random(f"lengths {source.seed} {source.run}")
    prefix = source.tokens("prefix", 0, shape.prefix_len)

    def length(middle: int) -> int:
        reach = int(middle * shape.range_ratio)
        return max(1, dice.randint(middle - reach, middle + reach))

    requests = []
    for number, at_s in enumerate(arrivals_s(rate, count, source.seed * 1009 + source.run, burstiness)):
        own = source.tokens("prompt", number, length(shape.input_len))
        requests.append(
            Request(at_s=at_s, prompt=np.concatenate([prefix, own]), output_tokens=length(shape.output_len))
        )
    about = {
        "dataset": "random",
        "input_len": shape.input_len,
        "output_len": shape.output_len,
        "prefix_len": shape.prefix_len,
        "range_ratio": shape.range_ratio,
        "burstiness": burstiness,
    }
    return Workload(requests=requests, request_rate=rate, about=about)


def warm_up_workload(workload: Workload, source: TokenSource, count: int) -> Workload:
    """`count` requests at once, with prompts as long as the first ones of `workload` but other tokens, and with short
    answers."""
    requests = [
        Request(
            at_s=0.0,
            prompt=source.tokens("warm-up", number, len(request.prompt)),
            output_tokens=min(8, request.output_tokens),
        )
        for number, request in enumerate(workload.requests[:count])
    ]
    return Workload(requests=requests, request_rate=float("inf"))
