"""Requests that ask for another protocol by `Upgrade`, which are parsed again without it.

The parser would leave everything after such a head to the other protocol, even a body. Clients of HTTP/2 without TLS
send the header with every request. If a body looked like a request, a proxy that forwards it would get two responses.
"""

from collections.abc import Iterable

from httptools import HttpRequestParser

from app.errors import NotHttp

UPGRADE = b"upgrade"
OPTIONS = frozenset({b"connection", b"proxy-connection"})  # the parser reads both


def is_upgrade(parser: HttpRequestParser) -> bool:
    """Return whether the head asks for another protocol; raise NotHttp if it asks for a tunnel."""
    if not parser.should_upgrade():
        return False
    if parser.get_method() == b"CONNECT":
        raise NotHttp("this service is not a proxy; nothing was done")
    return True


def head_without_upgrade(parser: HttpRequestParser, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the head that was parsed last, without its `Upgrade` option."""
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), url, parser.get_http_version().encode())]
    for name, value in headers:
        options = [option for option in value.split(b",") if option.strip().lower() != UPGRADE]
        lines.append(b"%b: %b" % (name, b",".join(options) if name in OPTIONS else value))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def new_parser(protocol: object) -> HttpRequestParser:
    """Return a parser as a new connection has it; after the last request of one, it would ignore what follows."""
    parser = HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
