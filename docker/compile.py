"""Let numba compile, while the image is built, all that a service runs: so that a container need not.

What is compiled is for this CPU; on one of another kind numba finds nothing that fits and compiles for that.

    NUMBA_CACHE_DIR=DIR python compile.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from starlette.types import Receive, Scope, Send

from app.jobs.datasets import synthetic_shop
from app.jobs.generations import rebuild
from app.main import create_app
from app.settings import Settings
from model.config import Config, ModelConfig, TrainConfig
from model.data.readers import read_interactions
from model.training.loop import EpochReport
from model.training.train import train


class Silent:
    def batch(self, epoch: int, share: float, loss: float) -> None: ...
    def epoch(self, report: EpochReport) -> None: ...


def main(place: Path) -> None:
    (place / "shop").mkdir()
    synthetic_shop.generate(place / "shop", shoppers=100)
    config = Config(model=ModelConfig(), training=TrainConfig(epochs=1))
    train(place / "shop", place / "model", config, progress=Silent())
    item_ids = read_interactions(place / "shop").item_ids[:3]
    settings = Settings(model_dir=place / "model", data_dir=place / "state")
    asyncio.run(use(settings, item_ids))
    asyncio.run(use(Settings(data_dir=place / "empty"), item_ids))  # a service that has no model yet
    asyncio.run(rebuild(settings, place / "model", lambda _: None))


async def use(settings: Settings, item_ids: list[str]) -> None:
    """Ask a service that runs in this process."""
    app = create_app(settings)
    async with app.router.lifespan_context(app) as state:

        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "state": dict(state or {})}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://service") as client:
            clicks = [{"user_id": "ann", "item_id": item_id} for item_id in item_ids]
            (await client.post("/v1/events", json=clicks)).raise_for_status()
            few = {"user_id": "ann", "candidates": item_ids}
            asked = [{"user_id": "ann"}, {"user_id": "bob"}, few, {"history": item_ids}]
            (await client.post("/v1/recommendations", json={"requests": asked})).raise_for_status()
            (await client.get("/v1/items", params={"query": "red"})).raise_for_status()


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        main(Path(place))
