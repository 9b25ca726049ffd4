"""What is noted of the request at hand: the id that its log lines and its answer carry, and where its time went."""

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
    """One request; whoever works for it adds to its spans."""

    __slots__ = ("_id", "spans")

    def __init__(self, request_id: bytes | None = None) -> None:
        self._id = request_id
        self.spans: Spans = {}

    @property
    def id(self) -> bytes:
        """The caller's, where it gave one that can stand in a log line; made when somebody first asks for it."""
        if self._id is None or not SANE_ID.fullmatch(self._id):
            self._id = b"%s%08x" % (PROCESS, next(_numbers) & 0xFFFFFFFF)
        return self._id

    def server_timing(self) -> bytes:
        """The value of the header of that name: milliseconds (https://www.w3.org/TR/server-timing/)."""
        return b", ".join(b"%s;dur=%.3f" % (name.encode(), seconds * 1e3) for name, seconds in self.spans.items())


current: ContextVar[Trace | None] = ContextVar("current", default=None)
"""The request that a task works for; None where it works for none, or for many."""

spans: ContextVar[Spans | None] = ContextVar("spans", default=None)
"""Where the time goes of what a task works for: of a request, or of a batch of them."""


def begin(trace: Trace) -> None:
    """From here on the task works for this request."""
    current.set(trace)
    spans.set(trace.spans)


def note(name: str, seconds: float) -> None:
    """Add a span to what is at hand, if there is something."""
    if (noted := spans.get()) is not None:
        noted[name] = noted.get(name, 0.0) + seconds
