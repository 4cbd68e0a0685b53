"""EventOutbox: one message per engine step, fewer and larger ones under load, nothing lost, nothing reordered."""

from __future__ import annotations

import asyncio
from itertools import chain

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from rpc.channel import DEFAULT_MAX_MESSAGE_BYTES
from rpc.session import MAX_BYTES_PER_MESSAGE, MAX_EVENTS_PER_MESSAGE, EventOutbox


def tokens(*ids: int) -> list[pb.WorkerEvent]:
    return [pb.WorkerEvent(request_id="r", tokens=pb.Tokens(index=i, token_ids=[i])) for i in ids]


def indices(message: pb.WorkerEvents) -> list[int]:
    return [event.tokens.index for event in message.events]


async def test_one_message_carries_one_step() -> None:
    outbox = EventOutbox(pb.WorkerLoad)
    messages = outbox.messages()
    for step in ([0, 1, 2], [3]):
        outbox.post(tokens(*step))
        assert indices(await anext(messages)) == step


async def test_steps_merge_while_the_reader_is_busy() -> None:
    outbox = EventOutbox(pb.WorkerLoad)
    for i in range(5):
        outbox.post(tokens(i))
    assert indices(await anext(outbox.messages())) == [0, 1, 2, 3, 4]


async def test_waits_without_events_and_wakes_on_post() -> None:
    outbox = EventOutbox(pb.WorkerLoad)
    waiting = asyncio.ensure_future(anext(outbox.messages()))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    outbox.post(tokens(7))
    assert indices(await waiting) == [7]


async def test_a_message_is_bounded_and_the_rest_follows() -> None:
    outbox = EventOutbox(pb.WorkerLoad)
    outbox.post(tokens(*range(2 * MAX_EVENTS_PER_MESSAGE + 1)))
    outbox.close()
    messages = [indices(message) async for message in outbox.messages()]
    assert [len(message) for message in messages] == [MAX_EVENTS_PER_MESSAGE, MAX_EVENTS_PER_MESSAGE, 1]
    assert list(chain.from_iterable(messages)) == list(range(2 * MAX_EVENTS_PER_MESSAGE + 1))


async def test_events_that_are_large_do_not_make_a_message_that_grpc_refuses() -> None:
    """Logprobs of long prompts pile up while a router is held up and takes no messages."""
    outbox = EventOutbox(pb.WorkerLoad)
    large = inference_pb.TokenLogprobs(sampled=inference_pb.Logprob(token=bytes(2_000_000)))
    for index in range(10):
        outbox.post([pb.WorkerEvent(request_id="r", tokens=pb.Tokens(index=index, prompt_logprobs=[large]))])
    outbox.close()
    messages = [message async for message in outbox.messages()]
    assert max(message.ByteSize() for message in messages) < DEFAULT_MAX_MESSAGE_BYTES
    assert list(chain.from_iterable(map(indices, messages))) == list(range(10))


async def test_an_event_beyond_the_bound_of_a_message_goes_alone() -> None:
    outbox = EventOutbox(pb.WorkerLoad)
    large = inference_pb.TokenLogprobs(sampled=inference_pb.Logprob(token=bytes(MAX_BYTES_PER_MESSAGE + 1)))
    outbox.post([pb.WorkerEvent(request_id="r", tokens=pb.Tokens(index=0, prompt_logprobs=[large])), *tokens(1)])
    messages = outbox.messages()
    assert [indices(await anext(messages)) for _ in range(2)] == [[0], [1]]


async def test_every_message_has_the_newest_load() -> None:
    loads = iter([3, 4])
    outbox = EventOutbox(lambda: pb.WorkerLoad(num_running=next(loads)))
    messages = outbox.messages()
    outbox.post(tokens(0))
    assert (await anext(messages)).load.num_running == 3
    outbox.post()  # no event, only a new load
    message = await anext(messages)
    assert (message.load.num_running, len(message.events)) == (4, 0)


async def test_close_sends_what_is_pending_then_ends() -> None:
    outbox = EventOutbox(pb.WorkerLoad)
    outbox.post(tokens(0))
    outbox.close()
    outbox.post(tokens(1))  # after the end: dropped
    assert [indices(message) async for message in outbox.messages()] == [[0]]


async def test_close_ends_a_waiting_reader() -> None:
    outbox = EventOutbox(pb.WorkerLoad)
    reader = asyncio.ensure_future(anext(outbox.messages(), None))
    await asyncio.sleep(0)
    outbox.close()
    assert await asyncio.wait_for(reader, 5) is None
