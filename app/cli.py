"""The command line. Commands import what they need when they run: torch takes seconds, ``--help`` should not."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from app.logs import LogFormat
from model.config import (
    EVENT_WEIGHTS,
    MECHANISMS,
    PRESETS,
    SERVED_MECHANISMS,
    SERVED_TRAINING,
    Config,
    DataCard,
    MechanismRecipe,
    MechanismTraining,
    Protocol,
    SeenRule,
    TrainOn,
)
from model.config import preset as preset_of

if TYPE_CHECKING:
    from pydantic import ValidationError

    from app.replay import ReplayCounts
    from app.settings import Settings, StoreSettings

cli = typer.Typer(
    help="Online recommendation: every user's whole history as one codeword histogram of constant size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console()
complaints = Console(stderr=True)

Device = Literal["cpu", "cuda"]
DataOption = Annotated[Path, typer.Option("--data", help="Data directory with interactions.tsv.gz.", metavar="DIR")]
ModelOption = Annotated[Path, typer.Option("--model", help="Model directory that 'train' wrote.", metavar="DIR")]
RedisUrlOption = Annotated[str | None, typer.Option(help="Users are kept in this Redis.", metavar="URL")]
DataDirOption = Annotated[Path | None, typer.Option(help="Users are kept in SQLite in this directory.", metavar="DIR")]
ArchiveDirOption = Annotated[
    Path | None, typer.Option(help="Where 'archive' moves the log of that Redis.", metavar="DIR")
]


class Address(NamedTuple):
    """Where something listens."""

    host: str
    port: int


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(f"{text!r} is no HOST:PORT, such as 127.0.0.1:9464")
    return Address(host, int(port))


MetricsOption = Annotated[
    Address | None, typer.Option(parser=_address, help="Answer Prometheus here.", metavar="HOST:PORT")
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. A failure prints one line that says what to do and exits 1; wrong usage exits 2."""
    try:
        cli(arguments, prog_name="lisarec")
    except Exception as exc:
        if not isinstance(exc, _expected_failures()):
            raise
        complaints.print(f"lisarec: {exc}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(1) from None


def _expected_failures() -> tuple[type[Exception], ...]:
    """Failures whose message says what to do; the rooms' own errors of data, model and training are ValueErrors."""
    from app.download import DownloadError
    from app.replay import ReplayError
    from storage.store import StorageError

    return DownloadError, ReplayError, StorageError, ValueError, OSError


def _known_preset(name: str) -> str:
    if name not in PRESETS:
        raise typer.BadParameter(f"{name!r} is none of: {', '.join(sorted(PRESETS))}")
    return name


def _known_preset_or_mechanism(name: str) -> str:
    return name if name in MECHANISMS else _known_preset(name)


@cli.command()
def train(
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Model directory to write.", metavar="DIR")],
    preset: Annotated[
        str,
        typer.Option(
            help="Shape and training settings; docs/mechanisms.md has those beside lisa-mini and lisa-recent.",
            callback=_known_preset_or_mechanism,
        ),
    ] = "lisa-mini",
    protocol: Annotated[Protocol, typer.Option(help="What to hold out for this protocol's test.")] = "loo_full",
    train_on: Annotated[TrainOn, typer.Option(help="'all' leaves nothing to evaluate; for production.")] = "train",
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the preset's.")] = None,
    lift: Annotated[
        float | None,
        typer.Option(min=0, help="Strength of the lift; default: chosen on validation, 1.5 where there is none."),
    ] = None,
    event_weight: Annotated[
        list[str] | None,
        typer.Option(
            help="What an event of a type adds to a user's state; 0: nothing. Own types need one; repeatable.",
            metavar="TYPE=WEIGHT",
        ),
    ] = None,
    unseen: Annotated[
        list[str] | None,
        typer.Option(
            help="Type whose items do not count as seen: so they may be shown again; repeatable.", metavar="TYPE"
        ),
    ] = None,
    codes_from: Annotated[
        Path | None,
        typer.Option(
            help="Keep the codes of this model: the paper's codebook migration. One without codes has them made.",
            metavar="DIR",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed and number of threads give the same model.")] = 0,
    device: Device = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
) -> None:
    """Train a model on a data directory."""
    from app.training_progress import TrainingProgress
    from model.artifact import Artifact
    from model.mechanisms import train as mechanisms
    from model.train import train as train_model

    if preset in MECHANISMS and lift is not None:
        raise typer.BadParameter("mechanisms lift nothing; leave out --lift")
    if preset in PRESETS and codes_from is not None:
        raise typer.BadParameter("this preset's codes are not learned; leave out --codes-from")
    chosen: dict[str, Any] = {"epochs": epochs, "seed": seed} if epochs else {"seed": seed}
    about: dict[str, Any] = _event_types(event_weight or (), unseen or ())
    if preset in MECHANISMS and not set(about["event_weights"].values()) <= {0, 1}:
        raise typer.BadParameter("mechanisms count every event alike; give --event-weight 0 or 1")
    about["data"] = DataCard(split="temporal" if protocol == "temporal" else "loo", train_on=train_on)
    recipe: Config | MechanismRecipe
    if preset in MECHANISMS:
        usual = SERVED_TRAINING if preset in SERVED_MECHANISMS else MechanismTraining()
        recipe = MechanismRecipe(model=MECHANISMS[preset], training=usual.model_copy(update=chosen), **about)
    else:
        shape, training = preset_of(preset)
        recipe = Config(model=shape, training=training.model_copy(update={**chosen, "lift_strength": lift}), **about)
    try:
        with TrainingProgress(recipe.training.epochs, console) as progress:
            how: dict[str, Any] = {"device": device, "resume": resume, "progress": progress}
            if isinstance(recipe, MechanismRecipe):
                made = mechanisms.train(data, out, recipe, codes_from=codes_from, **how)
            else:
                made = train_model(data, out, recipe, **how)
    except KeyboardInterrupt:
        _say("interrupted; the same command with --resume goes on after the last whole epoch")
        raise typer.Exit(130) from None
    if isinstance(made, Artifact):
        then = f"{len(made.items):,} items, generation {made.tag}; try 'lisarec serve --model {out}'"
    else:
        then = f"generation {made.tag}; try 'lisarec evaluate --model {out} --data {data}'"
    _say(f"{out}: {then}")


def _event_types(weights: Sequence[str], unseen: Sequence[str]) -> dict[str, Any]:
    """What the command line says of event types, beside what holds for the others."""
    from pydantic import ValidationError

    given = [text.partition("=") for text in weights]
    said = {
        "event_weights": EVENT_WEIGHTS | {name: weight for name, _, weight in given},
        "unseen_types": tuple(sorted(set(unseen))),
    }
    try:
        return Config.model_validate(said).model_dump(include=set(said))
    except ValidationError as exc:
        raise typer.BadParameter(f"{exc.errors()[0]['msg']}; give TYPE=WEIGHT, as purchase=3") from exc


@cli.command()
def evaluate(
    model: Annotated[
        list[Path],
        typer.Option(help="Model directory; several are seeds of one, the first is compared.", metavar="DIR"),
    ],
    data: DataOption,
    protocol: Annotated[Protocol | None, typer.Option(help="Default: the one the model was trained for.")] = None,
    seen: Annotated[SeenRule | None, typer.Option(help="Which seen items may not be recommended.")] = None,
    baselines: Annotated[bool, typer.Option("--baselines", help="Fit the baselines too; takes minutes.")] = False,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="Fit just this one too; repeatable. sasrec and gru4rec take tens of minutes.", metavar="NAME"
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers here too.", metavar="FILE")
    ] = None,
    ranks: Annotated[Path | None, typer.Option(help="Write every user's rank as Parquet.", metavar="FILE")] = None,
    report: Annotated[Path | None, typer.Option(help="Write index.html with plots here.", metavar="DIR")] = None,
) -> None:
    """Measure a model on the events held out of its data."""
    from app.quality_page import write_page
    from app.quality_table import baselines_table, metrics_table
    from model.baselines import GRIDS
    from model.evaluate import Compared, load
    from model.evaluate import evaluate as evaluate_models
    from model.sequential import NEURAL_GRIDS

    every_grid = {**GRIDS, **NEURAL_GRIDS}
    unknown = sorted(set(baseline or ()) - every_grid.keys())
    if unknown:
        raise typer.BadParameter(f"no baseline {unknown[0]!r}; there are: {', '.join(every_grid)}")
    chosen = {*(GRIDS if baselines else ()), *(baseline or ())}
    grids = {name: grid for name, grid in every_grid.items() if name in chosen}
    loaded = [load(directory) for directory in model]
    first = loaded[0]
    if report is not None and isinstance(first, Compared):
        raise typer.BadParameter("pages are written of models that are served; leave out --report, or see --json")
    with console.status("reading") as status:
        found = evaluate_models(loaded, data, protocol, seen, grids, status.update)
    numbers = found.to_json()
    if json_file is not None:
        json_file.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    if ranks is not None:
        found.write_ranks(ranks)
    if report is not None and not isinstance(first, Compared):
        _say(f"{write_page(report, found, first)} is ready; open it in a browser")
    console.print(metrics_table(numbers))
    if grids:
        console.print(baselines_table(numbers))


@cli.command()
def serve(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Model directory that 'train' wrote; default: none, until one of --models-dir is activated.",
            metavar="DIR",
        ),
    ] = None,
    redis_url: RedisUrlOption = None,
    data_dir: DataDirOption = None,
    archive_dir: ArchiveDirOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes any free one.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes.")] = None,
    device: Device | None = None,
    models_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the models that can be activated; default: where --model is, else models.", metavar="DIR"
        ),
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="File that 'lisarec keys add' wrote.", metavar="FILE")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Let other machines in without keys.", show_default=False)
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(help="One more shop, and its model; repeatable.", metavar="NAME=DIR")
    ] = None,
    playground: Annotated[
        bool | None, typer.Option("--playground", help="Show users' states at /playground.", show_default=False)
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Lines for people, or one JSON object a line; default: text.")
    ] = None,
) -> None:
    """Serve a model over HTTP. What is not given comes from LISAREC_* in the environment, else from the defaults.

    Without a model events are logged and popular items recommended, until the first model is activated.
    Without keys only this machine reaches the service.
    """
    from app.main import serve as serve_http

    given = {
        "model_dir": model,
        "redis_url": redis_url,
        "data_dir": data_dir,
        "archive_dir": archive_dir,
        "host": host,
        "port": port,
        "workers": workers,
        "device": device,
        "models_dir": models_dir,
        "keys_file": keys,
        "insecure": insecure,
        "tenants": _tenants(tenant) if tenant else None,
        "playground": playground,
        "log_format": log_format,
    }
    serve_http(_settings({name: value for name, value in given.items() if value is not None}))


@cli.command()
def rebuild(
    model: ModelOption,
    redis_url: RedisUrlOption = None,
    data_dir: DataDirOption = None,
    archive_dir: ArchiveDirOption = None,
) -> None:
    """Fold all events into a new model's states.

    The old model goes on being served, and events may go on coming in; 'activate' then switches to the new one.
    """
    from app import generations

    settings = _store_settings(redis_url=redis_url, data_dir=data_dir, archive_dir=archive_dir)
    os.nice(10)  # whoever is served goes first
    with Progress(TextColumn("{task.completed:,} events"), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("events", total=None)
        done = asyncio.run(
            generations.rebuild(settings, model, lambda rebuilt: bar.update(task, completed=rebuilt.events))
        )
    name = model.resolve().name
    _say(f"{name}: {done.events:,} events of {done.users:,} users folded; 'lisarec activate {name}' switches to it")


@cli.command()
def activate(
    name: Annotated[str, typer.Argument(help="Of a model directory in the models folder.", metavar="NAME")],
    redis_url: RedisUrlOption = None,
    data_dir: DataDirOption = None,
    models_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of the models; default: where LISAREC_MODEL_DIR is, else models.", metavar="DIR"),
    ] = None,
) -> None:
    """Let every process on a store serve another model.

    They follow within a second or so; no request fails. A model that was not rebuilt may be activated too: until a
    user's events are folded for it, which the first request starts, a user with many of them gets popular items.
    """
    from app import generations

    settings = _store_settings(redis_url=redis_url, data_dir=data_dir, models_dir=models_dir)
    named, before = asyncio.run(generations.activate(settings, name))
    _say(f"{named.name}, generation {named.tag.hex()}, is active")
    if before is not None and before != named:
        _say(f"'lisarec activate {before.name}' goes back, 'lisarec drop {before.name}' lets go of its states")


@cli.command()
def experiment(
    name: Annotated[str | None, typer.Argument(help="Of the experiment.", metavar="[NAME]")] = None,
    shares: Annotated[
        list[str] | None, typer.Argument(help="Models and their shares of the users.", metavar="MODEL=SHARE...")
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="Serve the active model to everybody again.")] = False,
    redis_url: RedisUrlOption = None,
    data_dir: DataDirOption = None,
    models_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of the models; default: where LISAREC_MODEL_DIR is, else models.", metavar="DIR"),
    ] = None,
) -> None:
    """Let every process on a store serve several models at the same time, each to its share of the users.

    Who gets which is told by a hash of the user's id and the experiment's name. GET /v1/stats tells what came of it.
    """
    from pydantic import ValidationError

    from app import generations
    from app.schemas import Experiment

    if end == (name is not None):
        raise typer.BadParameter("give a name and MODEL=SHARE for two models or more, or --end")
    settings = _store_settings(redis_url=redis_url, data_dir=data_dir, models_dir=models_dir)
    begun = None
    if name is not None:
        try:
            given = [share.rpartition("=") for share in shares or ()]
            begun = Experiment(name=name, shares={model: float(part) for model, _, part in given})
        except (ValueError, ValidationError) as exc:
            raise typer.BadParameter(
                "an experiment is a name and MODEL=SHARE for 2 to 8 models, with shares above 0"
            ) from exc
    asyncio.run(generations.note_experiment(settings, begun))
    _say("the experiment has ended" if begun is None else f"experiment {begun.name}: {', '.join(shares or ())}")


@cli.command()
def drop(
    name: Annotated[str, typer.Argument(help="Name, or tag, of a generation nobody serves.", metavar="NAME")],
    redis_url: RedisUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Remove the states of a model nobody serves. Events stay, so they can be rebuilt."""
    from app import generations

    settings = _store_settings(redis_url=redis_url, data_dir=data_dir)
    removed = asyncio.run(generations.drop(settings, name))
    _say(f"{removed:,} states of {name} removed")


@cli.command()
def archive(
    redis_url: Annotated[str | None, typer.Option(help="Move the log of this Redis.", metavar="URL")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Copy the log of the SQLite store in this directory.", metavar="DIR")
    ] = None,
    archive_dir: Annotated[
        Path | None, typer.Option(help="Where the archive is, or will be made.", metavar="DIR")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="One turn, instead of a turn every --every seconds.")] = False,
    every: Annotated[float, typer.Option(min=0, help="Seconds between two turns.")] = 60,
    keep_tail: Annotated[
        float, typer.Option(min=0, help="Seconds that an archived event stays in Redis at least.")
    ] = 3600,
    keep_days: Annotated[
        int | None,
        typer.Option(min=1, help="Forget archived events after so many whole days; default: never.", metavar="DAYS"),
    ] = None,
    metrics: MetricsOption = None,
) -> None:
    """Move the event log into Parquet files, each event once; it may be killed at any time and goes on where it was.

    What is not given comes from LISAREC_* in the environment. Afterwards 'lisarec train --data DIR' trains on it, and
    services on Redis need the same directory as --archive-dir.
    """
    from app.archiving import ArchiverMetrics, Turns, run

    settings = _store_settings(redis_url=redis_url, data_dir=data_dir, archive_dir=archive_dir)
    if settings.archive_dir is None:
        raise typer.BadParameter("give the archive with --archive-dir DIR, or LISAREC_ARCHIVE_DIR in the environment")
    if redis_url is not None and data_dir is not None:
        raise typer.BadParameter("give one of --redis-url and --data-dir")
    if data_dir is not None:
        settings = settings.model_copy(update={"redis_url": None})
    numbers = ArchiverMetrics()
    if metrics is not None:
        numbers.listen(metrics.host, metrics.port)
    run(settings, Turns(None if once else every, keep_tail, keep_days), _line_of_log(settings) or _say, numbers)


def _seconds(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    if not number.isdecimal() or not int(number) or unit not in seconds:
        raise typer.BadParameter(f"{text!r} is no time such as 24h, 30m or 7d")
    return float(int(number) * seconds[unit])


@cli.command()
def retrain(
    redis_url: RedisUrlOption = None,
    data_dir: DataDirOption = None,
    archive_dir: ArchiveDirOption = None,
    models_dir: Annotated[
        Path | None, typer.Option(help="Folder of the models, where new ones are put.", metavar="DIR")
    ] = None,
    every: Annotated[
        float | None, typer.Option(parser=_seconds, help="Again and again, as 24h; default: once.", metavar="TIME")
    ] = None,
    preset: Annotated[str, typer.Option(help="Shape and training settings.", callback=_known_preset)] = "lisa-mini",
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the preset's.")] = None,
    min_events: Annotated[int, typer.Option(min=1, help="In the archive, before there is a first model.")] = 2_000,
    max_events: Annotated[
        int, typer.Option(min=1, help="The newest ones to train on; they bound the memory.")
    ] = 2_000_000,
    max_loss: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the served model's NDCG@10 that a new one may lack.")
    ] = 0.1,
    metrics: MetricsOption = None,
) -> None:
    """Train on the archive, compare with the model that is served, and serve the new one if it is no worse.

    May be killed at any time and goes on where it was. Exits 0 when a new model is served or there is too little to
    train on yet, and 3 when the new one was refused. How it ended stands in retrain.json beside the models.
    """
    from app import retraining
    from app.trainer_metrics import TrainerMetrics

    settings = _store_settings(redis_url=redis_url, data_dir=data_dir, archive_dir=archive_dir, models_dir=models_dir)
    plan = retraining.Plan(preset, epochs, min_events, max_events, max_loss)
    numbers = TrainerMetrics()
    if metrics is not None:
        numbers.listen(metrics.host, metrics.port)
    outcome = retraining.run(settings, plan, every, console, numbers)
    if outcome.outcome == "refused":
        raise typer.Exit(3)


@cli.command()
def backup(
    out: Annotated[Path, typer.Option(help="File to write, such as log.jsonl.gz.", metavar="FILE")],
    redis_url: RedisUrlOption = None,
    data_dir: DataDirOption = None,
    archive_dir: ArchiveDirOption = None,
) -> None:
    """Write the whole log, archived events included, to one file, from which 'restore' fills any store.

    The service goes on meanwhile. The file appears when all of it is on disk.
    """
    from app import backups

    settings = _store_settings(redis_url=redis_url, data_dir=data_dir, archive_dir=archive_dir)
    with Progress(TextColumn("{task.completed:,} entries"), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("entries", total=None)
        entries = asyncio.run(backups.backup(settings, out, lambda done: bar.update(task, completed=done)))
    _say(f"{out}: {entries:,} entries of the log")


@cli.command()
def restore(
    file: Annotated[Path, typer.Argument(help="That 'backup' wrote.", metavar="FILE")],
    model: ModelOption,
    redis_url: RedisUrlOption = None,
    data_dir: DataDirOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after an interruption; nothing counts twice.")
    ] = False,
) -> None:
    """Fill an empty store with a back-up, and fold its events for a model."""
    from app import backups

    settings = _store_settings(redis_url=redis_url, data_dir=data_dir)
    with Progress(TextColumn("{task.completed:,} entries"), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("entries", total=None)
        entries = asyncio.run(
            backups.restore(
                settings, file, model, resume=resume, on_progress=lambda done: bar.update(task, completed=done)
            )
        )
    _say(f"{entries:,} entries restored; try 'lisarec serve --model {model}'")


@cli.command()
def replay(
    data: DataOption,
    url: Annotated[str, typer.Option(help="Where the service listens.")] = "http://127.0.0.1:8000",
    batch: Annotated[int, typer.Option(min=1, max=1000, help="Events in one request.")] = 500,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time, never two of one user.")] = 4,
    hold_out: Annotated[int, typer.Option(min=0, help="How many last events of each user to leave out.")] = 0,
    key_file: Annotated[
        Path | None, typer.Option(help="File with a key that may write events, where keys are on.", metavar="FILE")
    ] = None,
) -> None:
    """Post a data set as events into a running service. Repeating it counts nothing twice."""
    from app.replay import histories
    from app.replay import replay as replay_events
    from model.data import read_interactions

    interactions = read_interactions(data)
    lengths = interactions.starts[1:] - interactions.starts[:-1]
    events = int((lengths - hold_out).clip(0).sum())
    with Progress(
        TextColumn("events"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    ) as bar:
        task = bar.add_task("events", total=events)
        counts = asyncio.run(
            replay_events(
                histories(interactions, hold_out),
                url,
                batch_size=batch,
                concurrency=concurrency,
                key=None if key_file is None else key_file.read_text(encoding="utf-8").strip(),
                on_sent=lambda sent: bar.advance(task, sent),
            )
        )
    _say(_replay_summary(counts))


@cli.command("data")
def download_data(
    name: Annotated[str, typer.Argument(help="ml-1m, beauty or ml-latest-small.")],
    out: Annotated[
        Path | None, typer.Option(help="Data directory to write; default: data/NAME.", metavar="DIR")
    ] = None,
) -> None:
    """Download a public data set and check its hash."""
    from app.download import download, find

    public_set = find(name)
    target = out or Path("data") / name
    _say(f"{public_set.title}\nTerms of use: {public_set.terms}; {public_set.terms_url}")
    with Progress(TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(name, total=None)
        download(name, target, lambda done, size: bar.update(task, completed=done, total=size))
    _say(f"{target} is ready; try 'lisarec train --data {target} --out models/{name}'")


@cli.command()
def demo(
    data: Annotated[Path | None, typer.Option(help="Use this instead of the made-up shop.", metavar="DIR")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of 127.0.0.1 to serve on.")] = 8000,
) -> None:
    """Train on a made-up shop, serve it, say what to try."""
    from app.demo import demo as run_demo

    run_demo(data, port, console)


items_cli = typer.Typer(help="The items of a running service.", no_args_is_help=True)
cli.add_typer(items_cli, name="items")


@items_cli.command("import")
def import_items(
    file: Annotated[
        Path, typer.Argument(help="Table with item_id and any of title, categories (a|b), available.", metavar="FILE")
    ],
    url: Annotated[str, typer.Option(help="Where the service listens.")] = "http://127.0.0.1:8000",
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with a key that may write the catalogue, where keys are on.", metavar="FILE"),
    ] = None,
) -> None:
    """Say something of many items: .tsv, .csv (.gz) or .parquet.

    An empty cell, like a column that is missing, leaves what was said before. It can be done again.
    """
    from app.items_import import read, send

    items = read(file)
    key = None if key_file is None else key_file.read_text(encoding="utf-8").strip()
    with Progress(
        TextColumn("items"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    ) as bar:
        task = bar.add_task("items", total=len(items))
        unknown = send(items, url, key, on_sent=lambda sent: bar.advance(task, sent))
    rest = f"; {unknown:,} of them no model has learned yet" if unknown else ""
    _say(f"{len(items):,} items noted{rest}")


keys_cli = typer.Typer(help="Keys, which say who may call the service, and for which tenant.", no_args_is_help=True)
cli.add_typer(keys_cli, name="keys")
KeysFileOption = Annotated[
    Path | None, typer.Option("--keys", help="The file; default: LISAREC_KEYS_FILE, else keys.", metavar="FILE")
]


@keys_cli.command("add")
def add_key(
    scope: Annotated[
        list[str], typer.Option(help="What it may do: events:write, recs:read, users:admin ...; repeatable.")
    ],
    keys: KeysFileOption = None,
    tenant: Annotated[str | None, typer.Option(help="Whose it is; default: LISAREC_TENANT, else main.")] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(help="For browsers: pages that may use it, as https://shop.example; repeatable."),
    ] = None,
    rate: Annotated[int | None, typer.Option(min=1, help="Requests a minute; default: any number.")] = None,
    note: Annotated[str, typer.Option(help="Who has it, for people.")] = "",
) -> None:
    """Make a key and print it, once. The file gets its hash; services notice within a second."""
    from pydantic import ValidationError

    from app import keys as keyring

    file = _keys_file(keys)
    known = ", ".join(keyring.SCOPES)
    if unknown := sorted(set(scope) - set(keyring.SCOPES)):
        raise typer.BadParameter(f"no scope {unknown[0]!r}; there are: {known}")
    scopes = [one for one in keyring.SCOPES if one in scope]
    try:
        text, key = keyring.make(tenant or _store_settings().tenant, scopes, origin or (), rate, note)
    except ValidationError as exc:
        raise typer.BadParameter("; ".join(error["msg"] for error in exc.errors())) from exc
    keyring.add(file, key)
    complaints.print(f"key {key.id} for {key.tenant}, in '{file}'; it is shown once:", highlight=False, markup=False)
    _say(text)


@keys_cli.command("list")
def list_keys(keys: KeysFileOption = None) -> None:
    """Say which keys there are; nobody can say what they are."""
    from app.keys import read

    for key in read(_keys_file(keys)):
        rate = "" if key.requests_per_minute is None else f"{key.requests_per_minute}/min"
        _say("  ".join(filter(None, (key.id, key.tenant, ",".join(key.scopes), *key.origins, rate, key.note))))


@keys_cli.command("remove")
def remove_key(
    key_id: Annotated[str, typer.Argument(help="As 'lisarec keys list' shows it.", metavar="ID")],
    keys: KeysFileOption = None,
) -> None:
    """Let a key be valid no longer; services notice within a second."""
    from app.keys import remove

    remove(_keys_file(keys), key_id)
    _say(f"key {key_id} is no longer valid")


def _keys_file(given: Path | None) -> Path:
    return given or _store_settings().keys_file or Path("keys")


@cli.command()
def bench(
    model: Annotated[
        Path | None, typer.Option(help="Trained model, whose weights and codes are measured.", metavar="DIR")
    ] = None,
    items: Annotated[list[int] | None, typer.Option(min=1, help="Size of the catalogue; repeatable.")] = None,
    codes: Annotated[
        Literal["trained", "random"], typer.Option(help="Codes of those items: like the model's, or without structure.")
    ] = "trained",
    url: Annotated[str | None, typer.Option(help="Measure this service instead; its store keeps the events.")] = None,
    redis: Annotated[bool, typer.Option("--redis", help="On a Redis of its own, not on SQLite.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Of the service, on Redis.")] = 2,
    rate: Annotated[float, typer.Option(min=1, help="Recommendations per second to begin with.")] = 500.0,
    seconds: Annotated[float, typer.Option(min=1, help="At each rate.")] = 10.0,
    p90_ms: Annotated[float, typer.Option(min=0.1, help="What it has to keep up with.")] = 7.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers here too.", metavar="FILE")
    ] = None,
) -> None:
    """Raise the rate of requests until the service no longer keeps up; service and load share this machine."""
    from app.bench import Bench, as_json, at, of_size, sync_ms
    from app.bench_table import bench_table

    if (model is None) == (url is None):
        raise typer.BadParameter("give either a model with --model DIR or a running service with --url URL")
    found = {}
    for size in [0] if model is None else items or [100_000]:
        name = str(url) if model is None else f"{size:,} items, {codes} codes"
        with ExitStack() as stack:
            with console.status(f"{name}: starting"):
                running = (
                    at(str(url))
                    if model is None
                    else stack.enter_context(of_size(model, size, codes, processes if redis else 1, on_redis=redis))
                )
                measured = Bench(running)
            stack.callback(measured.close)
            rows = []
            for row in measured.until_it_breaks(rate, seconds, p90_ms):
                rows.append(row)
                _say(f"{name}: {row.recommendations_per_s:,.0f} recommendations/s, p90 {row.p90_ms:.1f} ms")
        found[name] = as_json(rows)
        console.print(bench_table(name, rows, p90_ms))
    if model is not None:
        _say("this disk syncs 4 kB in {:.1f} ms (90th percentile {:.1f} ms)".format(*sync_ms()))
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _tenants(given: list[str]) -> dict[str, Path]:
    pairs = [text.partition("=") for text in given]
    if not all(name and model for name, _, model in pairs) or len({name for name, _, _ in pairs}) < len(pairs):
        raise typer.BadParameter("give each further tenant once, as --tenant NAME=DIR")
    return {name: Path(model) for name, _, model in pairs}


def _settings(given: dict[str, object]) -> Settings:
    from pydantic import ValidationError

    from app.settings import Settings

    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as exc:
        raise _bad_settings(exc) from None


def _store_settings(**given: object) -> StoreSettings:
    from pydantic import ValidationError

    from app.settings import StoreSettings

    try:
        return StoreSettings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as exc:
        raise _bad_settings(exc) from None


def _bad_settings(exc: ValidationError) -> typer.BadParameter:
    """Of what does not go together, no field is at fault."""
    return typer.BadParameter(
        "; ".join(": ".join((*map(str, error["loc"][:1]), error["msg"])) for error in exc.errors())
    )


def _line_of_log(settings: StoreSettings) -> Callable[[str], None] | None:
    """How a process that runs for ever says something where other programs read it; None where people do."""
    from app import logs

    if settings.log_format == "text":
        return None
    logs.configure(settings.log_level, settings.log_format)
    return logging.getLogger("app.archiving").info


def _replay_summary(counts: ReplayCounts) -> str:
    return (
        f"{counts.accepted:,} events accepted, {counts.duplicates:,} known before, "
        f"{counts.unknown_items:,} of unknown items; {counts.requests:,} requests, {counts.retries:,} sent again"
    )


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
