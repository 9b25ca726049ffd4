"""The demo: a synthetic shop, a quick training, and a running service that learns from every click."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import numpy as np
from rich.console import Console

from app.http.connection.listeners import require_free
from app.jobs.datasets import synthetic_shop
from app.jobs.reports.job_progress import print_line
from app.jobs.reports.training_progress import TrainingProgress
from app.main import create_app, rare_garbage_collection, serve, start_and_stop
from app.serving import empty_model
from app.serving.served_generation import generation_of
from app.serving.store_factory import open_store
from app.settings import Settings
from model.artifact import model_directory
from model.config import EVENT_WEIGHTS, Config, preset
from model.data.interactions import Interactions
from model.data.readers import read_interactions, read_items
from model.inference.engine import open_engine
from model.training.threads import cores_in_use, use_threads
from model.training.train import train
from storage.state.event import Event

HOST = "127.0.0.1"
DIRECTORY = Path("var/demo")
EPOCHS = 2  # the third would add 0.003 to NDCG@10
EVENTS = 10_000  # of the data, logged before the start, in half a second
BATCH = 500


def demo(data: Path | None, port: int, console: Console, directory: Path = DIRECTORY) -> None:
    """Train on ``data``, or else on a synthetic shop, and serve on 127.0.0.1 until interrupted.

    directory  where the demo writes its shop, model and states; earlier ones are removed
    raises     PortTaken, or DataError before anything is removed
    """
    require_free(HOST, port, "lisarec demo --port 8001, or make demo PORT=8001")
    data = data or _generate_shop(directory / "shop", console)
    interactions, titles = read_interactions(data), read_items(data).titles
    interactions.type_weights(EVENT_WEIGHTS)  # raises if the training would
    model, state = _empty_directory(directory / "models") / "demo", _empty_directory(directory / "state")
    # only this machine may use the demo, whatever is set in the environment
    settings = Settings(data_dir=state, redis_url=None, keys_file=None, tenants={}, host=HOST, port=port)
    with compiling_meanwhile(settings, console):
        train_quickly(data, model, console)
        settings = settings.model_copy(update={"model_dir": model})
        asyncio.run(log_first_events(interactions, settings))
    print_line(console, instructions(interactions, titles, port))
    serve(settings.model_copy(update={"workers": 1, "playground": True}))


@contextlib.contextmanager
def compiling_meanwhile(settings: Settings, console: Console) -> Iterator[None]:
    """Compile the service in two other processes, and wait for them at the end: training keeps one core busy.

    Numba keeps compiled code in files, where the service finds it.
    """
    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as directory:
        empty = settings.model_copy(update={"model_dir": None, "data_dir": Path(directory)})
        compilers = [spawn.Process(target=_try, args=(run, empty)) for run in (compile_engine, compile_service)]
        # a terminal sends SIGINT to them, too; they inherit that it is ignored
        interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for compiler in compilers:
            compiler.start()
        signal.signal(signal.SIGINT, interrupted)
        terminated = signal.signal(signal.SIGTERM, _exit)  # so that they end, too
        try:
            yield
            if any(compiler.is_alive() for compiler in compilers):
                console.print("Compiling the service for this CPU, at its first start only ...")
            for compiler in compilers:
                compiler.join()
        finally:
            for compiler in compilers:
                compiler.kill()
                compiler.join()
            signal.signal(signal.SIGTERM, terminated)


def _exit(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _try(run: Callable[[Settings], None], settings: Settings) -> None:
    _end_first_if_memory_is_short()
    with contextlib.suppress(Exception):  # the service has the same problem, and reports it in one sentence
        run(settings)


def compile_engine(settings: Settings) -> None:
    """Open the engine of a model without items, which compiles nearly all that one of a trained model runs."""
    with rare_garbage_collection():
        open_engine(empty_model.artifact(), settings.device)


def compile_service(settings: Settings) -> None:
    """Start and stop a service without a model, whose engine comes last: `compile_engine` has compiled it by then."""
    with rare_garbage_collection():
        asyncio.run(start_and_stop(create_app(settings)))


def _end_first_if_memory_is_short() -> None:
    """Let Linux end this process before the demo, which then compiles for itself."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def train_quickly(data: Path, model: Path, console: Console) -> None:
    """Train the default preset for a few epochs, in some twenty seconds."""
    use_threads()
    shape, training = preset("lisa-mini")
    config = Config(model=shape, training=training.model_copy(update={"epochs": EPOCHS}))
    console.print(f"Training on {data}, on {cores_in_use()} ...", highlight=False, markup=False)
    with TrainingProgress(EPOCHS, training.patience, console) as progress:
        train(data, model, config, progress=progress)


async def log_first_events(interactions: Interactions, settings: Settings) -> None:
    """Log the first events of the data, so that the playground has users to open."""
    assert isinstance(settings.model_dir, Path)
    events = [_event(interactions, row) for row in range(min(EVENTS, len(interactions)))]
    store = await open_store(settings, generation_of(model_directory.load(settings.model_dir)))
    try:
        for begin in range(0, len(events), BATCH):
            await store.append(settings.tenant, events[begin : begin + BATCH])
    finally:
        await store.close()


def _event(interactions: Interactions, row: int) -> Event:
    time_us = int(interactions.timestamp_us[row])
    return Event(
        event_id=f"demo-{row}",
        user_id=interactions.user_ids[interactions.user[row]],
        item_id=interactions.item_ids[interactions.item[row]],
        type=interactions.type_names[interactions.type[row]],
        timestamp_us=time_us,
        id_time_us=time_us,
    )


def instructions(interactions: Interactions, titles: Mapping[str, str], port: int) -> str:
    """Return terminal instructions: two requests to try, about the most common first item, and a user to open."""
    beginnings = np.bincount(interactions.item[interactions.starts[:-1]])
    item_id = interactions.item_ids[int(beginnings.argmax())]
    title = titles.get(item_id) or item_id
    click, recommend = curl_lines(item_id, port)
    user_id = interactions.user_ids[0]
    return f"""
Once the service is running, click on {title!r}:

  {click}

Then request recommendations. Before the first click, you get popular items:

  {recommend}

To see the effect of each click, open the playground: http://{HOST}:{port}/playground

There you can also open a user of the data set, such as {user_id!r}.

Press Ctrl-C to stop the demo.
"""


def curl_lines(item_id: str, port: int) -> tuple[str, str]:
    """Return the command that posts a click of a visitor called ann, and the one that asks for her recommendations."""
    service = f"http://{HOST}:{port}/v1"
    click = json.dumps({"user_id": "ann", "item_id": item_id}, ensure_ascii=False)
    return (
        f"curl {service}/events -H 'content-type: application/json' -d {shlex.quote(click)}",
        f"curl {shlex.quote(f'{service}/users/ann/recommendations?k=5')}",
    )


def _generate_shop(directory: Path, console: Console) -> Path:
    console.print("Generating a small shop ...")
    synthetic_shop.generate(_empty_directory(directory))
    return directory


def _empty_directory(directory: Path) -> Path:
    """Return the directory, without the files of an earlier demo."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
