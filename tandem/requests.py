"""Makes requests to a router from prompts and sampling parameters in Python's types. Errors name what the wire cannot
carry."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from typing import Any, TypedDict, TypeGuard, Unpack

from google.protobuf.descriptor import FieldDescriptor

from protos import tandem_inference_pb2 as pb
from protos import tandem_worker_pb2
from tandem.checks import check_salt, check_text, is_list, is_number, is_whole, without_array
from tandem.structured_outputs import StructuredOutputsParams
from tandem.tools import add_tools, chat_message

MAX_PROFILE_S = 600.0
_TOKEN_IDS = range(2**32)
_INT32 = range(-(2**31), 2**31)
_RANGES = {
    FieldDescriptor.CPPTYPE_UINT32: range(2**32),
    FieldDescriptor.CPPTYPE_INT32: _INT32,
    FieldDescriptor.CPPTYPE_INT64: range(-(2**63), 2**63),
}
"""The integers that the wire can carry, by the field's type. The router checks the bounds of parameters."""
_BOUNDS = {"max_tokens": range(1, 2**32), "logprobs": range(21), "prompt_logprobs": range(21)}
"""The router's bounds that are narrower, for errors about numbers that do not get there."""

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages
"""A text, token ids, or messages ({"role": ..., "content": ...}) for the model's chat template; with tools also
messages with calls ("tool_calls") and with their results ("tool_call_id"), in OpenAI's format."""


class Sampling(TypedDict, total=False):
    """Sampling parameters by the wire's names, and further fields of a request. Absent ones take the model's
    defaults."""

    max_tokens: int
    is_max_tokens_target: bool
    """If the context has no room for max_tokens, the answer has fewer tokens, instead of the request being refused."""
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    seed: int
    skip_special_tokens: bool
    allowed_token_ids: Sequence[int]
    """No other tokens are sampled."""
    bad_words: Sequence[str]
    """Texts that the answer must not contain."""
    thinking_token_budget: int
    """In a chat: how many tokens the answer may think. -1: any number."""
    is_thinking_token_budget_target: bool
    """If the budget cannot be enforced, it is ignored, instead of the request being refused."""
    logit_bias: Mapping[int, float]
    logprobs: int
    prompt_logprobs: int
    priority: int
    structured_outputs: StructuredOutputsParams | Mapping[str, Any]
    cache_salt: str | None
    """Cached prefixes are shared only with requests that have the same salt."""
    fairness_id: str | None
    """The client's name: waiting clients of equal priority are served equally many tokens."""
    truncate_prompt_tokens: int | None
    """Use only the last tokens of a longer prompt, this many; -1: as many as the context has room for."""
    add_special_tokens: bool | None
    """Whether to add special tokens to a text; None: True."""
    with_prompt_token_ids: bool
    """Return the prompt's token ids with the answer."""
    tools: Sequence[Mapping[str, Any]] | None
    """Tools that the model may call, in OpenAI's format: {"type": "function", "function": {"name", "description",
    "parameters", "strict"}}. With messages."""
    tool_choice: str | Mapping[str, Any] | None
    """ "auto", "none", "required", or {"type": "function", "function": {"name": …}}."""
    parallel_tool_calls: bool | None
    """False: an answer makes at most one call."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Variables for the model's chat template, such as {"enable_thinking": False}. With messages."""
    add_generation_prompt: bool | None
    """False: the prompt ends with the last message, without the beginning of an answer."""
    continue_final_message: bool | None
    """The answer continues the content of the last message, which is left open."""


class Generating(Sampling, total=False):
    """`Sampling`, and the fields that concern the request itself."""

    request_id: str
    model: str
    timeout_s: float | None
    """Deadline of the request in all processes. None or infinity: there is none."""
    trace_headers: Mapping[str, str]
    """W3C's traceparent and tracestate, if the request is part of a trace."""


_OF_CHATS = (
    "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip


def generate_request(
    prompt: Prompt,
    *,
    request_id: str = "",
    model: str = "",
    n: int = 1,
    **sampling: Unpack[Sampling],
) -> pb.GenerateRequest:
    """The message for one request with `n` answers. Raises `ValueError` naming what the wire cannot carry."""
    check_text("request_id", request_id)
    check_text("model", model)
    of_chat = {name: sampling.pop(name, None) for name in _OF_CHATS}  # type: ignore[misc]
    own = _own_fields(sampling)
    several = {} if _plain("n", n) == 1 else {"n": n}
    request = pb.GenerateRequest(
        request_id=request_id, model=model, sampling_params=_sampling_params({**sampling, **several}), **own
    )
    if isinstance(prompt, str):
        check_text("prompt", prompt)
        request.text = prompt
    elif _is_chat(prompt):
        _set_chat(request.chat, prompt, of_chat)
        return request
    else:
        _set_token_ids(request, prompt)
    _check_no_chat(of_chat)
    return request


def _own_fields(sampling: Sampling) -> dict[str, Any]:
    """Take the fields that are no sampling parameters out of `sampling`, and return them for the request."""
    cache_salt, fairness_id = sampling.pop("cache_salt", None), sampling.pop("fairness_id", None)
    num_kept, adds = sampling.pop("truncate_prompt_tokens", None), sampling.pop("add_special_tokens", None)
    if cache_salt is not None:
        check_salt("cache_salt", cache_salt)
    if fairness_id is not None:
        check_text("fairness_id", fairness_id)
    return {
        "cache_salt": cache_salt or "",
        "fairness_id": fairness_id or "",
        "truncate_prompt_tokens": None if num_kept is None else _whole("truncate_prompt_tokens", num_kept, _INT32),
        "add_special_tokens": None if adds is None else _truth("add_special_tokens", adds),
        "with_prompt_token_ids": _truth("with_prompt_token_ids", sampling.pop("with_prompt_token_ids", False)),
    }


class Tokenizing(TypedDict, total=False):
    """Parameters of a prompt that is only turned into tokens."""

    model: str
    add_special_tokens: bool | None
    """Whether to add special tokens to a text; None: as `generate` does."""
    with_tokens: bool
    """Also return each token as the vocabulary writes it."""
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    """This and the previous three: as in `Sampling`."""


def tokenize_request(prompt: str | Messages, **asked: Unpack[Tokenizing]) -> pb.TokenizeRequest:
    """The message for Tokenize. Raises `ValueError` naming what the wire cannot carry."""
    if unknown := [name for name in asked if name not in Tokenizing.__annotations__]:
        known = ", ".join(Tokenizing.__annotations__)
        raise ValueError(f"{unknown[0]}: is not a known parameter; known are {known}")
    of_chat = {name: asked.get(name) for name in _OF_CHATS}
    check_text("model", asked.get("model", ""))
    request = pb.TokenizeRequest(
        model=asked.get("model", ""), with_tokens=_truth("with_tokens", asked.get("with_tokens", False))
    )
    if (adds := asked.get("add_special_tokens")) is not None:
        request.add_special_tokens = _truth("add_special_tokens", adds)
    if isinstance(prompt, str):
        check_text("prompt", prompt)
        request.text = prompt
        _check_no_chat(of_chat)
    elif _is_chat(prompt):
        _set_chat(request.chat, prompt, of_chat)
    else:
        raise ValueError(f"prompt: must be a text or messages, is {prompt!r:.80}")
    return request


def detokenize_request(token_ids: Sequence[int], model: str, skip_special_tokens: bool) -> pb.DetokenizeRequest:
    """The message for Detokenize. Raises `ValueError` naming what the wire cannot carry."""
    check_text("model", model)
    skips = _truth("skip_special_tokens", skip_special_tokens)
    request = pb.DetokenizeRequest(model=model, skip_special_tokens=skips)
    _add_ids("token_ids", request.token_ids, token_ids)
    return request


def _set_chat(chat: pb.Chat, messages: Messages, asked: Mapping[str, Any]) -> None:
    for message in messages:
        chat.messages.append(chat_message(message))
    chat.template_kwargs = _template_kwargs(asked["chat_template_kwargs"])
    set_end(chat, asked["add_generation_prompt"], asked["continue_final_message"])
    add_tools(chat, asked["tools"] or (), asked["tool_choice"], asked["parallel_tool_calls"])


def set_end(chat: pb.Chat, add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    """Set how the chat's prompt ends. Raises `ValueError` naming what is neither True nor False."""
    if add_generation_prompt is not None:
        chat.add_generation_prompt = _truth("add_generation_prompt", add_generation_prompt)
    if continue_final_message is not None:
        chat.continue_final_message = _truth("continue_final_message", continue_final_message)


def _check_no_chat(asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        # False asks for something only if it says how calls are made; an empty list or object never does.
        if value or (value is not None and name in ("tool_choice", "parallel_tool_calls")):
            raise ValueError(f"{name}: only with messages, since the chat template is for those")


def _is_chat(prompt: Any) -> TypeGuard[Messages]:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _set_token_ids(request: pb.GenerateRequest, prompt: Any) -> None:
    request.token_ids.SetInParent()
    prompt = without_array(prompt)
    # Iterating over bytes or dicts could give numbers that are no token ids.
    if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
        raise ValueError(f"prompt: must be a text, token ids or messages, is {prompt!r:.80}")
    _add_ids("prompt", request.token_ids.ids, prompt)


def _template_kwargs(given: object) -> str:
    if not given:
        return ""
    try:
        if not isinstance(given, Mapping):
            raise TypeError(f"is {given!r:.200}")
        text = json.dumps(dict(given), ensure_ascii=False)  # its bytes are counted
        text.encode()
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"chat_template_kwargs: must be a JSON object: {error}") from error


def profile_request(
    worker_id: str, num_steps: int, timeout_s: float, with_trace: bool
) -> tandem_worker_pb2.ProfileRequest:
    """The message for Profile. Raises `ValueError` naming what the wire cannot carry."""
    if type(num_steps) is not int or not 0 <= num_steps < 1 << 32:
        raise ValueError(f"num_steps: must be a whole number of at least 1, is {num_steps!r}")
    check_text("worker_id", worker_id)
    if not is_number(timeout_s) or not 0 < timeout_s <= MAX_PROFILE_S:
        raise ValueError(f"timeout_s: must be in (0, {MAX_PROFILE_S:g}], is {timeout_s!r}")
    return tandem_worker_pb2.ProfileRequest(
        worker_id=worker_id, num_steps=num_steps, timeout_ms=max(1, round(1e3 * timeout_s)), with_trace=with_trace
    )


def _sampling_params(sampling: Mapping[str, Any]) -> pb.SamplingParams:
    params = pb.SamplingParams()
    for name, value in sampling.items():
        if name not in Sampling.__annotations__ and name != "n":
            known = ", ".join(Sampling.__annotations__)
            raise ValueError(f"{name}: no such sampling parameter; known are {known}")
        if value is None:
            continue
        if name in ("stop", "bad_words"):
            getattr(params, name).extend(_texts(name, value))
        elif name in ("stop_token_ids", "allowed_token_ids"):
            _add_ids(name, getattr(params, name), value)
            if name == "allowed_token_ids" and not params.allowed_token_ids:
                raise ValueError("allowed_token_ids: must not be empty; for any token, leave it out")
        elif name == "logit_bias":
            params.logit_bias.update(_biases(name, value))
        elif name == "structured_outputs":
            try:
                params.structured_outputs.CopyFrom(StructuredOutputsParams.of(value).to_proto())
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: {error}") from error
        else:
            setattr(params, name, _plain(name, value))
    return params


def _plain(name: str, value: Any) -> bool | int | float:
    """A number or bool as its field takes it. protobuf would accept some other values, and its errors are less
    clear."""
    kind = pb.SamplingParams.DESCRIPTOR.fields_by_name[name].cpp_type
    value = without_array(value)
    if kind == FieldDescriptor.CPPTYPE_FLOAT:
        return _number(name, value)
    if kind != FieldDescriptor.CPPTYPE_BOOL:
        return _whole(name, value, _RANGES[kind], _BOUNDS.get(name))
    return _truth(name, value)


def _truth(name: str, value: Any) -> bool:
    value = without_array(value)
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be True or False, is {value!r:.80}")
    return value


def _whole(name: str, value: Any, within: range, told: range | None = None) -> int:
    """An integer that is `within` a range. `told`: the range to name instead in errors."""
    if not is_whole(value):
        raise ValueError(f"{name}: must be a whole number, is {value!r:.80}")
    if int(value) not in within:
        bounds = told or within
        raise ValueError(f"{name}: must be in [{bounds[0]}, {bounds[-1]}], is {value!r:.80}")
    return int(value)


def _number(name: str, value: Any) -> float:
    try:
        if is_number(value):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"{name}: must be a number, is {value!r:.80}")


def _texts(name: str, given: Any) -> Sequence[str]:
    texts = [given] if isinstance(given, str) else without_array(given)
    if not is_list(texts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name}: must be a text or a list of texts, is {given!r:.80}")
    for text in texts:
        check_text(name, text)
    return list(texts)


def _biases(name: str, given: Any) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{name}: must be a dict of token ids and numbers, is {given!r:.80}")
    pairs = [(without_array(token_id), without_array(bias)) for token_id, bias in given.items()]
    _check_ids(name, [token_id for token_id, _ in pairs])
    return {int(token_id): _number(name, bias) for token_id, bias in pairs}


def _add_ids(name: str, field: MutableSequence[int], given: Any) -> None:
    """Add ids to `field`. Checks them one by one only if protobuf finds something wrong, since prompts are long."""
    ids = without_array(given)
    if isinstance(ids, str | bytes | bytearray | Mapping) or not isinstance(ids, Iterable):
        raise ValueError(f"{name}: must be a list of token ids, is {given!r:.80}")
    ids = list(ids)
    try:
        field.extend(ids)
    except (TypeError, ValueError) as error:
        _check_ids(name, ids)
        raise ValueError(f"{name}: {error}") from error


def _check_ids(name: str, ids: Sequence[Any]) -> None:
    for position, token_id in enumerate(map(without_array, ids)):
        if not is_whole(token_id):
            raise ValueError(f"{name}: token ids must be whole numbers, is {token_id!r:.80} at {position}")
        if token_id not in _TOKEN_IDS:
            raise ValueError(f"{name}: token ids must be in [0, {_TOKEN_IDS[-1]}], is {token_id!r:.80} at {position}")
