"""Checks a request before anything is queued.

    validate -> ValidatedRequest -> tokenize_prompt -> check_prompt_length -> compile_grammar -> (sampling.py) resolve

Every check runs: the client learns of all wrong fields at once. Each description states the bound and what was given;
prompts are never quoted. Bounds are those of protos/tandem_inference.proto; those of sampling parameters are in
router/validation/sampling.py.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from google.protobuf.message import Message

from protos import tandem_inference_pb2 as pb
from router.model_info import ModelInfo
from router.text.calls.call_format import CannotBeHeld
from router.text.chat_template import GIVEN_NAMES, ChatMessage, ChatTemplate
from router.text.reasoning import opened_by
from router.text.structured_outputs import problem_of
from router.text.tokenizer import Tokenizer, TooManyTokens
from router.validation.grammar_checker import GrammarChecker
from router.validation.resumption import BegunAnswer, begun_answers
from router.validation.sampling import Violations, check_in_vocabulary, check_sampling
from router.validation.tools import NO_TOOLS, AskedTools, check_messages, check_tools, object_of
from rpc.errors import InvalidRequest

MAX_REQUEST_ID_CHARS = 128
MAX_PROMPT_LOGPROBS = 131_072
"""In one answer: 2 MB from a worker to a router, 3 MB to the client."""
MAX_CACHE_SALT_CHARS = 128
MAX_NAMES_TOLD = 8
"""Of adapters, in an error."""
MAX_FAIRNESS_ID_BYTES = 256
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
    """For the template."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def continued(self) -> str:
        """The content that the answer goes on with. Empty: it begins."""
        return self.messages[-1].content if self.continue_final_message else ""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    token_ids: list[int]
    thought_opened_by: str = ""
    """The word with which a chat's template has begun what the model thinks, if it has."""


Prompt: TypeAlias = TextPrompt | TokenIdsPrompt | ChatPrompt
_FIELD_OF_PROMPT: dict[type, str] = {TextPrompt: "text", TokenIdsPrompt: "token_ids", ChatPrompt: "chat"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidatedRequest:
    """A request whose fields are each within bounds. The prompt's length in tokens is not known yet."""

    request_id: str
    """The client's, or one made up."""
    prompt: Prompt
    sampling_params: pb.SamplingParams
    """As given: absent fields are still absent. With the form that tools ask for."""
    begun: Mapping[int, BegunAnswer]
    """By sequence: those that the client has something of already."""
    cache_salt: str
    lora_name: str
    """The adapter that is asked for. Empty: the model by itself."""
    fairness_id: str
    is_streaming: bool

    @property
    def num_sequences(self) -> int:
        """How many answers are asked for."""
        return self.sampling_params.n if self.sampling_params.HasField("n") else 1

    @property
    def open_sequences(self) -> list[int]:
        """Of them those whose end the client does not have."""
        return [i for i in range(self.num_sequences) if i not in self.begun or not self.begun[i].is_complete]

    @property
    def asked_tools(self) -> AskedTools:
        return self.prompt.asked if isinstance(self.prompt, ChatPrompt) else NO_TOOLS

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, ChatPrompt)

    @property
    def prompt_field(self) -> str:
        """Name of the prompt's field in the request, for violations."""
        return _FIELD_OF_PROMPT[type(self.prompt)]


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:MAX_NAMES_TOLD])) + (", …" if len(names) > MAX_NAMES_TOLD else "")


def check_size(request: Message, max_bytes: int) -> None:
    """Refuse a message of more than `max_bytes` bytes. Raises `InvalidRequest` naming the field that takes most."""
    num_bytes = request.ByteSize()
    if num_bytes > max_bytes:
        sizes = {field.name: _num_bytes(value) for field, value in request.ListFields()}
        largest = max(sizes, key=lambda name: sizes[name])
        bound = f"is too long: the request has {num_bytes} bytes, and at most {max_bytes} are taken"
        raise InvalidRequest([(largest, bound)])


def _num_bytes(value: Any) -> int:
    """Of a field's value on the wire, nearly."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, Message):
        return value.ByteSize()
    return len(value) if isinstance(value, Sequence) else 1


def validate(request: pb.GenerateRequest, model: ModelInfo) -> ValidatedRequest:
    """Check all that can be checked before tokenising. Raises `InvalidRequest` with every violation."""
    violations: Violations = []
    _check_request_id(request.request_id, violations)
    check_model(request.model, model, violations)
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        bound = f"must be at most {MAX_CACHE_SALT_CHARS} characters, has {len(request.cache_salt)}"
        violations.append(("cache_salt", bound))
    if (num_bytes := len(request.fairness_id.encode())) > MAX_FAIRNESS_ID_BYTES:
        violations.append(("fairness_id", f"must have at most {MAX_FAIRNESS_ID_BYTES} bytes, has {num_bytes}"))
    prompt = check_prompt(request, model, violations)
    params = request.sampling_params
    formed = None
    if isinstance(prompt, ChatPrompt):
        prompt, formed = _with_form(prompt, params, violations)
    wrongs: Violations = []
    check_sampling(params if formed is None else formed, model, wrongs)
    if formed is not None:  # whoever brought tools has not heard of structured_outputs
        wrongs = [(field, said.replace("structured_outputs", "tools that hold the answer")) for field, said in wrongs]
    violations += wrongs
    begun = begun_answers(request, model, violations)
    if violations:
        raise InvalidRequest(violations)
    return ValidatedRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt=prompt,
        sampling_params=params if formed is None else formed,
        begun=begun,
        cache_salt=request.cache_salt,
        lora_name=request.model if request.model in model.lora_names else "",
        fairness_id=request.fairness_id,
        is_streaming=request.stream if request.HasField("stream") else True,
    )


async def tokenize_prompt(
    prompt: Prompt, tokenizer: Tokenizer, chat_template: ChatTemplate | None, *, max_model_len: int | None = None
) -> TokenizedPrompt:
    """Token ids of `prompt`. Text gets the model's special tokens (bos); chats get those of the template alone.

    Raises `InvalidRequest` naming `chat` where the template refuses the messages; and naming the prompt where it is far
    longer than `max_model_len` (None: it may be), without reading all of it. Long prompts leave the event loop.
    """
    match prompt:
        case TokenIdsPrompt(given):
            return TokenizedPrompt(list(given))
        case TextPrompt(text, add_special_tokens):
            thought_opened_by = ""
        case ChatPrompt():
            assert chat_template is not None  # ModelInfo.has_chat_template
            text, add_special_tokens = await _rendered(prompt, chat_template), False
            thought_opened_by = opened_by(text, prompt.continued)
    max_tokens = None if max_model_len is None else max_model_len - 1
    try:
        token_ids = await tokenizer.encode_async(text, add_special_tokens, max_tokens=max_tokens)
    except TooManyTokens as error:
        assert max_model_len is not None
        raise InvalidRequest([(_FIELD_OF_PROMPT[type(prompt)], _too_long(str(error), max_model_len))]) from error
    return TokenizedPrompt(token_ids, thought_opened_by)


async def _rendered(prompt: ChatPrompt, chat_template: ChatTemplate) -> str:
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
        return await asyncio.to_thread(render) if is_long else render()
    except ValueError as error:
        raise InvalidRequest([("chat", str(error).removeprefix("chat: "))]) from error


def _num_chars(message: ChatMessage) -> int:
    return len(message.role) + len(message.content) + len(message.reasoning) + 32


async def compile_grammar(params: pb.SamplingParams, checker: GrammarChecker, asked: AskedTools = NO_TOOLS) -> str:
    """What workers go by for structured_outputs; empty where none are asked for. Leaves this process.

    Raises `InvalidRequest` with the reason that no answer can be held to it: also to what `asked` tools make of it.
    """
    if not params.HasField("structured_outputs"):
        return ""
    try:
        return await checker.check(params.structured_outputs, max(1, params.n))
    except ValueError as error:
        if asked.parser:
            raise InvalidRequest([asked.problem_of_form(str(error))]) from error
        raise InvalidRequest([("sampling_params.structured_outputs", str(error))]) from error


def check_prompt_length(validated: ValidatedRequest, num_prompt_tokens: int, model: ModelInfo) -> None:
    """Check what depends on the prompt's length in tokens. Raises `InvalidRequest` with every violation.

    Prompt and answer share the context: an explicit max_tokens that cannot be had is refused, as vLLM does, rather than
    cut short in silence.
    """
    violations: Violations = []
    params = validated.sampling_params
    num_left = model.max_model_len - num_prompt_tokens
    if num_prompt_tokens < 1:
        violations.append((validated.prompt_field, "must give at least 1 token, gives 0"))
    elif num_left < 1:
        violations.append((validated.prompt_field, _too_long(f"has {num_prompt_tokens}", model.max_model_len)))
    else:
        for begun in validated.begun.values():
            if len(begun.token_ids) > num_left:
                bound = f"may hold {num_left} ids beside a prompt of {num_prompt_tokens} tokens (the context is "
                bound += f"{model.max_model_len}), has {len(begun.token_ids)}"
                violations.append((begun.field, bound))
        num_numbers = num_prompt_tokens * (1 + params.prompt_logprobs)
        if params.HasField("prompt_logprobs") and num_numbers > MAX_PROMPT_LOGPROBS:
            bound = f"is too much for {num_prompt_tokens} tokens of the prompt: each with {params.prompt_logprobs} "
            bound += f"alternatives and itself makes {num_numbers} numbers, there may be {MAX_PROMPT_LOGPROBS}"
            violations.append(("sampling_params.prompt_logprobs", bound))
        for name in ("max_tokens", "min_tokens"):
            value = getattr(params, name)
            if params.HasField(name) and value > num_left:
                violations.append(
                    (
                        f"sampling_params.{name}",
                        f"must be at most {num_left} (the context of {model.max_model_len} tokens minus the prompt of "
                        f"{num_prompt_tokens}), is {value}",
                    )
                )
    if violations:
        raise InvalidRequest(violations)


def _too_long(how_long: str, max_model_len: int) -> str:
    return f"must be at most {max_model_len - 1} tokens (a context of {max_model_len}, 1 for the answer), {how_long}"


def _check_request_id(request_id: str, violations: Violations) -> None:
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        violations.append(("request_id", f"must be at most {MAX_REQUEST_ID_CHARS} characters, has {len(request_id)}"))
    # The id stands in log lines: line breaks and direction marks would forge them.
    position = next((i for i, char in enumerate(request_id) if not char.isprintable()), None)
    if position is not None:
        code = ord(request_id[position])
        violations.append(("request_id", f"must hold printable characters only, has U+{code:04X} at {position}"))


def check_model(name: str, model: ModelInfo, violations: Violations) -> None:
    """Whether a request may ask for `name`."""
    if name not in ("", model.served_model_name, *model.lora_names):
        adapters = f", an adapter of it ({_some(model.lora_names)})" if model.lora_names else ""
        known = f"{model.served_model_name!r}{adapters}"
        violations.append(("model", f"must be {known} or empty, is {name[:128]!r}"))


def check_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, model: ModelInfo, violations: Violations) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                violations.append(("text", "must not be empty"))
            return TextPrompt(request.text)
        case "token_ids" if isinstance(request, pb.GenerateRequest):
            token_ids = tuple(request.token_ids.ids)
            _check_prompt_ids(token_ids, model, violations)
            return TokenIdsPrompt(token_ids)
        case "chat":
            num_messages = len(request.chat.messages)
            if num_messages > MAX_CHAT_MESSAGES:
                violations.append(("chat.messages", f"may hold {MAX_CHAT_MESSAGES} messages, has {num_messages}"))
                return ChatPrompt(())
            messages = check_messages(request.chat.messages, model, violations)
            _check_chat(messages, model, violations)
            variables = _check_template_kwargs(request.chat.template_kwargs, violations)
            adds, continues = check_end(request.chat, violations)
            return ChatPrompt(messages, check_tools(request.chat, model, violations), variables, adds, continues)
    *others, last = (kind.name for kind in request.DESCRIPTOR.oneofs_by_name["prompt"].fields)
    violations.append(("prompt", f"must be given: one of {', '.join(others)} and {last}"))
    return TextPrompt("")


def _check_prompt_ids(token_ids: tuple[int, ...], model: ModelInfo, violations: Violations) -> None:
    if not token_ids:
        violations.append(("token_ids", "must not be empty"))
    elif len(token_ids) >= model.max_model_len:
        violations.append(("token_ids", _too_long(f"has {len(token_ids)}", model.max_model_len)))
    check_in_vocabulary("token_ids", token_ids, model, violations)


def _check_chat(messages: tuple[ChatMessage, ...], model: ModelInfo, violations: Violations) -> None:
    if not model.has_chat_template:
        violations.append(("chat", f"model {model.served_model_name!r} has no chat template: give text or token_ids"))
    if not messages:
        violations.append(("chat.messages", "must not be empty"))
    position = next((i for i, message in enumerate(messages) if not message.role), None)
    if position is not None:
        violations.append((f"chat.messages[{position}].role", "must not be empty"))


def check_end(chat: pb.Chat, violations: Violations) -> tuple[bool, bool]:
    """How its prompt ends: add_generation_prompt, continue_final_message."""
    field, continues = "chat.continue_final_message", chat.continue_final_message
    if continues and chat.add_generation_prompt:
        cannot = "cannot be had with add_generation_prompt: the answer goes on with the last message, or begins one"
        violations.append((field, cannot))
    if continues and chat.messages and chat.messages[-1].tool_calls:
        violations.append((field, "cannot be had: the last message has tool_calls, which end its content"))
    return (chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues), continues


def _check_template_kwargs(text: str, violations: Violations) -> dict[str, Any]:
    name = "chat.template_kwargs"
    num_bytes = len(text.encode())
    if num_bytes > MAX_TEMPLATE_KWARGS_BYTES:
        violations.append((name, f"must have at most {MAX_TEMPLATE_KWARGS_BYTES} bytes, has {num_bytes}"))
        return {}
    variables = (object_of(text, name, violations) if text else None) or {}
    if given := GIVEN_NAMES & variables.keys():
        violations.append((name, f"may not say what {', '.join(sorted(given))} is: the template is given that"))
    return variables


def _with_form(
    prompt: ChatPrompt, params: pb.SamplingParams, violations: Violations
) -> tuple[ChatPrompt, pb.SamplingParams | None]:
    """`prompt`, which knows what its tools hold answers to, and `params` with that; None: they do not."""
    try:
        prompt = replace(prompt, asked=prompt.asked.with_form(params))
    except ValueError as error:
        violations.append(("sampling_params.structured_outputs", str(error)))
        return prompt, None
    if not prompt.asked.holds:
        return prompt, None
    try:
        form = pb.StructuredOutputs(grammar=prompt.asked.grammar().text)
    except CannotBeHeld as error:
        violations.append((prompt.asked.field_of(error.tool), f"cannot be held to: {error}"))
        return prompt, None
    n = max(1, params.n)
    if (problem := problem_of(form, n)) is not None:
        if not (params.HasField("structured_outputs") and problem_of(params.structured_outputs, n)):
            violations.append(("chat.tools", f"as a {problem}"))
        return prompt, None
    formed = pb.SamplingParams()
    formed.CopyFrom(params)
    formed.structured_outputs.CopyFrom(form)
    return prompt, formed
