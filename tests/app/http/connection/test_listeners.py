"""Binding the sockets of a server to the addresses of a host."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import uvicorn

from app.http.connection.listeners import PortTaken, bind, require_free
from app.main import Server
from app.settings import listening_host
from tests.app.http.connection.ipv6 import needs_ipv6
from tests.app.service_process import Process

WAY_OUT = "--port 8001"


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses of the name `localhost`."""
    addresses: list[str] = []
    getaddrinfo = socket.getaddrinfo

    def resolve(host: str, *args: Any, **options: Any) -> list[Any]:
        hosts = addresses if host == "localhost" else [host]
        return [found for address in hosts for found in getaddrinfo(address, *args, **options)]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    return addresses


@needs_ipv6
@pytest.mark.parametrize("addresses", [["127.0.0.1", "::1"], ["::1", "127.0.0.1"], ["::1"], ["127.0.0.1"]])
def test_all_addresses_of_a_name_get_the_same_port(resolver: list[str], addresses: list[str]) -> None:
    resolver += addresses
    sockets = bind("localhost", 0, WAY_OUT)
    names = [listener.getsockname() for listener in sockets]
    for listener in sockets:
        listener.close()
    assert [name[0] for name in names] == addresses
    assert len({name[1] for name in names}) == 1


def test_an_address_of_a_name_that_this_machine_lacks_is_left_out(resolver: list[str]) -> None:
    resolver += ["2001:db8::1", "127.0.0.1"]
    (listener,) = bind("localhost", 0, WAY_OUT)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


def test_addresses_of_ipv6_are_left_out_where_the_kernel_has_no_ipv6(
    resolver: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sockets(socket.socket):
        def __init__(self, family: int = socket.AF_INET, *args: Any, **options: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *args, **options)

    monkeypatch.setattr("socket.socket", Sockets)
    resolver += ["::1", "127.0.0.1"]
    (listener,) = bind("localhost", 0, WAY_OUT)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


@needs_ipv6
@pytest.mark.parametrize("taken", ["127.0.0.1", "::1"])
def test_a_port_that_is_taken_at_one_address_is_refused(resolver: list[str], taken: str) -> None:
    resolver += ["127.0.0.1", "::1"]
    family = socket.AF_INET6 if ":" in taken else socket.AF_INET
    with (
        socket.create_server((taken, 0), family=family) as server,
        pytest.raises(PortTaken, match=r"in use\); choose another port: --port 8001"),
    ):
        require_free("localhost", server.getsockname()[1], WAY_OUT)


@pytest.mark.parametrize("host", ["2001:db8::1", "192.0.2.1", "fe80::1%nowhere"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(PortTaken, match="pass an address of this machine as --host"):
        require_free(host, 8000, WAY_OUT)


def test_all_addresses_are_those_of_ipv4_where_the_kernel_has_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listening_host("::") == listening_host("[::]") == "::"
    monkeypatch.setattr("socket.has_dualstack_ipv6", lambda: False)
    assert listening_host("::") == listening_host("[::]") == "0.0.0.0"
    assert listening_host("::1") == listening_host("[::1]") == "::1"


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "[::]"])
@pytest.mark.parametrize("workers", [1, 2])
def test_all_addresses_are_those_of_ipv6_and_ipv4(launch: Callable[..., Process], host: str, workers: int) -> None:
    process = launch(host=host, workers=workers, insecure=True)
    for reached in ("127.0.0.1", "[::1]"):
        assert httpx.get(f"http://{reached}:{process.address[1]}/readyz").is_success


@needs_ipv6
def test_an_address_of_ipv6_has_brackets_in_the_url(launch: Callable[..., Process]) -> None:
    process = launch(host="::1")
    assert process.url.startswith("http://[::1]:")
    assert httpx.get(f"{process.url}/readyz").is_success


def test_a_port_that_is_taken_during_the_start_is_refused() -> None:
    """Two sockets may have the same address until one of them listens."""
    messages = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        for name in ("startup", "shutdown"):
            messages.append((await receive())["type"])
            await send({"type": f"lifespan.{name}.complete"})

    (listener,) = bind("127.0.0.1", 0, WAY_OUT)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(listener.getsockname())
        other.listen()
        server = Server(uvicorn.Config(app, lifespan="on", loop="uvloop", log_config=None))
        with pytest.raises(PortTaken, match="another process has taken the port; choose another port: --port 8001"):
            server.run([listener])
    assert messages == ["lifespan.startup", "lifespan.shutdown"]
