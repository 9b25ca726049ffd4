"""Commands that train and evaluate models."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.console import console, say
from app.cli.options import (
    DataOptions,
    Device,
    EventsPerUserOption,
    JsonOption,
    MemoryOption,
    ThreadsOption,
    UsersSampleOption,
    known_preset_or_mechanism,
)
from app.jobs.reports.job_progress import announced
from model.config import (
    DEFAULT_LIFT_DECAY,
    DEFAULT_THREADS,
    EVENT_WEIGHTS,
    MECHANISMS,
    PRESETS,
    SERVED_MECHANISMS,
    SERVED_TRAINING,
    Config,
    DataCard,
    MechanismRecipe,
    MechanismTraining,
    NegativesChoice,
    Protocol,
    RegularisationChoice,
    SeenRule,
    SplitName,
    TrainOn,
    warm_training,
)
from model.config import preset as preset_of

if TYPE_CHECKING:
    from model.evaluation.baselines import Baseline


def _moment(text: str) -> datetime:
    """Return a date, or a time, of UTC where it says no other zone; raise BadParameter if it is none."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no date such as 2026-05-31, or time such as 2026-05-31T06:00Z") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


@dataclass(frozen=True)
class LessWorkOptions:
    """How much of the data is learned from."""

    since: Annotated[
        datetime | None,
        typer.Option(parser=_moment, help="Leave out training events before this date or time.", metavar="DATE"),
    ] = None
    users_sample: UsersSampleOption = 1.0
    events_per_user: EventsPerUserOption = None
    negatives: Annotated[
        NegativesChoice, typer.Option(help="How negatives are drawn for a catalogue of more than 20,000 items.")
    ] = "uniform"

    def require_none(self) -> None:
        """Raise BadParameter where one is given, as mechanisms take none of them."""
        if self.of_training() or self.of_data():
            raise typer.BadParameter(
                "mechanisms learn from all events; leave out --since, --users-sample, --events-per-user, --negatives"
            )

    def of_training(self) -> dict[str, Any]:
        """Return the settings of the training that are given."""
        bound = {} if self.events_per_user is None else {"events_per_user": self.events_per_user}
        return bound if self.negatives == "uniform" else {**bound, "negatives": self.negatives}

    def of_data(self) -> dict[str, Any]:
        """Return what the card of the data says of them."""
        since = {} if self.since is None else {"since": self.since}
        return since if self.users_sample == 1 else {**since, "users_sample": self.users_sample}


@dataclass(frozen=True)
class RecipeOptions(LessWorkOptions):
    """What is trained."""

    preset: Annotated[
        str,
        typer.Option(
            help="Preset or mechanism: shape and training settings. docs/reference/model.md lists them.",
            callback=known_preset_or_mechanism,
        ),
    ] = "lisa-mini"
    protocol: Annotated[Protocol, typer.Option(help="Protocol whose test and validation events are held out.")] = (
        "loo_full"
    )
    train_on: Annotated[
        TrainOn, typer.Option(help="Events to train on. 'all' leaves nothing to evaluate, and is for production.")
    ] = "train"
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs, in place of the preset's.")] = None
    regularisation: Annotated[
        RegularisationChoice,
        typer.Option(help="'by-density' takes dropout 0.5 and 5 epochs where items have few events."),
    ] = "given"
    lift: Annotated[
        float | None,
        typer.Option(min=0, help="Strength of the lift. Default: chosen on validation events, or 1.5 without any."),
    ] = None
    lift_from: Annotated[
        Path | None,
        typer.Option(help="Model whose lift to take, for --train-on all.", metavar="DIR"),
    ] = None
    event_weight: Annotated[
        list[str] | None,
        typer.Option(
            help="What an event of this type adds to a user's state, or 0. Types of your own need one. Repeatable.",
            metavar="TYPE=WEIGHT",
        ),
    ] = None
    unseen: Annotated[
        list[str] | None,
        typer.Option(
            help="Event type whose items do not count as seen, so that they may be shown again. Repeatable.",
            metavar="TYPE",
        ),
    ] = None
    codes_from: Annotated[
        Path | None,
        typer.Option(
            help="Model whose codes to keep (the paper's codebook migration). If it has none, they are made.",
            metavar="DIR",
        ),
    ] = None
    warm_from: Annotated[
        Path | None,
        typer.Option(help="Continue from this model in one short epoch. Its items keep their codes.", metavar="DIR"),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed. The same seed and --threads give the same model.")] = 0

    def recipe(self) -> Config | MechanismRecipe:
        """Return it, with the training settings that the options override; raise BadParameter if they do not fit."""
        if self.preset in MECHANISMS and (self.lift, self.lift_from) != (None, None):
            raise typer.BadParameter("mechanisms lift nothing; leave out --lift and --lift-from")
        if self.regularisation != "given" and (self.preset in MECHANISMS or self.epochs is not None):
            raise typer.BadParameter("the epochs are given, or those of a mechanism; leave out --regularisation")
        if self.preset in PRESETS and self.codes_from is not None:
            raise typer.BadParameter("this preset's codes are not learned; leave out --codes-from")
        if self.preset in MECHANISMS:
            self.require_none()
        if self.warm_from is not None and (self.preset in MECHANISMS or self.regularisation != "given"):
            raise typer.BadParameter("--warm-from goes on with a preset and its settings; leave out others")
        overrides: dict[str, Any] = {"seed": self.seed, **({"epochs": self.epochs} if self.epochs else {})}
        split: SplitName = "temporal" if self.protocol == "temporal" else "loo"
        card = DataCard(split=split, train_on=self.train_on, **self.of_data())
        about_data = {**self._event_types(), "data": card}
        if self.preset not in MECHANISMS:
            shape, training = preset_of(self.preset)
            training = training if self.warm_from is None else warm_training(training)
            lift, overrides["regularisation"] = self._lift(), self.regularisation
            overrides |= self.of_training()
            of_shape: dict[str, Any] = {name: lift.pop(name) for name in ("followers", "lift_decay") if name in lift}
            shape = shape.model_copy(update=of_shape)
            return Config(model=shape, training=training.model_copy(update={**overrides, **lift}), **about_data)
        if not set(about_data["event_weights"].values()) <= {0, 1}:
            raise typer.BadParameter("mechanisms count every event alike; give --event-weight 0 or 1")
        usual = SERVED_TRAINING if self.preset in SERVED_MECHANISMS else MechanismTraining()
        return MechanismRecipe(model=MECHANISMS[self.preset], training=usual.model_copy(update=overrides), **about_data)

    def _lift(self) -> dict[str, Any]:
        """Return the settings of the lift, with its shape where it is another model's."""
        if self.lift_from is None:
            return {"lift_strength": self.lift}
        if self.lift is not None:
            raise typer.BadParameter("--lift-from is the whole lift; leave out --lift")
        from model.artifact import model_directory

        chosen = model_directory.load(self.lift_from).metrics.get("lift")
        if chosen is None:
            raise typer.BadParameter(f"the training of {str(self.lift_from)!r} has not recorded its lift; give --lift")
        shape = {"followers": chosen["followers"], "lift_decay": chosen.get("decay", DEFAULT_LIFT_DECAY)}
        return shape | {f"lift_{name}": chosen[name] for name in ("strength", "count_decay", "faint_share")}

    def _event_types(self) -> dict[str, Any]:
        """Return the weights of all event types, and the unseen types, with those that the options name."""
        from pydantic import ValidationError

        given = [text.partition("=") for text in self.event_weight or ()]
        fields = {
            "event_weights": EVENT_WEIGHTS | {name: weight for name, _, weight in given},
            "unseen_types": tuple(sorted(set(self.unseen or ()))),
        }
        try:
            return Config.model_validate(fields).model_dump(include=set(fields))
        except ValidationError as exc:
            raise typer.BadParameter(f"{exc.errors()[0]['msg']}; give TYPE=WEIGHT, as purchase=3") from exc


def train(
    source: DataOptions,
    out: Annotated[Path, typer.Option(help="Model directory to write.", metavar="DIR")],
    options: RecipeOptions,
    device: Annotated[Device, typer.Option(help="Device that trains.")] = "cpu",
    threads: ThreadsOption = DEFAULT_THREADS,
    memory: MemoryOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False,
) -> None:
    """Train a model on a data directory, an archive, or a shop's table of events."""
    from app.jobs.reports.training_progress import TrainingProgress
    from model.artifact import model_directory
    from model.artifact.model_directory import Artifact
    from model.mechanisms import train as mechanisms
    from model.training.distributed.processes import Processes
    from model.training.memory import Resources
    from model.training.threads import cores_in_use, use_threads
    from model.training.train import train as train_model
    from model.training.train import train_warm

    recipe = options.recipe()
    if memory is not None and isinstance(recipe, MechanismRecipe):
        raise typer.BadParameter("mechanisms train on events in memory; leave out --memory")
    data = source.directory()
    use_threads(threads)
    processes = Processes.joined()
    if processes.count > 1 and isinstance(recipe, MechanismRecipe):
        raise typer.BadParameter("mechanisms train in one process; leave out torchrun")
    console.quiet = not processes.is_first  # it speaks for all
    gpu = " and the GPU" if device == "cuda" else ""
    together = f" in each of {processes.count} processes" if processes.count > 1 else ""
    say(f"training {options.preset} on {cores_in_use()}{gpu}{together} (--threads {threads})")
    try:
        with TrainingProgress(recipe.training.epochs, recipe.training.patience, console) as progress:
            how: dict[str, Any] = {"resume": resume, "progress": progress}
            if isinstance(recipe, MechanismRecipe):
                made = mechanisms.train(data, out, recipe, codes_from=options.codes_from, device=device, **how)
            else:
                how["resources"] = Resources(device, memory, processes)
                if options.warm_from is None:
                    made = train_model(data, out, recipe, on_config=progress.set_config, **how)
                else:
                    made = train_warm(model_directory.load(options.warm_from), data, out, recipe, **how)
    except KeyboardInterrupt:
        say("interrupted; the same command with --resume goes on after the last whole epoch")
        raise typer.Exit(130) from None
    if isinstance(made, Artifact):
        if lift := made.metrics.get("lift"):
            count = lift["followers"]
            say(
                f"the {count} items that follow an item most often gain score after it (lift {lift['strength']:g}); "
                f"this takes {8 * count} bytes an item"
            )
        then = f"{len(made.items):,} items, generation {made.tag}; try 'lisarec serve --model {out}'"
    else:
        then = f"generation {made.tag}; try 'lisarec evaluate --model {out} --data {source.data}{source.arguments()}'"
    say(f"{out}: {then}")


@dataclass(frozen=True)
class RuleOptions:
    """The rules by which models are measured."""

    protocol: Annotated[
        Protocol | None, typer.Option(help="Protocol. Default: the one that the model was trained for.")
    ] = None
    seen: Annotated[
        SeenRule | None,
        typer.Option(help="Seen items that must not be recommended. Default: the rule that the model was chosen with."),
    ] = None


@dataclass(frozen=True)
class BaselineOptions:
    """Which baselines are fitted."""

    baselines: Annotated[bool, typer.Option("--baselines", help="Fit the baselines too, which takes minutes.")] = False
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="Fit this baseline too. Repeatable. sasrec and gru4rec take tens of minutes.", metavar="NAME"
        ),
    ] = None

    def grids(self) -> dict[str, Sequence[Baseline]]:
        """Return what each of them is fitted with; raise BadParameter where there is no such baseline."""
        from model.evaluation.baselines import GRIDS
        from model.evaluation.neural_baselines import NEURAL_GRIDS

        every_grid = {**GRIDS, **NEURAL_GRIDS}
        unknown = sorted(set(self.baseline or ()) - every_grid.keys())
        if unknown:
            raise typer.BadParameter(f"no baseline {unknown[0]!r}; there are: {', '.join(every_grid)}")
        chosen = {*(GRIDS if self.baselines else ()), *(self.baseline or ())}
        return {name: grid for name, grid in every_grid.items() if name in chosen}


@dataclass(frozen=True)
class ReportOptions:
    """Where the numbers are written."""

    json_file: JsonOption = None
    ranks: Annotated[
        Path | None, typer.Option(help="Write every user's rank to this Parquet file.", metavar="FILE")
    ] = None
    report: Annotated[
        Path | None, typer.Option(help="Write a report with plots, index.html, to this directory.", metavar="DIR")
    ] = None
    report_seed: Annotated[
        int, typer.Option(min=0, help="Seed that draws the twenty users whose lists the report shows.")
    ] = 0


def evaluate(
    model: Annotated[
        list[Path],
        typer.Option(
            help="Model directory. Repeatable: the first is compared with the others, and seeds of one are averaged.",
            metavar="DIR",
        ),
    ],
    source: DataOptions,
    rules: RuleOptions,
    *,
    threads: ThreadsOption = DEFAULT_THREADS,
    baselines: BaselineOptions,
    reports: ReportOptions,
    context: typer.Context,
) -> None:
    """Measure a model on the events held out of its data, and compare it with others."""
    from app.jobs.reports.quality_page import Provenance, write_page
    from app.jobs.reports.quality_table import baselines_table, metrics_table, other_models_table, verdicts_of
    from app.observability.version import own_version
    from model.evaluation.evaluate import evaluate as evaluate_models
    from model.evaluation.evaluate import load_model
    from model.mechanisms.train import TrainedMechanism
    from model.training.threads import use_threads

    use_threads(threads)
    grids, data = baselines.grids(), source.directory()
    loaded = [load_model(directory) for directory in model]
    first = loaded[0]
    if reports.report is not None and isinstance(first, TrainedMechanism):
        raise typer.BadParameter("pages are written of models that are served; leave out --report, or see --json")
    with announced("reading the data", console) as notify:
        evaluation = evaluate_models(loaded, data, rules.protocol, rules.seen, grids, notify)
    numbers = evaluation.to_json()
    if reports.json_file is not None:
        reports.json_file.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    if reports.ranks is not None:
        evaluation.write_ranks(reports.ranks)
    if reports.report is not None and not isinstance(first, TrainedMechanism):
        command = shlex.join(["lisarec", *context.find_root().obj])
        made = Provenance(command, datetime.now(UTC), own_version())
        page = write_page(reports.report, evaluation, loaded, made, reports.report_seed)
        say(f"{page} is ready; open it in a browser")
    console.print(metrics_table(numbers))
    if evaluation.others:
        console.print(other_models_table(numbers))
    for verdict in verdicts_of(numbers):
        say(verdict)
    if grids:
        console.print(baselines_table(numbers))
    say(numbers["verdict"])
