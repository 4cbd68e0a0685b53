"""Routers behind a name: how a gateway uses a name server's answers, over real connections and with a server that
speaks DNS."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificate, Signer
from gateway_harness import TIMEOUT_S
from spread_harness import SERVICE, Router, until_asked

from rpc.errors import Unreachable
from tandem.client import AsyncClient

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is not there")

A_RECORD = 1


class NameServer(asyncio.DatagramProtocol):
    """Answers with the same IPv4 addresses, whatever name it is asked for."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.num_asked = 0

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.DatagramTransport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """RFC 1035: a header, the question, and records whose name is that of the question, at byte 12."""
        self.num_asked += 1
        end = data.index(b"\0", 12) + 5
        (kind,) = struct.unpack(">H", data[end - 4 : end - 2])
        told = [ipaddress.IPv4Address(address).packed for address in self.addresses if kind == A_RECORD]
        head = data[:2] + struct.pack(">5H", 0x8180, 1, len(told), 0, 0)
        records = b"".join(struct.pack(">3HIH", 0xC00C, A_RECORD, 1, 0, 4) + address for address in told)
        self._transport.sendto(head + data[12:end] + records, addr)


@asynccontextmanager
async def named(
    num_told: int, certificate: Certificate | None = None
) -> AsyncIterator[tuple[NameServer, list[Router], AsyncClient]]:
    """Two routers at two addresses, `num_told` of which the name server tells, and a client that knows their name.
    `certificate`: the routers', for TLS."""
    server_tls = certificate.args.server_tls(asks_callers=False) if certificate is not None else None
    client_tls = certificate.trusting if certificate is not None else None
    transport, names = await asyncio.get_running_loop().create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 0)
    )
    routers = [Router(tls=server_tls)]
    port = (await routers[0].server.start()).rpartition(":")[2]
    routers.append(Router(f"127.0.0.2:{port}", server_tls))
    await routers[1].server.start()
    for router in routers:
        router.server.set_serving(SERVICE, True)
    names.addresses = ["127.0.0.1", "127.0.0.2"][:num_told]
    asked = transport.get_extra_info("sockname")[1]
    try:
        async with (
            asyncio.timeout(3 * TIMEOUT_S),
            AsyncClient(
                f"dns://127.0.0.1:{asked}/routers.test:{port}", is_spread=True, resume_s=0.0, tls=client_tls
            ) as client,
        ):
            yield names, routers, client
    finally:
        for router in routers:
            await router.server.drain(0)
        transport.close()


@pytest.mark.parametrize("has_tls", [False, True])
async def test_all_routers_behind_a_name_take_turns(has_tls: bool, tmp_path: Path) -> None:
    certificate = Signer(tmp_path).sign("routers", address="DNS:routers.test") if has_tls else None
    async with named(2, certificate) as (_, routers, client):
        await until_asked(client, *routers)
        for _ in range(6):
            assert (await client.generate("a")).text == "one two"
        assert [len(router.requests) for router in routers] == [3, 3]


async def test_a_name_that_comes_back_is_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, gRPC repeats an unanswered name query after 1, 2.6, 5.2 seconds, in the end every two minutes."""
    monkeypatch.setattr("rpc.spread_channel.REOPEN_S", 0.1)
    async with named(0) as (names, routers, client):
        while names.num_asked < 60:
            with pytest.raises(Unreachable):
                await client.generate("a")
            await asyncio.sleep(0.01)
        names.addresses = ["127.0.0.1", "127.0.0.2"]
        while not all(router.requests for router in routers):
            try:
                await client.generate("a")
            except Unreachable:
                await asyncio.sleep(0.01)
