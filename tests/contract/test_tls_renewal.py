"""Servers show certificates that are renewed on disk to every client that connects afterwards, over gRPC and HTTPS."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificate, Signer

from protos import tandem_inference_pb2 as pb
from protos import tandem_inference_pb2_grpc
from rpc.channel import open_channel
from rpc.errors import Unreachable, rpc_errors_as_tandem_errors
from rpc.http import HttpServer
from rpc.server import Server
from rpc.tls import ClientTLS, Renewals, SslArgs

TIMEOUT_S = 20.0


class Served:
    """The certificate files of a process: first from one signer, then from another."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = (Signer(folder / name).sign("server") for name in ("old", "new"))
        self.at = Certificate(*(folder / name for name in ("ca.pem", "cert.pem", "key.pem")))
        self.put(self.old)

    def put(self, certificate: Certificate, *names: str) -> None:
        """Replaces each file atomically, as renewal programs do."""
        for name in names or ("ca", "cert", "key"):
            target: Path = getattr(self.at, name)
            shutil.copy(getattr(certificate, name), target.with_suffix(".part"))
            target.with_suffix(".part").rename(target)

    def args(self) -> SslArgs:
        return self.at.args


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


def spoiled(served: Served) -> list[Callable[[], object]]:
    """Actions that leave the files in a state that no server can use."""
    return [
        lambda: served.put(served.old, "cert"),  # not the key's
        lambda: served.at.cert.write_text("-----BEGIN"),
        served.at.key.unlink,
        lambda: served.at.ca.write_text(""),
    ]


class Handlers(tandem_inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]
    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:  # noqa: N802
        return pb.GetModelInfoResponse(model="m")


async def ask(channel: Any) -> str:
    with rpc_errors_as_tandem_errors():
        stub = tandem_inference_pb2_grpc.InferenceStub(channel)
        info = await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT_S)
    return str(info.model)


async def ask_anew(address: str, tls: ClientTLS) -> str:
    async with open_channel(address, tls=tls) as channel:
        return await ask(channel)


async def test_over_grpc(served: Served) -> None:
    """The callers that a worker accepts change too: after the renewal, those with the new signer's certificate."""
    server = Server("127.0.0.1:0", tls=served.args().server_tls(asks_callers=True))
    server.add(tandem_inference_pb2_grpc.add_InferenceServicer_to_server, Handlers(), "tandem.v1.Inference")
    address = await server.start()
    async with asyncio.timeout(TIMEOUT_S), open_channel(address, tls=served.old.client) as begun:
        assert await ask(begun) == "m"
        with pytest.raises(Unreachable):
            await ask_anew(address, served.new.client)
        served.put(served.new)
        assert await ask_anew(address, served.new.client) == "m"
        with pytest.raises(Unreachable):
            await ask_anew(address, served.old.client)
        for spoil in spoiled(served):
            spoil()
            assert await ask_anew(address, served.new.client) == "m"
            served.put(served.new)
        assert await ask(begun) == "m"
        # Many connections at once, which keep the event loop busy, all succeed.
        served.put(served.old)
        assert set(await asyncio.gather(*(ask_anew(address, served.old.client) for _ in range(50)))) == {"m"}
    await server.drain(0)


async def test_who_calls_shows_what_there_is_when_it_opens_a_channel(served: Served) -> None:
    tls = served.args().client_tls
    assert tls is not None
    for there in (served.old, served.new):
        args = SslArgs(ssl_certfile=str(there.cert), ssl_keyfile=str(there.key), ssl_ca_certs=str(there.ca))
        server = Server("127.0.0.1:0", tls=args.server_tls(asks_callers=True))
        server.add(tandem_inference_pb2_grpc.add_InferenceServicer_to_server, Handlers(), "tandem.v1.Inference")
        address = await server.start()
        served.put(there)
        assert await ask_anew(address, tls) == "m"
        served.at.key.unlink()
        assert (await ask_anew(address, tls) == "m") if there is served.old else True
        served.put(there)
        await server.drain(0)


async def test_over_https(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    server = HttpServer(application, tls=served.args().server_tls())
    host, _, port = server.start("127.0.0.1:0", flag="--listen").rpartition(":")

    async def open_to(trusted: Certificate) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context(cafile=str(trusted.ca))
        return await asyncio.open_connection(host, int(port), ssl=context)

    async def get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        return (await reader.readuntil(b"ok"))[:15]

    async with asyncio.timeout(TIMEOUT_S):
        begun = await open_to(served.old)
        assert await get(*begun) == b"HTTP/1.1 200 OK"
        served.put(served.new)
        opened = [begun, await open_to(served.new)]
        with pytest.raises(ssl.SSLCertVerificationError):
            await open_to(served.old)
        for spoil in spoiled(served)[:3]:
            spoil()
            opened.append(await open_to(served.new))
            served.put(served.new)
        for reader, writer in opened:
            assert await get(reader, writer) == b"HTTP/1.1 200 OK"
            writer.transport.abort()
        assert "must be a certificate and its key" in str([vars(record) for record in caplog.records])
        await server.close()


def test_a_secret_of_kubernetes_changes_by_a_link(served: Served, tmp_path: Path) -> None:
    for name, made in (("..1", served.old), ("..2", served.new)):
        (tmp_path / name).mkdir()
        for kind in ("ca", "cert", "key"):
            shutil.copy(getattr(made, kind), tmp_path / name / f"{kind}.pem")
    data, mounted = tmp_path / "..data", tmp_path / "mounted"
    mounted.mkdir()
    data.symlink_to("..1")
    for kind in ("ca", "cert", "key"):
        (mounted / f"{kind}.pem").symlink_to(data / f"{kind}.pem")
    args = SslArgs(ssl_certfile=str(mounted / "cert.pem"), ssl_keyfile=str(mounted / "key.pem"))
    tls = args.server_tls()
    assert tls is not None
    assert Renewals(tls)() is None
    renewals = Renewals(tls)
    (tmp_path / "..next").symlink_to("..2")
    os.rename(tmp_path / "..next", data)
    renewed = renewals()
    assert renewed is not None
    assert renewed.cert == served.new.cert.read_bytes()
    assert renewals() is None
