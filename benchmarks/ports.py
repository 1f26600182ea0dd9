"""Ports for processes that must know one before a server listens there."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 15_000
USUAL_FIRST = 32_768
"""The first port that Linux gives out by itself, unless it is configured otherwise."""


def free_port() -> int:
    """Returns a port of loopback that is free now, and that the system does not assign by itself.

    A port that ``bind`` chose (port 0) goes back to those that the system gives to any connection,
    so another process may have it before the intended one listens. A port below that range is
    taken only by a process that names it.
    """
    first = int(RANGE.read_text().split()[0]) if RANGE.is_file() else USUAL_FIRST
    ports = range(LOWEST, max(first, LOWEST + 1000))
    for port in random.SystemRandom().sample(ports, 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED:
                return port
    raise OSError(f"no port between {ports[0]} and {ports[-1]} is free")
