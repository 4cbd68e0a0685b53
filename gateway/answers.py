"""The answers, in OpenAI's words. Pure: the router's messages in, JSON objects out.

Beside what OpenAI defines, the last object of an answer carries `timings`: who served it and where the time went.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from gateway.echo import Echo
from gateway.logprobs import of_chat, of_completion, of_prompt
from protos.tandem_inference_pb2 import (
    FinishReason,
    GenerateResponse,
    GetModelInfoResponse,
    Timings,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from tandem.answer import Answer, message_to_dict, short_name


class Style:
    """How the objects of one request look; `of_completion` and `of_chat` make them."""

    def __init__(
        self,
        *,
        is_chat: bool,
        answer_id: str,
        created_s: int,
        model: str,
        echo: Echo | None = None,
        names_tool: bool = False,
        role: str = "assistant",
        tells_token_ids: bool = False,
        names_by_id: bool = False,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        """`echo`: of a completion that begins with its prompt. Of a chat, `names_tool`: it said which tool to call,
        `role`: who answers. `tells_token_ids`: beside the text. `names_by_id`: tokens of logprobs. `stop_token_ids`:
        that were asked for."""
        self.is_chat = is_chat
        self._role = role
        self._tells_token_ids = tells_token_ids
        self._names_by_id = names_by_id
        self._echo = echo
        self._names_tool = names_tool
        self._stop_token_ids = frozenset(stop_token_ids)
        self._last_token_ids: dict[int, int] = {}
        """Of each choice whose stream has begun."""
        self._calling: set[int] = set()
        """Choices whose streams have called tools."""
        self._head = {"id": answer_id, "created": created_s, "model": model}

    # -- a whole answer -----------------------------------------------------------------------------------------

    def whole(
        self, answers: list[Answer], logprobs: list[list[TokenLogprobs]], n: int, num_prompt_top: int | None = None
    ) -> dict[str, Any]:
        """All choices at once, `n` to each prompt. `logprobs`: what is told of each one's. `num_prompt_top`: how likely
        the prompt's tokens were, too, with so many alternatives, as vLLM says it."""
        name = "chat.completion" if self.is_chat else "text_completion"
        choices = [
            self._whole_choice(index, answer, told)
            for index, (answer, told) in enumerate(zip(answers, logprobs, strict=True))
        ]
        whole = {
            **self._head,
            "object": name,
            "choices": choices,
            "usage": usage_of([answer.usage for answer in answers], n),
            "timings": timings_of([answer.timings for answer in answers]),
        }
        if self._tells_token_ids and self.is_chat:
            whole["prompt_token_ids"] = answers[0].prompt_token_ids
        elif self._tells_token_ids:
            for index, choice in enumerate(choices):
                choice["prompt_token_ids"] = answers[index - index % n].prompt_token_ids
        if num_prompt_top is not None:
            of_prompts = [of_prompt(answer.prompt_logprobs, num_prompt_top) for answer in answers[::n]]
            if self.is_chat:
                whole["prompt_logprobs"] = of_prompts[0]
            else:
                for index, choice in enumerate(choices):
                    choice["prompt_logprobs"] = of_prompts[index // n]
        return whole

    def _whole_choice(self, index: int, answer: Answer, logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        said, told = self._said(index, answer.text, logprobs, answer.prompt_logprobs)
        text: dict[str, Any] = {"text": said}
        if self.is_chat:
            message: dict[str, Any] = {"role": self._role, "content": said, "refusal": None}
            if answer.tool_calls:
                message["content"] = said or None
                message["tool_calls"] = [call.to_dict() for call in answer.tool_calls]
            if answer.reasoning:
                message["reasoning"] = answer.reasoning
            text = {"message": message}
        finish_reason = self._finish_reason(answer.finish_reason, bool(answer.tool_calls))
        shown = self._logprobs(told, has_any=self.is_chat and bool(answer.logprobs))
        ids = {"token_ids": answer.token_ids} if self._tells_token_ids else {}
        why = self._stop_reason(answer.finish_reason, answer.stop_reason, answer.token_ids[-1:])
        return {
            "index": index, **text, "logprobs": shown, "finish_reason": finish_reason, "stop_reason": why, **ids,
        }  # fmt: skip

    # -- a stream's events --------------------------------------------------------------------------------------

    def opening(self, index: int, prompt_token_ids: Sequence[int] | None = None) -> dict[str, Any]:
        """Of a chat: who speaks, and the prompt that is answered."""
        event = self._event([self._piece(index, {"role": self._role, "content": ""}, None, None)])
        return event if prompt_token_ids is None else {**event, "prompt_token_ids": prompt_token_ids}

    def piece(
        self,
        index: int,
        message: GenerateResponse,
        logprobs: Sequence[TokenLogprobs],
        prompt_token_ids: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """New text, or the end of one choice. `logprobs`: what is told of them with it. `prompt_token_ids`: with the
        first piece of a completion."""
        if message.tool_calls:
            self._calling.add(index)
        if message.token_ids:
            self._last_token_ids[index] = message.token_ids[-1]
        finish_reason = why = None
        if message.finish_reason:
            reason = short_name(FinishReason.DESCRIPTOR, message.finish_reason)
            finish_reason = self._finish_reason(reason, index in self._calling)
            last = [self._last_token_ids[index]] if index in self._last_token_ids else []
            why = self._stop_reason(reason, message.stop_reason, last)
        text, told = self._said(index, message.text, logprobs, message.prompt_logprobs)
        is_other_news = finish_reason or message.tool_calls or message.reasoning
        delta: dict[str, Any] = {"reasoning": message.reasoning} if message.reasoning else {}
        if text or not is_other_news:
            delta["content"] = text
        if message.tool_calls:
            delta["tool_calls"] = [_piece_of_call(piece) for piece in message.tool_calls]
        piece = {**self._piece(index, delta, finish_reason, self._logprobs(told)), "stop_reason": why}
        if prompt_token_ids is not None:
            piece["prompt_token_ids"] = prompt_token_ids
        if self._tells_token_ids:
            piece["token_ids"] = list(message.token_ids)
        event = self._event([piece])
        if message.HasField("timings"):
            event["timings"] = message_to_dict(message.timings)
        return event

    def usage(self, usages: list[Usage], n: int) -> dict[str, Any]:
        """The last event where usage was asked for; `n` choices to each prompt."""
        return {**self._event([]), "usage": usage_of(usages, n)}

    def _piece(
        self, index: int, delta: dict[str, Any], finish_reason: str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        text: dict[str, Any] = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        return {"index": index, **text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _said(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprobs],
        prompt_logprobs: Sequence[TokenLogprobs],
    ) -> tuple[str, Sequence[TokenLogprobs]]:
        return (text, logprobs) if self._echo is None else self._echo.before(index, text, logprobs, prompt_logprobs)

    def _finish_reason(self, reason: str, has_calls: bool) -> str:
        """An answer that stops at its calls was no answer yet; one that had to be that call is one: as OpenAI says."""
        return "tool_calls" if reason == "stop" and has_calls and not self._names_tool else reason

    def _stop_reason(self, finish_reason: str, stop: str, last: Sequence[int]) -> str | int | None:
        """vLLM's: the stop string, or the stop token, that ended an answer. `last`: its last token, if it has one."""
        if finish_reason != "stop":
            return None
        return stop or next((token_id for token_id in last if token_id in self._stop_token_ids), None)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], *, has_any: bool = False) -> dict[str, Any] | None:
        """None where there are none. `has_any`: of other tokens there are."""
        if not logprobs and not has_any:
            return None
        return (of_chat if self.is_chat else of_completion)(logprobs, by_id=self._names_by_id)

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._head, "object": name, "choices": choices}


def _piece_of_call(piece: ToolCallDelta) -> dict[str, Any]:
    """The first of a call says which it is."""
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def usage_of(usages: list[Usage], n: int = 1) -> dict[str, Any]:
    """Of all choices together, `n` to each prompt: this is counted once, as it was for the first of them."""
    num_prompt = sum(usage.prompt_tokens for usage in usages[::n])
    num_completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages[::n])},
    }


def timings_of(timings: list[Timings]) -> dict[str, Any] | list[dict[str, Any]]:
    """One object, or one for each choice."""
    plain = [message_to_dict(each) for each in timings]
    return plain[0] if len(plain) == 1 else plain


def models_of(info: GetModelInfoResponse, created_s: int) -> dict[str, Any]:
    """The one model that the router serves, by all its names, and its adapters."""
    data = [
        {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "tandem",
            "root": info.model if name in info.aliases else name,
            "parent": info.model if name in info.lora_names else None,
            "max_model_len": info.max_model_len,
        }
        for name in (info.model, *info.aliases, *info.lora_names)
    ]
    return {"object": "list", "data": data}
