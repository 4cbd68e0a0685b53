"""The prompt of a request: checks it, and turns it into tokens.

    check_prompt ──> TextPrompt | TokenIdsPrompt | ChatPrompt ──tokenize_prompt──> TokenizedPrompt

Bounds are those of protos/tandem_inference.proto.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from protos import tandem_inference_pb2 as pb
from router.model_info import ModelInfo
from router.text.chat_template import ChatMessage, ChatTemplate
from router.text.reasoning import opened_by
from router.text.template_kwargs import GIVEN_NAMES
from router.text.tokenizer import Tokenizer, TooManyTokens
from router.validation.tools import NO_TOOLS, AskedTools, check_messages, check_tools, object_of
from router.validation.violations import Violations, check_in_vocabulary
from rpc.errors import InvalidRequest

MAX_CHAT_MESSAGES = 8192
MAX_TEMPLATE_KWARGS_BYTES = 65_536
INLINE_RENDER_CHARS = 65_536
"""Chats longer than this (32 characters counted for what the template adds to a message), and those with tools or
variables for the template, are rendered in a thread."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenIdsPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]
    asked: AskedTools = NO_TOOLS
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the chat template."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def continued(self) -> str:
        """The content that the answer continues. Empty: the answer begins a new message."""
        return self.messages[-1].content if self.continue_final_message else ""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    token_ids: list[int]
    thought_opened_by: str = ""
    """The words with which the chat template has begun a thought, if it has."""
    is_within_thought: bool = False
    """The prompt contains more of the thought than those words."""


Prompt: TypeAlias = TextPrompt | TokenIdsPrompt | ChatPrompt
FIELD_OF_PROMPT: dict[type, str] = {TextPrompt: "text", TokenIdsPrompt: "token_ids", ChatPrompt: "chat"}


def check_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, model: ModelInfo, violations: Violations) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text and isinstance(request, pb.GenerateRequest):
                violations.append(("text", "must not be empty"))
            return TextPrompt(
                request.text, request.add_special_tokens if request.HasField("add_special_tokens") else True
            )
        case "token_ids" if isinstance(request, pb.GenerateRequest):
            token_ids = tuple(request.token_ids.ids)
            _check_prompt_ids(token_ids, request.HasField("truncate_prompt_tokens"), model, violations)
            return TokenIdsPrompt(token_ids)
        case "chat":
            num_messages = len(request.chat.messages)
            if num_messages > MAX_CHAT_MESSAGES:
                violations.append(
                    ("chat.messages", f"must have at most {MAX_CHAT_MESSAGES} messages, has {num_messages}")
                )
                return ChatPrompt(())
            messages = check_messages(request.chat.messages, model, violations)
            if not model.has_chat_template:
                no_template = f"model {model.served_model_name!r} has no chat template: give text or token_ids"
                violations.append(("chat", no_template))
            variables = _check_template_kwargs(request.chat.template_kwargs, violations)
            adds, continues = check_end(request.chat, violations)
            if request.add_special_tokens:
                violations.append(
                    ("add_special_tokens", "is only for text prompts: in a chat, the template adds special tokens")
                )
            return ChatPrompt(messages, check_tools(request.chat, model, violations), variables, adds, continues)
    *others, last = (kind.name for kind in request.DESCRIPTOR.oneofs_by_name["prompt"].fields)
    violations.append(("prompt", f"must be given: one of {', '.join(others)} and {last}"))
    return TextPrompt("")


def _check_prompt_ids(token_ids: tuple[int, ...], is_cut: bool, model: ModelInfo, violations: Violations) -> None:
    if not token_ids:
        violations.append(("token_ids", "must not be empty"))
    elif len(token_ids) >= model.max_model_len and not is_cut:
        violations.append(("token_ids", too_long(f"has {len(token_ids)}", model.max_model_len)))
    check_in_vocabulary("token_ids", token_ids, model, violations)


def check_end(chat: pb.Chat, violations: Violations) -> tuple[bool, bool]:
    """Check how the chat's prompt ends. Returns add_generation_prompt and continue_final_message."""
    field, continues = "chat.continue_final_message", chat.continue_final_message
    if continues and chat.add_generation_prompt:
        cannot = "cannot be combined with add_generation_prompt: one continues the last message, the other begins one"
        violations.append((field, cannot))
    if continues and chat.messages and chat.messages[-1].tool_calls:
        violations.append((field, "cannot be used: the last message has tool_calls, which end its content"))
    return (chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues), continues


def _check_template_kwargs(text: str, violations: Violations) -> dict[str, Any]:
    name = "chat.template_kwargs"
    num_bytes = len(text.encode())
    if num_bytes > MAX_TEMPLATE_KWARGS_BYTES:
        violations.append((name, f"must have at most {MAX_TEMPLATE_KWARGS_BYTES} bytes, has {num_bytes}"))
        return {}
    variables = (object_of(text, name, violations) if text else None) or {}
    if given := GIVEN_NAMES & variables.keys():
        violations.append((name, f"must not set {', '.join(sorted(given))}: the server sets it"))
    return variables


def too_long(how_long: str, max_model_len: int) -> str:
    return f"must be at most {max_model_len - 1} tokens (a context of {max_model_len}, 1 for the answer), {how_long}"


async def tokenize_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    *,
    max_model_len: int | None = None,
    num_kept: int | None = None,
    threads: Executor | None = None,
) -> TokenizedPrompt:
    """Token ids of `prompt`; if there are more than `num_kept`, the last ones. A text gets the model's special tokens
    (bos), even if it is cut; a chat gets only those of the template.

    Raises `InvalidRequest` naming `chat` if the template refuses the messages, or naming the prompt if it is far longer
    than `max_model_len` (None: no bound), without reading all of it. Long prompts run in one of `threads` (None: the
    event loop's own).
    """
    match prompt:
        case TokenIdsPrompt(given):
            return TokenizedPrompt(list(given if num_kept is None else given[-num_kept:]))
        case TextPrompt(text, add_special_tokens):
            thought_opened_by = ""
        case ChatPrompt():
            assert chat_template is not None  # ModelInfo.has_chat_template
            text, add_special_tokens = await _rendered(prompt, chat_template, threads), False
            thought_opened_by = opened_by(text, prompt.continued)
    max_tokens = None if max_model_len is None else max_model_len - 1
    try:
        token_ids = await tokenizer.encode_async(
            text, add_special_tokens, max_tokens=max_tokens, num_kept=num_kept, threads=threads
        )
    except TooManyTokens as error:
        assert max_model_len is not None
        raise InvalidRequest([(FIELD_OF_PROMPT[type(prompt)], too_long(str(error), max_model_len))]) from error
    is_within_thought = not text.rstrip().endswith(thought_opened_by)
    return TokenizedPrompt(token_ids, thought_opened_by, is_within_thought)


async def _rendered(prompt: ChatPrompt, chat_template: ChatTemplate, threads: Executor | None) -> str:
    messages, tools = prompt.messages, [tool.to_template() for tool in prompt.asked.tools]
    render = partial(
        chat_template.render,
        messages,
        tools,
        prompt.variables,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
    )
    has_objects = bool(tools or prompt.variables) or any(message.tool_calls for message in messages)
    is_long = has_objects or sum(map(_num_chars, messages)) > INLINE_RENDER_CHARS
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, render) if is_long else render()
    except ValueError as error:
        raise InvalidRequest([("chat", str(error).removeprefix("chat: "))]) from error


def _num_chars(message: ChatMessage) -> int:
    return len(message.role) + len(message.content) + len(message.reasoning) + 32
