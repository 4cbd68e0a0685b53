"""The answers of completions and chats in OpenAI's format. Pure: the router's messages in, JSON objects out.

Beyond OpenAI's fields, the last object of an answer has `timings`: which workers served it and where the time went.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from gateway.echo import Echo
from gateway.logprobs import OfContent, of_chat, of_completion, of_prompt
from gateway.requests import AskedForChoices, ChatRequest, CompletionRequest
from protos.tandem_inference_pb2 import (
    FinishReason,
    GenerateResponse,
    GetModelInfoResponse,
    Timings,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from tandem.answer import Answer, message_to_dict, short_name, stop_token_id_of


class Style(ABC):
    """Formats the choices of one request, as one object and as a stream's events: what completions and chats share."""

    whole_name: ClassVar[str]
    """Value of `object` in the whole answer."""
    event_name: ClassVar[str]
    """Value of `object` in an event."""

    def __init__(self, body: AskedForChoices, head: dict[str, Any]) -> None:
        """`head`: the fields that all objects begin with (id, created, model)."""
        self._n = body.num_answers
        self._num_prompt_top = body.prompt_logprobs
        self._tells_token_ids = bool(body.return_token_ids)
        self._names_by_id = bool(body.return_tokens_as_token_ids)
        self._prompt_token_ids: dict[int, Sequence[int]] = {}
        """By prompt number, if a stream reports them."""
        self._head = head

    def told_logprobs(self, choice: int, message: GenerateResponse) -> Sequence[TokenLogprobs]:
        """The logprobs to report with `message`, the next one of `choice`."""
        return message.logprobs

    def _usage_of(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """The usage of all choices together. Each prompt counts once, by the first choice that answers it."""
        prompts = usages[:: self._n]
        told = _counts_of(sum(each.prompt_tokens for each in prompts), sum(each.completion_tokens for each in usages))
        return told | {"prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)}}

    # -- a whole answer -----------------------------------------------------------------------------------------

    def whole(self, answers: list[Answer], logprobs: list[list[TokenLogprobs]]) -> dict[str, Any]:
        """All choices as one object. `logprobs`: those to report for each choice."""
        choices = [
            self._whole_choice(choice, answer, told)
            for choice, (answer, told) in enumerate(zip(answers, logprobs, strict=True))
        ]
        whole = {
            **self._head,
            "object": self.whole_name,
            "choices": choices,
            "usage": self._usage_of([answer.usage for answer in answers]),
            "timings": timings_of([answer.timings for answer in answers]),
        }
        self._tell_prompts(whole, [self._prompt_of(first) for first in answers[:: self._n]])
        return whole

    def _whole_choice(self, choice: int, answer: Answer, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        said = self._said(choice, answer, logprobs)
        end = self._end(choice, answer.finish_reason, answer.stop_reason or answer.stop_token_id)
        ids = {"token_ids": answer.token_ids} if self._tells_token_ids else {}
        return {"index": choice, **said, **end, **ids}

    def _prompt_of(self, first: Answer) -> dict[str, Any]:
        """What vLLM's fields report about a prompt, from the first answer to it."""
        told: dict[str, Any] = {"prompt_token_ids": first.prompt_token_ids} if self._tells_token_ids else {}
        if self._num_prompt_top is not None:
            told["prompt_logprobs"] = of_prompt(first.prompt_logprobs, self._num_prompt_top)
        return told

    @abstractmethod
    def _tell_prompts(self, whole: dict[str, Any], prompts: Sequence[dict[str, Any]]) -> None:
        """Put the fields about each prompt in their place."""

    @abstractmethod
    def _said(self, choice: int, answer: Answer, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """A whole choice's text and logprobs."""

    # -- a stream's events --------------------------------------------------------------------------------------

    def note_prompt(self, choice: int, message: GenerateResponse) -> None:
        """Keep what `message` reports about the prompt that `choice` answers."""
        if message.prompt_token_ids:
            self._prompt_token_ids[choice // self._n] = list(message.prompt_token_ids)

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The event before a choice's first piece; None: there is none."""
        return None

    def first_piece(self, choice: int, message: GenerateResponse, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """As `piece`, for a choice's first one."""
        return self.piece(choice, message, logprobs)

    def piece(self, choice: int, message: GenerateResponse, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """An event with new text of a choice, or its end. `logprobs`: those to report with it."""
        said = self._newly_said(choice, message, logprobs)
        end: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
        if message.finish_reason:
            reason = short_name(FinishReason.DESCRIPTOR, message.finish_reason)
            end = self._end(choice, reason, message.stop_reason or stop_token_id_of(message))
        ids = {"token_ids": list(message.token_ids)} if self._tells_token_ids else {}
        event = self._event([{"index": choice, **said, **end, **ids}])
        if message.HasField("timings"):
            event["timings"] = message_to_dict(message.timings)
        return event

    def usage(self, usages: list[Usage]) -> dict[str, Any]:
        """The last event, if usage was requested."""
        return {**self._event([]), "usage": self._usage_of(usages)}

    @staticmethod
    def usage_so_far(usage: Usage) -> dict[str, Any]:
        """The usage of one choice, as far as it has come. As in vLLM, without details, which only the end knows."""
        return _counts_of(usage.prompt_tokens, usage.completion_tokens)

    @abstractmethod
    def _newly_said(self, choice: int, message: GenerateResponse, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """A piece's text and logprobs."""

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.event_name, "choices": choices}

    # -- both ---------------------------------------------------------------------------------------------------

    def _end(self, choice: int, finish_reason: str, stop: str | int | None) -> dict[str, Any]:
        """Why a choice ended. `stop`: the stop string or stop token that ended it; vLLM's `stop_reason`."""
        return {"finish_reason": self._finish_reason(choice, finish_reason), "stop_reason": stop}

    def _finish_reason(self, choice: int, reason: str) -> str:
        return reason


class CompletionStyle(Style):
    whole_name = event_name = "text_completion"

    def __init__(self, body: CompletionRequest, head: dict[str, Any]) -> None:
        super().__init__(body, head)
        self._echo = None
        if body.echo:
            self._echo = Echo(body.prompts(), body.num_answers, body.logprobs, is_known=body.knows_its_texts)

    def first_piece(self, choice: int, message: GenerateResponse, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        event = self.piece(choice, message, logprobs)
        if (prompt := self._prompt_token_ids.get(choice // self._n)) is not None:
            event["choices"][0]["prompt_token_ids"] = prompt
        return event

    def _tell_prompts(self, whole: dict[str, Any], prompts: Sequence[dict[str, Any]]) -> None:
        """In each choice."""
        for index, choice in enumerate(whole["choices"]):
            choice.update(prompts[index // self._n])

    def _said(self, choice: int, answer: Answer, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._text(choice, answer.text, logprobs, answer.prompt_logprobs)

    def _newly_said(self, choice: int, message: GenerateResponse, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._text(choice, message.text, logprobs, message.prompt_logprobs)

    def _text(
        self,
        choice: int,
        text: str,
        logprobs: Sequence[TokenLogprobs],
        prompt_logprobs: Sequence[TokenLogprobs],
    ) -> dict[str, Any]:
        if self._echo is not None:
            text, logprobs = self._echo.before(choice, text, logprobs, prompt_logprobs)
        return {"text": text, "logprobs": of_completion(logprobs, by_id=self._names_by_id) if logprobs else None}


class ChatStyle(Style):
    whole_name = "chat.completion"
    event_name = "chat.completion.chunk"

    def __init__(self, body: ChatRequest, head: dict[str, Any]) -> None:
        super().__init__(body, head)
        self._role = body.role
        self._has_logprobs = bool(body.logprobs)
        self._names_tool = body.names_tool
        self._calling: set[int] = set()
        """Choices that have called tools."""
        self._contents: dict[int, OfContent] = {}
        self._tells_reasoning = body.include_reasoning is not False

    def _usage_of(self, usages: Sequence[Usage]) -> dict[str, Any]:
        num_thought = sum(usage.reasoning_tokens for usage in usages)
        return super()._usage_of(usages) | {"completion_tokens_details": {"reasoning_tokens": num_thought}}

    def told_logprobs(self, choice: int, message: GenerateResponse) -> Sequence[TokenLogprobs]:
        return self._contents.setdefault(choice, OfContent()).accept(message) if self._has_logprobs else ()

    def opening(self, choice: int) -> dict[str, Any]:
        """The event with the role, and the prompt's token ids if requested."""
        delta = {"role": self._role, "content": ""}
        event = self._event([{"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}])
        if (prompt := self._prompt_token_ids.get(0)) is not None:
            event["prompt_token_ids"] = prompt
        return event

    def _tell_prompts(self, whole: dict[str, Any], prompts: Sequence[dict[str, Any]]) -> None:
        """A chat has one prompt."""
        whole.update(prompts[0])

    def _said(self, choice: int, answer: Answer, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self._role, "content": answer.text, "refusal": None}
        if answer.tool_calls:
            self._calling.add(choice)
            message["content"] = answer.text or None
            message["tool_calls"] = [call.to_dict() for call in answer.tool_calls]
        # Always present: a client that reads it from an answer without a thought gets null, not an error.
        message["reasoning"] = (answer.reasoning or None) if self._tells_reasoning else None
        # If all logprobs are left out, such as those of a thought, there is an empty list.
        has_any = bool(logprobs or answer.logprobs)
        return {"message": message, "logprobs": of_chat(logprobs, by_id=self._names_by_id) if has_any else None}

    def _newly_said(self, choice: int, message: GenerateResponse, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        is_told = message.reasoning and self._tells_reasoning
        delta: dict[str, Any] = {"reasoning": message.reasoning} if is_told else {}
        if message.text or not (message.finish_reason or message.tool_calls or message.reasoning):
            delta["content"] = message.text
        if message.tool_calls:
            self._calling.add(choice)
            delta["tool_calls"] = _pieces_of_calls(message.tool_calls)
        return {"delta": delta, "logprobs": of_chat(logprobs, by_id=self._names_by_id) if logprobs else None}

    def _finish_reason(self, choice: int, reason: str) -> str:
        """As OpenAI: "tool_calls" for an answer that stops after calling tools, but not if the request named the
        tool."""
        return "tool_calls" if reason == "stop" and choice in self._calling and not self._names_tool else reason


def _pieces_of_calls(pieces: Iterable[ToolCallDelta]) -> list[dict[str, Any]]:
    """The pieces of one message, joined to one for each call: many clients read only the first of an event."""
    told: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.index in told:
            told[piece.index]["function"]["arguments"] += piece.arguments
        else:
            told[piece.index] = _piece_of_call(piece)
    return list(told.values())


def _piece_of_call(piece: ToolCallDelta) -> dict[str, Any]:
    """A piece of a call; the first piece has its id and name."""
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _counts_of(num_prompt: int, num_completion: int) -> dict[str, Any]:
    total = num_prompt + num_completion
    return {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": total}


def timings_of(timings: list[Timings]) -> dict[str, Any] | list[dict[str, Any]]:
    """One object for one choice, else a list with one for each choice."""
    plain = [message_to_dict(each) for each in timings]
    return plain[0] if len(plain) == 1 else plain


def models_of(infos: Sequence[GetModelInfoResponse], created_s: int) -> dict[str, Any]:
    """The models under all their names, and their adapters. If two have the same name, the first is listed."""
    known: dict[str, dict[str, Any]] = {}
    for info in infos:
        for name in (info.model, *info.aliases, *info.lora_names):
            described = {
                "id": name,
                "object": "model",
                "created": created_s,
                "owned_by": "tandem",
                "root": info.model if name in info.aliases else name,
                "parent": info.model if name in info.lora_names else None,
                "max_model_len": info.max_model_len,
            }
            known.setdefault(name, described)
    return {"object": "list", "data": list(known.values())}
