"""What is noted of the request at hand: the id that its log lines and its answer carry, and where its time went."""

import re
from contextvars import ContextVar
from itertools import count
from os import urandom

PROCESS = urandom(4).hex().encode()
_numbers = count()

SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Trace:
    """One request. `spans` are seconds by name; whoever works for the request adds to them."""

    __slots__ = ("_id", "spans")

    def __init__(self, request_id: bytes | None = None) -> None:
        self._id = request_id
        self.spans: dict[str, float] = {}

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


def note(name: str, seconds: float) -> None:
    """Add a span to the request at hand, if there is one."""
    if (trace := current.get()) is not None:
        trace.spans[name] = trace.spans.get(name, 0.0) + seconds
