"""The trace of the current request: the id in its log lines and its response, and where its time went."""

from contextvars import ContextVar
from dataclasses import dataclass, field

Spans = dict[str, float]
"""Seconds by name."""


@dataclass(slots=True)
class Trace:
    """The id and the spans of one request."""

    id: bytes
    spans: Spans = field(default_factory=dict)

    def add(self, spans: Spans) -> None:
        """Add spans. Other requests may share them, so nobody may change them."""
        self.spans = self.spans | spans if self.spans else spans


current: ContextVar[Trace | None] = ContextVar("current", default=None)
"""The request that the current task works for; None if it works for none or for several."""
