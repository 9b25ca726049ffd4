"""Commands about the model that is served: rebuild, activate, experiment, drop, retrain."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.cli.console import console, job_console, say
from app.cli.options import (
    LogOptions,
    MemoryOption,
    MetricsOption,
    ModelOption,
    ModelsDirOption,
    StoreOptions,
    known_preset,
    place_of,
)
from app.jobs.reports.job_progress import counted


def rebuild(model: ModelOption, log: LogOptions) -> None:
    """Fold all events into a new model's states.

    The old model goes on being served, and events may go on coming in; 'activate' then switches to the new one.
    """
    from app.jobs import generations

    settings = log.settings()
    place = place_of(model)
    os.nice(10)  # requests have priority
    with counted("events", console) as on_progress:
        done = asyncio.run(generations.rebuild(settings, place, lambda rebuilt: on_progress(rebuilt.events)))
    place = place.resolve() if isinstance(place, Path) else place
    folder = settings.models_folder
    is_usual = place.parent == (folder.resolve() if isinstance(folder, Path) else folder)
    models_dir = None if is_usual else place_of(model).parent
    activate = log.command(f"lisarec activate {place.name}", models_dir)
    say(f"{place.name}: {done.events:,} events of {done.users:,} users folded; {activate} switches to it")


def activate(
    name: Annotated[str, typer.Argument(help="Of a model directory in the models folder.", metavar="NAME")],
    store: StoreOptions,
    models_dir: ModelsDirOption = None,
) -> None:
    """Let every process on a store serve another model.

    They follow within a second or so; no request fails. A model that was not rebuilt may be activated too: until a
    user's events are folded for it, which the first request starts, a user with many of them gets popular items.
    """
    from app.jobs import generations

    settings = store.settings(models_dir=models_dir)
    named, before = asyncio.run(generations.activate(settings, name))
    say(f"{named.name}, generation {named.tag.hex()}, is active")
    if before is not None and before != named:
        back = store.command(f"lisarec activate {before.name}", models_dir)
        drop = store.command(f"lisarec drop {before.name}")
        say(f"{back} goes back, {drop} lets go of its states")


def experiment(
    name: Annotated[str | None, typer.Argument(help="Of the experiment.", metavar="[NAME]")] = None,
    shares: Annotated[
        list[str] | None, typer.Argument(help="Names and their shares of the users.", metavar="NAME=SHARE...")
    ] = None,
    *,
    over: Annotated[
        Literal["models", "scenarios"],
        typer.Option(help="What the names are. Of scenarios, requests that name one get the user's."),
    ] = "models",
    end: Annotated[bool, typer.Option("--end", help="Serve the active model to everybody again.")] = False,
    store: StoreOptions,
    models_dir: ModelsDirOption = None,
) -> None:
    """Let every process on a store serve several models, or scenarios, each to its share of the users.

    Models compare how items are ranked, scenarios what a list allows and prefers. Who gets which is told by a hash of
    the user's id and the experiment's name. GET /v1/stats tells what came of it.
    """
    from pydantic import ValidationError

    from app.jobs import generations
    from app.schemas.operations import Experiment

    if end == (name is not None):
        raise typer.BadParameter("give a name and NAME=SHARE for two models or scenarios, or more, or --end")
    settings = store.settings(models_dir=models_dir)
    begun = None
    if name is not None:
        try:
            given = [share.rpartition("=") for share in shares or ()]
            begun = Experiment(name=name, over=over, shares={arm: float(part) for arm, _, part in given})
        except (ValueError, ValidationError) as exc:
            raise typer.BadParameter(
                f"an experiment is a name and NAME=SHARE for 2 to 8 {over}, with shares above 0"
            ) from exc
    asyncio.run(generations.set_experiment(settings, begun))
    say("the experiment has ended" if begun is None else f"experiment {begun.name}: {', '.join(shares or ())}")


def drop(
    name: Annotated[str, typer.Argument(help="Name, or tag, of a generation nobody serves.", metavar="NAME")],
    store: StoreOptions,
) -> None:
    """Remove the states of a model nobody serves. Events stay, so they can be rebuilt."""
    from app.jobs import generations

    settings = store.settings()
    removed = asyncio.run(generations.drop(settings, name))
    say(f"{removed:,} states of {name} removed")


def _seconds(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    if not number.isdecimal() or not int(number) or unit not in seconds:
        raise typer.BadParameter(f"{text!r} is no time such as 24h, 30m or 7d")
    return float(int(number) * seconds[unit])


@dataclass(frozen=True)
class RoundOptions:
    """What a round trains, and when what it has trained is served."""

    preset: Annotated[str, typer.Option(help="Shape and training settings.", callback=known_preset)] = "lisa-mini"
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the preset's.")] = None
    min_events: Annotated[int, typer.Option(min=1, help="In the archive, before there is a first model.")] = 2_000
    max_events: Annotated[int, typer.Option(min=1, help="The newest ones to train on; they bound the memory.")] = (
        2_000_000
    )
    max_loss: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the served model's quality that a new one may lack.")
    ] = 0.1
    criterion: Annotated[
        Literal["ndcg", "value"],
        typer.Option(
            help="What decides: NDCG@10, or which share of the held-out events' value is among the first ten."
        ),
    ] = "ndcg"
    memory: MemoryOption = None


def retrain(
    log: LogOptions,
    *,
    models_dir: Annotated[
        str | None, typer.Option(help="Folder of the models, where new ones are put.", metavar="DIR|URL")
    ] = None,
    every: Annotated[
        float | None, typer.Option(parser=_seconds, help="Again and again, as 24h; default: once.", metavar="TIME")
    ] = None,
    round_: RoundOptions,
    metrics: MetricsOption = None,
) -> None:
    """Train on the archive, compare with the model that is served, and serve the new one if it is no worse.

    May be killed at any time and goes on where it was. Exits 0 when a new model is served or there is too little to
    train on yet, and 3 when the new one was refused. How it ended stands in retrain.json beside the models.
    """
    from app.jobs.retraining.loop import run_trainer
    from app.jobs.retraining.metrics import TrainerMetrics
    from app.jobs.retraining.round import RetrainingPlan

    settings = log.settings(models_dir=models_dir)
    plan = RetrainingPlan(**vars(round_))
    trainer_metrics = TrainerMetrics()
    if metrics is not None:
        trainer_metrics.listen(metrics.host, metrics.port)
    outcome = run_trainer(settings, plan, every, job_console(settings, "app.jobs.retraining"), trainer_metrics)
    if outcome.outcome == "refused":
        raise typer.Exit(3)
