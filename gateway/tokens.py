"""Requests to tokenize, detokenize and count tokens, which the router does: vLLM's POST /tokenize and /detokenize,
OpenAI's /v1/responses/input_tokens, and Anthropic's /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any, Self, cast

from pydantic import model_validator

from gateway.asked import AT_START, Asked, Body, Listed, TokenId, only
from gateway.messages.request import AskedOfMessages
from gateway.names import name_in_body, named, renamed
from gateway.requests import Messages, Tools
from gateway.responses.request import ResponseRequest
from rpc.errors import InvalidRequest
from tandem.client import AsyncClient
from tandem.requests import Messages as Chat


class TokenizeRequest(Body):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    """Also return each token as the vocabulary writes it."""
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: only(instead=AT_START) = None  # type: ignore[valid-type]
    media_io_kwargs: only() = None  # type: ignore[valid-type]
    mm_processor_kwargs: only() = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages must be given")
        return self

    async def answer(self, client: AsyncClient) -> dict[str, Any]:
        """Raises what `client` raises."""
        try:
            told = await client.tokenize(
                self.prompt if self.prompt is not None else [message.to_prompt() for message in self.messages or ()],
                model=self.model or "",
                add_special_tokens=self.add_special_tokens,
                with_tokens=bool(self.return_token_strs),
                tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
                chat_template_kwargs=self.chat_template_kwargs,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
            )
        except InvalidRequest as error:
            raise renamed(named(error, name_in_body), {"with_tokens": "return_token_strs"}) from error
        return {
            "count": len(told.token_ids),
            "max_model_len": told.max_model_len or None,
            "tokens": list(told.token_ids),
            "token_strs": list(told.tokens) if self.return_token_strs else None,
        }


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Listed[TokenId]

    async def answer(self, client: AsyncClient) -> dict[str, Any]:
        """Raises what `client` raises."""
        try:
            return {"prompt": await client.detokenize(self.tokens, model=self.model or "")}
        except InvalidRequest as error:
            raise renamed(error, {"token_ids": "tokens"}) from error


class CountRequest(ResponseRequest):
    """POST /v1/responses/input_tokens: how many tokens a response's input has."""

    async def answer(self, client: AsyncClient) -> dict[str, Any]:
        """Raises what `client` raises."""
        return {"object": "response.input_tokens", "input_tokens": await _num_tokens(client, self)}


class CountMessagesRequest(AskedOfMessages):
    """POST /v1/messages/count_tokens: how many tokens the messages have."""

    async def answer(self, client: AsyncClient) -> dict[str, Any]:
        """Raises what `client` raises."""
        return {"input_tokens": await _num_tokens(client, self)}


async def _num_tokens(client: AsyncClient, body: Asked) -> int:
    """The number of tokens of the body's one prompt, a chat."""
    [messages], sampling = body.prompts(), body.sampling()
    try:
        told = await client.tokenize(
            cast(Chat, messages),
            model=body.model or "",
            tools=sampling.get("tools"),
            chat_template_kwargs=sampling.get("chat_template_kwargs"),
            continue_final_message=sampling.get("continue_final_message"),
        )
    except InvalidRequest as error:
        raise body.in_its_words(error) from error
    return len(told.token_ids)
