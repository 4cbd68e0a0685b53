"""Checks a request before anything is queued.

    validate ──> ValidatedRequest ──> tokenize_prompt ──> check_prompt_length ──> compile_grammar ──> resolve_sampling
                                      (prompt.py)         `router.prepared` calls these              (sampling.py)

All checks run, so that the client learns about all wrong fields at once. Each description states the bound and the
given value, but never quotes a prompt. The bounds are those of protos/tandem_inference.proto; other modules check
prompts and sampling parameters.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from protos import tandem_inference_pb2 as pb
from router.model_info import ModelInfo
from router.text.calls.call_format import CannotBeHeld
from router.text.structured_outputs import problem_of
from router.validation.grammar_checker import GrammarChecker
from router.validation.prompt import FIELD_OF_PROMPT, ChatPrompt, Prompt, check_prompt, too_long
from router.validation.resumption import BegunAnswer, begun_answers
from router.validation.sampling import bounded_by_room, check_sampling, has_thinking_budget
from router.validation.tools import NO_TOOLS, AskedTools
from router.validation.violations import Violations
from rpc.errors import InvalidRequest

MAX_REQUEST_ID_CHARS = 128
MAX_PROMPT_LOGPROBS = 131_072
"""Numbers in one answer: 2 MB from a worker to a router, 3 MB to the client."""
MAX_CACHE_SALT_CHARS = 128
MAX_NAMES_TOLD = 8
"""How many names of adapters or aliases an error lists."""
MAX_FAIRNESS_ID_BYTES = 256
ROOM = -1
"""Value of truncate_prompt_tokens: keep what the context has room for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidatedRequest:
    """A request whose fields are each within bounds. The prompt's length in tokens is not known yet."""

    request_id: str
    """The client's, or a generated one."""
    prompt: Prompt
    sampling_params: pb.SamplingParams
    """As given, with absent fields still absent, plus the structured outputs that tools require."""
    begun: Mapping[int, BegunAnswer]
    """By sequence: answers of which the client has a part already, or all."""
    cache_salt: str
    lora_name: str
    """The requested adapter. Empty: the model itself."""
    fairness_id: str
    is_streaming: bool
    truncate_prompt_tokens: int | None
    with_prompt_token_ids: bool

    @property
    def num_sequences(self) -> int:
        """How many answers are requested."""
        return self.sampling_params.n if self.sampling_params.HasField("n") else 1

    @property
    def open_sequences(self) -> list[int]:
        """The sequences whose answers the client does not have completely."""
        return [i for i in range(self.num_sequences) if i not in self.begun or not self.begun[i].is_complete]

    @property
    def asked_tools(self) -> AskedTools:
        return self.prompt.asked if isinstance(self.prompt, ChatPrompt) else NO_TOOLS

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, ChatPrompt)

    def num_kept_tokens(self, model: ModelInfo) -> int | None:
        """How many tokens of the prompt to keep at most. None: the prompt is not cut. With truncate_prompt_tokens=-1,
        the prompt leaves room in the context for max_tokens or min_tokens."""
        if self.truncate_prompt_tokens != ROOM:
            return self.truncate_prompt_tokens
        asked = self.sampling_params.max_tokens
        if asked >= model.max_model_len:  # a target that leaves no room for any prompt
            asked = 1
        return model.max_model_len - max(1, asked, self.sampling_params.min_tokens)

    @property
    def prompt_field(self) -> str:
        """Name of the prompt's field in the request, for violations."""
        return FIELD_OF_PROMPT[type(self.prompt)]


def check_size(request: Message, max_bytes: int) -> None:
    """Refuse a message of more than `max_bytes` bytes. Raises `InvalidRequest` naming the field that takes most."""
    num_bytes = request.ByteSize()
    if num_bytes > max_bytes:
        sizes = {field.name: _num_bytes(value) for field, value in request.ListFields()}
        largest = max(sizes, key=lambda name: sizes[name])
        bound = f"{max_bytes} (the router's --max-message-bytes)"
        raise InvalidRequest([(largest, f"is too long: the request has {num_bytes} bytes, the maximum is {bound}")])


def _num_bytes(value: Any) -> int:
    """Approximate size of a field's value on the wire."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, Message):
        return value.ByteSize()
    return len(value) if isinstance(value, Sequence) else 1


def validate(request: pb.GenerateRequest, model: ModelInfo) -> ValidatedRequest:
    """Check everything that can be checked before tokenising. Raises `InvalidRequest` with all violations."""
    violations: Violations = []
    _check_request_id(request.request_id, violations)
    has_begun = bool(request.worker_kind) or any(each.worker_kind for each in request.answers_so_far)
    check_model(request.model, model, violations, has_begun=has_begun)
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        bound = f"must be at most {MAX_CACHE_SALT_CHARS} characters, has {len(request.cache_salt)}"
        violations.append(("cache_salt", bound))
    if (num_bytes := len(request.fairness_id.encode())) > MAX_FAIRNESS_ID_BYTES:
        violations.append(("fairness_id", f"must have at most {MAX_FAIRNESS_ID_BYTES} bytes, has {num_bytes}"))
    prompt = check_prompt(request, model, violations)
    _check_truncation(request, model, violations)
    asked = params = request.sampling_params
    if isinstance(prompt, ChatPrompt):
        prompt, params = _with_form(prompt, asked, violations)
    wrongs: Violations = []
    check_sampling(params, model, wrongs)
    if params is not asked:  # a client that gave tools does not know about structured_outputs
        wrongs = [(field, said.replace("structured_outputs", "tools that hold the answer")) for field, said in wrongs]
    violations += wrongs
    if has_thinking_budget(params) and not isinstance(prompt, ChatPrompt):
        said = "is only for chats: reasoning is told apart from the answer by the chat template"
        violations.append(("sampling_params.thinking_token_budget", said))
    begun = begun_answers(request, model, violations)
    if violations:
        raise InvalidRequest(violations)
    return ValidatedRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt=prompt,
        sampling_params=params,
        begun=begun,
        cache_salt=request.cache_salt,
        lora_name=request.model if model.is_lora(request.model, has_begun=has_begun) else "",
        fairness_id=request.fairness_id,
        is_streaming=request.stream if request.HasField("stream") else True,
        truncate_prompt_tokens=request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None,
        with_prompt_token_ids=request.with_prompt_token_ids,
    )


def _check_truncation(request: pb.GenerateRequest, model: ModelInfo, violations: Violations) -> None:
    num_kept = request.truncate_prompt_tokens
    if request.HasField("truncate_prompt_tokens") and num_kept != ROOM and not 1 <= num_kept <= model.max_model_len:
        bound = f"must be in [1, {model.max_model_len}] (the context), or -1 for as many as fit, is {num_kept}"
        violations.append(("truncate_prompt_tokens", bound))


async def compile_grammar(
    params: pb.SamplingParams,
    checker: GrammarChecker,
    asked: AskedTools = NO_TOOLS,
    tokens: Mapping[str, int] = MappingProxyType({}),
    *,
    client: str = "",
) -> str:
    """The grammar that workers follow for structured_outputs; empty if none are requested. `tokens`: as in
    `grammar_of`. `client`: with whom others take turns. The compilation runs in another process.

    Raises `InvalidRequest` saying why the grammar cannot constrain an answer; if `asked` tools made the grammar, it
    names the tool.
    """
    if not params.HasField("structured_outputs"):
        return ""
    try:
        return await checker.check(params.structured_outputs, max(1, params.n), tokens, client=client)
    except ValueError as error:
        if asked.parser:
            raise InvalidRequest([asked.problem_of_form(str(error))]) from error
        raise InvalidRequest([("sampling_params.structured_outputs", str(error))]) from error


def check_prompt_length(validated: ValidatedRequest, num_prompt_tokens: int, model: ModelInfo) -> None:
    """Check what depends on the prompt's length in tokens. Raises `InvalidRequest` with all violations.

    Prompt and answer share the context: a max_tokens for which there is no room is refused, as by Anthropic, unless it
    is only a target, as in vLLM.
    """
    violations: Violations = []
    num_left = model.max_model_len - num_prompt_tokens
    if num_prompt_tokens < 1:
        violations.append((validated.prompt_field, "must give at least 1 token, gives 0"))
    elif num_left < 1:
        violations.append((validated.prompt_field, too_long(f"has {num_prompt_tokens}", model.max_model_len)))
    else:
        _check_beside_prompt(validated, num_prompt_tokens, model, violations)
    if violations:
        raise InvalidRequest(violations)


def _check_beside_prompt(
    validated: ValidatedRequest, num_prompt_tokens: int, model: ModelInfo, violations: Violations
) -> None:
    """Check what needs room in the context beside the prompt, and what comes with each token of the prompt."""
    params, num_left = validated.sampling_params, model.max_model_len - num_prompt_tokens
    for begun in validated.begun.values():
        if len(begun.token_ids) > num_left:
            bound = f"must have at most {num_left} ids beside a prompt of {num_prompt_tokens} tokens (the context is "
            bound += f"{model.max_model_len}), has {len(begun.token_ids)}"
            violations.append((begun.field, bound))
    num_numbers = num_prompt_tokens * (1 + params.prompt_logprobs)
    if params.HasField("prompt_logprobs") and num_numbers > MAX_PROMPT_LOGPROBS:
        bound = f"must be lower for a prompt of {num_prompt_tokens} tokens: 1 + {params.prompt_logprobs} logprobs for "
        bound += f"each are {num_numbers}, the maximum is {MAX_PROMPT_LOGPROBS}"
        violations.append(("sampling_params.prompt_logprobs", bound))
    for name in bounded_by_room(params):
        value = getattr(params, name)
        if value > num_left:
            bound = f"must be at most {num_left} (the context of {model.max_model_len} tokens minus the prompt of "
            violations.append((f"sampling_params.{name}", bound + f"{num_prompt_tokens}), is {value}"))


def _check_request_id(request_id: str, violations: Violations) -> None:
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        violations.append(("request_id", f"must be at most {MAX_REQUEST_ID_CHARS} characters, has {len(request_id)}"))
    # The id appears in log lines: line breaks and direction marks could forge them.
    position = next((i for i, char in enumerate(request_id) if not char.isprintable()), None)
    if position is not None:
        code = ord(request_id[position])
        violations.append(("request_id", f"must consist of printable characters, has U+{code:04X} at {position}"))


def check_model(name: str, model: ModelInfo, violations: Violations, *, has_begun: bool = False) -> None:
    """Check whether a request may name `name` as its model. `has_begun`: an answer of it has begun, and its client says
    on which kind of workers."""
    if not model.has_name(name, has_begun=has_begun):
        aliases = f", also named {_some(model.aliases)}" if model.aliases else ""
        adapters = f", one of its adapters ({_some(model.lora_names)})" if model.lora_names else ""
        known = f"{model.served_model_name!r}{aliases}{adapters}"
        violations.append(("model", f"must be {known} or empty, is {name[:128]!r}"))


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:MAX_NAMES_TOLD])) + (", …" if len(names) > MAX_NAMES_TOLD else "")


def _with_form(
    prompt: ChatPrompt, params: pb.SamplingParams, violations: Violations
) -> tuple[ChatPrompt, pb.SamplingParams]:
    """`prompt`, whose tools know the requested structured outputs, and `params`; if the tools constrain the answer, new
    params with the tools' grammar as structured outputs."""
    try:
        prompt = replace(prompt, asked=prompt.asked.with_form(params))
    except ValueError as error:
        violations.append(("sampling_params.structured_outputs", str(error)))
        return prompt, params
    if not prompt.asked.holds:
        return prompt, params
    try:
        form = pb.StructuredOutputs(grammar=prompt.asked.grammar().text)
    except CannotBeHeld as error:
        violations.append((prompt.asked.field_of(error.tool), f"cannot be enforced: {error}"))
        return prompt, params
    n = max(1, params.n)
    if (problem := problem_of(form, n)) is not None:
        if not (params.HasField("structured_outputs") and problem_of(params.structured_outputs, n)):
            violations.append(("chat.tools", f"as a {problem}"))
        return prompt, params
    formed = pb.SamplingParams()
    formed.CopyFrom(params)
    formed.structured_outputs.CopyFrom(form)
    return prompt, formed
