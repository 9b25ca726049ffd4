"""A tiny model and the real app over it: real engine, real SQLite, requests over ASGI."""

from __future__ import annotations

import asyncio
import logging
import logging.config
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from starlette.types import Receive, Scope, Send

from app.http.services import Services
from app.jobs.datasets import synthetic_shop
from app.main import create_app
from app.observability.log_format import OWN_LOGGERS
from app.serving import store_factory
from app.serving.model_locations import load_model
from app.serving.served_generation import generation_of
from app.serving.store_factory import open_store
from app.settings import Settings
from model.artifact import model_directory
from model.artifact.item_table import ItemTable
from model.config import Config, DataCard, ModelConfig
from model.lisa.lisa_mini import LisaMini
from storage.redis.store import RedisOptions
from storage.state.event import Event
from tests.storage.redis.servers import RedisServer, new_server
from tests.waiting import PATIENCE_S

ITEMS = 60
SHAPE = ModelConfig(
    width=16,
    decay_rates=(0.05, 0.8),
    history_codebooks=3,
    history_codewords=8,
    target_codebooks=3,
    target_codewords=16,
)
CATEGORIES = ("tea", "cup", "pot")
WEIGHTS = {"click": 1.0, "purchase": 2.0, "dislike": 0.0}


@pytest.fixture(autouse=True)
def _keep_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the priority of this process, which some commands lower for good."""
    monkeypatch.setattr("os.nice", lambda _: 0)


@pytest.fixture(autouse=True)
def _restore_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore logging after each test, since commands configure it; handlers of pytest stay."""
    root, configure = logging.getLogger(), logging.config.dictConfig
    handlers = [*root.handlers]
    loggers = [root, *map(logging.getLogger, OWN_LOGGERS)]
    levels = [logger.level for logger in loggers]

    def configure_beside(config: dict[str, Any]) -> None:
        configure(config)
        for handler in handlers:
            root.addHandler(handler)

    monkeypatch.setattr("logging.config.dictConfig", configure_beside)
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def item_id(row: int) -> str:
    return f"item-{row}"


def categories_of(row: int) -> tuple[str, ...]:
    """Every item has one category, every fourth has two, and every eleventh none."""
    if row % 11 == 0:
        return ()
    return (CATEGORIES[row % 3], CATEGORIES[(row + 1) % 3]) if row % 4 == 0 else (CATEGORIES[row % 3],)


def write_model(directory: Path, seed: int = 7, shape: ModelConfig = SHAPE) -> Path:
    """Write a model with random weights and codes; every fifth item has no title."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    history = torch.from_numpy(rng.integers(0, shape.history_codewords, (ITEMS, shape.history_codebooks)))
    target = torch.from_numpy(rng.integers(0, shape.target_codewords, (ITEMS, shape.target_codebooks)))
    model = LisaMini(shape, history, target)
    with torch.no_grad():
        model.target_codebooks.normal_()  # far from ties
    items = ItemTable(
        [item_id(row) for row in range(ITEMS)],
        ["" if row % 5 == 0 else f"{'Green' if row % 2 else 'Black'} thing number {row}" for row in range(ITEMS)],
        [categories_of(row) for row in range(ITEMS)],
        rng.integers(0, 20, ITEMS),
    )
    model_directory.save(
        directory, model, Config(model=shape, data=DataCard(), event_weights=WEIGHTS), items, {"loss": 1.5}
    )
    return directory


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of a synthetic shop with 120 users; do not change it."""
    directory = tmp_path_factory.mktemp("shop")
    synthetic_shop.generate(directory, shoppers=120)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


async def logged_events(settings: Settings, user_id: str) -> list[Event]:
    """The log of the user as another process reads it."""
    assert settings.model_dir is not None
    store = await open_store(settings, generation_of(load_model(settings.model_dir, settings)))
    try:
        entries = await store.events(settings.tenant, user_id, limit=100_000)
        events = [entry.record for entry in entries if isinstance(entry.record, Event)]
        assert len(events) == len(entries)
        return events
    finally:
        await store.close()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """An empty Redis server. Tests of the stores run on all kinds of servers; one is enough here."""
    server = new_server("redis-server")
    yield server
    server.stop()


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def store_server(request: pytest.FixtureRequest) -> Iterator[RedisServer | None]:
    """A Redis server for the services of a module; None if their store is SQLite."""
    server = new_server("redis-server") if request.param == "redis" else None
    yield server
    if server is not None:
        server.stop()


@pytest.fixture(scope="module")
def store_url(store_server: RedisServer | None) -> str | None:
    return None if store_server is None else store_server.url


class Client:
    """Blocking requests to an app whose lifespan is running; an exception in the app fails the test.

    Between requests the app's event loop rests, however long that is, so that what it waits for comes late: Redis has
    `redis_timeout_s` to answer.
    """

    def __init__(self, settings: Settings, redis_timeout_s: float = PATIENCE_S) -> None:
        app = create_app(settings)
        self.settings = settings
        self.runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        with pytest.MonkeyPatch.context() as patch:
            patient = partial(RedisOptions, connect_timeout_s=PATIENCE_S, socket_timeout_s=redis_timeout_s)
            patch.setattr(store_factory, "RedisOptions", patient)
            try:
                state = self.runner.run(self._stack.enter_async_context(app.router.lifespan_context(app)))
            except BaseException:
                self.runner.close()
                raise
        assert state is not None
        self.services: Services = state["services"]
        self.service = self.services.by_tenant[settings.tenant]

        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "state": dict(state)}, receive, send)

        self.transport = httpx.ASGITransport(with_state)
        self.http = httpx.AsyncClient(transport=self.transport, base_url="http://service")

    @property
    def model_dir(self) -> Path:
        """The directory of the model that the app starts with."""
        assert isinstance(self.settings.model_dir, Path)
        return self.settings.model_dir

    def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        return self.runner.run(self.http.request(method, url, **options))

    def get(self, url: str, **options: Any) -> httpx.Response:
        return self.request("GET", url, **options)

    def post(self, url: str, **options: Any) -> httpx.Response:
        return self.request("POST", url, **options)

    def click(self, user_id: str, *item_ids: str) -> None:
        """Post a click on each item, in order."""
        events = [{"user_id": user_id, "item_id": item_id} for item_id in item_ids]
        assert self.post("/v1/events", json=events).json()["accepted"] == len(item_ids)

    def recommend(self, user_id: str, **params: Any) -> Any:
        response = self.get(f"/v1/users/{user_id}/recommendations", params=params)
        assert response.status_code == 200, response.text
        return response.json()

    def log(self, user_id: str) -> list[Event]:
        """The durable log of the user, read through a separate store."""
        return self.runner.run(logged_events(self.settings, user_id))

    def close_store(self) -> None:
        """Make every further call of the store fail."""
        self.runner.run(self.service.store.close())

    def close(self) -> None:
        self.runner.run(self.http.aclose())
        self.runner.run(self._stack.aclose())
        self.runner.close()


@pytest.fixture(scope="session")
def start(model_dir: Path) -> Callable[..., Client]:
    """Start an app with a client of its own; the caller closes it."""

    def start_client(data_dir: Path, redis_timeout_s: float = PATIENCE_S, **settings: Any) -> Client:
        return Client(Settings(model_dir=model_dir, data_dir=data_dir, **settings), redis_timeout_s)

    return start_client


@pytest.fixture
def client(start: Callable[..., Client], tmp_path: Path) -> Iterator[Client]:
    """A service without users."""
    client = start(tmp_path)
    yield client
    client.close()


@pytest.fixture(scope="session")
def shared_client(start: Callable[..., Client], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A service for tests that change nothing, or only users of their own."""
    client = start(tmp_path_factory.mktemp("state"))
    yield client
    client.close()


CLICKS = [item_id(row % 37) for row in range(0, 200, 3)]  # many more than the ring holds
SEEN = {"clicker": CLICKS, "disliker": ["item-3", "item-4"], "nobody": []}
SOLD_OUT = ["item-7", "item-30"]
BRANDS = {item_id(row): f"brand {row % 9}" for row in range(ITEMS) if row % 7}
COLOURS = {item_id(row): [f"colour {row % 5}", f"colour {row % 4}"][: row % 3] for row in range(0, ITEMS, 2)}
UPDATED_CATEGORIES = {"item-11": ["new", "tea"], "item-12": [], "item-13": ["cup", "new"]}


@pytest.fixture(scope="module")
def shop(store_url: str | None, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A service with the users of SEEN; some items are sold out and others have new categories."""
    settings = Settings(model_dir=model_dir, data_dir=tmp_path_factory.mktemp("state"), redis_url=store_url)
    client = Client(settings)
    client.click("clicker", *SEEN["clicker"])
    client.post("/v1/events", json=[{"user_id": "disliker", "item_id": i, "type": "dislike"} for i in SEEN["disliker"]])
    posted = [{"item_id": name, "available": False} for name in SOLD_OUT]
    posted += [{"item_id": name, "categories": categories} for name, categories in UPDATED_CATEGORIES.items()]
    posted += [{"item_id": name, "properties": {"brand": brand, "price": 5.0}} for name, brand in BRANDS.items()]
    posted += [{"item_id": name, "properties": {"colours": colours}} for name, colours in COLOURS.items()]
    assert client.post("/v1/items", json=posted).status_code == 200
    yield client
    client.close()
