"""Measure the loss of quality by less training work, and by warm starts, on validation events alone.

Each way is one training of `lisa-mini`. All have the same validation events, each with its whole history. Time is
processor time, which includes reading and writing, because wall time varies on a shared machine. The warm start
simulates 5 % new events: a first model is trained on the events before them, without the validation events. With
``--warm 1,0.0005,0.4,6`` the first model lacks 30 % of the events, and six warm starts follow each other, each with 5 %
more. Trainings use a GPU if there is one.

Trainings are kept in ``--out`` and not repeated.

    python -m benchmarks.quality.training.less_work --data $LISAREC_DATA/online-retail --out runs/less --epochs 3
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import polars as pl
import torch
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.machine import cpu, load_averages
from benchmarks.quality.training.epoch_printer import EpochPrinter
from model.artifact import model_directory
from model.config import (
    EVENT_WEIGHTS,
    WARM_EPOCH_SHARE,
    WARM_EPOCHS,
    WARM_LEARNING_RATE,
    Config,
    DataCard,
    Protocol,
    SplitName,
    preset,
    warm_training,
)
from model.data.interactions import Interactions
from model.data.readers import read_interactions
from model.data.splits import split
from model.training.memory import Resources
from model.training.threads import use_threads
from model.training.train import train, train_warm

NEW_SHARE = 0.05  # of the training events, which the first model of a warm start lacks
EVERYTHING, BEFORE, WARM = "everything", "before", "warm"

console = Console(width=160)


class Way(NamedTuple):
    """What a way changes: settings of the preset's training, and of the data card."""

    training: Mapping[str, Any]
    card: Mapping[str, Any]


class Found(NamedTuple):
    """The result of a training: the best validation NDCG@10 of its epochs, their number, and CPU seconds."""

    ndcg_at_10: float
    epochs: int
    cpu_s: float


class WarmStarts(NamedTuple):
    """Warm trainings in a row, each with 5 % more events, and the settings of each."""

    epochs: int
    learning_rate: float
    share: float
    in_a_row: int = 1

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse ``EPOCHS,LEARNING_RATE,SHARE[,IN_A_ROW]``."""
        epochs, rate, share, *row = text.split(",")
        return cls(int(epochs), float(rate), float(share), *map(int, row))

    @property
    def name(self) -> str:
        """The name of the row in the table of results."""
        text = f"{WARM}: {self.epochs} epochs, rate {self.learning_rate:g}, share {self.share:g}"
        return text if self.in_a_row == 1 else f"{text}, {self.in_a_row} in a row"


class Trials:
    """Trains on one table in different ways, all with the same seed."""

    def __init__(self, data: Path, out: Path, protocol: Protocol, epochs: int | None, seed: int) -> None:
        self._data, self._out = data, out / (data.name if seed == 0 else f"{data.name}-seed-{seed}")
        self._resources = Resources("cuda" if torch.cuda.is_available() else "cpu")
        shape, training = preset("lisa-mini")
        changed = {"seed": seed} if epochs is None else {"seed": seed, "epochs": epochs}
        self._shape, self._training = shape, training.model_copy(update=changed)
        self._split: SplitName = "temporal" if protocol == "temporal" else "loo"
        self._interactions = read_interactions(data).stepping(EVENT_WEIGHTS)
        self._parts = split(self._interactions, self._split)

    def ways(self) -> dict[str, Way]:
        """Return the ways to train, by name, except warm starts."""
        found = {
            EVERYTHING: Way({}, {}),
            "--users-sample 0.5": Way({}, {"users_sample": 0.5}),
            "--users-sample 0.25": Way({}, {"users_sample": 0.25}),
            "--events-per-user 64": Way({"events_per_user": 64}, {}),
            "--events-per-user 16": Way({"events_per_user": 16}, {}),
            "512 negatives, uniform": Way({"full_softmax_items": 1, "sampled_negatives": 512}, {}),
            "512 negatives, popular": Way(
                {"full_softmax_items": 1, "sampled_negatives": 512, "negatives": "popular"}, {}
            ),
        }
        if not self._interactions.time_is_order:
            moment = datetime.fromtimestamp(self._quantile_us(0.5) / 1e6, UTC)
            found["--since, the newest half"] = Way({}, {"since": moment})
        return found

    def train(self, name: str, way: Way) -> Found:
        """Train in one way, or read the stored result."""
        training = self._training.model_copy(update=way.training)
        config = Config(model=self._shape, training=training, data=DataCard(split=self._split, **way.card))
        return self._measured(self._out / name.strip("-").replace(" ", "-"), config, None)

    def warm_start(self, starts: WarmStarts) -> Found:
        """Return the result of the last warm training of a row; make the models before it if necessary."""
        settings = {"epochs": starts.epochs, "learning_rate": starts.learning_rate, "epoch_share": starts.share}
        training = warm_training(self._training).model_copy(update=settings)
        place = self._out / f"{WARM}-{starts.epochs}-{starts.learning_rate:g}-{starts.share:g}"
        place = place if starts.in_a_row == 1 else place.with_name(f"{place.name}-in-a-row-{starts.in_a_row}")
        model = self._first_model(starts.in_a_row)
        for missing in range(starts.in_a_row - 1, 0, -1):
            out = place.with_name(f"{place.name}-without-{missing}")
            if not model_directory.exists(out):
                config = Config(model=self._shape, training=training, data=DataCard(train_on="all"))
                train_warm(model, self._earlier_events(missing), out, config, **self._common(out.name))
            model = model_directory.load(out)
        return self._measured(
            place, Config(model=self._shape, training=training, data=DataCard(split=self._split)), model
        )

    def _first_model(self, missing: int) -> model_directory.Artifact:
        """Return the model of the events without the newest, as many times 5 % of them."""
        out = self._out / (BEFORE if missing == 1 else f"{BEFORE}-{missing}")
        if not model_directory.exists(out):
            config = Config(model=self._shape, training=self._training, data=DataCard(train_on="all"))
            train(self._earlier_events(missing), out, config, **self._common(out.name))
        return model_directory.load(out)

    def _common(self, name: str) -> dict[str, Any]:
        return {"resources": self._resources, "progress": EpochPrinter(name, console)}

    def _measured(self, place: Path, config: Config, start: model_directory.Artifact | None) -> Found:
        result = place.with_name(f"{place.name}.json")
        if not result.exists():
            begin_s, common = time.process_time(), self._common(place.name)
            if start is None:
                made = train(self._data, place, config, **common)
            else:
                made = train_warm(start, self._data, place, config, **common)
            epochs = [epoch["ndcg_at_10"] for epoch in made.metrics["epochs"]]
            found = Found(max(epochs), len(epochs), time.process_time() - begin_s)
            result.write_text(json.dumps(found._asdict()), encoding="utf-8")
        return Found(**json.loads(result.read_text(encoding="utf-8")))

    def _quantile_us(self, share: float) -> int:
        return int(np.quantile(self._interactions.timestamp_us[self._parts.train], share))

    def _earlier_events(self, missing: int) -> Path:
        """Write the training events except the newest, as many times 5 % of them, to a data directory; return it."""
        before = self._parts.train & (self._interactions.timestamp_us < self._quantile_us(1 - missing * NEW_SHARE))
        directory = self._out / f"{BEFORE}-{missing}-data"
        directory.mkdir(parents=True, exist_ok=True)
        table_of(self._interactions, before).write_parquet(directory / "interactions.parquet")
        return directory


def table_of(interactions: Interactions, chosen: NDArray[np.bool_]) -> pl.DataFrame:
    """Return the chosen events as the table of a data directory."""
    users, items = (np.array(names) for names in (interactions.user_ids, interactions.item_ids))
    return pl.DataFrame(
        {
            "user_id": users[interactions.user[chosen]],
            "item_id": items[interactions.item[chosen]],
            "timestamp": interactions.timestamp_us[chosen] / 1e6,
            "type": np.array(interactions.type_names)[interactions.type[chosen]],
        }
    )


def results_table(found: Mapping[str, Found]) -> Table:
    """Return the quality and the time of each way, compared with the first."""
    table = Table("way", "epochs", "NDCG@10, validation", "difference", "CPU s", "share of it", box=box.MARKDOWN)
    first = found[EVERYTHING]
    for name, one in found.items():
        table.add_row(
            name,
            str(one.epochs),
            f"{one.ndcg_at_10:.4f}",
            "" if one is first else f"{one.ndcg_at_10 - first.ndcg_at_10:+.4f}",
            f"{one.cpu_s:.0f}",
            f"{one.cpu_s / first.cpu_s:.2f}",
        )
    return table


def main(
    data: Annotated[Path, typer.Option(help="Data directory.")],
    out: Annotated[Path, typer.Option(help="Where trainings are kept.")],
    protocol: Protocol = "temporal",
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the preset's.")] = None,
    way: Annotated[list[str] | None, typer.Option(help="Just these beside 'everything'; repeatable.")] = None,
    warm: Annotated[
        list[str] | None,
        typer.Option(help="EPOCHS,LEARNING_RATE,SHARE[,IN_A_ROW] of a warm training; repeatable."),
    ] = None,
    seed: int = 0,
) -> None:
    """Train what is not trained yet, and print the table."""
    use_threads()
    trials = Trials(data, out, protocol, epochs, seed)
    found = {
        name: trials.train(name, one)
        for name, one in trials.ways().items()
        if way is None or name in (EVERYTHING, *way)
    }
    for text in warm or [f"{WARM_EPOCHS},{WARM_LEARNING_RATE},{WARM_EPOCH_SHARE}"]:
        starts = WarmStarts.of(text)
        found[starts.name] = trials.warm_start(starts)
    console.print(results_table(found))
    console.print(
        f"{data.name}, seed {seed}, {cpu()}, load averages {load_averages()}, "
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}"
    )


if __name__ == "__main__":
    typer.run(main)
