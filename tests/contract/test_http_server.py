"""Edge cases of HTTP over real connections: clients that send endlessly, that are silent, or that leave."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest

from rpc.http import MAX_HEAD_BYTES, READ_BYTES, HttpServer
from rpc.listener import hold_port, open_listener
from rpc.server import CannotListen

TIMEOUT_S = 20.0
HEAD = b"POST / HTTP/1.1\r\nhost: h\r\n"


class Application:
    """Reads each request's body, and answers once `may_answer` is set."""

    def __init__(self) -> None:
        self.has_head = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.is_asked = asyncio.Event()
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.has_head.set()
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        self.bodies.append(body + message.get("body", b""))
        self.is_asked.set()
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Application, str, int]]:
    application = Application()
    server = HttpServer(application)
    host, _, port = server.start("127.0.0.1:0", flag="--listen").rpartition(":")
    async with asyncio.timeout(TIMEOUT_S):
        yield application, host, int(port)
    application.may_answer.set()
    await server.close()


async def test_a_connection_to_elsewhere_is_refused() -> None:
    async with serving() as (_, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"CONNECT other:443 HTTP/1.1\r\nhost: other:443\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()


@pytest.mark.parametrize(
    ("begin", "line"),
    [
        (HEAD, b"x: " + b"y" * 1000 + b"\r\n"),
        (HEAD + b"x: ", b"y" * 1000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", b"x: " + b"y" * 1000 + b"\r\n"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"y" * 1000),
    ],
    ids=["headers", "a header", "trailers", "an extension of a chunk"],
)
async def test_what_is_no_body_has_a_bound(begin: bytes, line: bytes) -> None:
    async with serving() as (_, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(begin)
        for _ in range(2 * (MAX_HEAD_BYTES + READ_BYTES) // len(line)):
            writer.write(line)
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_bodies_are_as_long_as_they_like_in_chunks_of_any_size() -> None:
    async with serving() as (_, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(2 * (MAX_HEAD_BYTES + READ_BYTES) // 6):
            writer.write(b"1\r\nx\r\n")
        writer.write(b"0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_many_requests_over_one_connection_have_the_bound_of_one_each() -> None:
    async with serving() as (_, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        for _ in range(2 * (MAX_HEAD_BYTES + READ_BYTES) // 50_000):
            writer.write(b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"y" * 50_000 + b"\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"\r\n\r\nok")
        writer.close()


BODIES = [b"content-length: 4\r\n\r\nbody", b"transfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"]


@pytest.mark.parametrize("body", BODIES, ids=["with a length", "in chunks"])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_who_would_rather_speak_another_protocol_is_answered_in_this_one(protocol: bytes, body: bytes) -> None:
    """Java's HttpClient, for example, offers HTTP/2 with each first request, even one with a body."""
    async with serving() as (application, host, port):
        head = (
            HEAD + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: " + protocol + b"\r\nhttp2-settings: AAMAAABk\r\n"
        )
        for pieces in ([head + body], [head, body], [bytes([byte]) for byte in head + body]):
            reader, writer = await asyncio.open_connection(host, port)
            for num_asked in (1, 2):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
                assert application.bodies == num_asked * [b"body"]
            application.bodies.clear()
            writer.close()


@pytest.mark.parametrize(
    "begin",
    [b"", b"POST / HT", HEAD + b"content-length: 9\r\n\r\nhalf"],
    ids=["nothing", "half a head", "half a body"],
)
async def test_a_client_that_says_no_more_is_not_waited_for(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.http.KEEP_ALIVE_S", 0.1)
    async with serving() as (_, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(begin)
        assert b"200" not in await reader.read()
        writer.close()


async def test_nor_is_one_that_began_its_next_request_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.http.KEEP_ALIVE_S", 0.1)
    async with serving() as (application, host, port):
        application.may_answer.clear()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(HEAD + b"content-length: 4\r\n\r\nbody" + HEAD + b"content-length: 9\r\n\r\nhalf")
        await application.is_asked.wait()
        application.may_answer.set()
        assert (await reader.read()).count(b"HTTP/1.1 200") == 1
        writer.close()


@contextmanager
def files_left(number: int) -> Iterator[None]:
    """Limit the process' open files, as `ulimit -n` does, so that `number` more can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    files = []
    try:
        with suppress(OSError):
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + number, hard))
        yield
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def connected(client: socket.socket, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect a socket that was made before the files ran out."""
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, port))
    return await asyncio.open_connection(sock=client)


async def test_clients_for_whom_no_file_is_left_are_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Connected clients are served meanwhile, and some files are kept for the process itself."""
    monkeypatch.setattr("rpc.listener.KEPT_BACK", 8)
    first, *others = (socket.socket() for _ in range(21))
    with files_left(8 + 2):  # beside the 8 kept back, one for the server and one for its first client
        async with serving() as (application, host, port):
            application.may_answer.clear()
            reader, writer = await connected(first, host, port)
            writer.write(HEAD + b"content-length: 4\r\n\r\nbody")
            await application.is_asked.wait()
            connections = [await connected(client, host, port) for client in others]
            for turned_away, _ in connections:
                assert (await turned_away.read()).startswith(b"HTTP/1.1 503")
            application.may_answer.set()
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            for each in (writer, *(its_writer for _, its_writer in connections)):
                each.close()
            while True:  # until the server has seen that its first client is gone
                reader, writer = await connected(socket.socket(), host, port)
                writer.write(HEAD + b"content-length: 4\r\n\r\nbody")
                status = await reader.readline()
                writer.close()
                if status.startswith(b"HTTP/1.1 200"):
                    break
                assert status.startswith(b"HTTP/1.1 503")
    assert [record.name for record in caplog.records] == ["rpc.listener"]


@pytest.mark.parametrize("has_tls", [False, True])
def test_over_tls_they_are_told_nothing_since_there_was_no_handshake(has_tls: bool) -> None:
    with open_listener("127.0.0.1:0", "--listen", has_tls=has_tls) as listener:
        listener._first_kept_back = 0
        with socket.create_connection(listener.getsockname(), TIMEOUT_S) as client:
            listener.setblocking(True)
            with pytest.raises(BlockingIOError):
                listener.accept()
            assert client.recv(1000).startswith(b"HTTP/1.1 503") is not has_tls


async def test_where_not_one_file_is_left_they_wait() -> None:
    """The server tries to accept once a second, however many clients wait."""
    failures: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    async with serving() as (_, host, port):
        clients = [socket.socket() for _ in range(3)]
        with files_left(0):
            connections = [await connected(client, host, port) for client in clients]
            began_s = loop.time()
            while not failures or loop.time() - began_s < 0.2:  # noqa: ASYNC110 - that nothing more comes is seen by time
                await asyncio.sleep(0.01)
            assert len(failures) == 1
        for reader, writer in connections:
            writer.write(HEAD + b"content-length: 4\r\n\r\nbody")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()


@pytest.mark.parametrize("beside", [b"", b"POST / HT"], ids=["alone", "half a request after it"])
async def test_an_answer_may_take_longer_than_a_client_may(beside: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.http.KEEP_ALIVE_S", 0.1)
    async with serving() as (application, host, port):
        application.may_answer.clear()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(HEAD + b"content-length: 4\r\n\r\nbody" + beside)
        await application.is_asked.wait()
        silent, silent_writer = await asyncio.open_connection(host, port)
        assert await silent.read() == b""  # it came later, and has timed out
        application.may_answer.set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        silent_writer.close()


async def test_a_server_that_ends_waits_for_the_rest_of_a_request_only_while_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rpc.http.LAST_SILENCE_S", 0.5)
    application = Application()
    server = HttpServer(application)
    host, _, port = server.start("127.0.0.1:0", flag="--listen").rpartition(":")
    clients = []
    for _ in range(2):
        application.has_head.clear()
        clients.append(await asyncio.open_connection(host, int(port)))
        clients[-1][1].write(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        await application.has_head.wait()
    (silent, silent_writer), (slow, slow_writer) = clients
    closing, silenced = asyncio.create_task(server.close(2 * TIMEOUT_S)), asyncio.create_task(silent.read())
    async with asyncio.timeout(TIMEOUT_S):
        while not silenced.done():
            slow_writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.02)
        assert silenced.result() == b""
        slow_writer.write(b"0\r\n\r\n")
        assert (await slow.readline()).startswith(b"HTTP/1.1 200")
        await closing
    assert len(application.bodies[-1]) > 1
    silent_writer.close()
    slow_writer.close()


async def test_an_answer_does_not_wait_for_its_head_to_be_acknowledged() -> None:
    """Nor does a stream's token wait for the previous one: that would cost 40 ms if the client sends nothing."""
    server = HttpServer(Application())
    host, _, port = server.start("127.0.0.1:0", flag="--listen").rpartition(":")
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(HEAD + b"content-length: 0\r\n\r\n")
        await reader.readuntil(b"ok")
        (connection,) = server._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await server.close()


async def test_several_share_a_port_that_is_nobody_elses() -> None:
    """While the port is held, no other process gets it, whether one of our servers listens or not."""
    held, address = hold_port("127.0.0.1:0", "--http-port")
    host, _, port = address.rpartition(":")
    with held:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, port)
        with pytest.raises(CannotListen, match="Address already in use; take another port with --http-port"):
            HttpServer(Application()).start(address, flag="--http-port")
        applications = Application(), Application()
        servers = [HttpServer(application) for application in applications]
        assert {server.start(address, flag="--listen", reuse_port=True) for server in servers} == {address}
        async with asyncio.timeout(TIMEOUT_S):
            while not all(application.bodies for application in applications):
                assert await _asked(host, port)
            with pytest.raises(CannotListen, match=f"cannot listen on {address}: Address already in use"):
                hold_port(address, "--http-port")
            await servers[0].close()
            num_before = len(applications[1].bodies)
            assert all([await _asked(host, port) for _ in range(8)])
            assert len(applications[1].bodies) == num_before + 8
            await servers[1].close()


async def _asked(host: str, port: str) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(HEAD + b"connection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.endswith(b"ok")
