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
    EventsPerUserOption,
    LogOptions,
    MemoryOption,
    MetricsOption,
    ModelOption,
    ModelsDirOption,
    StoreOptions,
    UsersSampleOption,
    known_preset,
    place_of,
)
from app.jobs.reports.job_progress import counted
from model.config import FULL_EVERY


def rebuild(model: ModelOption, log: LogOptions) -> None:
    """Fold all events into the states of a new model.

    The old model serves meanwhile, and events may come in. Run 'lisarec activate' afterwards to switch. Where training
    went on from the active model, states are taken over, except those of users who touched an item new to that model.
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
    carried = f"{done.carried:,} states carried over, " if done.carried else ""
    say(f"{place.name}: {carried}{done.events:,} events of {done.users:,} users folded; {activate} switches to it")


def activate(
    name: Annotated[str, typer.Argument(help="Name of a model in the models folder.", metavar="NAME")],
    store: StoreOptions,
    models_dir: ModelsDirOption = None,
) -> None:
    """Switch every process on a store to another model.

    They follow within about a second, and no request fails. A model that was not rebuilt can be activated too. A user
    with many events then gets popular items until these are folded, which the first request starts.
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
    name: Annotated[str | None, typer.Argument(help="Name of the experiment.", metavar="[NAME]")] = None,
    shares: Annotated[
        list[str] | None,
        typer.Argument(help="Models or scenarios, and their shares of the users.", metavar="NAME=SHARE..."),
    ] = None,
    *,
    over: Annotated[
        Literal["models", "scenarios"],
        typer.Option(help="What is compared. With scenarios, a request that names one of them gets the user's."),
    ] = "models",
    end: Annotated[
        bool, typer.Option("--end", help="End the experiment: everybody gets the active model again.")
    ] = False,
    store: StoreOptions,
    models_dir: ModelsDirOption = None,
) -> None:
    """Serve several models, or scenarios, at the same time, each to its share of the users.

    Compare models for how items are ranked, and scenarios for what a list allows and prefers. A hash of the user's id
    and the experiment's name assigns each user. GET /v1/stats has the outcome.
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
    name: Annotated[str, typer.Argument(help="Name or tag of a model that no process serves.", metavar="NAME")],
    store: StoreOptions,
) -> None:
    """Remove the states of a model that no process serves. Events stay, so the states can be rebuilt."""
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

    preset: Annotated[
        str,
        typer.Option(
            help="Preset: shape and training settings. docs/reference/model.md lists them.", callback=known_preset
        ),
    ] = "lisa-mini"
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs, in place of the preset's.")] = None
    min_events: Annotated[int, typer.Option(min=1, help="Archived events before the first model is trained.")] = 2_000
    max_events: Annotated[int, typer.Option(min=1, help="Newest events to train on. They bound the memory.")] = (
        2_000_000
    )
    max_loss: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the served model's quality that a new model may lose.")
    ] = 0.1
    criterion: Annotated[
        Literal["ndcg", "value"],
        typer.Option(help="Metric that decides: NDCG@10, or HR@10 weighted by the value of the held-out events."),
    ] = "ndcg"
    memory: MemoryOption = None
    warm: Annotated[
        bool, typer.Option("--warm", help="Continue from the served model. Known items keep their codes.")
    ] = False
    full_every: Annotated[int, typer.Option(min=1, help="With --warm: one of so many models is trained in full.")] = (
        FULL_EVERY
    )
    events_per_user: EventsPerUserOption = None
    users_sample: UsersSampleOption = 1.0


def retrain(
    log: LogOptions,
    *,
    models_dir: Annotated[
        str | None, typer.Option(help="Folder of the models, in which new ones are written.", metavar="DIR|URL")
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(parser=_seconds, help="Interval between rounds, such as 24h. Default: one round.", metavar="TIME"),
    ] = None,
    round_: RoundOptions,
    metrics: MetricsOption = None,
) -> None:
    """Train on the archive, compare with the served model, and serve the new model if it is no worse.

    It can be killed at any time and continues where it stopped. The outcome is in retrain.json beside the models. The
    exit status is 0 when a new model is served or there are too few events yet, and 3 when the new one was refused.
    """
    from app.jobs.retraining.loop import run_trainer
    from app.jobs.retraining.metrics import TrainerMetrics
    from app.jobs.retraining.round import RetrainingPlan

    settings = log.settings(models_dir=models_dir)
    plan = RetrainingPlan(**vars(round_))
    trainer_metrics = TrainerMetrics()
    if metrics is not None:
        trainer_metrics.listen(metrics.host, metrics.port)
    outcome = run_trainer(settings, plan, every, job_console(settings, run_trainer.__module__), trainer_metrics)
    if outcome.outcome == "refused":
        raise typer.Exit(3)
