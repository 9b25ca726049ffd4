"""The training of a model from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import AwareDatetime, Field
from typing_extensions import TypedDict

from lisarec.tables import TableSettings, checked, directory_of, is_of_a_table
from model.config import DEFAULT_THREADS, MAX_LIFT, MAX_SEED, NegativesChoice, Protocol, TrainOn

if TYPE_CHECKING:
    from lisarec.recommender import Recommender


class RecipeSettings(TypedDict, total=False):
    """What to train. The fields have the names of the options of `lisarec train`."""

    preset: str
    protocol: Protocol
    train_on: TrainOn
    epochs: Annotated[int, Field(ge=1)]
    lift: Annotated[float, Field(ge=0, le=MAX_LIFT)]
    event_weights: Mapping[str, float]
    unseen: Sequence[str]
    since: AwareDatetime
    users_sample: Annotated[float, Field(ge=0.001, le=1)]
    events_per_user: Annotated[int, Field(ge=2)]
    negatives: NegativesChoice
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)]


class TrainSettings(RecipeSettings, TableSettings, total=False):
    """What to train, on which table, and with which resources.

    memory   memory limit of the process in bytes; default: none
    verbose  print the progress
    """

    device: Literal["cpu", "cuda"]
    threads: Annotated[int, Field(ge=1)]
    memory: Annotated[int, Field(ge=1)]
    verbose: bool


MACHINE = ("device", "threads", "memory", "verbose")


def train(data: str | Path, out: str | Path, **settings: Unpack[TrainSettings]) -> Recommender:
    """Train a model, write it to a directory and load it.

    data      a data directory, or a shop's table of events
    out       the model directory
    settings  as the options of `lisarec train`, with its defaults

    raises    ValueError  when the data or a setting cannot be used; it says all that is wrong
              TypeError   when there is no setting of that name
    """
    from rich.console import Console

    from app.jobs.reports.training_progress import TrainingProgress
    from lisarec.recommender import load
    from model.training.memory import Resources
    from model.training.threads import threads_kept, use_threads
    from model.training.train import train as train_model

    given = checked(settings, TrainSettings)
    machine = {name: given.pop(name) for name in MACHINE if name in given}
    table = {name: given.pop(name) for name in [*given] if is_of_a_table(name)}
    recipe = _recipe(given)
    device = machine.get("device", "cpu")
    console = Console(quiet=not machine.get("verbose", False))
    shown = TrainingProgress(recipe.training.epochs, recipe.training.patience, console)
    with threads_kept(), directory_of(Path(data), table) as directory, shown as progress:
        use_threads(machine.get("threads", DEFAULT_THREADS))
        train_model(
            directory,
            Path(out),
            recipe,
            resources=Resources(device, machine.get("memory")),
            progress=progress,
        )
    return load(out, device=device)


def _recipe(given: dict[str, Any]) -> Any:
    import typer

    from app.cli.models import RecipeOptions
    from model.config import Config

    options = dict(given)
    if "event_weights" in options:
        options["event_weight"] = [f"{name}={weight}" for name, weight in options.pop("event_weights").items()]
    if "unseen" in options:
        options["unseen"] = list(options["unseen"])
    try:
        recipe = RecipeOptions(**options).recipe()
    except typer.BadParameter as exc:
        raise ValueError(exc.message) from None
    if not isinstance(recipe, Config):
        raise ValueError(f"{options['preset']!r} is a mechanism that is compared; train it by 'lisarec train'")
    return recipe
