"""Sampling parameters of a request: the bounds of each, and the defaults for those that it does not give.

Bounds are those of protos/tandem_inference.proto and the engine's SamplingParams.
"""

from __future__ import annotations

from protos import tandem_inference_pb2 as pb
from router.model_info import ModelInfo
from router.seeds import drawn_seed, has_seed
from router.text.structured_outputs import problem_of
from router.validation.violations import Violations, check_in_vocabulary

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_LOGPROBS = 20
MAX_N = 128
"""OpenAI's."""


def check_sampling(params: pb.SamplingParams, model: ModelInfo, violations: Violations) -> None:
    """Add what is wrong with the parameters to `violations`."""
    _check_numbers(params, violations)
    _check_lengths(params, model, violations)
    _check_stops(params, model, violations)
    _check_logit_bias(params, model, violations)
    _check_allowed(params, model, violations)
    _check_bad_words(params, violations)
    _check_structured_outputs(params, model, violations)


def has_thinking_budget(params: pb.SamplingParams) -> bool:
    """Whether the parameters bound the tokens of a thought. -1 does not."""
    return params.HasField("thinking_token_budget") and params.thinking_token_budget >= 0


def bounded_by_room(params: pb.SamplingParams) -> list[str]:
    """Names of the given parameters that must not exceed the room in the context."""
    names = ["min_tokens"] if params.is_max_tokens_target else ["max_tokens", "min_tokens"]
    return [name for name in names if params.HasField(name)]


def resolve_sampling(params: pb.SamplingParams, model: ModelInfo, num_prompt_tokens: int) -> pb.SamplingParams:
    """`params` with every field set: by the request, else the model's generation_config, else the proto's default.

    An absent max_tokens becomes what is left of the context (at most the model's max_new_tokens, at least min_tokens);
    an absent seed is drawn, so that any worker can continue the same random stream; absent logprobs, of answer or
    prompt, stay absent.
    `stop` is kept: the router applies it, workers need not see it.
    """
    defaults = model.defaults
    num_left = model.max_model_len - num_prompt_tokens
    assert num_left >= 1, "check_prompt_length comes first"
    resolved = pb.SamplingParams(
        n=1,
        priority=0,
        max_tokens=max(params.min_tokens, min(num_left, defaults.max_new_tokens or num_left)),
        min_tokens=0,
        temperature=1.0 if defaults.temperature is None else defaults.temperature,
        top_p=1.0 if defaults.top_p is None else defaults.top_p,
        top_k=0 if defaults.top_k is None else defaults.top_k,
        min_p=0.0 if defaults.min_p is None else defaults.min_p,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0 if defaults.repetition_penalty is None else defaults.repetition_penalty,
        include_stop_str_in_output=False,
        ignore_eos=False,
        skip_special_tokens=True,
    )
    resolved.MergeFrom(params)  # every field that the request sets wins; lists and the map are empty in `resolved`
    if not has_seed(params):
        resolved.seed = drawn_seed()
    if params.is_max_tokens_target:
        resolved.max_tokens = min(resolved.max_tokens, num_left)
    return resolved


def _check_numbers(params: pb.SamplingParams, violations: Violations) -> None:
    # Each bound is written so that NaN fails it.
    bounds = (
        ("temperature", 0 <= params.temperature < float("inf"), "at least 0 and finite"),
        ("top_p", 0 < params.top_p <= 1, "in (0, 1]"),
        ("top_k", params.top_k >= -1, "-1 or more"),
        ("min_p", 0 <= params.min_p <= 1, "in [0, 1]"),
        ("presence_penalty", -2 <= params.presence_penalty <= 2, "in [-2, 2]"),
        ("frequency_penalty", -2 <= params.frequency_penalty <= 2, "in [-2, 2]"),
        ("repetition_penalty", 0 < params.repetition_penalty <= 2, "in (0, 2]"),
        ("max_tokens", params.max_tokens >= 1, "at least 1"),
        ("n", 1 <= params.n <= MAX_N, f"in [1, {MAX_N}]"),
        ("logprobs", params.logprobs <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
        ("prompt_logprobs", params.prompt_logprobs <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
        ("thinking_token_budget", params.thinking_token_budget >= -1, "-1 or more"),
    )
    for name, is_ok, bound in bounds:
        if params.HasField(name) and not is_ok:
            violations.append((f"sampling_params.{name}", f"must be {bound}, is {_plain(getattr(params, name))}"))


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _check_lengths(params: pb.SamplingParams, model: ModelInfo, violations: Violations) -> None:
    longest = model.max_model_len - 1
    for name in bounded_by_room(params):
        value = getattr(params, name)
        if value > longest:
            bound = (
                f"must be at most {longest} (the context of {model.max_model_len} minus 1 for the prompt), is {value}"
            )
            violations.append((f"sampling_params.{name}", bound))
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        bound = f"must be at most max_tokens={params.max_tokens}, is {params.min_tokens}"
        violations.append(("sampling_params.min_tokens", bound))


def _check_stops(params: pb.SamplingParams, model: ModelInfo, violations: Violations) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        violations.append(
            ("sampling_params.stop", f"must have at most {MAX_STOP_STRINGS} strings, has {len(params.stop)}")
        )
    position = next((i for i, stop in enumerate(params.stop) if not 1 <= len(stop) <= MAX_STOP_CHARS), None)
    if position is not None:
        bound = f"must be 1 to {MAX_STOP_CHARS} characters long, is {len(params.stop[position])}"
        violations.append((f"sampling_params.stop[{position}]", bound))
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        bound = f"must have at most {MAX_STOP_TOKEN_IDS} ids, has {len(params.stop_token_ids)}"
        violations.append(("sampling_params.stop_token_ids", bound))
    check_in_vocabulary("sampling_params.stop_token_ids", params.stop_token_ids, model, violations)


def _check_logit_bias(params: pb.SamplingParams, model: ModelInfo, violations: Violations) -> None:
    bias_of = dict(params.logit_bias)
    if len(bias_of) > MAX_LOGIT_BIAS:
        violations.append(
            ("sampling_params.logit_bias", f"must have at most {MAX_LOGIT_BIAS} entries, has {len(bias_of)}")
        )
    check_in_vocabulary("sampling_params.logit_bias", sorted(bias_of), model, violations)
    wrong = next((token_id for token_id, bias in sorted(bias_of.items()) if not -100 <= bias <= 100), None)
    if wrong is not None:
        bound = f"must be in [-100, 100], is {bias_of[wrong]:g}"
        violations.append((f"sampling_params.logit_bias[{wrong}]", bound))


def _check_allowed(params: pb.SamplingParams, model: ModelInfo, violations: Violations) -> None:
    field, allowed = "sampling_params.allowed_token_ids", params.allowed_token_ids
    if len(allowed) > MAX_ALLOWED_TOKEN_IDS:
        violations.append((field, f"must have at most {MAX_ALLOWED_TOKEN_IDS} ids, has {len(allowed)}"))
        return
    check_in_vocabulary(field, allowed, model, violations)
    if allowed and params.min_tokens and model.eos_token_ids.union(params.stop_token_ids).issuperset(allowed):
        bound = f"must have an id that does not end the answer, because of min_tokens={params.min_tokens}"
        violations.append((field, bound))
    if allowed and has_thinking_budget(params) and not params.is_thinking_token_budget_target:
        violations.append(
            (field, "cannot be combined with thinking_token_budget: it may lack the token that ends the reasoning")
        )
    if allowed and params.HasField("structured_outputs"):
        violations.append(
            (field, "cannot be combined with structured_outputs: together they may leave no allowed token")
        )


def _check_bad_words(params: pb.SamplingParams, violations: Violations) -> None:
    field, words = "sampling_params.bad_words", params.bad_words
    if len(words) > MAX_BAD_WORDS:
        violations.append((field, f"must have at most {MAX_BAD_WORDS} words, has {len(words)}"))
        return
    wrong = next((i for i, word in enumerate(words) if not word.strip() or len(word) > MAX_BAD_WORD_CHARS), None)
    if wrong is not None:
        bound = f"must be 1 to {MAX_BAD_WORD_CHARS} characters long, not all of them spaces, has {len(words[wrong])}"
        violations.append((f"{field}[{wrong}]", bound))
    has_form = params.HasField("structured_outputs")
    for name, is_given in (("structured_outputs", has_form), ("allowed_token_ids", params.allowed_token_ids)):
        if words and is_given:
            violations.append((field, f"cannot be combined with {name}: together they may leave no allowed token"))


def _check_structured_outputs(params: pb.SamplingParams, model: ModelInfo, violations: Violations) -> None:
    if not params.HasField("structured_outputs"):
        return
    if (problem := problem_of(params.structured_outputs, max(1, params.n))) is not None:
        violations.append(("sampling_params.structured_outputs", problem))
    if not model.eos_token_ids:
        cannot = (
            f"cannot be used: model {model.served_model_name!r} has no end-of-sequence token to end the answer with"
        )
        violations.append(("sampling_params.structured_outputs", cannot))
    # An answer that is complete and cannot continue must end.
    for name in ("min_tokens", "ignore_eos"):
        if value := getattr(params, name):
            violations.append((f"sampling_params.{name}", f"cannot be combined with structured_outputs, is {value}"))
