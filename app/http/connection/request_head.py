"""Checks of a request head that the parser does not make."""

import re
from collections.abc import Iterable

from app.errors import NotHttp

VERSIONS = frozenset({"1.0", "1.1"})
BLANKS = b" \t"  # after a value, where the parser does not remove them
HOST = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[\w.~:%-]+\])(?::\d*)?[ \t]*")  # \w is ASCII


def check_head(version: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check a head that the parser has accepted. A proxy that reads it differently could be made to smuggle requests.

    Source: RFC 9112, sections 2.3, 3.2 and 6.1

    raises  NotHttp  when the version is unknown, the host is missing, ambiguous or invalid, or the body is encoded
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
