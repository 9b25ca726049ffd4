"""The client for programs without asyncio."""

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError
from typing import Any, Self, TypeVar

from .async_client import TIMEOUT_S, AsyncClient
from .outbox import QUEUE_SIZE, start_in_children
from .responses import RETRY_FOR_S, Recommendations

Result = TypeVar("Result")


class Client:
    """The blocking, thread-safe client. Create one per process. See the package's docstring.

    It runs an `AsyncClient` in a background thread, because only asyncio can cancel a call that exceeds its timeout.
    """

    def __init__(
        self, url: str, key: str | None = None, *, timeout_s: float = TIMEOUT_S, queue_size: int = QUEUE_SIZE
    ) -> None:
        self._client = AsyncClient(url, key, timeout_s=timeout_s, queue_size=queue_size)
        self.outbox = self._client.outbox
        self.event = self._client.event
        self.order = self._client.order
        self.impression = self._client.impression
        self._is_closed = False
        self._start()
        start_in_children(self, Client._start)

    def _start(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = threading.RLock()  # of loop, thread and is_closed; a signal handler may close it during a call

    def recommendations(
        self,
        user_id: str | None,
        k: int | None = None,
        *,
        fallback: Iterable[str] = (),
        timeout_s: float | None = None,
        **options: Any,
    ) -> Recommendations:
        """Like `AsyncClient.recommendations`."""
        call = self._client.recommendations(user_id, k, fallback=fallback, timeout_s=timeout_s, **options)
        try:
            return self._run(call)
        except RuntimeError as exc:  # the client is closed
            return self._client.fallback.recommend(exc, fallback, k)

    def portable_events(self, state: str | None, events: Iterable[Mapping[str, Any]]) -> str:
        """Like `AsyncClient.portable_events`."""
        return self._run(self._client.portable_events(state, events))

    def check(self) -> None:
        """Like `AsyncClient.check`."""
        self._run(self._client.check())

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Like `AsyncClient.call`."""
        return self._run(self._client.call(method, path, body))

    def search(self, query: str, user_id: str | None = None, limit: int = 20) -> list[dict[str, Any]]:
        """Like `AsyncClient.search`."""
        return self._run(self._client.search(query, user_id, limit))

    def user(self, user_id: str) -> dict[str, Any] | None:
        """Like `AsyncClient.user`."""
        return self._run(self._client.user(user_id))

    def properties(self, user_id: str) -> dict[str, Any]:
        """Like `AsyncClient.properties`."""
        return self._run(self._client.properties(user_id))

    def put_properties(self, user_id: str, properties: dict[str, Any]) -> dict[str, Any]:
        """Like `AsyncClient.put_properties`."""
        return self._run(self._client.put_properties(user_id, properties))

    def undo(self, user_id: str, event_id: str) -> bool:
        """Like `AsyncClient.undo`."""
        return self._run(self._client.undo(user_id, event_id))

    def merge(self, user_id: str, visitor: str) -> bool:
        """Like `AsyncClient.merge`."""
        return self._run(self._client.merge(user_id, visitor))

    def erase(self, user_id: str) -> str:
        """Like `AsyncClient.erase`."""
        return self._run(self._client.erase(user_id))

    def flush(self, timeout_s: float = RETRY_FOR_S) -> bool:
        """Like `AsyncClient.flush`."""
        return self.outbox.flush(timeout_s)

    def close(self, timeout_s: float = RETRY_FOR_S) -> bool:
        """Like `AsyncClient.close`. Calls of other threads end first: recommendations with the fallback."""
        all_sent = self.outbox.close(timeout_s)
        with self._state:
            is_open, self._is_closed = not self._is_closed, True
        if is_open and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._end_calls(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        return all_sent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _end_calls(self) -> None:
        await self._client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for other in others:  # one may be pausing before its next try
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)  # their callers wait for the results

    def _run(self, call: Coroutine[Any, Any, Result]) -> Result:
        with self._state:
            if self._is_closed:
                call.close()
                raise RuntimeError("this client is closed")
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=loop.run_forever, name="lisarec calls", daemon=True)
                self._thread.start()
                self._loop = loop
            answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return answer.result()
        except CancelledError:
            raise RuntimeError("this client was closed during the call") from None
