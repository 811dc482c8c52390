"""A port for a server that is started later."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """A free port that the system gives to nobody who asks for any: those are from its range for that, which is passed
    over. A port from that range may be a client's by the time the server has started."""
    given_out = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(given_out.read_text().split()[0]) if given_out.exists() else 32768
    for port in random.sample(range(min(10_000, first - 1000), first), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
