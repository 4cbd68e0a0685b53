"""Resumes answers that another router began, or this one before the stream was lost. Pure.

    begun_answers ──> a BegunAnswer for each answer of which the client has a part, within bounds

its tokens ──> detokenizer and reader read them, without output ──> continues after them, or ends at once: was complete
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from protos import tandem_inference_pb2 as pb
from router.model_info import ModelInfo
from router.seeds import has_seed
from router.served_kind import Kind
from router.text.detokenizer import IncrementalDetokenizer
from router.text.reasoning import AnswerReader
from router.validation.violations import Violations, check_in_vocabulary
from rpc.errors import InvalidRequest

MAX_KIND_CHARS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BegunAnswer:
    """One answer as far as its client has it."""

    token_ids: tuple[int, ...]
    worker_kind: str = ""
    """The kind of the workers that began it, by its name for clients. Empty: any worker may continue it."""
    is_complete: bool = False
    """The client has its last message, too."""
    field: str = "output_token_ids"
    """The request's field with its tokens, for violations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """Where an answer continues."""

    token_ids: Sequence[int] = ()
    """The answer's tokens that the client has, with their text."""
    kind: Kind | None = None
    """Kind of the workers that computed them, or that computed other answers to the prompt. None: any worker may
    continue."""
    finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
    """Set if the answer's tokens are complete, so that only its last message was lost."""


NOTHING = Resumption()
"""The resumption of an answer that begins here."""


def kind_name(kind: Kind) -> str:
    """The name of a kind of workers for clients: they can ask for the kind again, but learn nothing about it."""
    text = "\0".join(filter(None, kind))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def begun_answers(request: pb.GenerateRequest, model: ModelInfo, violations: Violations) -> dict[int, BegunAnswer]:
    """The begun answers by sequence. Adds to `violations` what is wrong with them: their continuation must be the one
    that would have followed."""
    params, n = request.sampling_params, max(1, request.sampling_params.n)
    begun: dict[int, BegunAnswer] = {}
    if request.output_token_ids or request.worker_kind:
        begun[0] = BegunAnswer(token_ids=tuple(request.output_token_ids), worker_kind=request.worker_kind)
        _check(begun[0], "worker_kind", params, model, violations)
        if begun[0].token_ids and n > 1:
            bound = f"must be 1 with output_token_ids, is {n}: to continue several answers, use answers_so_far"
            violations.append(("sampling_params.n", bound))
        if request.answers_so_far:
            bound = "must be empty with output_token_ids and worker_kind, which continue a single answer"
            violations.append(("answers_so_far", bound))
    elif len(request.answers_so_far) > n:
        violations.append(("answers_so_far", f"must have at most n={n} answers, has {len(request.answers_so_far)}"))
    else:
        begun = _several(request.answers_so_far, n, params, model, violations)
    is_known = has_seed(params) or (params.HasField("temperature") and params.temperature == 0)
    if not is_known and (of := next((each for each in begun.values() if each.token_ids or each.is_complete), None)):
        what = of.field.partition("[")[0]
        bound = f"must be given with {what}, unless temperature is 0: the seed that the tokens were drawn with"
        violations.append(("sampling_params.seed", bound))
    return begun


def _several(
    answers: Sequence[pb.AnswerSoFar], n: int, params: pb.SamplingParams, model: ModelInfo, violations: Violations
) -> dict[int, BegunAnswer]:
    begun: dict[int, BegunAnswer] = {}
    for position, answer in enumerate(answers):
        name = f"answers_so_far[{position}]"
        if answer.sequence >= n:
            violations.append((f"{name}.sequence", f"must be less than n={n}, is {answer.sequence}"))
        elif answer.sequence in begun:
            violations.append((f"{name}.sequence", f"must be given once, {answer.sequence} is given again"))
        each = BegunAnswer(
            token_ids=tuple(answer.token_ids),
            worker_kind=answer.worker_kind,
            is_complete=answer.is_complete,
            field=f"{name}.token_ids",
        )
        _check(each, f"{name}.worker_kind", params, model, violations)
        begun[answer.sequence] = each
    if sum(each.is_complete for each in begun.values()) == n:
        violations.append(("answers_so_far", f"must leave something to continue: all {n} answers are complete"))
    return begun


def _check(
    begun: BegunAnswer, kind_field: str, params: pb.SamplingParams, model: ModelInfo, violations: Violations
) -> None:
    num_tokens = len(begun.token_ids)
    if len(begun.worker_kind) > MAX_KIND_CHARS:
        bound = f"must be at most {MAX_KIND_CHARS} characters, has {len(begun.worker_kind)}"
        violations.append((kind_field, bound))
    if num_tokens >= model.max_model_len:
        bound = (
            f"must have at most {model.max_model_len - 1} ids (the context of {model.max_model_len}), has {num_tokens}"
        )
        violations.append((begun.field, bound))
        return
    check_in_vocabulary(begun.field, begun.token_ids, model, violations)
    if params.HasField("max_tokens") and num_tokens > params.max_tokens:
        violations.append((begun.field, f"must have at most max_tokens={params.max_tokens} ids, has {num_tokens}"))


def resumption_of(
    begun: BegunAnswer,
    kind: Kind | None,
    detokenizer: IncrementalDetokenizer,
    reader: AnswerReader | None = None,
    *,
    max_tokens: int,
    stop_token_ids: Collection[int],
) -> Resumption:
    """The resumption of the answer that has `begun`. `detokenizer` and `reader` read its text, to continue after it.

    `max_tokens`: the answer's bound, at most what fits the context. `stop_token_ids`: all tokens that end the answer.
    Raises `InvalidRequest` for tokens that continue after a stop.
    """
    token_ids = begun.token_ids
    stop_position = next((i for i, token_id in enumerate(token_ids) if token_id in stop_token_ids), None)
    delta = detokenizer.push(token_ids)
    if reader is not None:
        reader.push(delta.text)
    if delta.is_stopped:
        stop_position = min(delta.num_tokens - 1, len(token_ids) if stop_position is None else stop_position)
    if stop_position is not None and stop_position < len(token_ids) - 1:
        raise InvalidRequest([(begun.field, f"continues after the answer's end at {stop_position}")])
    finish_reason = pb.FINISH_REASON_UNSPECIFIED
    if stop_position is not None:
        finish_reason = pb.FINISH_REASON_STOP
    elif len(token_ids) >= max_tokens:
        finish_reason = pb.FINISH_REASON_LENGTH
    return Resumption(token_ids=token_ids, kind=kind, finish_reason=finish_reason)
