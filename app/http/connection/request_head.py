"""What servers must refuse in the head of a request, and the parser lets pass."""

import re
from collections.abc import Iterable

from app.errors import NotHttp

VERSIONS = frozenset({"1.0", "1.1"})
BLANKS = b" \t"  # the parser leaves those that follow a value
HOST = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[\w.~:%-]+\])(?::\d*)?[ \t]*")  # \w is ASCII


def check_head(version: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check a head that the parser has accepted; programs that read it in different ways could be played off.

    Source: RFC 9112, sections 2.3, 3.2 and 6.1

    raises  NotHttp  where the version is another one, the host is missing, ambiguous or no host, or the body is encoded
    """
    if version not in VERSIONS:
        raise NotHttp(f"this service speaks HTTP/1.1, not HTTP/{version}; nothing was done")
    host: bytes | None = None
    for name, value in headers:
        if name == b"host":
            if host is not None or HOST.fullmatch(value) is None:
                raise NotHttp("a request must have one Host header, with a host; nothing was done")
            host = value
        elif name == b"transfer-encoding" and value.rstrip(BLANKS).lower() != b"chunked":
            raise NotHttp("the only Transfer-Encoding that this service reads is chunked; nothing was done")
    if host is None and version == "1.1":
        raise NotHttp("a request must have a Host header; nothing was done")
