"""Commands that train and evaluate models."""

from __future__ import annotations

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
    JsonOption,
    MemoryOption,
    ThreadsOption,
    file_to_write,
    known_preset_or_mechanism,
    model_output,
    moment,
    write_json,
)
from app.jobs.reports.job_progress import announced
from model.config import (
    DEFAULT_LIFT_DECAY,
    DEFAULT_THREADS,
    EVENT_WEIGHTS,
    MAX_LIFT,
    MAX_SEED,
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
    SeenRule,
    SplitName,
    TrainOn,
    warm_training,
)
from model.config import preset as preset_of

if TYPE_CHECKING:
    from model.artifact.model_directory import Artifact
    from model.evaluation.baselines import Baseline
    from model.mechanisms.train import TrainedMechanism


@dataclass(frozen=True)
class LessWorkOptions:
    """Options that limit the training data."""

    since: Annotated[
        datetime | None,
        typer.Option(
            parser=moment,
            help="Ignore training events before this date or time, in UTC unless it has an offset.",
            metavar="DATE",
        ),
    ] = None
    users_sample: Annotated[float, typer.Option(min=0.001, max=1, help="Share of users to train on.")] = 1.0
    events_per_user: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Maximum events per user and epoch: half are the newest, half a stretch that changes each epoch.",
        ),
    ] = None
    negatives: Annotated[
        NegativesChoice, typer.Option(help="How to sample negatives for a catalogue of more than 20,000 items.")
    ] = "uniform"

    def require_none(self) -> None:
        """Raise BadParameter if any of these options is given: mechanisms support none of them."""
        if self.of_training() or self.of_data():
            raise typer.BadParameter(
                "mechanisms train on all events; omit --since, --users-sample, --events-per-user and --negatives"
            )

    def of_training(self) -> dict[str, Any]:
        """Return the training settings that the options set."""
        bound = {} if self.events_per_user is None else {"events_per_user": self.events_per_user}
        return bound if self.negatives == "uniform" else {**bound, "negatives": self.negatives}

    def of_data(self) -> dict[str, Any]:
        """Return the options as entries of the data card."""
        since = {} if self.since is None else {"since": self.since}
        return since if self.users_sample == 1 else {**since, "users_sample": self.users_sample}


@dataclass(frozen=True)
class RecipeOptions(LessWorkOptions):
    """Options that describe the model and its training."""

    preset: Annotated[
        str,
        typer.Option(
            help="Preset or mechanism: model shape and training settings, see docs/reference/model.md.",
            callback=known_preset_or_mechanism,
        ),
    ] = "lisa-mini"
    protocol: Annotated[
        Protocol, typer.Option(help="Evaluation protocol. Its test and validation events are held out.")
    ] = "loo_full"
    train_on: Annotated[
        TrainOn,
        typer.Option(help="Events to train on. 'all' is for production: it leaves no events for an evaluation."),
    ] = "train"
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs. Default: the preset's.")] = None
    lift: Annotated[
        float | None,
        typer.Option(min=0, max=MAX_LIFT, help="Strength of the lift. Default: chosen on validation events, else 1.5."),
    ] = None
    lift_from: Annotated[
        Path | None,
        typer.Option(help="Model to copy the lift from, for --train-on all.", metavar="DIR"),
    ] = None
    event_weight: Annotated[
        list[str] | None,
        typer.Option(
            help="Weight of an event type in users' states; 0 ignores the type. Required for custom types. Repeatable.",
            metavar="TYPE=WEIGHT",
        ),
    ] = None
    unseen: Annotated[
        list[str] | None,
        typer.Option(
            help="Event type that doesn't mark an item as seen, so that the item can be recommended again. Repeatable.",
            metavar="TYPE",
        ),
    ] = None
    codes_from: Annotated[
        Path | None,
        typer.Option(
            help="Model to copy item codes from (the paper's codebook migration). If it has none, they are computed.",
            metavar="DIR",
        ),
    ] = None
    warm_from: Annotated[
        Path | None,
        typer.Option(
            help="Continue training from this model for one short epoch. Its items keep their codes.", metavar="DIR"
        ),
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Random seed. The same seed and --threads give the same model.")
    ] = 0

    def recipe(self) -> Config | MechanismRecipe:
        """Return the recipe that the options describe. Raise BadParameter if they contradict each other."""
        if self.preset in MECHANISMS and (self.lift, self.lift_from) != (None, None):
            raise typer.BadParameter("mechanisms have no lift; omit --lift and --lift-from")
        if self.preset in PRESETS and self.codes_from is not None:
            raise typer.BadParameter("this preset doesn't learn its codes; omit --codes-from")
        if self.preset in MECHANISMS:
            self.require_none()
        if self.warm_from is not None and self.preset in MECHANISMS:
            raise typer.BadParameter("--warm-from needs a preset")
        overrides: dict[str, Any] = {"seed": self.seed, **({"epochs": self.epochs} if self.epochs else {})}
        split: SplitName = "temporal" if self.protocol == "temporal" else "loo"
        card = DataCard(split=split, train_on=self.train_on, **self.of_data())
        about_data = {**self._event_types(), "data": card}
        if self.preset not in MECHANISMS:
            shape, training = preset_of(self.preset)
            training = training if self.warm_from is None else warm_training(training)
            lift = self._lift()
            overrides |= self.of_training()
            of_shape: dict[str, Any] = {name: lift.pop(name) for name in ("followers", "lift_decay") if name in lift}
            shape = shape.model_copy(update=of_shape)
            return Config(model=shape, training=training.model_copy(update={**overrides, **lift}), **about_data)
        if not set(about_data["event_weights"].values()) <= {0, 1}:
            raise typer.BadParameter("mechanisms weight all events equally; --event-weight must be 0 or 1")
        usual = SERVED_TRAINING if self.preset in SERVED_MECHANISMS else MechanismTraining()
        return MechanismRecipe(model=MECHANISMS[self.preset], training=usual.model_copy(update=overrides), **about_data)

    def _lift(self) -> dict[str, Any]:
        """Return the settings of the lift. With --lift-from they include its shape."""
        if self.lift_from is None:
            return {"lift_strength": self.lift}
        if self.lift is not None:
            raise typer.BadParameter("--lift-from copies the whole lift; omit --lift")
        from model.artifact import model_directory

        chosen = model_directory.load(self.lift_from).metrics.get("lift")
        if chosen is None:
            raise typer.BadParameter(f"the model {str(self.lift_from)!r} has no recorded lift; pass --lift instead")
        shape = {"followers": chosen["followers"], "lift_decay": chosen.get("decay", DEFAULT_LIFT_DECAY)}
        return shape | {f"lift_{name}": chosen[name] for name in ("strength", "count_decay", "faint_share")}

    def _event_types(self) -> dict[str, Any]:
        """Return the weights of all event types and the unseen types, including those from the options."""
        from pydantic import ValidationError

        given = [text.partition("=") for text in self.event_weight or ()]
        fields = {
            "event_weights": EVENT_WEIGHTS | {name: weight for name, _, weight in given},
            "unseen_types": tuple(sorted(set(self.unseen or ()))),
        }
        try:
            return Config.model_validate(fields).model_dump(include=set(fields))
        except ValidationError as exc:
            raise typer.BadParameter(f"{exc.errors()[0]['msg']}; use TYPE=WEIGHT, such as purchase=3") from exc


def train(
    source: DataOptions,
    out: Annotated[str, typer.Option(help="Model directory to write.", metavar="DIR|URL")],
    options: RecipeOptions,
    device: Annotated[Device, typer.Option(help="Device to train on.")] = "cpu",
    threads: ThreadsOption = DEFAULT_THREADS,
    memory: MemoryOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False,
) -> None:
    """Train a model on a data directory, on an archive, or on a shop's event table."""
    from app.settings import is_started_by_torchrun
    from model.training.distributed.ending import end_with_others

    if is_started_by_torchrun():
        end_with_others()  # before torch is imported, which takes seconds
    from app.jobs.reports.training_progress import TrainingProgress, after_interruption
    from model.artifact import model_directory
    from model.mechanisms import train as mechanisms
    from model.training.distributed.processes import Processes
    from model.training.memory import Resources
    from model.training.threads import cores_in_use, use_threads
    from model.training.train import train as train_model
    from model.training.train import train_warm

    recipe = options.recipe()
    if memory is not None and isinstance(recipe, MechanismRecipe):
        raise typer.BadParameter("mechanisms need all events in memory; omit --memory")
    use_threads(threads)
    processes = Processes.joined()
    if processes.count > 1 and isinstance(recipe, MechanismRecipe):
        raise typer.BadParameter("mechanisms train in one process; run this command without torchrun")
    output = model_output(out, resume)
    if output.is_uploaded and (processes.count > 1 or isinstance(recipe, MechanismRecipe)):
        raise typer.BadParameter("several processes, and mechanisms, write to a directory; pass one as --out")
    data = source.directory() if processes.is_first else source.data  # which the others do not read
    console.quiet = not processes.is_first  # only the first process prints
    gpu = " and the GPU" if device == "cuda" else ""
    together = f" in each of {processes.count} processes" if processes.count > 1 else ""
    say(f"training {options.preset} on {cores_in_use()}{gpu}{together} (--threads {threads})")
    made: Artifact | TrainedMechanism
    try:
        with TrainingProgress(recipe.training.epochs, recipe.training.patience, console) as progress:
            how: dict[str, Any] = {"resume": resume, "progress": progress}
            if output.is_finished:
                made = model_directory.load(output.directory)
            elif isinstance(recipe, MechanismRecipe):
                how |= {"codes_from": options.codes_from, "device": device}
                made = mechanisms.train(data, output.directory, recipe, **how)
            else:
                how["resources"] = Resources(device, memory, processes)
                if options.warm_from is None:
                    made = train_model(data, output.directory, recipe, **how)
                else:
                    made = train_warm(model_directory.load(options.warm_from), data, output.directory, recipe, **how)
    except KeyboardInterrupt:
        say(after_interruption(output.directory))
        raise typer.Exit(130) from None
    output.upload()
    _say_next(made, out, f"{shlex.quote(str(source.data))}{source.arguments()}")


def _say_next(made: Artifact | TrainedMechanism, out: str, data: str) -> None:
    """Print what was trained, and the command that uses it."""
    from model.artifact.model_directory import Artifact

    model = shlex.quote(out)
    if isinstance(made, Artifact):
        if (lift := made.metrics.get("lift")) and lift["strength"]:
            count = lift["followers"]
            say(
                f"lift: after each item, the {count} items that follow it most often get a higher score "
                f"(strength {lift['strength']:g}, {8 * count} bytes per item)"
            )
        then = f"{len(made.items):,} items, generation {made.tag}. Next: 'lisarec serve --model {model}'"
    else:
        then = f"generation {made.tag}. Next: 'lisarec evaluate --model {model} --data {data}'"
    say(f"{out}: {then}")


@dataclass(frozen=True)
class RuleOptions:
    """Options for the rules of the evaluation."""

    protocol: Annotated[
        Protocol | None, typer.Option(help="Evaluation protocol. Default: the one that the model was trained for.")
    ] = None
    seen: Annotated[
        SeenRule | None,
        typer.Option(help="Seen items to exclude. Default: the rule that the model was selected with."),
    ] = None


@dataclass(frozen=True)
class BaselineOptions:
    """Options that choose the baselines."""

    baselines: Annotated[bool, typer.Option("--baselines", help="Also fit the baselines. This takes minutes.")] = False
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="Also fit this baseline. Repeatable. sasrec and gru4rec take tens of minutes.", metavar="NAME"
        ),
    ] = None

    def grids(self) -> dict[str, Sequence[Baseline]]:
        """Return the hyperparameters to try for each baseline. Raise BadParameter for an unknown baseline."""
        from model.evaluation.baselines import GRIDS
        from model.evaluation.neural_baselines import NEURAL_GRIDS

        every_grid = {**GRIDS, **NEURAL_GRIDS}
        unknown = sorted(set(self.baseline or ()) - every_grid.keys())
        if unknown:
            raise typer.BadParameter(f"unknown baseline {unknown[0]!r}; valid baselines: {', '.join(every_grid)}")
        chosen = {*(GRIDS if self.baselines else ()), *(self.baseline or ())}
        return {name: grid for name, grid in every_grid.items() if name in chosen}


@dataclass(frozen=True)
class ReportOptions:
    """Options that name the output files."""

    json_file: JsonOption = None
    ranks: Annotated[
        Path | None,
        typer.Option(parser=file_to_write, help="Write every user's rank to this Parquet file.", metavar="FILE"),
    ] = None
    report: Annotated[
        Path | None, typer.Option(help="Write a report with plots, index.html, to this directory.", metavar="DIR")
    ] = None
    report_seed: Annotated[
        int, typer.Option(min=0, help="Random seed that selects the report's twenty example users.")
    ] = 0


def evaluate(
    model: Annotated[
        list[Path],
        typer.Option(
            help="Model directory. Repeatable: compares the first model with the others; averages seeds of one model.",
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
    """Evaluate a model on the held-out events of its data, and compare it with other models."""
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
        raise typer.BadParameter("--report needs a model that can be served; use --json instead")
    with announced("reading data", console) as notify:
        evaluation = evaluate_models(loaded, data, rules.protocol, rules.seen, grids, notify)
    numbers = evaluation.to_json()
    write_json(reports.json_file, numbers)
    if reports.ranks is not None:
        evaluation.write_ranks(reports.ranks)
    if reports.report is not None and not isinstance(first, TrainedMechanism):
        command = shlex.join(["lisarec", *context.find_root().obj])
        made = Provenance(command, datetime.now(UTC), own_version())
        page = write_page(reports.report, evaluation, loaded, made, reports.report_seed)
        say(f"{page} is ready. Open it in a browser")
    console.print(metrics_table(numbers))
    if evaluation.others:
        console.print(other_models_table(numbers))
    for verdict in verdicts_of(numbers):
        say(verdict)
    if grids:
        console.print(baselines_table(numbers))
    say(numbers["verdict"])
