"""Requests without a pause, and the history of each: what was asked, what came, how it ended.

Owns the client and its running requests. Does not judge: `tandem.chaos.verdict` does.

    ask ──> Asked ──tokens as they come──> one Ending
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rpc.errors import DeadlinePassed, Draining, NoWorker, Overloaded, TandemError, Unreachable
from tandem.answer import StreamBroken
from tandem.client import AsyncClient

DEADLINE_S = 60.0
"""Of every request. None may meet it: waiting that long is hanging."""
PAUSE_S = 0.3
"""Of a client that was refused."""
RESUME_S = 30.0
"""For how long a stream waits for a router: longer than one takes to be started again."""
LEAVING_SHARE = 0.1
SEVERAL_SHARE = 0.15
"""Of the requests: those for several answers."""
RETURNING_SHARE = 0.2
"""Of the requests: those that begin as an earlier one, which may have given way to others since, to host memory."""


class Ending(Enum):
    """How a client saw its request end. The value is how a report names it."""

    ANSWERED = "answered"
    LEFT = "left by their clients"
    OVERLOADED = "refused: overload"
    UNAVAILABLE = "refused: nobody to serve"
    BROKEN = "broken off"
    """After some tokens, since no router was there any more."""
    GIVEN_UP = "given up"
    """After some tokens, by the router: nobody was left to go on with it."""
    HUNG = "hung"
    WRONG = "ended wrongly"
    """By an error that nothing of this excuses, or a stream with a gap or a repetition."""


@dataclass(slots=True)
class Asked:
    """One request, on the wire "soak-" and its number."""

    number: int
    prompt: list[int]
    sampling: dict[str, Any]
    n: int = 1
    answers: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of those of its `n` answers that have begun."""
    ending: Ending | None = None
    """None: it has none, which is worse than any."""
    error: str = ""
    num_attempts: int = 0
    """As the last messages say, at most."""
    num_resumed: int = 0
    """How often the client asked for the rest of an answer, since the stream broke."""
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Of all that has come."""
        return sum(map(len, self.answers.values()))


class Load:
    """Clients of one router."""

    def __init__(self, address: str, seed: int, vocab_size: int) -> None:
        """`vocab_size`: of the model that is asked."""
        self._token_ids = range(min(100, vocab_size // 2), min(40_000, vocab_size))
        self.history: list[Asked] = []
        self.num_running = 0
        self._client = AsyncClient(address, resume_s=RESUME_S)
        self._dice = random.Random(seed)
        self._is_over = asyncio.Event()

    async def run(self, num_clients: int) -> None:
        """So many clients, each with one request after the other, until `end`."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(self._ask_on())

    async def burst(self, num_requests: int) -> None:
        """So many at once."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_requests):
                group.create_task(self._ask(self._invent(max_prompt_tokens=500)))

    def end(self) -> None:
        """Ask nothing new."""
        self._is_over.set()

    async def again(self, asked: Asked) -> list[list[int]]:
        """The answers to the same request now. Raises what the client raises."""
        answers = await self._client.generate_n(asked.prompt, asked.n, **asked.sampling, timeout_s=DEADLINE_S)
        return [answer.token_ids for answer in answers]

    async def close(self) -> None:
        await self._client.close()

    # -- one request --------------------------------------------------------------------------------------------

    async def _ask_on(self) -> None:
        while not self._is_over.is_set():
            asked = self._invent(max_prompt_tokens=160)
            await self._ask(asked)
            if asked.ending not in (Ending.ANSWERED, Ending.LEFT):
                await asyncio.sleep(PAUSE_S)

    def _invent(self, *, max_prompt_tokens: int) -> Asked:
        """Mostly a prompt that no cache has seen, so that KV travels; greedy or seeded, plain or with penalties."""
        dice = self._dice
        prompt = [dice.choice(self._token_ids) for _ in range(dice.randint(20, max_prompt_tokens))]
        if self.history and dice.random() < RETURNING_SHARE:
            prompt[:0] = dice.choice(self.history).prompt[:max_prompt_tokens]
        sampling: dict[str, Any] = {"max_tokens": dice.randint(4, 32), "ignore_eos": True, "temperature": 0.0}
        if dice.random() < 0.7:
            sampling |= {"temperature": 0.8, "top_p": 0.95, "seed": dice.randrange(1 << 40)}
        if dice.random() < 0.3:
            sampling |= {"repetition_penalty": 1.1, "presence_penalty": 0.4}
        if dice.random() < 0.2:
            sampling |= {"stop": ["e", "a"], "min_tokens": 4}
        asked = Asked(len(self.history), prompt, sampling, n=3 if dice.random() < SEVERAL_SHARE else 1)
        self.history.append(asked)
        return asked

    async def _ask(self, asked: Asked) -> None:
        patience_s = self._dice.uniform(0.005, 1.5) if self._dice.random() < LEAVING_SHARE else None
        self.num_running += 1
        try:
            async with asyncio.timeout(patience_s):
                await self._read(asked)
            asked.ending = Ending.ANSWERED
        except TimeoutError:
            asked.ending = Ending.LEFT
        except (TandemError, StreamBroken) as error:
            asked.ending, asked.error = ending_of(error, asked.num_tokens), repr(error)
        finally:
            asked.ended_s = time.monotonic()
            self.num_running -= 1

    async def _read(self, asked: Asked) -> None:
        stream = self._client.stream(
            asked.prompt, request_id=f"soak-{asked.number}", n=asked.n, **asked.sampling, timeout_s=DEADLINE_S
        )
        async with aclosing(stream) as messages:
            async for message in messages:
                asked.num_resumed += bool(message.offset and message.worker_kind)  # of an answer's first message
                asked.answers.setdefault(message.sequence, []).extend(message.token_ids)
                asked.num_attempts = max(asked.num_attempts, message.timings.attempts)


def ending_of(error: Exception, num_tokens: int) -> Ending:
    """What `error` after `num_tokens` tokens means to a client."""
    match error:
        case DeadlinePassed():
            return Ending.HUNG
        case Overloaded() if not num_tokens:
            return Ending.OVERLOADED
        case NoWorker() | Draining() | Unreachable() if not num_tokens:
            return Ending.UNAVAILABLE
        case Unreachable():
            return Ending.BROKEN
        case NoWorker():
            return Ending.GIVEN_UP
        case _:
            return Ending.WRONG
