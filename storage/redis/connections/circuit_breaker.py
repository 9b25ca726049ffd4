"""A circuit breaker: after a timeout, calls to a server fail at once until it answers a probe."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context

PROBE_EVERY_S = 0.25

logger = logging.getLogger(__name__)


class CircuitBreaker:
    """Fails calls to a server at once after one has timed out, until the server answers again.

    While the circuit is open, failing calls trigger probes in the background, one at a time. So no call waits for a
    server that hangs, and a server that is not needed is not probed.

    name   the server's name, for messages
    probe  sends any request to the server; it raises an Exception if there is no answer
    """

    def __init__(self, name: str, probe: Callable[[], Awaitable[object]]) -> None:
        self._name = name
        self._probe = probe
        self._is_open = False
        self._probing: asyncio.Task[None] | None = None

    def allows_call(self) -> bool:
        """Return whether the circuit is closed, so that the server may be called."""
        if self._is_open and self._probing is None:
            self._probing = asyncio.create_task(self._send_probe(), context=Context())  # not the context of one request
        return not self._is_open

    def require_closed(self) -> None:
        """Raise TimeoutError while the circuit is open."""
        if not self.allows_call():
            raise TimeoutError(f"{self._name} has not responded since a timeout")

    def open(self) -> None:
        """Open the circuit, because a call has timed out."""
        if not self._is_open:
            self._is_open = True
            logger.warning("%s does not respond in time; failing calls at once until it responds", self._name)

    async def close(self) -> None:
        """Stop the probe."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])

    async def _send_probe(self) -> None:
        try:
            await self._probe()
        except Exception:
            await asyncio.sleep(PROBE_EVERY_S)
        else:
            self._is_open = False
            logger.warning("%s responds again", self._name)
        finally:
            self._probing = None
