"""`tandem.client` and `tandem.answer`: requests as they are sent, streams that are not exact, errors, cancelling.

The client talks to a real gRPC server on a loopback port, whose answers are scripted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import pytest
from scripted_router import EXACT, STOP, Scripted, breaking, last, scripted_router, tokens

from protos import tandem_inference_pb2 as pb
from rpc.errors import DETAILS_KEY, STATUS_CODES, InvalidRequest, Overloaded, Unreachable, to_status
from tandem.answer import Answer, AnswersStream, AnswerStream, StreamBroken
from tandem.client import AsyncClient, Client
from tandem.requests import Sampling, detokenize_request, generate_request, tokenize_request


def add_up(messages: list[pb.GenerateResponse]) -> Answer:
    stream = AnswerStream()
    for message in messages:
        assert stream.accept(message) is message
    return stream.answer()


# -- exactness --------------------------------------------------------------------------------------------------


def test_an_exact_stream_adds_up() -> None:
    answer = add_up(EXACT)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("abcd", [10, 11, 12], "stop")
    told = {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 3, "reasoning_tokens": 0}
    assert answer.to_dict()["usage"] == told


def test_several_answers_are_each_exact() -> None:
    stream, messages = AnswersStream(2), []
    for message in EXACT:
        for sequence in range(2):
            messages.append(pb.GenerateResponse())
            messages[-1].CopyFrom(message)
            messages[-1].sequence = sequence
    for message in messages[:-1]:
        stream.accept(message)
    with pytest.raises(StreamBroken, match="without its last message of sequence 1"):
        stream.check_ended()
    stream.accept(messages[-1])
    stream.check_ended()
    assert [answer.text for answer in stream.answers()] == ["abcd"] * 2
    with pytest.raises(StreamBroken, match="sequence 2 was not asked for"):
        stream.accept(pb.GenerateResponse(sequence=2))


def test_a_whole_answer_in_one_message_is_exact() -> None:
    message = last(0, 2, text="ab")
    message.token_ids.extend([1, 2])
    assert add_up([message]).token_ids == [1, 2]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([tokens(0, 1), tokens(2, 3)], "position 2 came, 1 was to come"),
        ([tokens(0, 1), tokens(0, 1)], "position 0 came, 1 was to come"),
        ([tokens(1, 1)], "position 1 came, 0 was to come"),
        ([tokens(0, 1), last(0, 1)], "position 0 came, 1 was to come"),
        ([tokens(0, 1), last(1, 2)], "1 tokens came, 2 were counted"),
        ([tokens(0, 1), last(1, 1), last(1, 1)], "after the last one"),
        ([tokens(0, 1), last(1, 1), tokens(1, 2)], "after the last one"),
        ([last(0, 0, finish_reason=pb.FINISH_REASON_UNSPECIFIED)], "its end has no reason"),
        ([pb.GenerateResponse(finish_reason=STOP)], "its end carries no usage"),
        ([pb.GenerateResponse(sequence=1)], "sequence 1 was not asked for"),
        ([tokens(0, 1)], "without its last message"),
        ([], "without its last message"),
    ],
)
def test_any_other_stream_is_broken(messages: list[pb.GenerateResponse], complaint: str) -> None:
    with pytest.raises(StreamBroken, match=complaint):
        add_up(messages)


def told(offset: int, *token_ids: int, logprobs_of: tuple[int, ...]) -> pb.GenerateResponse:
    message = tokens(offset, *token_ids)
    for token_id in logprobs_of:
        message.logprobs.add(sampled=pb.Logprob(token_id=token_id, logprob=-0.5, rank=1, token="\u00e9".encode()[:1]))
    return message


def test_logprobs_come_with_all_tokens() -> None:
    answer = add_up([told(0, 1, 2, logprobs_of=(1, 2)), told(2, 3, logprobs_of=(3,)), last(3, 3)])
    assert [each.sampled.token_id for each in answer.logprobs] == answer.token_ids == [1, 2, 3]
    sampled = {"token_id": 3, "logprob": -0.5, "rank": 1, "token": "\ufffd", "bytes": [0xC3]}
    assert answer.to_dict()["logprobs"][2] == {"sampled": sampled, "top": [], "text_offset": 0}
    assert add_up([tokens(0, 1), last(1, 1)]).to_dict()["logprobs"] is None


def test_logprobs_of_the_prompt_come_with_the_first_token() -> None:
    first, second = tokens(0, 1), tokens(1, 2)
    first.prompt_logprobs.add(sampled=pb.Logprob(token_id=9, token=b"a"))
    answer = add_up([first, second, last(2, 2)])
    [told] = answer.to_dict()["prompt_logprobs"]
    assert (told["sampled"]["token"], told["sampled"]["rank"]) == ("a", 0)
    second.prompt_logprobs.extend(first.prompt_logprobs)
    with pytest.raises(StreamBroken, match="logprobs of the prompt came after the first token"):
        add_up([first, second, last(2, 2)])


def test_the_prompts_tokens_come_with_the_first_token() -> None:
    first, second = tokens(0, 1), tokens(1, 2)
    first.prompt_token_ids.extend([9, 8])
    answer = add_up([first, second, last(2, 2)])
    assert (answer.prompt_token_ids, answer.to_dict()["prompt_token_ids"]) == ([9, 8], [9, 8])
    second.prompt_token_ids.append(9)
    with pytest.raises(StreamBroken, match="tokens of the prompt came after the first token"):
        add_up([first, second, last(2, 2)])


@pytest.mark.parametrize(
    "messages",
    [
        [told(0, 1, 2, logprobs_of=(1,)), last(2, 2)],
        [told(0, 1, 2, logprobs_of=(1, 3)), last(2, 2)],
        [tokens(0, 1), told(1, 2, logprobs_of=(2,)), last(2, 2)],
        [told(0, 1, logprobs_of=(1,)), tokens(1, 2), last(2, 2)],
    ],
)
def test_logprobs_of_other_tokens_break_a_stream(messages: list[pb.GenerateResponse]) -> None:
    with pytest.raises(StreamBroken, match="logprobs came of other tokens"):
        add_up(messages)


# -- requests ---------------------------------------------------------------------------------------------------


def test_prompts_of_each_kind() -> None:
    assert generate_request("hi").text == "hi"
    assert list(generate_request([1, 2]).token_ids.ids) == [1, 2]
    assert list(generate_request(np.array([1, 2])).token_ids.ids) == [1, 2]  # type: ignore[arg-type]
    assert generate_request([]).WhichOneof("prompt") == "token_ids", "the router says what is wrong with it"
    chat = generate_request([{"role": "user", "content": "hi"}]).chat
    assert [(m.role, m.content) for m in chat.messages] == [("user", "hi")]
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert generate_request([{"role": "user", "content": parts}]).chat.messages[0].parts == ["h", "i"]
    assert generate_request([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]).chat == chat


def test_only_what_is_given_travels() -> None:
    assert generate_request("hi").sampling_params == pb.SamplingParams()
    sampling = Sampling(temperature=0.0, stop="x", stop_token_ids=[5], logit_bias={3: -1.0}, seed=-2)
    expected = pb.SamplingParams(temperature=0.0, stop=["x"], stop_token_ids=[5], logit_bias={3: -1.0}, seed=-2)
    assert generate_request("hi", **sampling).sampling_params == expected
    numpys: dict[str, Any] = {
        "temperature": np.float32(0), "stop": ("x",), "stop_token_ids": np.array([5]), "seed": np.int64(-2),
        "logit_bias": {np.int64(3): np.float32(-1)}, "max_tokens": None, "n": np.int32(1),
    }  # fmt: skip
    assert generate_request("hi", **numpys).sampling_params == expected
    assert generate_request("hi", stop_token_ids={5}).sampling_params.stop_token_ids == [5]  # type: ignore[typeddict-item]


CHAT = [{"role": "user", "content": "hi"}]
OF_CHATS = {
    "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message",
}  # fmt: skip


def test_a_request_says_whose_it_is() -> None:
    assert generate_request("hi", fairness_id="tenant 1").fairness_id == "tenant 1"
    assert not generate_request("hi", fairness_id="").fairness_id
    assert not generate_request("hi", fairness_id=None).fairness_id


def test_every_parameter_of_the_wire_can_be_given() -> None:
    of_sampling = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    of_request = {"cache_salt", "fairness_id", "truncate_prompt_tokens", "add_special_tokens", "with_prompt_token_ids"}
    assert {*Sampling.__annotations__, "n"} == of_sampling | of_request | OF_CHATS


@pytest.mark.parametrize(
    ("prompt", "sampling", "complaint"),
    [
        ("hi", {"max_tokens": -1}, r"max_tokens: must be in \[1, 4294967295\], is -1$"),
        ("hi", {"logprobs": -1}, r"logprobs: must be in \[0, 20\], is -1$"),
        ("hi", {"max_tokens": 1.5}, "max_tokens: must be a whole number, is 1.5$"),
        ("hi", {"logprobs": True}, "logprobs: must be a whole number, is True$"),
        ("hi", {"top_k": 2**31}, r"top_k: must be in \[-2147483648, 2147483647\], is 2147483648$"),
        ("hi", {"seed": -(2**63) - 1}, r"seed: must be in \[-9223372036854775808, 9223372036854775807\], is -92"),
        ("hi", {"n": None}, "n: must be a whole number, is None$"),
        ("hi", {"n": True}, "n: must be a whole number, is True$"),
        ("hi", {"temperature": "hot"}, "temperature: must be a number, is 'hot'$"),
        ("hi", {"temperature": True}, "temperature: must be a number, is True$"),
        ("hi", {"temperature": 10**400}, "temperature: must be a number, is 1000"),
        ("hi", {"ignore_eos": 1}, "ignore_eos: must be True or False, is 1$"),
        ("hi", {"stop": ["a", None]}, r"stop: must be a text or a list of texts, is \['a', None\]$"),
        ("hi", {"stop": "a\ud800"}, "stop: has an invalid character at 1$"),
        ("hi", {"stop_token_ids": 5}, "stop_token_ids: must be a list of token ids, is 5$"),
        ("hi", {"stop_token_ids": [1, None]}, "stop_token_ids: token ids must be whole numbers, is None at 1$"),
        ("hi", {"logit_bias": [1]}, r"logit_bias: must be a dict of token ids and numbers, is \[1\]$"),
        ("hi", {"logit_bias": {"1": 2}}, "logit_bias: token ids must be whole numbers, is '1' at 0$"),
        ("hi", {"logit_bias": {1: None}}, "logit_bias: must be a number, is None$"),
        ([1, 2.0], {}, "prompt: token ids must be whole numbers, is 2.0 at 1$"),
        ([True], {}, "prompt: token ids must be whole numbers, is True at 0$"),
        ("hi", {"temprature": 1}, "temprature: no such sampling parameter"),
        ("hi", {"stop_token_ids": ["a"]}, "stop_token_ids: "),
        ("hi", {"cache_salt": 5}, "cache_salt: must be a text, is 5"),
        ("hi", {"cache_salt": ""}, "cache_salt: must not be empty"),
        ("hi", {"cache_salt": "a\ud800"}, "cache_salt: has an invalid character at 1"),
        ("hi", {"truncate_prompt_tokens": 2**31}, r"truncate_prompt_tokens: must be in \[-2147483648, 2147483647\]"),
        ("hi", {"truncate_prompt_tokens": True}, "truncate_prompt_tokens: must be a whole number, is True"),
        ("hi", {"allowed_token_ids": []}, "allowed_token_ids: must not be empty; for any token, leave it out"),
        ("hi", {"with_prompt_token_ids": 1}, "with_prompt_token_ids: must be True or False, is 1"),
        ("hi", {"fairness_id": 0}, "fairness_id: must be a text, is 0"),
        ("hi", {"fairness_id": "ab\ud800"}, "fairness_id: has an invalid character at 2"),
        ([-1], {}, r"prompt: token ids must be in \[0, 4294967295\], is -1 at 0$"),
        (5, {}, "prompt: must be a text, token ids or messages, is 5$"),
        (None, {}, "prompt: must be a text, token ids or messages, is None$"),
        ({"a": 1}, {}, "prompt: must be a text, token ids or messages, is {'a': 1}$"),
        (b"x", {}, "prompt: must be a text, token ids or messages, is b'x'$"),
        ("hi \ud800", {}, "prompt: has an invalid character at 3"),
        ("hi", {"request_id": 5}, "request_id: must be a text, is 5"),
        ("hi", {"model": None}, "model: must be a text, is None"),
        (["a", "b"], {}, "prompt: "),
        ([{"role": "user"}], {}, "prompt: a message has a role and a content"),
        ([{"role": "user", "content": 3}], {}, "prompt: role and content"),
        ([{"role": "user", "content": "hi", "sound": "a"}], {}, "prompt: a message has a role and a content"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], {}, "prompt: a message's call is not"),
        ("hi", {"tools": [{"function": {"name": "f"}}]}, "tools: only with messages"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, r"prompt: content\[0\] of a message must be"),
        (CHAT, {"tools": [{"name": "f"}]}, "tools: number 0 is not"),
        ([{"role": "assistant", "tool_calls": 5}], {}, "prompt: role and content"),
        ([{"role": "user", "content": "\ud800"}], {}, "prompt: role and content"),
        (CHAT, {"tools": 5}, "tools: must be a list"),
        (CHAT, {"tools": [{"type": "search", "function": {"name": "f"}}]}, "tools: number 0 is not .*type is 'search'"),
        (CHAT, {"tools": [], "tool_choice": "f"}, "tool_choice: must be 'auto', "),
        (CHAT, {"tool_choice": {"function": {"name": ""}}}, "tool_choice: names no tool"),
        (CHAT, {"parallel_tool_calls": "no"}, "parallel_tool_calls: must be true or false"),
        (CHAT, {"add_generation_prompt": "no"}, "add_generation_prompt: must be True or False, is 'no'$"),
        (CHAT, {"continue_final_message": 1}, "continue_final_message: must be True or False, is 1$"),
        ("hi", {"continue_final_message": True}, "continue_final_message: only with messages"),
        ("hi", {"tool_choice": "required"}, "tool_choice: only with messages"),
        ([1, 2], {"parallel_tool_calls": False}, "parallel_tool_calls: only with messages"),
    ],
)
def test_what_the_wire_cannot_carry_is_named(prompt: object, sampling: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        generate_request(prompt, **sampling)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "asked", "complaint"),
    [
        (5, {}, "prompt: must be a text or messages, is 5$"),
        ([1, 2], {}, r"prompt: must be a text or messages, is \[1, 2\]$"),
        ("hi", {"model": None}, "model: must be a text, is None$"),
        ("hi", {"add_special_token": False}, "add_special_token: is not a known parameter; known are model, "),
        ("hi", {"tool_choice": "none"}, "tool_choice: is not a known parameter"),
        ("hi", {"add_special_tokens": "no"}, "add_special_tokens: must be True or False, is 'no'$"),
        ("hi", {"add_special_tokens": 0}, "add_special_tokens: must be True or False, is 0$"),
        ("hi", {"with_tokens": "yes"}, "with_tokens: must be True or False, is 'yes'$"),
        ("hi", {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs: only with messages"),
        (CHAT, {"tools": 5}, "tools: must be a list"),
    ],
)
def test_what_cannot_be_asked_of_a_tokenizer_is_named(prompt: object, asked: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tokenize_request(prompt, **asked)  # type: ignore[arg-type]


def test_what_cannot_be_asked_of_tokens_is_named() -> None:
    with pytest.raises(ValueError, match="skip_special_tokens: must be True or False, is 'no'"):
        detokenize_request([1], "", "no")  # type: ignore[arg-type]


# -- over a connection ------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[str, Scripted]]:
    with scripted_router() as served:
        yield served


@pytest.fixture
async def async_client(server: tuple[str, Scripted]) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server[0]) as client:
        yield client


async def test_both_clients_give_the_same_answer(server: tuple[str, Scripted], async_client: AsyncClient) -> None:
    address, scripted = server
    scripted.script = lambda request, context: iter(EXACT)
    with Client(address) as client:
        answer = client.generate("hi")
        assert [message.text for message in client.stream("hi")] == ["a", "bc", "d"]
    assert (answer.text, answer.token_ids) == ("abcd", [10, 11, 12])
    assert await async_client.generate("hi") == answer
    assert [message.text async for message in async_client.stream("hi")] == ["a", "bc", "d"]


async def test_both_clients_go_on_where_a_stream_broke(server: tuple[str, Scripted], async_client: AsyncClient) -> None:
    """However often it breaks, their caller gets one exact stream."""
    address, scripted = server
    asked: list[pb.GenerateRequest] = []

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        asked.append(request)
        return breaking(request, context)

    scripted.script = script
    with Client(address) as client:
        assert [message.text for message in client.stream("hi")] == ["a", "bc", "d"]
    assert [list(request.output_token_ids) for request in asked] == [[], [10], [10, 11, 12]]
    assert [request.worker_kind for request in asked] == ["", "k", "k"]
    assert len({request.sampling_params.seed for request in asked}) == 1
    assert [message.text async for message in async_client.stream("hi")] == ["a", "bc", "d"]
    with Client(address, resume_s=0) as client, pytest.raises(Unreachable):
        list(client.stream("hi"))


async def test_both_clients_need_no_status_of_an_answer_that_is_whole(
    server: tuple[str, Scripted], async_client: AsyncClient
) -> None:
    address, scripted = server
    num_calls = 0

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        nonlocal num_calls
        num_calls += 1
        yield from EXACT
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    scripted.script = script
    with Client(address) as client:
        assert [message.text for message in client.stream("hi")] == ["a", "bc", "d"]
    assert [message.text async for message in async_client.stream("hi")] == ["a", "bc", "d"]
    assert num_calls == 2


async def test_both_clients_refuse_a_stream_with_a_gap(server: tuple[str, Scripted], async_client: AsyncClient) -> None:
    address, scripted = server
    for script, complaint in (([tokens(0, 1), tokens(2, 3)], "position 2"), ([tokens(0, 1)], "without its last")):
        scripted.script = lambda request, context, script=script: iter(script)
        with Client(address) as client, pytest.raises(StreamBroken, match=complaint):
            list(client.stream("hi"))
        with pytest.raises(StreamBroken, match=complaint):
            await async_client.generate("hi")


async def test_errors_are_the_routers_own(server: tuple[str, Scripted], async_client: AsyncClient) -> None:
    address, scripted = server

    def refuse(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        is_wrong = request.sampling_params.HasField("top_p")
        wrong = InvalidRequest([("sampling_params.top_p", "must be in (0, 1]")])
        error = wrong if is_wrong else Overloaded("full", retry_after_s=1.5)
        context.set_trailing_metadata([(DETAILS_KEY, to_status(error).SerializeToString())])
        context.abort(STATUS_CODES[type(error)], error.message)
        yield pb.GenerateResponse()

    scripted.script = refuse
    with Client(address) as client, pytest.raises(Overloaded) as overloaded:
        client.generate("hi")
    assert overloaded.value.retry_after_s == 1.5
    with pytest.raises(InvalidRequest) as invalid:
        await async_client.generate("hi", top_p=3)
    assert invalid.value.violations[0].field == "sampling_params.top_p"


def test_a_refused_connection_is_unreachable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unreachable):
        client.generate("hi")


def test_leaving_the_loop_cancels_the_request(server: tuple[str, Scripted]) -> None:
    address, scripted = server
    scripted.script = scripted.endless
    with Client(address) as client:
        stream = client.stream("hi")
        assert next(stream).text == "a"
        stream.close()
        assert scripted.was_cancelled.wait(5)


async def test_leaving_the_async_loop_cancels_the_request(
    server: tuple[str, Scripted], async_client: AsyncClient
) -> None:
    scripted = server[1]
    scripted.script = scripted.endless
    async with aclosing(async_client.stream("hi")) as stream:
        async for message in stream:
            assert message.text == "a"
            break
    assert await asyncio.to_thread(scripted.was_cancelled.wait, 5)


def test_a_deadline_travels(server: tuple[str, Scripted]) -> None:
    address, scripted = server
    seen: list[float | None] = []

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        seen.append(context.time_remaining())
        yield from EXACT

    scripted.script = script
    with Client(address) as client:
        client.generate("hi", timeout_s=30)
    assert seen[0] is not None
    assert 0 < seen[0] < 31


@pytest.mark.parametrize("timeout_s", [float("nan"), 0.0, -1.0, float("-inf"), "x", True, [1]])
async def test_what_is_no_time_is_no_timeout(
    server: tuple[str, Scripted], async_client: AsyncClient, timeout_s: Any
) -> None:
    with Client(server[0]) as client, pytest.raises(ValueError, match="timeout_s: must be more than 0"):
        client.generate("hi", timeout_s=timeout_s)
    with pytest.raises(ValueError, match="timeout_s: must be more than 0"):
        await async_client.generate("hi", timeout_s=timeout_s)


async def test_arguments_of_both_clients_are_named(server: tuple[str, Scripted], async_client: AsyncClient) -> None:
    with Client(server[0]) as client:
        for wrong, complaint in (
            (lambda either: either.generate("hi", n=2), "n: generate has one answer; generate_n"),
            (lambda either: either.abort(3), "request_id: must be a text, is 3"),
            (lambda either: either.profile("w", timeout_s="x"), "timeout_s: must be in .*, is 'x'"),
            (lambda either: either.profile(3), "worker_id: must be a text, is 3"),
        ):
            with pytest.raises(ValueError, match=complaint):
                wrong(client)
            with pytest.raises(ValueError, match=complaint):
                await wrong(async_client)
    for make in (Client, AsyncClient):
        for resume_s in (-1, float("nan"), "x"):
            with pytest.raises(ValueError, match="resume_s: must be at least 0, is "):
                make(server[0], resume_s=resume_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [None, float("inf"), 1e300])
async def test_for_ever_is_a_timeout(
    server: tuple[str, Scripted], async_client: AsyncClient, timeout_s: float | None
) -> None:
    server[1].script = lambda request, context: iter(EXACT)
    with Client(server[0]) as client:
        assert client.generate("hi", timeout_s=timeout_s).text == "abcd"
    assert (await async_client.generate("hi", timeout_s=timeout_s)).text == "abcd"


@pytest.mark.parametrize("address", ["127.0.0.1:115693", "127.0.0.1", "", "here:there", ":50051"])
def test_what_is_no_address_is_none(address: str) -> None:
    """gRPC would take the first of these ports for 50157."""
    for make in (Client, AsyncClient):
        with pytest.raises(ValueError, match="address: must be HOST:PORT with a port from 0 to 65535"):
            make(address)


def test_names_of_grpc_are_addresses() -> None:
    for address in ("dns:///router.example:50051", "unix:/tmp/nobody", "[::1]:50051", "ipv4:127.0.0.1:50051"):
        Client(address).close()
