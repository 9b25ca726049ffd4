"""Malformed HTTP requests: the service's own calls, mutated in every part."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Ending = Literal["half-close", "reset", "wait"]

METHODS = (b"", b"get", b"GET\0", b"GET GET", b"BREW", b"P" * 3_000, b"CONNECT", b"TRACE", b"PRI", b"OPTIONS", b"\xff")
TARGETS = (
    b"*",
    b"",
    b"/",
    b"//",
    b"/\0",
    b"/ /",
    b"http://evil.example/v1/model",
    b"evil.example:80",
    b"/v1/users/%ff",
    b"/v1/users/\xff",
    b"/v1/users/%00",
    b"/v1/users/a%2f..%2fb",
    b"/../../etc/passwd",
    b"/%2e%2e/",
    b"/v1//model",
    b"/v1/users/a%0d%0aX-Evil:%201",
    b"/v1/items?query=%00",
    b"/v1/items?query=%ff&limit=9",
    b"/v1/model?",
    b"/#x",
    b"/v1/items?" + b"a=b&" * 3_000,
    b"/v1/users/" + b"u" * 5_000,
    b"/" + b"x" * 40_000,
    b"/v1/items?limit=1e3",
    b"/v1/users/ada/recommendations?k=1&k=2",
    b"/v1/users/ada/recommendations?k=%31",
    b"/v1/users/ada/events?after=-1",
    b"/v1/admin/generations/..%2f..%2fetc/activate",
    b"/v1/admin/generations/%2e%2e/activate",
    b"/metrics%3f",
)
VERSIONS = (
    b"",
    b"HTTP/0.9",
    b"HTTP/1.0",
    b"HTTP/1.2",
    b"HTTP/2.0",
    b"HTTP/9999.1",
    b"http/1.1",
    b"HTTP/1.1 ",
    b"HTTP/1",
)
HEADERS = (
    b"Content-Length: -1",
    b"Content-Length: +5",
    b"Content-Length: 5, 5",
    b"Content-Length: 0x5",
    b"Content-Length: ",
    b"Content-Length: 0",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: 3",
    b"Content-Length : 3",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding:\x0bchunked",
    b"Transfer-Encoding : chunked",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Connection: close, upgrade",
    b"Connection: Content-Length",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    b"Expect: 100-continue",
    b"Expect: 999-more",
    b"Host: evil.example",
    b"Host: a\0b",
    b"Host: [::1",
    b"Host:",
    b"X-Request-ID: a\tb\x7f",
    b"X-Request-ID: ok\r\nX-Request-ID: two",
    b"X-Request-ID: " + b"x" * 500,
    b"Authorization: Bearer",
    b"Origin: null",
    b"Authorization: Bearer lisarec_000000000000_" + b"A" * 43,
    b"Authorization: Basic YTpi",
    b"Origin: \xff\xfe",
    b"Authorization: Bearer \xc3\xa4",
    b"Content-Type: text/html",
    b"Content-Type: application/json; charset=utf-16",
    b"Content-Encoding: gzip",
    b"Content-Encoding: br",
    b"Cookie: " + b"c=d; " * 2_000,
    b"X: " + b"y" * 40_000,
    b"Range: bytes=0-0",
    b"If-None-Match: *",
    b"Accept: application/xml",
    b"Accept-Encoding: \0",
    b"TE: trailers",
    b"no colon",
    b": no name",
    b"na me: x",
    b"n\xc3\xa4me: x",
    b" folded: x",
    b"X: y\r\n folded",
    b"X: y\n\tfolded",
    b"X: \x00",
    b"X: \x0b\x1b[2J",
    b"Access-Control-Request-Method: POST",
    b"X-HTTP-Method-Override: DELETE",
    b"Forwarded: for=evil",
    b"X-Forwarded-Host: evil.example",
    b"\r\n".join(b"X-%d: y" % n for n in range(300)),
)
BEGINNINGS = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    b"\r\n" * 20,
    b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\r\n",
    b"\r\n\r\n\0\r\nQUIT\n!\x11\0\x0c" + bytes(12),
    b"SSH-2.0-x\r\n",
    bytes(50),
)
LINE_ENDS = (b"\n", b"\r", b"\r\r\n", b"\n\r", b"\0\r\n", b" \r\n")
CHUNK_SIZES = (
    b"-1",
    b"0x5",
    b"FFFFFFFFFFFFFFFFF",
    b"7fffffffffffffff",
    b"5;x=" + b"y" * 9_000,
    b" 5",
    b"5 ",
    b"",
    b"g",
    b"00",
)
LAST_CHUNKS = (*[b"0\r\n\r\n"] * 3, b"0\r\nX-Trailer: y\r\n\r\n", b"0\r\n", b"", b"000;a\r\n\r\n")
VALUES = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e400",
    "9" * 400,
    "9" * 5_000,
    "true",
    "null",
    "[]",
    "{}",
    '""',
    "-0.0",
    '"\\ud800"',
    '"\\u0000"',
    '"' + "x" * 2_000 + '"',
    "1e-400",
    "1.7976931348623157e308",
    "[" * 2_000,
    '".."',
    "0x10",
    '"9999-12-31T23:59:59Z"',
    '"0000-00-00T00:00:00Z"',
    "253402300800",
    "-1e15",
    '{"a": 1, "a": 2}',
    '"\x1b[2J"',
)


@dataclass(frozen=True, slots=True)
class ServiceCall:
    """A request in its parts; `body` is framed by its length unless it is `chunked` already."""

    method: bytes
    target: bytes
    body: bytes = b""
    version: bytes = b"HTTP/1.1"
    headers: tuple[bytes, ...] = (b"Host: service",)
    line_end: bytes = b"\r\n"
    chunked: bytes | None = None

    def __bytes__(self) -> bytes:
        framed = b"Transfer-Encoding: chunked" if self.chunked is not None else b"Content-Length: %d" % len(self.body)
        lines = [b" ".join((self.method, self.target, self.version)).rstrip(b" "), *self.headers]
        if self.body or self.chunked is not None:
            lines.append(framed)
        return self.line_end.join([*lines, b"", b""]) + (self.body if self.chunked is None else self.chunked)


@dataclass(frozen=True, slots=True)
class MalformedCase:
    """Bytes to send over a connection, chunk by chunk, and what the client does afterwards."""

    pieces: tuple[bytes, ...]
    end: Ending


def calls_of(description: Mapping[str, Any], headers: tuple[bytes, ...] = ()) -> list[ServiceCall]:
    """Return every call of an OpenAPI document with its examples, well-formed."""
    calls = []
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            target = path
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    example = parameter.get("example") or parameter["schema"].get("examples", ["ada"])[0]
                    target = target.replace(f"{{{parameter['name']}}}", str(example))
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            bodies = [json.dumps(one["value"]).encode() for one in content.get("examples", {}).values()] or [b""]
            kept = (b"Host: service", *headers, *((b"Content-Type: application/json",) if bodies[0] else ()))
            calls += [ServiceCall(method.upper().encode(), target.encode(), body, headers=kept) for body in bodies]
    return calls


def malformed_cases(calls: list[ServiceCall], count: int, seed: int, waiting_share: float) -> Iterator[MalformedCase]:
    """Yield this many cases, determined by the seed; some of them wait until the service closes."""
    rng = random.Random(seed)
    for _ in range(count):
        content = b"".join(_mutated_call(rng, calls) for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 6))))
        if rng.random() < 0.05:
            content = rng.choice(BEGINNINGS) + content
        if rng.random() < 0.2:
            content = _mutate_bytes(rng, content)
        if rng.random() < 0.15:
            content = content[: rng.randrange(len(content) + 1)]
        end: Ending = "wait" if rng.random() < waiting_share else "reset" if rng.random() < 0.1 else "half-close"
        yield MalformedCase(_pieces(rng, content), end)


def _mutated_call(rng: random.Random, calls: list[ServiceCall]) -> bytes:
    call = rng.choice(calls)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        call = rng.choice(MUTATIONS)(rng, call)
    return bytes(call)


def _mutate_method(rng: random.Random, call: ServiceCall) -> ServiceCall:
    return replace(call, method=rng.choice(METHODS))


def _mutate_target(rng: random.Random, call: ServiceCall) -> ServiceCall:
    target = rng.choice(TARGETS) if rng.random() < 0.6 else _mutate_bytes(rng, call.target)
    return replace(call, target=target)


def _mutate_version(rng: random.Random, call: ServiceCall) -> ServiceCall:
    return replace(call, version=rng.choice(VERSIONS))


def _add_header(rng: random.Random, call: ServiceCall) -> ServiceCall:
    place = rng.randrange(len(call.headers) + 1)
    return replace(call, headers=(*call.headers[:place], rng.choice(HEADERS), *call.headers[place:]))


def _remove_header(rng: random.Random, call: ServiceCall) -> ServiceCall:
    lost = rng.randrange(len(call.headers)) if call.headers else 0
    return replace(call, headers=call.headers[:lost] + call.headers[lost + 1 :])


def _mutate_line_ends(rng: random.Random, call: ServiceCall) -> ServiceCall:
    return replace(call, line_end=rng.choice(LINE_ENDS))


def _mutate_body(rng: random.Random, call: ServiceCall) -> ServiceCall:
    """Replace a value of the body, or its bytes."""
    if call.body and rng.random() < 0.7:
        text = call.body.decode("utf-8", "replace")
        places = [place for place, letter in enumerate(text) if letter in ":["]
        if places:
            place = rng.choice(places) + 1
            end = min((found for found in (text.find(mark, place) for mark in ",}]") if found > 0), default=len(text))
            return replace(call, body=(text[:place] + rng.choice(VALUES) + text[end:]).encode("utf-8", "replace"))
    other = (_mutate_bytes(rng, call.body), rng.randbytes(rng.randrange(200)), b"\x1f\x8b")
    return replace(call, body=rng.choice(other))


def _chunk_body(rng: random.Random, call: ServiceCall) -> ServiceCall:
    """Send the body in chunks, some with a wrong size."""
    body, chunks = call.body, []
    while body:
        size = rng.randrange(1, len(body) + 1)
        stated = rng.choice(CHUNK_SIZES) if rng.random() < 0.15 else b"%x" % size
        chunks.append(stated + b"\r\n" + body[:size] + (b"" if rng.random() < 0.05 else b"\r\n"))
        body = body[size:]
    return replace(call, chunked=b"".join(chunks) + rng.choice(LAST_CHUNKS))


def _mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    mutated = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(mutated) + 1)
        match rng.randrange(3):
            case 0:
                mutated[place:place] = rng.choice(
                    (b"\0", b"\r\n", b"\n", b" ", b"\xff", b"%", b"\r\n\r\n", rng.randbytes(4))
                )
            case 1:
                del mutated[place : place + rng.choice((1, 2, 10))]
            case 2 if place < len(mutated):
                mutated[place] ^= 1 << rng.randrange(8)
    return bytes(mutated)


def _pieces(rng: random.Random, content: bytes) -> tuple[bytes, ...]:
    if rng.random() < 0.8 or len(content) < 2:
        return (content,)
    cuts = sorted(rng.randrange(1, len(content)) for _ in range(rng.choice((1, 2, 5))))
    return tuple(content[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True))


Mutation = Callable[[random.Random, ServiceCall], ServiceCall]
MUTATIONS: tuple[Mutation, ...] = (
    *(_mutate_method, _mutate_target, _mutate_target, _mutate_version, _add_header, _add_header, _add_header),
    *(_remove_header, _mutate_line_ends, _mutate_body, _mutate_body, _mutate_body, _chunk_body, _chunk_body),
)
