"""Converts several addresses to one gRPC target, "ipv4:10.0.0.4:50051,10.0.0.5:50051", and back. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address

from rpc.server import split_address

_SCHEMES = {4: "ipv4:", 6: "ipv6:"}


def target_of(addresses: Sequence[str]) -> str:
    """gRPC's target for all `addresses` ("host:port"). Raises `ValueError` for several addresses if one has a host
    name: gRPC takes a single name, but no list of names."""
    if len(addresses) == 1:
        return addresses[0]
    schemes = {_scheme(address) for address in addresses}
    if len(schemes) != 1 or "" in schemes:
        raise ValueError(f"several addresses must be all IPv4 or all IPv6, are {', '.join(addresses)}")
    return schemes.pop() + ",".join(addresses)


def addresses_of(target: str) -> list[str]:
    """The addresses that `target` lists. Any other target is returned as the only one: gRPC resolves it."""
    for scheme in _SCHEMES.values():
        if target.startswith(scheme):
            return target.removeprefix(scheme).split(",")
    return [target]


def check_target(target: str, *, has_tls: bool = False) -> None:
    """Raise `ValueError` for a target that gRPC would misread, such as one with a port beyond 65535, or could not use,
    such as a list of names. With `has_tls`, also for any list, since gRPC would look for the whole list in each
    certificate. Targets with other schemes are left to gRPC."""
    if re.match(r"(?:dns|unix|xds)[:-]", target):
        return
    if not target.startswith(tuple(_SCHEMES.values())) and re.search(r"[,\s].*\S", target):
        raise ValueError(
            "must be one HOST:PORT; several routers are ipv4:HOST:PORT,HOST:PORT (or ipv6:), all with IP addresses, is "
            f"{target!r}"
        )
    of_list = next((scheme for scheme in _SCHEMES.values() if target.startswith(scheme)), "")
    for address in addresses_of(target):
        split_address(address)
        if of_list and _scheme(address) != of_list:
            raise ValueError(
                f"{of_list} must be followed by IP addresses of that kind with ports, is followed by {address!r}"
            )
    if has_tls and len(addresses_of(target)) > 1:
        raise ValueError(
            f"with TLS, several routers need one DNS name that is in their certificates, not a list: {target!r}"
        )


def _scheme(address: str) -> str:
    """gRPC's scheme for an address; empty if its host is a name."""
    try:
        return _SCHEMES[ip_address(split_address(address)[0].strip("[]")).version]
    except ValueError:
        return ""
