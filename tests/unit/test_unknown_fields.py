"""A request of a newer client, with fields that this router does not know, is never answered as if it lacked them."""

from __future__ import annotations

from typing import Any, cast

import pytest
from google.protobuf.message import Message
from lifecycle_bench import Bench
from test_lifecycle_ends import MODEL, Context, servicer_of
from test_resume import LOST, Clock, stream_of, tokens
from test_tokenizer_servicer import Slow, grammar_cases

from protos import tandem_inference_pb2 as pb
from router.policy import PolicyConfig
from router.served_model import Texts
from router.tokenizer_servicer import TokenizerServicer
from router.validation.unknown_fields import check_known_fields
from router.worker_pool import WorkerPool
from rpc.errors import Outdated
from tandem.resume import ANOTHER_ROUTER_S

FIELD_1000 = b"\xc2\x3e\x01x"
"""A text in field 1000, which no message has."""
TOO_OLD = Outdated("too old", retry_after_s=1)


def newer(message: Message) -> None:
    """Set a field of `message` as a client of a later version may."""
    message.MergeFromString(FIELD_1000)


def request_of() -> pb.GenerateRequest:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="a"), pb.ChatMessage(role="user", parts=["b"])])
    params = pb.SamplingParams(temperature=0, logit_bias={3: 1.0})
    params.structured_outputs.choice.texts.extend(["x", "y"])
    return pb.GenerateRequest(chat=chat, sampling_params=params)


def test_a_request_whose_fields_are_all_known_passes() -> None:
    check_known_fields(request_of())


@pytest.mark.parametrize(
    ("where", "named"),
    [
        (lambda request: request, "field 1000"),
        (lambda request: request.sampling_params, "field 1000 of sampling_params"),
        (
            lambda request: request.sampling_params.structured_outputs.choice,
            "sampling_params.structured_outputs.choice",
        ),
        (lambda request: request.chat.messages[1], "field 1000 of chat.messages"),
    ],
)
def test_a_field_that_this_router_does_not_know_is_named(where: Any, named: str) -> None:
    request = request_of()
    newer(where(request))
    with pytest.raises(Outdated, match=named) as refused:
        check_known_fields(request)
    assert refused.value.retry_after_s, "another router may know it"


async def test_it_is_not_answered() -> None:
    servicer = servicer_of(Bench())
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))
    newer(request.sampling_params)
    with pytest.raises(Outdated):
        await anext(aiter(servicer.Generate(request, cast(Any, Context()))))
    await servicer.close()


async def test_its_tokens_are_not_counted() -> None:
    pool = WorkerPool(router_id="r", policy=PolicyConfig(), on_change=lambda: None)
    texts = Texts(MODEL, Slow(grammar_cases.tokenizer()), None)
    servicer = TokenizerServicer(texts=texts, pool=pool, max_request_bytes=10_000)
    asked, read = pb.TokenizeRequest(text="a"), pb.DetokenizeRequest(token_ids=[1])
    for request in (asked, read):
        newer(request)
    with pytest.raises(Outdated):
        await servicer.Tokenize(asked, cast(Any, None))
    with pytest.raises(Outdated):
        await servicer.Detokenize(read, cast(Any, None))
    servicer.close()


def test_our_clients_ask_another_router() -> None:
    """During an upgrade some routers are newer, and the others will be soon."""
    clock = Clock()
    stream = stream_of(resume_s=30, has_others=True, clock=clock)
    assert [stream.wait_s(TOO_OLD) for _ in range(3)] == [0, 0.05, 0.1]
    clock.now_s += ANOTHER_ROUTER_S
    with pytest.raises(Outdated):
        stream.wait_s(TOO_OLD)
    with pytest.raises(Outdated):  # there is no other one
        stream_of(resume_s=30, clock=clock).wait_s(TOO_OLD)


def test_a_stream_that_has_begun_waits_for_a_router_that_knows_the_fields() -> None:
    stream = stream_of(resume_s=30, has_others=True)
    stream.accept(tokens(0, 5, kind="k"))
    for error in (LOST, TOO_OLD):
        assert stream.wait_s(error) > 0
    stream.accept(tokens(1, 6))
    assert stream.num_resumed == 1
