"""The trace of the current request: the id in its log lines and its response, and where its time went."""

import re
from contextvars import ContextVar
from itertools import count
from os import urandom

PROCESS = urandom(4).hex().encode()
_numbers = count()

Spans = dict[str, float]
"""Seconds by name."""

SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Trace:
    """The id and the spans of one request."""

    __slots__ = ("_id", "spans")

    def __init__(self, request_id: bytes | None = None) -> None:
        self._id = request_id
        self.spans: Spans = {}

    @property
    def id(self) -> bytes:
        """The caller's id, if it is safe in a log line; else one that is made at the first use."""
        if self._id is None or not SANE_ID.fullmatch(self._id):
            self._id = b"%s%08x" % (PROCESS, next(_numbers) & 0xFFFFFFFF)
        return self._id

    def server_timing(self) -> bytes:
        """Return the value of the `Server-Timing` header, in milliseconds (https://www.w3.org/TR/server-timing/)."""
        return b", ".join(b"%s;dur=%.3f" % (name.encode(), seconds * 1e3) for name, seconds in self.spans.items())


current: ContextVar[Trace | None] = ContextVar("current", default=None)
"""The request that a task works for; None where it works for none or for several."""

spans: ContextVar[Spans | None] = ContextVar("spans", default=None)
"""The spans of the request, or of the batch of requests, that a task works for."""


def begin(trace: Trace) -> None:
    """Let the current task work for this request from now on."""
    current.set(trace)
    spans.set(trace.spans)


def add_span(name: str, seconds: float) -> None:
    """Add seconds to a span of what the task works for, if it works for something."""
    if (current_spans := spans.get()) is not None:
        current_spans[name] = current_spans.get(name, 0.0) + seconds
