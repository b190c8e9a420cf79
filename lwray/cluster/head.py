"""Whether a Ray head can be reached; Ray itself takes a minute to give one up."""

import socket

PROBE_S = 5.0


def answers(address: str) -> bool:
    """Whether somebody listens at `host:port`; anything else that names a cluster is left to Ray."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "://" in address:
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
    except OSError:
        return False
    return True
