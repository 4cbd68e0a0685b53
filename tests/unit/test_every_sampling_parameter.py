"""No sampling parameter is lost on its way: through the gateway, and from a worker's message to its engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.requests import CompletionRequest
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from router.worker_commands import _ROUTERS_OWN
from worker_service.messages import sampling_params_of

OTHERS: dict[str, Any] = {
    "max_tokens": 7, "min_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 4, "min_p": 0.25,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "stop": ["end"],
    "stop_token_ids": [9], "include_stop_str_in_output": True, "ignore_eos": True, "seed": 5,
    "skip_special_tokens": False, "logit_bias": {"9": 1.5}, "n": 2, "logprobs": 2, "priority": 4,
    "structured_outputs": {"choice": ["a", "b"]}, "prompt_logprobs": 3, "allowed_token_ids": [8, 9],
    "bad_words": ["bad"], "thinking_token_budget": 6,
}  # fmt: skip
"""By field of the wire: a value that is not its default."""
TARGETS = {"is_thinking_token_budget_target", "is_max_tokens_target"}
"""Say how others are meant; other routes set them."""
OF_ANSWERS = {"include_stop_str_in_output", "skip_special_tokens"}
"""The router renders the text."""
IN_THE_REQUEST: dict[str, dict[str, Any]] = {
    "structured_outputs": {"grammar": "g"},
    "bad_words": {"bad_words": [pb.BadWord(token_ids=[5, 6])]},
    "thinking_token_budget": {
        "thinking_budget": pb.ThinkingBudget(num_tokens=6, end_token_id=7, begin_token_ids=[8], may_repeat=True)
    },
}
"""What a worker gets beside the sampling parameters in place of these."""
FIELDS = {field.name for field in inference_pb.SamplingParams.DESCRIPTOR.fields}
NEEDED = {"max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": 1}
"""What the router always sets."""


def test_all_are_here() -> None:
    assert OTHERS.keys() | TARGETS == FIELDS
    assert IN_THE_REQUEST.keys() < set(_ROUTERS_OWN) < FIELDS


@pytest.mark.parametrize("name", sorted(OTHERS.keys() - {"n"}))
def test_a_body_s_reaches_the_router(name: str) -> None:
    def asked(**given: Any) -> dict[str, Any]:
        return dict(CompletionRequest.read(json.dumps({"prompt": "a", **given}).encode()).sampling())

    assert asked(**{name: OTHERS[name]}).get(name) != asked().get(name)


def test_a_number_of_answers_is_of_the_run() -> None:
    body = CompletionRequest.read(json.dumps({"prompt": "a", "n": OTHERS["n"]}).encode())
    assert body.num_answers == OTHERS["n"]


@pytest.mark.parametrize("name", sorted(FIELDS - set(_ROUTERS_OWN) - OF_ANSWERS))
def test_a_message_s_reaches_the_engine(name: str) -> None:
    value = {9: 1.5} if name == "logit_bias" else OTHERS[name]
    plain, given = (
        sampling_params_of(pb.EngineRequest(sampling_params=inference_pb.SamplingParams(**NEEDED | changed)))
        for changed in ({}, {name: value})
    )
    assert given != plain


@pytest.mark.parametrize("name", sorted(IN_THE_REQUEST))
def test_what_the_router_makes_of_one_reaches_the_engine(name: str) -> None:
    plain, given = (
        sampling_params_of(pb.EngineRequest(sampling_params=inference_pb.SamplingParams(**NEEDED), **changed))
        for changed in ({}, IN_THE_REQUEST[name])
    )
    assert given != plain
