"""How long an answer may think: turns a request's budget into the model's tokens."""

from __future__ import annotations

from protos import tandem_inference_pb2 as pb
from protos.tandem_worker_pb2 import ThinkingBudget
from router.text.harmony import Harmony
from router.text.reasoning import Reasoning
from router.text.tokenizer import Tokenizer
from router.validation.sampling import has_thinking_budget
from rpc.errors import InvalidRequest

MAX_SPACE_TOKENS = 4096
"""The engine's bound. A vocabulary has some hundreds."""


def thinking_budget_of(
    params: pb.SamplingParams, reasoning: Reasoning | Harmony, tokenizer: Tokenizer
) -> ThinkingBudget | None:
    """The thinking budget; None: there is no bound, or the model does not think. Raises `InvalidRequest` if the model's
    thoughts cannot be bounded."""
    thoughts = reasoning.thoughts
    if not has_thinking_budget(params) or thoughts is None:
        return None
    end_token_ids = _token_ids(thoughts.end, tokenizer)
    can_be_kept = len(end_token_ids) == 1 and not params.allowed_token_ids
    if not can_be_kept and params.is_thinking_token_budget_target:
        return None
    if len(end_token_ids) != 1:
        cannot = f"cannot be used: this model ends its reasoning with {thoughts.end!r}, which is not one token"
        raise InvalidRequest([("sampling_params.thinking_token_budget", cannot)])
    may_begin = not thoughts.has_begun and not thoughts.may_repeat
    return ThinkingBudget(
        num_tokens=params.thinking_token_budget,
        end_token_id=end_token_ids[0],
        begin_token_ids=_token_ids(thoughts.begin, tokenizer),
        has_begun=thoughts.has_begun,
        may_repeat=thoughts.may_repeat,
        other_end_token_ids=tokenizer.added_ids(thoughts.other_ends).values(),
        space_token_ids=tokenizer.space_token_ids[:MAX_SPACE_TOKENS] if may_begin else (),
    )


def _token_ids(word: str, tokenizer: Tokenizer) -> list[int]:
    added = tokenizer.added_ids([word])
    return [added[word]] if word in added else tokenizer.encode_plain(word)
