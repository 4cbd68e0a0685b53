"""Checks requests to tokenize and detokenize. Bounds are those of protos/tandem_inference.proto."""

from __future__ import annotations

from protos import tandem_inference_pb2 as pb
from router.model_info import ModelInfo
from router.validation.prompt import Prompt, check_prompt
from router.validation.request import check_model
from router.validation.violations import Violations, check_in_vocabulary
from rpc.errors import InvalidRequest

MAX_TOKENS = 1_000_000
"""Maximum token ids in an answer of Tokenize: 3 MB."""
MAX_NAMED_TOKENS = 262_144
"""The same if each token also comes as the vocabulary writes it."""
MAX_TEXT_BYTES = 16_000_000
"""Maximum text in an answer of Detokenize: a message holds little more."""


def prompt_to_tokenize(request: pb.TokenizeRequest, model: ModelInfo) -> Prompt:
    """The checked prompt of a Tokenize request. Raises `InvalidRequest` with all violations."""
    violations: Violations = []
    check_model(request.model, model, violations)
    prompt = check_prompt(request, model, violations)
    if violations:
        raise InvalidRequest(violations)
    return prompt


def check_num_tokens(request: pb.TokenizeRequest, num_tokens: int) -> None:
    """Raise `InvalidRequest` if `num_tokens` tokens are too many for an answer of Tokenize."""
    most = MAX_NAMED_TOKENS if request.with_tokens else MAX_TOKENS
    if num_tokens > most:
        field = request.WhichOneof("prompt")
        also = " with with_tokens" if request.with_tokens else ""
        raise InvalidRequest([(field, f"must be at most {most} tokens{also}, has {num_tokens}")])


def check_num_bytes(text: str) -> None:
    """Raise `InvalidRequest` if `text` is too long for an answer of Detokenize."""
    if (num_bytes := len(text.encode())) > MAX_TEXT_BYTES:
        raise InvalidRequest([("token_ids", f"must be at most {MAX_TEXT_BYTES} bytes as text, are {num_bytes}")])


def token_ids_to_read(request: pb.DetokenizeRequest, model: ModelInfo) -> list[int]:
    """The token ids of a Detokenize request. Raises `InvalidRequest` with all violations."""
    violations: Violations = []
    check_model(request.model, model, violations)
    token_ids = list(request.token_ids)
    check_in_vocabulary("token_ids", token_ids, model, violations)
    if violations:
        raise InvalidRequest(violations)
    return token_ids
