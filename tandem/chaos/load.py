"""Sends requests without pause, over gRPC and HTTP, to the model and its adapters, and keeps the history of each.

Owns the client and its running requests. Does not judge them: `tandem.chaos.verdict` does.

    ask ──> Asked ──tokens and text as they come──> one Ending
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from protos.tandem_inference_pb2 import FinishReason, GetModelInfoResponse
from rpc.errors import DeadlinePassed, Draining, NoWorker, Overloaded, TandemError, Unreachable
from tandem.answer import StreamBroken, short_name
from tandem.chaos.asked import DEADLINE_S, Asked, EndedAs, Ending, Heard, Way, numbers_of
from tandem.chaos.over_http import read_over_http
from tandem.client import AsyncClient
from tandem.requests import Prompt

PAUSE_S = 0.3
"""A client pauses for this time after a refusal."""
RESUME_S = 30.0
"""How long a stream waits for a router: longer than a router takes to be started again."""
LEAVING_SHARE = 0.1
"""Share of requests whose client leaves early."""
SHORT_ANSWER, LONG_ANSWER = (4, 32), (100, 300)
"""The least and the most tokens of an answer."""
LONG_SHARE = 0.1
"""Share of requests with long answers, if every prompt leaves room for them: they outlive several faults, and may move
as they run."""
BURST_PROMPT_TOKENS = 500
"""The most tokens of a prompt in a burst, and as many again if it begins like an earlier one."""
SEVERAL_SHARE = 0.15
"""Share of requests for several answers."""
RETURNING_SHARE = 0.2
"""Share of requests that begin like an earlier one, whose KV may have moved to host memory since."""
HTTP_SHARE = 0.4
"""Share of requests through the gateway; half of them are chats."""
FURTHER_SHARE = 0.08
"""Share of requests with each of the `FURTHER` parameters, and with each of two parameters that restrict sampling."""
FURTHER: Sequence[Mapping[str, Any]] = (
    {"top_k": 20}, {"min_p": 0.02}, {"frequency_penalty": 0.5}, {"logit_bias": {5: -100.0, 7: 2.0}},
    {"bad_words": ["the", " a"]}, {"cache_salt": "x"}, {"cache_salt": "y"}, {"priority": -1}, {"priority": 1},
    {"truncate_prompt_tokens": 48}, {"include_stop_str_in_output": True}, {"skip_special_tokens": False},
)  # fmt: skip
REGEX = "[a-z ,.]{4,30}"
TOKENS_OF_A_WORD = 5
"""Tokens per word of a chat. The words are numbers, and a vocabulary may have one token for each digit."""


async def again(client: AsyncClient, asked: Asked, model: str) -> list[Heard]:
    """Send the same request to `model` again, and return its answers; over gRPC, so that the gateway does not judge
    itself. While the queue is full, waits as long as it is told to. Raises what the client raises."""
    gives_up_at = time.monotonic() + asked.deadline_s
    while True:
        try:
            answers = await client.generate_n(
                asked.prompt, asked.n, model=model, **asked.sampling, timeout_s=asked.deadline_s
            )
        except Overloaded as error:
            if error.retry_after_s is None or time.monotonic() > gives_up_at:
                raise
            await asyncio.sleep(error.retry_after_s)
        else:
            return [Heard.of_answer(answer) for answer in answers]


class Load:
    """Clients of one or several routers and gateways."""

    def __init__(
        self, router: str, gateway: str, seed: int, info: GetModelInfoResponse, deadline_s: float = DEADLINE_S
    ) -> None:
        """`router`: the router's address, or gRPC's target for several. `info`: about the served model. `deadline_s`:
        of each request."""
        self._deadline_s = deadline_s
        self._token_ids = range(min(100, info.vocab_size // 2), min(40_000, info.vocab_size))
        self._models = ["", *info.lora_names]
        self._ways_over_http = [Way.COMPLETIONS, *([Way.CHATS] if info.has_chat_template else [])]
        longest = 2 * BURST_PROMPT_TOKENS + LONG_ANSWER[1]
        self._long_share = LONG_SHARE if info.max_model_len >= longest else 0.0
        self._gateway = gateway
        self.history: list[Asked] = []
        self._prompts: dict[bool, list[Prompt]] = {False: [], True: []}
        """All prompts so far, by whether they are chats."""
        self.num_running = 0
        self._client = AsyncClient(router, resume_s=RESUME_S)
        self._dice = random.Random(seed)
        self._is_over = asyncio.Event()

    async def run(self, num_clients: int) -> None:
        """Run `num_clients` clients, each with one request after the other, until `end`."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(self._ask_on())

    async def burst(self, num_requests: int) -> None:
        """Send `num_requests` requests at once."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_requests):
                group.create_task(self._ask(self._invent(max_prompt_tokens=BURST_PROMPT_TOKENS)))

    def end(self) -> None:
        """Send no new requests."""
        self._is_over.set()

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
        """Make up a request, mostly with a prompt that is in no cache, so that KV travels; greedy or seeded, plain or
        with penalties."""
        dice = self._dice
        way = dice.choice(self._ways_over_http) if dice.random() < HTTP_SHARE else Way.GRPC
        prompt = self._prompt(way is Way.CHATS, max_prompt_tokens)
        max_tokens = dice.randint(*(LONG_ANSWER if dice.random() < self._long_share else SHORT_ANSWER))
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
        if dice.random() < 0.7:
            sampling |= {"temperature": 0.8, "top_p": 0.95, "seed": dice.randrange(1 << 40)}
        if dice.random() < 0.3:
            sampling |= {"repetition_penalty": 1.1, "presence_penalty": 0.4}
        if dice.random() < 0.2:
            sampling |= {"stop": ["e", "a"], "min_tokens": 4}
        for further in FURTHER:
            if dice.random() < FURTHER_SHARE:
                sampling |= further
        bound = dice.random()
        if bound < FURTHER_SHARE:
            sampling |= {"structured_outputs": {"regex": REGEX}}
        elif bound < 2 * FURTHER_SHARE:
            sampling |= {"allowed_token_ids": sorted(dice.sample(self._token_ids, 50))}
        sampling = _without_conflicts(sampling)
        if way is not Way.CHATS and dice.random() < 0.3:  # chats leave out logprobs of tokens without text
            sampling |= {"logprobs": dice.randrange(3)}
        n, model = 3 if dice.random() < SEVERAL_SHARE else 1, dice.choice(self._models)
        asked = Asked(len(self.history), prompt, sampling, n, way, model, self._deadline_s)
        self.history.append(asked)
        return asked

    def _prompt(self, is_chat: bool, max_tokens: int) -> Prompt:
        """Token ids, or messages. May begin like an earlier prompt, for whichever model that was."""
        dice = self._dice
        num_tokens = dice.randint(20, max_tokens)
        alike = self._prompts[is_chat]
        earlier: Any = dice.choice(alike) if alike and dice.random() < RETURNING_SHARE else None
        if not is_chat:
            token_ids = [dice.choice(self._token_ids) for _ in range(num_tokens)]
            alike.append(token_ids if earlier is None else [*earlier[:max_tokens], *token_ids])
            return alike[-1]
        words = [str(dice.randrange(1000)) for _ in range(num_tokens // TOKENS_OF_A_WORD)]
        if earlier is not None:
            words[:0] = earlier[0]["content"].split()[: max_tokens // TOKENS_OF_A_WORD]
        alike.append([{"role": "user", "content": " ".join(words)}])
        return alike[-1]

    async def _ask(self, asked: Asked) -> None:
        patience_s = self._dice.uniform(0.005, 1.5) if self._dice.random() < LEAVING_SHARE else None
        self.num_running += 1
        try:
            async with asyncio.timeout(patience_s):
                await (self._read(asked) if asked.way is Way.GRPC else read_over_http(self._gateway, asked))
            asked.ending = Ending.ANSWERED
        except TimeoutError:
            asked.ending = Ending.LEFT
        except EndedAs as ended:
            asked.ending, asked.error = ended.ending, ended.why
        except (TandemError, StreamBroken) as error:
            asked.ending, asked.error = ending_of(error, asked.num_tokens), repr(error)
        finally:
            asked.ended_s = time.monotonic()
            self.num_running -= 1

    async def _read(self, asked: Asked) -> None:
        stream = self._client.stream(
            asked.prompt,
            request_id=asked.request_id,
            model=asked.model,
            n=asked.n,
            **asked.sampling,
            timeout_s=asked.deadline_s,
        )
        async with aclosing(stream) as messages:
            async for message in messages:
                # Only the first message of each call names the kind of workers: with an offset, the answer was resumed.
                asked.num_resumed += bool(message.offset and message.worker_kind)
                heard = asked.heard(message.sequence)
                heard.token_ids += message.token_ids
                heard.text += message.text
                heard.logprobs += numbers_of(message.logprobs)
                if message.finish_reason:
                    heard.finish_reason = short_name(FinishReason.DESCRIPTOR, message.finish_reason)
                asked.num_attempts = max(asked.num_attempts, message.timings.attempts)
                asked.num_moves += message.timings.moves


def _without_conflicts(sampling: dict[str, Any]) -> dict[str, Any]:
    """Leave out parameters that cannot be combined: structured outputs determine where an answer ends, and with few
    allowed tokens, bad words might leave none."""
    if "structured_outputs" in sampling:
        left_out = {"ignore_eos", "min_tokens", "stop", "bad_words"}
    elif "allowed_token_ids" in sampling:
        left_out = {"bad_words"}
    else:
        left_out = set()
    return {name: value for name, value in sampling.items() if name not in left_out}


def ending_of(error: Exception, num_tokens: int) -> Ending:
    """The ending that `error` after `num_tokens` tokens means to a client."""
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
