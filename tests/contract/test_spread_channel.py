"""A client spreads its requests over the routers behind one address that can serve: over real connections, with routers
whose answers are scripted."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Signer
from gateway_harness import TIMEOUT_S
from spread_harness import SERVICE, Router, until_asked

from protos import tandem_inference_pb2 as pb
from protos import tandem_inference_pb2_grpc
from rpc.errors import DeadlinePassed, Draining, NoWorker, Overloaded, TandemError, Unreachable
from rpc.health import HealthServicer
from rpc.spread_channel import SpreadChannel
from rpc.targets import addresses_of, target_of
from rpc.tls import ServerTLS
from tandem.client import AsyncClient, Client
from tandem.client_base import ClientClosed


@asynccontextmanager
async def spread(num_ready: int = 2, tls: ServerTLS | None = None) -> AsyncIterator[tuple[list[Router], AsyncClient]]:
    """Two routers, `num_ready` of which can serve, and a client that knows both and uses no TLS."""
    routers = [Router(tls=tls) for _ in range(2)]
    addresses = [await router.server.start() for router in routers]
    for router in routers[:num_ready]:
        router.server.set_serving(SERVICE, True)
    client = AsyncClient(f"ipv4:{','.join(addresses)}", resume_s=TIMEOUT_S)
    try:
        async with asyncio.timeout(3 * TIMEOUT_S), client:
            yield routers, client
    finally:
        for router in routers:
            await router.server.drain(0)


async def until_left_aside(client: AsyncClient, router: Router, other: Router) -> None:
    """Waits until the client knows that `router` can no longer serve: of two requests, `router` would get one."""
    while True:
        router.requests.clear()
        for _ in range(2):
            await client.generate("a")
        if not router.requests:
            other.requests.clear()
            return


async def test_each_in_turn() -> None:
    async with spread() as (routers, client):
        await until_asked(client, *routers)
        for _ in range(6):
            assert (await client.model_info()).model == "m", "a question takes no request's turn"
            assert (await client.generate("a")).text == "one two"
        assert [len(router.requests) for router in routers] == [3, 3]
        assert await client.is_serving()


async def test_closing_ends_streams_over_old_connections() -> None:
    async with spread() as (routers, client):
        await until_asked(client, *routers)
        for router in routers:
            router.may_go_on.clear()
        stream = client.stream("a")
        assert (await anext(stream)).text == "one "
        channel, old = client._channel, client._channel._now
        channel._renew_s = 0.0
        while channel._now is old:
            await client.model_info()
        await client.close()
        with pytest.raises(ClientClosed):
            await anext(stream)


async def test_one_that_cannot_serve_is_left_aside_until_it_can() -> None:
    async with spread(num_ready=1) as ((ready, other), client):
        for _ in range(4):
            await client.generate("a")
        assert other.requests == []
        assert await client.is_serving()
        other.server.set_serving(SERVICE, True)
        await until_asked(client, other)
        ready.server.set_serving(SERVICE, False)
        await until_left_aside(client, ready, other)


async def test_one_that_drains_ends_its_streams_and_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    num_watches, watch = 0, HealthServicer.Watch

    async def counted(self: HealthServicer, request: Any, context: Any) -> None:
        nonlocal num_watches
        num_watches += 1
        await watch(self, request, context)

    monkeypatch.setattr(HealthServicer, "Watch", counted)
    async with spread(num_ready=1) as ((leaving, other), client):
        leaving.may_go_on.clear()
        stream = client.stream("a")
        await anext(stream)
        other.server.set_serving(SERVICE, True)
        leaving.server.enter_drain()
        leaving.refusal = Draining("leaving")
        await until_left_aside(client, leaving, other)
        leaving.may_go_on.set()
        assert "".join([message.text async for message in stream]) == "two"
        assert other.requests == [], "the stream did not move"
        for _ in range(20):
            await client.generate("a")
        assert leaving.requests == []
        assert num_watches <= 12, "who leaves is not asked hundreds of times a second whether it does"


async def test_a_question_that_one_does_not_answer_is_asked_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no router answers, the error is not a passed deadline, since the caller gave none."""
    async with spread() as (routers, client):
        await until_asked(client, *routers)
        monkeypatch.setattr("tandem.client.CONTROL_TIMEOUT_S", 0.3)
        routers[0].may_tell.clear()
        for _ in range(2):
            assert (await client.model_info()).model == "m"
        routers[1].may_tell.clear()
        with pytest.raises(Unreachable, match="the router does not answer"):
            await client.model_info()


async def test_one_that_dies_is_left_aside_and_its_streams_go_on() -> None:
    async with spread(num_ready=1) as ((dying, other), client):
        dying.may_go_on.clear()
        streams = [client.stream("a", request_id=f"r-{number}") for number in range(4)]
        for stream in streams:
            await anext(stream)
        other.server.set_serving(SERVICE, True)
        await dying.server.drain(0)
        for stream in streams:
            assert "".join([message.text async for message in stream]) == "two"
        assert sorted(request.request_id for request in other.requests) == [f"r-{number}" for number in range(4)]
        assert all(request.output_token_ids == [1] for request in other.requests)
        for _ in range(4):
            await client.generate("a")


@pytest.mark.parametrize("refusal", [Draining("leaving"), Unreachable("cut")], ids=lambda error: type(error).__name__)
async def test_what_one_did_not_take_on_is_asked_of_another(
    refusal: TandemError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client may not know yet that the first router leaves or has gone."""
    monkeypatch.setattr("tandem.resume.ANOTHER_ROUTER_S", 0.3)
    async with spread() as (routers, client):
        await until_asked(client, *routers)
        routers[0].refusal = refusal
        for _ in range(4):
            await client.generate("a")
        assert len(routers[1].requests) == 4
        assert routers[0].requests
        routers[1].refusal = refusal
        with pytest.raises(type(refusal), match=refusal.message):
            await client.generate("a")


async def test_any_other_refusal_is_the_callers() -> None:
    async with spread() as (routers, client):
        await until_asked(client, *routers)
        for router in routers:
            router.refusal = Overloaded("full", retry_after_s=3.0)
        with pytest.raises(Overloaded, match="full"):
            await client.generate("a")
        assert sum(len(router.requests) for router in routers) == 1


async def test_where_none_can_serve_one_says_why() -> None:
    async with spread(num_ready=0) as (routers, client):
        for router in routers:
            router.refusal = NoWorker("no decode worker is available", retry_after_s=2.0)
        with pytest.raises(NoWorker, match="no decode worker is available") as caught:
            await client.generate("a")
        assert caught.value.retry_after_s == 2.0
        assert not await client.is_serving()
        for router in routers:
            await router.server.drain(0)
        with pytest.raises(Unreachable):
            await client.is_serving()
        with pytest.raises(Unreachable):
            await client.generate("a")


async def test_connections_are_opened_anew_and_old_ones_end_with_their_streams() -> None:
    """Otherwise a client would find an added router only when it loses another one."""
    router = Router()
    address = await router.server.start()
    router.server.set_serving(SERVICE, True)
    router.may_go_on.clear()
    channel = SpreadChannel(address, service=SERVICE, renew_s=0.0)
    stub = tandem_inference_pb2_grpc.InferenceStub(channel)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            messages = aiter(stub.Generate(pb.GenerateRequest()))
            assert (await anext(messages)).text == "one "
            while len(router.peers) < 5:
                await stub.GetModelInfo(pb.GetModelInfoRequest())
            router.may_go_on.set()
            assert [message.text async for message in messages] == ["two", ""]
    finally:
        await channel.close()
        await router.server.drain(0)


async def test_an_abort_might_reach_another_router_and_is_refused() -> None:
    async with spread() as (_, client):
        with pytest.raises(RuntimeError, match="close the stream"):
            await client.abort("r")


@pytest.mark.parametrize("num_ready", [1, 2])
async def test_plain_code_asks_those_of_a_list_that_serve(num_ready: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first router of the list leaves. Its health service says so, or only its refusal of a request does."""
    monkeypatch.setattr("tandem.resume.ANOTHER_ROUTER_S", 0.3)
    async with spread(num_ready=num_ready) as (routers, client):
        leaving, other = routers if num_ready == 2 else routers[::-1]
        leaving.refusal = Draining("leaving")
        the_leaving_first = addresses_of(client._address)[:: 1 if leaving is routers[0] else -1]
        with Client(target_of(the_leaving_first)) as plain:
            assert (await asyncio.to_thread(plain.model_info)).model == "m"
            while len(other.requests) < 4 or (num_ready == 2 and not leaving.requests):
                assert (await asyncio.to_thread(plain.generate, "a")).text == "one two"
            assert num_ready == 2 or not leaving.requests
            other.refusal = Draining("leaving, too")
            with pytest.raises(Draining):
                await asyncio.to_thread(plain.generate, "a")
            with pytest.raises(RuntimeError, match="abort"):
                plain.abort("r")


async def test_plain_code_hears_why_none_of_a_list_serves_and_goes_on_where_another_does() -> None:
    async with spread(num_ready=0) as (routers, client):
        for router in routers:
            router.refusal = NoWorker("no worker")
        with Client(client._address, resume_s=TIMEOUT_S) as plain:
            with pytest.raises(NoWorker, match="no worker"):
                await asyncio.to_thread(plain.generate, "a")
            for router in routers:
                router.refusal = None
                router.requests.clear()
                router.may_go_on.clear()
            stream = plain.stream("a")
            await asyncio.to_thread(next, stream)
            first, other = routers if routers[0].requests else routers[::-1]
            other.may_go_on.set()
            other.server.set_serving(SERVICE, True)
            await first.server.drain(0)
            assert [message.text for message in await asyncio.to_thread(list, stream)] == ["two", ""]
            assert other.requests[-1].output_token_ids == [1]


@contextmanager
def mute() -> Iterator[str]:
    """A list of two servers that accept connections and say nothing."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as other:
        yield target_of([f"127.0.0.1:{each.getsockname()[1]}" for each in (first, other)])


def test_plain_code_hears_in_time_that_none_of_a_list_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.channel.CONNECT_MS", 5_000)  # to find out who serves takes as long
    with mute() as target, Client(target, resume_s=0.0) as plain:
        start_s = time.monotonic()
        with pytest.raises(DeadlinePassed):
            plain.generate("a", timeout_s=0.7)
        assert time.monotonic() - start_s < 3, "to find out who serves is part of it"


async def test_of_a_list_one_that_is_silent_leaves_the_others_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.channel.CONNECT_MS", 5_000)  # longer than the call's timeout
    async with spread(num_ready=1) as (routers, client):
        with mute() as target:
            both = target_of([addresses_of(target)[0], addresses_of(client._address)[0]])
            with Client(both, resume_s=0.0) as plain:
                answer = await asyncio.to_thread(plain.generate, "a", timeout_s=3.0)
        assert answer.text == "one two"
        assert len(routers[0].requests) == 1


async def test_plain_code_gives_those_of_a_list_the_time_that_tls_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpc.channel.CONNECT_MS", 1)
    certificate = Signer(tmp_path).sign("router")
    tls = certificate.args.server_tls(asks_callers=False)
    async with spread(num_ready=1, tls=tls) as ((ready, other), client):
        the_other_first = target_of(addresses_of(client._address)[::-1])
        with Client(the_other_first, tls=certificate.trusting) as plain:
            for _ in range(2):
                assert (await asyncio.to_thread(plain.generate, "a")).text == "one two"
        assert (len(ready.requests), other.requests) == (2, [])


def test_plain_code_that_waits_for_a_list_hears_that_its_client_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.channel.CONNECT_MS", 5_000)  # to find out who serves takes as long
    with mute() as target:
        plain = Client(target, resume_s=0.0)
        closing = threading.Timer(0.1, plain.close)
        closing.start()
        start_s = time.monotonic()
        with pytest.raises(ClientClosed):
            plain.generate("a")
        assert time.monotonic() - start_s < 3, "as soon as it is"
        closing.join()


def test_plain_code_has_no_thread_for_its_list() -> None:
    """With such a thread, a child that the program forks would crash."""
    before = set(threading.enumerate())
    with mute() as target:
        Client(target).close()
        with Client(target, resume_s=0.0) as plain:
            with pytest.raises(DeadlinePassed):
                plain.generate("a", timeout_s=0.1)
            for thread in set(threading.enumerate()) - before:  # the call's own thread ends with the call
                thread.join(2.0)
                assert not thread.is_alive()


async def test_a_process_ends_that_has_not_closed_its_client() -> None:
    async with spread() as (routers, client):
        program = f"from tandem.client import Client; c = Client({client._address!r}); print(c.generate('a').text)"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
        try:
            said, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        finally:
            if process.returncode is None:
                process.kill()
        assert (process.returncode, said.decode().strip()) == (0, "one two")
        assert any(router.requests for router in routers)
