"""Commands for the active model: rebuild, activate, experiment, compare, drop, retrain."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.cli.console import console, job_console, print_table, say
from app.cli.options import (
    JsonOption,
    LogOptions,
    MetricsOption,
    ModelOption,
    ModelsDirOption,
    StoreOptions,
    known_preset,
    place_of,
    size_in_bytes,
    write_json,
)
from app.jobs.reports.job_progress import counted
from model.config import FULL_EVERY


def rebuild(model: ModelOption, log: LogOptions) -> None:
    """Fold all events into the states of a new model.

    Meanwhile the active model keeps serving and events are accepted. Then switch with 'lisarec activate'. If the new
    model continues from the active one, its states are copied, except those of users with items new to that model.
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
    say(f"{place.name}: {carried}{done.events:,} events of {done.users:,} users folded. To switch, run {activate}")


def activate(
    name: Annotated[str, typer.Argument(help="Name of a model in the models folder.", metavar="NAME")],
    store: StoreOptions,
    models_dir: ModelsDirOption = None,
) -> None:
    """Switch every process that uses a store to another model.

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
        say(f"to roll back, run {back}; to delete the old states, run {drop}")


def experiment(
    name: Annotated[str | None, typer.Argument(help="Name of the experiment.", metavar="NAME")] = None,
    shares: Annotated[
        list[str] | None,
        typer.Argument(help="Models or scenarios with their shares of the users.", metavar="NAME=SHARE"),
    ] = None,
    *,
    over: Annotated[
        Literal["models", "scenarios"],
        typer.Option(
            help="What to compare. With scenarios, a request that names one of them gets the one assigned to the user."
        ),
    ] = "models",
    end: Annotated[
        bool, typer.Option("--end", help="End the experiment. All users get the active model again.")
    ] = False,
    store: StoreOptions,
    models_dir: ModelsDirOption = None,
) -> None:
    """Run an A/B test: serve several models or scenarios, each to a share of the users.

    Models differ in how they rank items, scenarios in the rules for a list. A hash of the user's id
    and the experiment's name assigns each user. 'lisarec compare' says what is decided.
    """
    from pydantic import ValidationError

    from app.jobs import generations
    from app.schemas.operations import NewExperiment

    if end == (name is not None):
        raise typer.BadParameter("pass a name and at least two NAME=SHARE, one per model or scenario, or pass --end")
    settings = store.settings(models_dir=models_dir)
    begun = None
    if name is not None:
        try:
            given = [share.rpartition("=") for share in shares or ()]
            begun = NewExperiment(name=name, over=over, shares={arm: float(part) for arm, _, part in given})
        except (ValueError, ValidationError) as exc:
            raise typer.BadParameter(
                f"an experiment needs a name other than 'other', and 2 to 8 {over} as NAME=SHARE, with shares above 0"
            ) from exc
    asyncio.run(generations.set_experiment(settings, begun))
    say("the experiment has ended" if begun is None else f"experiment {begun.name}: {', '.join(shares or ())}")


def compare(
    name: Annotated[
        str | None, typer.Argument(help="Name of the experiment. Default: the newest.", metavar="NAME")
    ] = None,
    json_file: JsonOption = None,
    *,
    log: LogOptions,
) -> None:
    """Compare the arms of an experiment with its first one: what their lists led to, by user, and what is decided.

    The command reads the whole event log, at low priority.
    """
    from app.jobs.reports import experiment_result
    from app.jobs.reports.experiment_outcomes import read_outcomes

    settings = log.settings()
    os.nice(10)  # requests have priority
    with counted("entries", console) as on_progress:
        outcomes = asyncio.run(read_outcomes(settings, name, on_progress))
    results = experiment_result.results_of(outcomes)
    write_json(json_file, experiment_result.to_json(outcomes, results))
    print_table(experiment_result.result_table(outcomes, results))
    for line in (*experiment_result.verdicts_of(results), *experiment_result.warnings_of(outcomes)):
        say(line)


def drop(
    name: Annotated[str, typer.Argument(help="Name or tag of a model that no process serves.", metavar="NAME")],
    store: StoreOptions,
) -> None:
    """Delete the states of a model that no process serves, and the statistics of its lists.

    Events stay, so you can rebuild the states.
    """
    from app.jobs import generations

    settings = store.settings()
    removed = asyncio.run(generations.drop(settings, name))
    say(f"{removed:,} states of {name} deleted")


def _seconds(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    if not number.isdecimal() or not int(number) or unit not in seconds:
        raise typer.BadParameter(f"{text!r} is not a valid duration; use a format such as 24h, 30m or 7d")
    return float(int(number) * seconds[unit])


@dataclass(frozen=True)
class RoundOptions:
    """Options for a round: what it trains, and when the new model is activated. Limits may be in the environment."""

    preset: Annotated[
        str,
        typer.Option(
            help="Preset of model shape and training settings, see docs/reference/model.md.", callback=known_preset
        ),
    ] = "lisa-mini"
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs. Default: the preset's.")] = None
    min_events: Annotated[
        int, typer.Option(min=1, help="Number of archived events required before the first model is trained.")
    ] = 2_000
    max_events: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="LISAREC_RETRAIN_MAX_EVENTS",
            help="Train on at most this many of the newest events. This bounds the memory.",
        ),
    ] = 2_000_000
    max_loss: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Largest loss of quality, as a share of the active model's, at which a new model is accepted.",
        ),
    ] = 0.1
    criterion: Annotated[
        Literal["ndcg", "value"],
        typer.Option(help="Deciding metric: NDCG@10, or HR@10 weighted by the value of the held-out events."),
    ] = "ndcg"
    memory: Annotated[
        int | None,
        typer.Option(
            parser=size_in_bytes,
            envvar="LISAREC_RETRAIN_MEMORY",
            help="Memory limit of each training, such as 3GiB. The events are then kept in files next to the model.",
            metavar="SIZE",
        ),
    ] = None
    warm: Annotated[
        bool,
        typer.Option(
            "--warm/--no-warm", help="Continue training from the active model, if any. Known items keep their codes."
        ),
    ] = True
    full_every: Annotated[
        int,
        typer.Option(
            min=1, envvar="LISAREC_RETRAIN_FULL_EVERY", help="With --warm: train every nth model from scratch."
        ),
    ] = FULL_EVERY
    events_per_user: Annotated[
        int | None,
        typer.Option(
            min=2,
            envvar="LISAREC_RETRAIN_EVENTS_PER_USER",
            help="Maximum events per user and epoch: half are the newest, half a stretch that changes each epoch.",
        ),
    ] = None
    users_sample: Annotated[
        float,
        typer.Option(min=0.001, max=1, envvar="LISAREC_RETRAIN_USERS_SAMPLE", help="Share of users to train on."),
    ] = 1.0


def retrain(
    log: LogOptions,
    *,
    models_dir: Annotated[
        str | None, typer.Option(help="Folder of the models. New models are written to it.", metavar="DIR|URL")
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(parser=_seconds, help="Interval between rounds, such as 24h. Default: one round.", metavar="TIME"),
    ] = None,
    round_: RoundOptions,
    metrics: MetricsOption = None,
) -> None:
    """Train on the archive, compare with the active model, and activate the new model if it is no worse.

    The command is safe to kill: the next run continues. The result is in retrain.json in the folder of the models. The
    exit status is 0 if a new model is active or the round waits, and 3 if the new model was refused.
    """
    from app.jobs.retraining.loop import run_trainer
    from app.jobs.retraining.metrics import TrainerMetrics
    from app.jobs.retraining.plan import RetrainingPlan

    settings = log.settings(models_dir=models_dir)
    plan = RetrainingPlan(**vars(round_))
    trainer_metrics = TrainerMetrics()
    if metrics is not None:
        trainer_metrics.listen(metrics.host, metrics.port)
    outcome = run_trainer(settings, plan, every, job_console(settings, run_trainer.__module__), trainer_metrics)
    if outcome.outcome == "refused":
        raise typer.Exit(3)
