"""Whether this machine has IPv6, as containers of Docker often have not."""

import socket

import pytest


def _has_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


HAS_IPV6 = _has_loopback()
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no address ::1")
LOOPBACK = "[::1]" if HAS_IPV6 else "127.0.0.1"
IPV6_LOOPBACK = pytest.param("::1", marks=needs_ipv6)
