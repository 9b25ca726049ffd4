"""A transport that writes the head of a response together with its body."""

import asyncio

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MAX_COPIED_BYTES = 1 << 16  # of a body, into one write with its head


class ResponseTransport(asyncio.Transport):
    """Sends the head of a response in one write with the first part of the body.

    Uvicorn writes them separately. If a process is killed in between, the load balancer has already forwarded the head.
    It can then no longer send the request to another process, and the client gets half a response.

    cycle  the request and its response, which has a body
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        super().__init__()
        self._cycle = cycle
        self._transport = cycle.transport
        self._head: bytes | None = None

    @override
    def write(self, data: bytes) -> None:  # type: ignore[override]
        if not self._cycle.response_started:  # the interim response to Expect: 100-continue
            self._transport.write(data)
        elif self._head is None:
            self._head = data
        else:
            first, self._head = self._head + data[:MAX_COPIED_BYTES], b""
            self._transport.write(first)
            if rest := memoryview(data)[MAX_COPIED_BYTES:]:
                self._transport.write(rest)

    @override
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    @override
    def close(self) -> None:
        self._transport.close()
