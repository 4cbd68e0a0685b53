"""An answer that another router began, or this one before it lost the stream: what there is of it. Pure.

its tokens ──> detokenizer and reader of calls take them in, unsaid ──> goes on after them, or ends at once: it was
                                                                        complete
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from protos import tandem_inference_pb2 as pb
from router.detokenizer import IncrementalDetokenizer
from router.tool_calls import ToolCallParser
from rpc.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """Where an answer goes on."""

    token_ids: Sequence[int] = ()
    """Of the answer, that the client has, with their text."""
    compat_digest: str = ""
    """Of the workers that computed them. Empty: any may go on."""
    finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
    """Why nothing follows, where nothing does: only the last message was lost."""


NOTHING = Resumption()
"""An answer that begins here."""


def kind_name(compat_digest: str) -> str:
    """What clients hear of a kind of workers: enough to ask for it again, and nothing of what it is."""
    return blake2b(compat_digest.encode(), digest_size=16).hexdigest()


def resumption_of(
    token_ids: Sequence[int],
    compat_digest: str,
    detokenizer: IncrementalDetokenizer,
    tool_calls: ToolCallParser | None = None,
    *,
    max_tokens: int,
    stop_token_ids: Collection[int],
) -> Resumption:
    """Of the answer whose `token_ids` the client has; `detokenizer` and `tool_calls` go on after their text.

    `max_tokens`: what fits the context, at most. `stop_token_ids`: all that end the answer. Raises `InvalidRequest`
    for tokens that go on after a stop.
    """
    stop_position = next((i for i, token_id in enumerate(token_ids) if token_id in stop_token_ids), None)
    delta = detokenizer.push(token_ids)
    if tool_calls is not None:
        tool_calls.push(delta.text)
    if delta.is_stopped:
        stop_position = min(delta.num_tokens - 1, len(token_ids) if stop_position is None else stop_position)
    if stop_position is not None and stop_position < len(token_ids) - 1:
        raise InvalidRequest([("output_token_ids", f"goes on after the answer's end at {stop_position}")])
    finish_reason = pb.FINISH_REASON_UNSPECIFIED
    if stop_position is not None:
        finish_reason = pb.FINISH_REASON_STOP
    elif len(token_ids) >= max_tokens:
        finish_reason = pb.FINISH_REASON_LENGTH
    return Resumption(token_ids=token_ids, compat_digest=compat_digest, finish_reason=finish_reason)
