"""Where the workers of a generation can meet: an address of this host, free now.

World: host-only. Floor: recovery. Read `jaxft/recovery/job_supervisor.py` next.
"""

from __future__ import annotations

import contextlib
import socket

_LOOPBACK = ("127.", "localhost", "::1")


def free_address(coordinator: str) -> str:
    """A `host:port` of this host that nobody listens on now.

    Args:
        coordinator: `host:port` that the job was given. Where that is on this machine
            alone, so is the result; else it is the address that packets to there
            come from, which is one that the others can reach.
    """
    host = coordinator.rpartition(":")[0].strip("[]")
    mine = host if host.startswith(_LOOPBACK) else _address_towards(host)
    family = socket.AF_INET6 if ":" in mine else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((mine if host.startswith(_LOOPBACK) else "", 0))
        port = probe.getsockname()[1]
    return f"[{mine}]:{port}" if ":" in mine else f"{mine}:{port}"


def _address_towards(host: str) -> str:
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # Nothing is sent.
            return str(probe.getsockname()[0])
    return socket.gethostname()
