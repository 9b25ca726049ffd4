"""Compare settings that may become the default, on validation events alone; no test event is read.

A variant is a preset with changed settings: ``lisa-mini,dropout=0.5,epochs=5``. Each variant is trained on each table,
to its last epoch. The first table shows the quality of the best epoch, the paired difference to the first variant, and
the epoch that each patience would have kept, with its loss of quality. ``variants.py`` defines the changes other than
settings.

The second table evaluates the choice of the lift's decay for the first variant's model. One half of the validation
users chooses it, as a training does; the other half compares it with the usual decay, with the strength that is best
for the first half. Then the halves are swapped.

Trainings are kept in ``--out`` and not repeated; an interrupted training resumes.

    python -m benchmarks.quality.training.choices --out runs/choices --data $LISAREC_DATA/ml-1m \\
        --data $LISAREC_DATA/beauty --variant lisa-mini --variant lisa-recent,recent_items=64
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.machine import cpu
from benchmarks.quality.training.epoch_printer import EpochPrinter
from benchmarks.quality.training.variants import TEACHER, Variant
from model.config import DEFAULT_THREADS, Config, DataCard
from model.lisa.item_followers import Lift
from model.metrics import gains, mean_interval_95
from model.training.lift_choice import chosen_lift
from model.training.loop import LAST_CHECKPOINT
from model.training.memory import Resources
from model.training.threads import use_threads
from model.training.train import prepare_training
from model.training.trainer import Trainer, prepare

TEMPORAL = {"online-retail", "completejourney"}  # tables that are split in time
VARIANTS = ("lisa-mini", "lisa-mini,dropout=0.35", "lisa-mini,dropout=0.5", "lisa-mini,epochs=5")
PATIENCE = (1, 2, 3)
GAINS = "gains.npy"
METRICS = {"hr_at_10": "HR@10", "ndcg_at_10": "NDCG@10"}

console = Console(width=320)
Gains = dict[str, NDArray[np.float64]]


class LiftTrial(NamedTuple):
    """The value of a chosen decay of the lift for the other half of the users, (Q,) by metric, and the choices."""

    chosen: Gains
    usual: Gains
    lifts: list[Lift]


@dataclass(frozen=True)
class Run:
    """A training: the validation NDCG@10 of its epochs, and the metrics of each validation user.

    without_lift  NDCG@10 of the best epoch without a lift
    """

    events_per_item: float
    without_lift: float
    ndcg_at_10: list[float]
    lift: dict[str, Any]
    by_user: Gains
    lift_trial: LiftTrial

    def kept(self, patience: int) -> int:
        """Return the epoch that a training with this patience would have kept, counted from 0."""
        best = 0
        for epoch, quality in enumerate(self.ndcg_at_10):
            best = epoch if quality >= self.ndcg_at_10[best] else best
            if epoch - best >= patience:
                break
        return best


def train(data: Path, variant: Variant, seed: int, out: Path, device: str) -> Run:
    """Train once to the last epoch, or read the stored result."""
    folder = out / data.name / f"{variant.text}-seed-{seed}"
    if not (folder / "run.json").exists():
        shape, training = variant.settings()
        config = Config(
            model=shape,
            training=training.model_copy(update={"patience": training.epochs, "seed": seed}),
            data=DataCard(split="temporal" if data.name in TEMPORAL else "loo"),
        )
        resume = (folder / LAST_CHECKPOINT).exists()
        with variant.parts(folder.with_name(f"{TEACHER}-seed-{seed}")):
            inputs = prepare_training(data, folder, config, Resources(device))
            trainer = Trainer(prepare(inputs.interactions, inputs.parts, inputs.recipe), inputs.recipe, folder, device)
            trainer.fit(EpochPrinter(f"{data.name}, {variant.text}, seed {seed}", console), resume)
        _keep(trainer, folder)
    return _read(folder)


def train_all(
    trainings: Sequence[tuple[Path, Variant, int]], out: Path, device: str, threads: int, processes: int
) -> Iterator[Run]:
    """Train in this many processes at the same time, and yield the runs in order."""
    arguments = [*zip(*trainings, strict=True), itertools.repeat(out), itertools.repeat(device)]
    if processes == 1:
        use_threads(threads)
        yield from map(train, *arguments)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, use_threads, (threads,)) as pool:
        yield from pool.map(train, *arguments)


def _keep(trainer: Trainer, folder: Path) -> None:
    assert trainer.ranked is not None, "the table holds nothing out for validation"
    usual, trial = _usual_lift(trainer), try_lift(trainer)
    plain = _gains(trainer.ranked.ranks(usual._replace(strength=0.0)))
    by_user = [_gains(trainer.ranked.ranks(usual)), trial.chosen, trial.usual]
    np.save(folder / GAINS, np.stack([list(found.values()) for found in by_user]))
    about = {
        "events_per_item": trainer.config.data.events_per_item,
        "ndcg_at_10_without_lift": plain["ndcg_at_10"].mean(),
        "ndcg_at_10": [report.ndcg_at_10 for report in trainer.reports],
        "lift": trainer.lift._asdict(),
        "lifts_of_halves": [lift._asdict() for lift in trial.lifts],
    }
    (folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")


def _read(folder: Path) -> Run:
    about = json.loads((folder / "run.json").read_text())
    plain, chosen, usual = (dict(zip(METRICS, found, strict=True)) for found in np.load(folder / GAINS))
    lifts = [Lift(**lift) for lift in about["lifts_of_halves"]]
    quality = about["ndcg_at_10_without_lift"], about["ndcg_at_10"]
    return Run(about["events_per_item"], *quality, about["lift"], plain, LiftTrial(chosen, usual, lifts))


def try_lift(trainer: Trainer) -> LiftTrial:
    """Choose a decay of the lift by each half of the validation users, and apply it to the other half."""
    ranked = trainer.ranked
    assert ranked is not None
    users = len(ranked.ranks(trainer.chooser.usual))
    chosen, usual = np.empty(users, np.int64), np.empty(users, np.int64)
    lifts = []
    for choosing, asked in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        choice = trainer.chooser.choose(ranked, choosing)
        lifts.append(choice.lift)
        chosen[asked] = ranked.ranks(choice.lift)[asked]
        usual[asked] = ranked.ranks(_usual_lift(trainer, choosing))[asked]
    return LiftTrial(_gains(chosen), _gains(usual), lifts)


def _usual_lift(trainer: Trainer, choosing: slice = slice(None)) -> Lift:
    """Return the lift with the usual decay, and the strength that is best for some of the users."""
    ranked, usual = trainer.ranked, trainer.chooser.usual
    assert ranked is not None
    return chosen_lift(lambda lift: ranked.ranks(lift)[choosing], usual, decays=(usual.decay,)).lift


def _gains(ranks: NDArray[np.int64]) -> Gains:
    return {metric: gains(ranks, metric) for metric in METRICS}


def difference(one: Gains, other: Gains, metric: str) -> str:
    """Return the paired difference with its interval over users, as text."""
    by_user = one[metric] - other[metric]
    low, high = mean_interval_95(np.round(by_user, 12))
    return f"{by_user.mean():+.4f} ({low:+.4f} to {high:+.4f})"


def mean_gains(runs: Sequence[Run]) -> Gains:
    """Return the metrics of each user, as the mean over seeds."""
    return {metric: np.mean([run.by_user[metric] for run in runs], axis=0) for metric in METRICS}


def variants_table(found: dict[tuple[str, str], list[Run]]) -> Table:
    """Return the quality of each variant on each table, compared with the first variant."""
    columns = ("table", "events an item", "variant", *METRICS.values(), "minus the first, HR@10", "NDCG@10")
    patience = [f"patience {one}: epoch, loss" for one in PATIENCE]
    table = Table(*columns, "without lift", "best epoch", *patience, box=box.MARKDOWN)
    firsts: dict[str, Gains] = {}
    for (name, variant), runs in found.items():
        own = mean_gains(runs)
        first = firsts.setdefault(name, own)
        margins = ["", ""] if own is first else [difference(own, first, metric) for metric in METRICS]
        means = [f"{own[metric].mean():.4f}" for metric in METRICS]
        cells = ["; ".join(_kept(run, patience) for run in runs) for patience in PATIENCE]
        plain = f"{np.mean([run.without_lift for run in runs]):.4f}"
        epochs = "; ".join(str(run.kept(len(run.ndcg_at_10)) + 1) for run in runs)
        table.add_row(name, f"{runs[0].events_per_item:.1f}", variant, *means, *margins, plain, epochs, *cells)
    return table


def _kept(run: Run, patience: int) -> str:
    epoch = run.kept(patience)
    return f"{epoch + 1}, {max(run.ndcg_at_10) - run.ndcg_at_10[epoch]:.4f}"


def lifts_table(found: dict[tuple[str, str], list[Run]]) -> Table:
    """Return the value of the chosen decay for users who have not chosen it, for the first variant."""
    table = Table("table", "chosen by each half", "minus the usual decay, HR@10", "NDCG@10", "by all", box=box.MARKDOWN)
    names: set[str] = set()
    for (name, _), runs in found.items():
        if name in names:
            continue
        names.add(name)
        for run in runs:
            trial = run.lift_trial
            chosen = "; ".join(_lift_text(lift) for lift in trial.lifts)
            margins = [difference(trial.chosen, trial.usual, metric) for metric in METRICS]
            table.add_row(name, chosen, *margins, _lift_text(Lift(**run.lift)))
    return table


def _lift_text(lift: Lift) -> str:
    return f"{lift.strength:g}, decay {lift.decay:g}"


def main(
    data: Annotated[list[Path], typer.Option(help="Data directory; repeatable.")],
    out: Annotated[Path, typer.Option(help="Where trainings are kept.")],
    variant: Annotated[
        list[str] | None, typer.Option(help="PRESET[,SETTING=VALUE...]; repeatable, the first is compared.")
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Repeatable; default: 0.")] = None,
    device: str = "cpu",
    threads: int = DEFAULT_THREADS,
    processes: Annotated[int, typer.Option(min=1, help="Trainings at once.")] = 1,
) -> None:
    """Train what is not trained yet, and print both tables."""
    variants, seeds = [Variant.of(text) for text in variant or VARIANTS], seed or [0]
    trainings = list(itertools.product(data, variants, seeds))
    found: dict[tuple[str, str], list[Run]] = {}
    for (directory, each, _), run in zip(trainings, train_all(trainings, out, device, threads, processes), strict=True):
        found.setdefault((directory.name, each.text), []).append(run)
    console.print(variants_table(found), soft_wrap=True)
    console.print(lifts_table(found), soft_wrap=True)
    console.print(
        f"validation, best epoch of each training, seeds {seeds}; {cpu()}, {len(os.sched_getaffinity(0))} cores, "
        f"{processes} processes of {threads} threads, {device}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    typer.run(main)
