"""From nothing to a recommender that learns from every click: a made-up shop, a quick training, a running service."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from app import shop
from app.main import require_free, serve
from app.settings import Settings
from app.training_progress import TrainingProgress
from model.config import Config, preset
from model.data import read_interactions, read_items
from model.train import train

HOST = "127.0.0.1"
DIRECTORY = Path("var/demo")
EPOCHS = 3


def demo(data: Path | None, port: int, console: Console, directory: Path = DIRECTORY) -> None:
    """Train on ``data``, or else on a made-up shop, and serve on 127.0.0.1 until interrupted.

    directory  where the shop, the model and the states of the demo are made anew
    raises     PortTaken
    """
    require_free(HOST, port, "lisarec demo --port 8001, or make demo PORT=8001")
    data = data or _shop(directory / "shop", console)
    model, state = _anew(directory / "models") / "demo", _anew(directory / "state")
    train_quickly(data, model, console)
    console.print(invitation(data, port), highlight=False, soft_wrap=True, markup=False)
    # whatever the environment says, the demo is this machine's alone
    own = Settings(model_dir=model, data_dir=state, redis_url=None, keys_file=None, tenants={}, host=HOST, port=port)
    serve(own.model_copy(update={"workers": 1, "playground": True}))


def train_quickly(data: Path, model: Path, console: Console) -> None:
    """Train the default preset for a few epochs, in about half a minute."""
    # matrices this small gain little from a second thread, and lose tenfold where another process wants its core
    torch.set_num_threads(1)
    shape, training = preset("lisa-mini")
    config = Config(model=shape, training=training.model_copy(update={"epochs": EPOCHS}))
    console.print(f"Training on {data} ...", highlight=False, markup=False)
    with TrainingProgress(EPOCHS, console) as progress:
        train(data, model, config, progress=progress)


def invitation(data: Path, port: int) -> str:
    """Two requests to try, about the item with which most users of the data begin."""
    interactions = read_interactions(data)
    beginnings = np.bincount(interactions.item[interactions.starts[:-1]])
    item_id = interactions.item_ids[int(beginnings.argmax())]
    title = read_items(data).titles.get(item_id) or item_id
    click, question = curl_lines(item_id, port)
    return f"""
Once it says that it is running, click on {title!r}:

  {click}

and ask what to recommend. Asked before the first click, it offers what is popular:

  {question}

Or see what a click does, in a browser: http://{HOST}:{port}/playground

Ctrl-C ends the demo.
"""


def curl_lines(item_id: str, port: int) -> tuple[str, str]:
    """A click of a visitor called ann, and the question what to recommend to her."""
    service = f"http://{HOST}:{port}/v1"
    click = f'{{"user_id": "ann", "item_id": "{item_id}"}}'
    return (
        f"curl {service}/events -H 'content-type: application/json' -d {shlex.quote(click)}",
        f"curl {shlex.quote(f'{service}/users/ann/recommendations?k=5')}",
    )


def _shop(directory: Path, console: Console) -> Path:
    console.print("Making up a small shop ...")
    shop.generate(_anew(directory))
    return directory


def _anew(directory: Path) -> Path:
    """The directory, without what an earlier demo left in it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
