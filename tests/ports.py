"""Ports for servers that a test stops and restarts at the same address."""

from __future__ import annotations

import random
import socket
from pathlib import Path

FIRST = 10_240
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def lasting_port() -> int:
    """Return a free port that stays free while its server is down: it lies below the range from which the system gives
    ports to outgoing connections and to servers that bind port 0."""
    first_given = int(_RANGE.read_text().split()[0]) if _RANGE.is_file() else 32_768
    for port in random.sample(range(FIRST, first_given), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"100 ports of {FIRST} to {first_given} are taken")
