"""The service's own parts in this process: what ranks lists there ranks them here."""

from __future__ import annotations

import asyncio
import shutil
import threading
import weakref
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import orjson

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.trained_catalogue import encode
from app.errors import RequestError
from app.http.services import open_services
from app.observability.metrics import Metrics
from app.schemas.recommendations import RecommendationRequest, Recommendations
from app.settings import Settings
from model.artifact.model_directory import Artifact
from model.training.threads import threads_kept

ResultT = TypeVar("ResultT")


class LocalService:
    """One tenant's service without a network, whose event loop runs in a thread of its own.

    directory  of its store, which is empty and goes with it
    """

    def __init__(self, artifact: Artifact, settings: Settings, directory: Path) -> None:
        opening = open_services(settings, {settings.tenant: artifact}, Metrics())
        self._loop = _Loop()
        self._remove = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        self._finalizer = weakref.finalize(self, self._loop.close)
        self._finalizer.atexit = False  # when the program ends, the threads that closing needs have ended
        with threads_kept():  # a service leaves the cores to its other processes
            services = self._loop.run(self._loop.stack.enter_async_context(opening))
        self._service = services.by_tenant[settings.tenant]

    @property
    def catalogue(self) -> LiveCatalogue:
        """The items."""
        return self._service.catalogue

    @property
    def description(self) -> dict[str, Any]:
        """What `GET /v1/model` answers."""
        return self._service.served_model.model_dump(mode="json")

    def recommend(self, requests: Sequence[RecommendationRequest]) -> list[list[dict[str, Any]]]:
        """Return the items of the answers; raise ValueError when a request cannot be answered."""

        async def ranked() -> list[Recommendations]:
            return await self._service.switcher.recommender.recommend(requests)

        return [_items(answer) for answer in self._answered(ranked())]

    def similar(self, item_id: str, request: RecommendationRequest) -> list[dict[str, Any]]:
        """Return the items that are most like the item; raise ValueError when it is unknown."""
        return _items(self._answered(self._service.switcher.recommender.similar(item_id, request)))

    def close(self) -> None:
        """End the threads, and remove the store."""
        self._finalizer()
        self._remove()

    def _answered(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        try:
            return self._loop.run(work)
        except RequestError as exc:
            raise as_value_error(exc) from None


def as_value_error(refusal: RequestError) -> ValueError:
    """Return the rejection of a request as a ValueError."""
    reasons = (" ".join(filter(None, [detail.field, detail.reason])) for detail in refusal.details)
    return ValueError("; ".join([str(refusal), *reasons]))


def _items(answer: Recommendations) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = orjson.loads(encode(answer))["items"]  # some are in JSON already
    return items


class _Loop:
    """An event loop in a thread, and what is to be closed in it."""

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lisarec", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return what comes of the work; raise RuntimeError once this is closed."""
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("this recommender is closed, or of the process before a fork: load the model again")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the work, the loop and the thread."""
        self.run(self.stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
