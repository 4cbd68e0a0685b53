"""Several routers as one gRPC target, and a target as addresses."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import Signer

from gateway.args import GatewayArgs
from rpc.targets import addresses_of, check_target, target_of
from rpc.tls import ClientTLS
from tandem.client import AsyncClient, Client


@pytest.mark.parametrize(
    ("addresses", "target"),
    [
        (["localhost:1"], "localhost:1"),
        (["10.0.0.4:1", "10.0.0.5:2"], "ipv4:10.0.0.4:1,10.0.0.5:2"),
        (["[::1]:1", "[fe80::2]:2"], "ipv6:[::1]:1,[fe80::2]:2"),
    ],
)
def test_several_addresses_are_one_and_come_back(addresses: list[str], target: str) -> None:
    assert target_of(addresses) == target
    assert addresses_of(target) == addresses


@pytest.mark.parametrize("addresses", [["localhost:1", "localhost:2"], ["10.0.0.4:1", "[::1]:1"]])
def test_a_list_of_names_is_refused(addresses: list[str]) -> None:
    """gRPC resolves a single name, and would take a list for one name."""
    with pytest.raises(ValueError, match="all IPv4 or all IPv6, are"):
        target_of(addresses)


@pytest.mark.parametrize("target", ["routers.example:50051", "dns:///routers:50051", "unix:/tmp/a,b"])
def test_what_a_name_server_knows_is_left_to_grpc(target: str) -> None:
    assert addresses_of(target) == [target]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("ipv4:localhost:1,127.0.0.1:2", "ipv4: must be followed by IP addresses .*, is followed by 'localhost:1'"),
        ("ipv4:127.0.0.1:1, 127.0.0.2:2", "ipv4: must be followed by IP addresses .*, is followed by ' 127.0.0.2:2'"),
        ("ipv6:[::1]:1,127.0.0.1:2", "ipv6: must be followed by IP addresses .*, is followed by '127.0.0.1:2'"),
        ("ipv4:127.0.0.1:1,", "HOST:PORT"),
        ("ipv4:127.0.0.1:1,127.0.0.1:65536", "HOST:PORT"),
        ("localhost", "HOST:PORT"),
        ("a,b", "must be one HOST:PORT; several routers are ipv4:HOST:PORT,HOST:PORT .*, is 'a,b'"),
        ("127.0.0.1:1,127.0.0.2:2", "must be one HOST:PORT; several routers are ipv4:HOST:PORT,HOST:PORT"),
        ("127.0.0.1:1 127.0.0.2:2", "must be one HOST:PORT; several routers are ipv4:HOST:PORT,HOST:PORT"),
    ],
)
def test_what_grpc_could_not_use_is_refused_where_it_is_said(target: str, said: str) -> None:
    """gRPC would fail each call with an error of its own."""
    for check in (check_target, AsyncClient, lambda target: GatewayArgs(router=(target,))):
        with pytest.raises(ValueError, match=said):
            check(target)


def test_over_tls_a_list_is_no_target_for_one_channel(tmp_path: Path) -> None:
    """gRPC would look for the whole list in the routers' certificates. A `Client` has a channel to each router
    instead."""
    several, one = "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv4:127.0.0.1:1"
    ca = Signer(tmp_path).cert
    tls = ClientTLS.of_files(ca=ca)
    for make in (
        lambda target: AsyncClient(target, tls=tls),
        lambda target: GatewayArgs(router=(target,), ssl_ca_certs=str(ca)),
    ):
        with pytest.raises(
            ValueError, match="with TLS, several routers need one DNS name that is in their certificates"
        ):
            make(several)
        make(one)
    Client(several, tls=tls).close()


@pytest.mark.parametrize("target", ["ipv4:127.0.0.1:1", "ipv6:[::1]:1,[fe80::2]:2", "dns:///routers:50051", "a.b:1"])
def test_what_grpc_can_use_is_taken(target: str) -> None:
    check_target(target)
    assert GatewayArgs(router=(target,)).router == (target,)
