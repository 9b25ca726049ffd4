"""The idle connections of a process, which are closed to make room for new ones."""

from dataclasses import dataclass, field
from itertools import chain

from app.http.connection.lingering_transport import LingeringTransport


@dataclass(frozen=True, slots=True)
class IdleConnections:
    """Connections without a whole request, in the order in which they began to wait.

    idle  they are owed no response
    late  they have sent a head, and not yet the whole body; they are owed no earlier response
    """

    idle: dict[LingeringTransport, None] = field(default_factory=dict)
    late: dict[LingeringTransport, None] = field(default_factory=dict)

    def close_longest(self, newest: LingeringTransport) -> None:
        """Close the connection that has been idle for longest, or else late, or else the newest one."""
        longest = next(chain(self.idle, self.late), newest)
        self.forget(longest)
        longest.abort()

    def forget(self, connection: LingeringTransport) -> None:
        """Record that a connection is no longer idle or late."""
        self.idle.pop(connection, None)
        self.late.pop(connection, None)
