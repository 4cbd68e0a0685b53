"""Completions and chats on their way out: a run's messages as one object of choices, or as server-sent events.

What fails after the first event is an event {"error": …}, and no [DONE] follows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from gateway.answers import Style, usage_of
from gateway.echo import Echo
from gateway.errors import refusal_of_any
from gateway.logprobs import OfContent
from gateway.requests import AskedForChoices, ChatRequest, CompletionRequest
from gateway.run import Run
from gateway.streams import COMMENT, DONE, Begun, event, to_json
from protos.tandem_inference_pb2 import GenerateResponse, TokenLogprobs, Usage
from tandem.answer import AnswersStream


class Choices:
    """Of one request."""

    keep_alive = COMMENT

    def __init__(self, run: Run, body: AskedForChoices, model: str) -> None:
        """`model`: its name in what is answered."""
        self._run = run
        self._body = body
        self._is_chat = isinstance(body, ChatRequest)
        self._contents: dict[int, OfContent] = {}
        """Of a chat's choices."""
        self._prompt_token_ids: dict[int, Sequence[int]] = {}
        """By prompt, where they are asked for."""
        self._style = Style(
            is_chat=self._is_chat,
            answer_id=f"{'chatcmpl' if self._is_chat else 'cmpl'}-{run.request_id}",
            created_s=int(time.time()),
            model=model,
            echo=_echo_of(run, body),
            names_tool=isinstance(body, ChatRequest) and body.names_tool,
            role=body.role if isinstance(body, ChatRequest) else "",
            tells_token_ids=bool(body.return_token_ids),
            names_by_id=bool(body.return_tokens_as_token_ids),
            stop_token_ids=body.stop_token_ids or (),
        )

    async def whole(self) -> bytes:
        """All answers as one object, in JSON."""
        streams = [AnswersStream(self._run.n) for _ in self._run.prompts]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in range(len(streams) * self._run.n)]
        async with aclosing(self._run.messages()) as messages:
            async for choice, message in messages:
                streams[choice // self._run.n].accept(message)
                logprobs[choice] += self._logprobs_of(choice, message)
        answers = [answer for stream in streams for answer in stream.answers()]

        def render() -> bytes:
            return to_json(self._style.whole(answers, logprobs, self._run.n, self._body.prompt_logprobs))

        # Logprobs take milliseconds for every hundred tokens: others go on meanwhile.
        if any(answer.logprobs or answer.prompt_logprobs or answer.prompt_token_ids for answer in answers):
            return await asyncio.to_thread(render)
        return render()

    async def events(self, messages: Begun[tuple[int, GenerateResponse]]) -> AsyncGenerator[bytes, None]:
        """Of the run's `messages`, which it closes."""
        usages = [Usage() for _ in range(len(self._run.prompts) * self._run.n)]
        opened: set[int] = set()
        tells_prompt = self._body.return_token_ids or "prompt_logprobs" in self._run.sampling
        try:
            async for index, message in messages:
                is_first = index not in opened
                opened.add(index)
                is_long = is_first and tells_prompt  # a prompt's numbers, in front of each choice: they may take long
                usage = usages[index]
                usage.prompt_tokens = message.prompt_tokens or message.usage.prompt_tokens or usage.prompt_tokens
                if message.prompt_token_ids:
                    self._prompt_token_ids[index // self._run.n] = list(message.prompt_token_ids)
                if self._is_chat and is_first:
                    opening = partial(self._opening, index, usage)
                    yield await asyncio.to_thread(opening) if is_long else opening()
                usage.completion_tokens += len(message.token_ids)
                if message.HasField("usage"):
                    usage.CopyFrom(message.usage)
                logprobs = self._logprobs_of(index, message)
                is_news = (
                    message.text
                    or message.reasoning
                    or message.finish_reason
                    or message.tool_calls
                    or logprobs
                    or message.prompt_logprobs
                    or (self._body.return_token_ids and message.token_ids)
                )
                if is_news or self._body.includes_usage_always:
                    render = partial(self._event, index, message, logprobs, usage, is_first=is_first)
                    yield await asyncio.to_thread(render) if is_long else render()
        except Exception as error:
            yield event(refusal_of_any(error, self._run.request_id).body)
            return
        finally:
            await messages.aclose()
        if self._body.includes_usage:
            yield event(self._style.usage(usages, self._run.n))
        yield DONE

    def _logprobs_of(self, choice: int, message: GenerateResponse) -> Sequence[TokenLogprobs]:
        """Of its tokens, those that are told with `message`."""
        if not self._is_chat:
            return message.logprobs
        return self._contents.setdefault(choice, OfContent()).accept(message)

    def _opening(self, choice: int, usage: Usage) -> bytes:
        return self._with_usage(self._style.opening(choice, self._prompt_token_ids.get(0)), usage)

    def _event(
        self,
        choice: int,
        message: GenerateResponse,
        logprobs: Sequence[TokenLogprobs],
        usage: Usage,
        *,
        is_first: bool,
    ) -> bytes:
        of_prompt = self._prompt_token_ids.get(choice // self._run.n) if is_first and not self._is_chat else None
        return self._with_usage(self._style.piece(choice, message, logprobs, of_prompt), usage)

    def _with_usage(self, piece: dict[str, Any], usage: Usage) -> bytes:
        if self._body.includes_usage_always:
            piece["usage"] = usage_of([usage])
        return event(piece)


def _echo_of(run: Run, body: AskedForChoices) -> Echo | None:
    if isinstance(body, CompletionRequest) and body.echo:
        return Echo(run.prompts, run.n, body.logprobs, is_known=body.knows_its_texts)
    return None
