"""The sockets that a server listens on."""

from __future__ import annotations

import errno
import socket
from typing import Any


class PortTaken(ValueError):
    """The service cannot listen on an address; the message names a way out."""


def bind(host: str, port: int, way_out: str) -> list[socket.socket]:
    """Return a bound socket for each address of the host, such as 127.0.0.1 and ::1 for localhost.

    host     `::` is all addresses, of IPv6 and IPv4
    port     0 chooses a free port
    way_out  how to choose another port, for the message
    raises   PortTaken
    """
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(addresses):
            if sockets:  # the port that the first one has got
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            try:
                sockets.append(_bound(family, address, is_ipv4_too=host == "::"))
            except OSError as exc:
                if exc.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                failure = exc  # a name such as localhost may have ::1 where IPv6 is off
        if not sockets and failure is not None:
            raise failure
    except OSError as exc:
        for listener in sockets:
            listener.close()
        is_other_machine = isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL
        remedy = "pass an address of this machine as --host" if is_other_machine else f"choose another port: {way_out}"
        raise PortTaken(f"cannot listen on port {port} of {host} ({exc.strerror}); {remedy}") from exc
    return sockets


def _bound(family: int, address: tuple[Any, ...], is_ipv4_too: bool) -> socket.socket:
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_ipv4_too)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def require_free(host: str, port: int, way_out: str) -> None:
    """Raise PortTaken if `bind` would."""
    for listener in bind(host, port, way_out):
        listener.close()
