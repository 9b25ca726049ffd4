"""The trainer: what has been collected becomes the next generation, if it is no worse than the one that is served.

A round goes through these steps, and may be killed in each of them; the next start goes on where it was. What it works
with lies in MODELS/.retraining, and `round.json` there says that the data are complete:

  prepare   the archive's events as they are now, and of these the past, which ends before what is asked
  try       a model trained on the past answers questions about what came then, as does the one that is served
  train     the same on everything, once it is no worse
  go live   MODELS/NAME: all events folded for it, activated; what the trainer made before the last two is removed

MODELS/retrain.json says how the last round ended, and what the trainer has made: it removes nothing else.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from rich.console import Console

from app import generations, no_model
from app.models_folder import load_named
from app.settings import StoreSettings
from app.store_factory import opened_store
from app.trainer_metrics import TrainerMetrics
from app.training_progress import TrainingProgress
from model import artifact
from model.artifact import MANIFEST, Artifact
from model.config import EVENT_WEIGHTS, Config, DataCard, TrainConfig, preset
from model.data_table import SUFFIXES
from model.exam import Exam, cut
from model.followers import STRENGTH, STRENGTHS
from model.metrics import difference, difference_interval_95, metrics
from model.train import CHECKPOINT, LAST, train
from storage.archive_events import TrainingEvents
from storage.archive_manifest import MANIFEST as ARCHIVE
from storage.errors import StorageError
from storage.records import KnownGeneration

WORK, ROUND, REPORT, LOCK = ".retraining", "round.json", "retrain.json", ".retraining.lock"
FEWEST_QUESTIONS = 100
LOOK_AGAIN_S = 600.0  # for enough events to begin with
AFTER_FAILURE_S = 300.0
NICENESS = 10

FACTS = ("served", "events", "questions", "ndcg_at_10", "served_ndcg_at_10", "difference_interval_95")

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """What an operator can set.

    max_loss  the share of the served model's NDCG@10 that a new one may lack, where that may be chance
    """

    preset: str = "lisa-mini"
    epochs: int | None = None
    min_events: int = 2_000
    max_events: int = 2_000_000
    max_loss: float = 0.1

    def config(self, lift_strength: float | None) -> Config:
        """To train on all that is there: what is held out is not."""
        shape, training = preset(self.preset)
        training = training.model_copy(
            update={"epochs": self.epochs or training.epochs, "lift_strength": lift_strength}
        )
        return Config(model=shape, training=training, data=DataCard(train_on="all"))


@dataclass(frozen=True)
class Outcome:
    """How a round ended. NDCG@10 on the judging half of the questions; of the served model, or of popular items.

    served  tag of the model that was served when the round began
    """

    outcome: Literal["activated", "refused", "waiting"]
    reason: str
    at: str
    name: str | None = None
    served: str | None = None
    events: int = 0
    questions: int = 0
    ndcg_at_10: float | None = None
    served_ndcg_at_10: float | None = None
    difference_interval_95: tuple[float, float] | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """What retrain.json says: the last outcome, what was served before the last activation, and all that was made."""

    last: dict[str, Any] | None = None
    previous: str | None = None
    made: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Report:
        try:
            found = json.loads((folder / REPORT).read_text(encoding="utf-8"))
            return cls(found["last"], found["previous"], tuple(found["made"]))
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError, KeyError) as exc:
            raise ValueError(f"'{folder / REPORT}' is none of the trainer's reports; move it away") from exc

    def write(self, folder: Path) -> None:
        _write(folder / REPORT, json.dumps(asdict(self), indent=2))


@dataclass(frozen=True)
class Verdict:
    passes: bool
    reason: str
    ndcg_at_10: float
    served_ndcg_at_10: float
    difference_interval_95: tuple[float, float]


def run(
    settings: StoreSettings, plan: Plan, every_s: float | None, console: Console, numbers: TrainerMetrics
) -> Outcome:
    """Retrain once, or for ever; in between, failures are said and waited out.

    raises  StorageError, ValueError, OSError  when the one round fails
    """
    os.nice(NICENESS)
    torch.set_num_threads(1)
    folder = settings.models_folder
    with _alone(folder):
        numbers.begin(folder, Report.read(folder), every_s or 0.0)
        while True:
            if every_s is not None:
                time.sleep(_due_in_s(folder, every_s))
            try:
                outcome = Round(settings, plan, console).run()
            except (StorageError, ValueError, OSError) as exc:
                if every_s is None:
                    raise
                numbers.failed()
                _say(console, f"will try again: {exc}")
                time.sleep(min(AFTER_FAILURE_S, every_s))
                continue
            numbers.ended(folder, Report.read(folder), outcome)
            _say(console, f"{outcome.outcome}: {outcome.reason}")
            if every_s is None:
                return outcome


class Round:
    """One round, begun or gone on with."""

    def __init__(self, settings: StoreSettings, plan: Plan, console: Console) -> None:
        if settings.archive_dir is None:
            raise ValueError("give the archive with --archive-dir DIR, or LISAREC_ARCHIVE_DIR in the environment")
        self._settings = settings
        self._plan = plan
        self._console = console
        self._folder = settings.models_folder
        self._work = self._folder / WORK
        self._archive_dir = settings.archive_dir
        self._begin_s = time.monotonic()

    def run(self) -> Outcome:
        served = self._served()
        if self._is_trained(served):
            return self._go_live(served)
        if not self._is_prepared(served):
            waiting = self._prepare(served)
            if waiting is not None:
                return self._ended(waiting)
        past, exam = self._cut(served)
        choosing, judging = exam.halves()
        tried = _with_best_lift(self._trained("past", None), choosing)
        ranks = judging.ranks(tried)
        verdict = self._judge(ranks, _served_ranks(judging, served, past), is_first=served is None)
        if verdict.passes:
            strength = _strength(tried) or 0.0
            verdict = self._checked(self._trained("all", strength), judging, ranks, verdict)
        self._note(**{**asdict(verdict), "questions": len(judging)})
        if not verdict.passes:
            return self._ended(self._outcome("refused", verdict.reason, served))
        self._made(self._noted()["name"])
        made = self._work / "all" / "model"
        shutil.rmtree(made / CHECKPOINT, ignore_errors=True)
        made.rename(self._folder / self._noted()["name"])
        return self._go_live(served)

    def _served(self) -> Artifact | None:
        """The model that users get answers from; None where there is none yet."""
        known = asyncio.run(self._known())
        chosen = [one for one in known if one.is_active] or [one for one in known if one.is_live]
        names = [one.named for one in chosen if one.named.tag != no_model.TAG]
        if not names:
            return None
        loaded = load_named(self._folder, names[0].name)
        if loaded.tag != names[0].tag.hex():
            raise ValueError(
                f"the model {names[0].name!r} in '{self._folder}' is not the one that is served; activate another one"
            )
        return loaded

    async def _known(self) -> list[KnownGeneration]:
        async with opened_store(self._settings) as store:
            return await store.generations.known()

    # ---- the steps

    def _is_trained(self, served: Artifact | None) -> bool:
        """Whether the model of this round lies where models lie, and is active already or was to replace this one."""
        noted = self._noted()
        if "name" not in noted or not artifact.exists(self._folder / noted["name"]):
            return False
        return _tag(served) in (noted["served"], artifact.load(self._folder / noted["name"]).tag)

    def _is_prepared(self, served: Artifact | None) -> bool:
        noted = self._noted()
        return noted.get("plan") == asdict(self._plan) and noted.get("served") == _tag(served)

    def _prepare(self, served: Artifact | None) -> Outcome | None:
        """Write the data of a round, from the archive as it is now; or say what is to be waited for."""
        self._clear()
        archived = TrainingEvents(self._archive_dir, self._settings.tenant)
        entries = len(archived) if (self._archive_dir / ARCHIVE).exists() else 0
        if entries < self._plan.min_events:
            reason = f"{entries:,} events are archived, {self._plan.min_events:,} are needed to begin with"
            return self._outcome("waiting", reason, served, events=entries)
        kinds = [kind for kind, weight in EVENT_WEIGHTS.items() if weight > 0]
        events = archived.newest(self._plan.max_events).filter(pl.col("type").is_in(kinds))
        past, exam = cut(events, _made_at_ms(self._folder, served))
        if len(exam) < FEWEST_QUESTIONS:
            reason = f"{len(exam)} users have done something new, {FEWEST_QUESTIONS} are needed to compare models"
            return self._outcome("waiting", reason, served, events=len(events), questions=len(exam))
        for name, table in (("past", past), ("all", events)):
            self._write_data(self._work / name / "data", table)
        events.write_parquet(self._work / "events.parquet")
        name = _new_name(self._folder)
        self._note(name=name, served=_tag(served), plan=asdict(self._plan), events=len(events))
        _say(self._console, f"round {name}: {len(events):,} events, {len(exam):,} questions")
        return None

    def _write_data(self, directory: Path, events: pl.DataFrame) -> None:
        """A data directory; titles and categories lie beside the archive."""
        directory.mkdir(parents=True)
        table = events.select("user_id", "item_id", "type", "value", timestamp=pl.col("timestamp_us") / 1e6)
        table.write_parquet(directory / "interactions.parquet")
        for suffix in SUFFIXES:
            if (self._archive_dir / f"items{suffix}").is_file():
                shutil.copy(self._archive_dir / f"items{suffix}", directory)

    def _cut(self, served: Artifact | None) -> tuple[pl.DataFrame, Exam]:
        return cut(pl.read_parquet(self._work / "events.parquet"), _made_at_ms(self._folder, served))

    def _trained(self, name: str, lift_strength: float | None) -> Artifact:
        """A model trained on these data, now or before."""
        out = self._work / name / "model"
        if artifact.exists(out):
            return artifact.load(out)
        config = self._plan.config(lift_strength)
        _say(self._console, f"training on {'everything' if name == 'all' else 'the past'}")
        with TrainingProgress(config.training.epochs, self._console) as progress:
            return train(self._work / name / "data", out, config, resume=(out / LAST).exists(), progress=progress)

    def _judge(self, ranks: Ranks, served: Ranks, *, is_first: bool) -> Verdict:
        """The first model has to gain something; a later one may lose what may be chance, and not too much of it."""
        new, old = (metrics(each)["ndcg_at_10"] for each in (ranks, served))
        interval = difference_interval_95(ranks, served, "ndcg_at_10")
        against = "popular items" if is_first else "the served model"
        numbers = f"NDCG@10 {new:.4f}, of {against} {old:.4f}, on {len(ranks):,} users"
        if is_first:
            passes = difference(ranks, served, "ndcg_at_10") > 0
        else:
            passes = interval[1] >= 0 and new >= old * (1 - self._plan.max_loss)
        return Verdict(passes, numbers, new, old, interval)

    def _checked(self, model: Artifact, judging: Exam, tried: Ranks, verdict: Verdict) -> Verdict:
        """Refuse what was spoiled by training on everything: on what it has seen now it should do better, not worse."""
        found = metrics(judging.ranks(model))["ndcg_at_10"]
        if found >= metrics(tried)["ndcg_at_10"] * (1 - self._plan.max_loss):
            return verdict
        reason = f"trained on everything, its NDCG@10 fell to {found:.4f}; {verdict.reason}"
        return replace(verdict, passes=False, reason=reason)

    def _go_live(self, served: Artifact | None) -> Outcome:
        noted = self._noted()
        name: str = noted["name"]
        if _tag(served) == noted["served"]:
            previous = None if served is None else served.name
            replace(Report.read(self._folder), previous=previous).write(self._folder)
            _say(self._console, f"folding all events for {name}")
            asyncio.run(generations.rebuild(self._settings, self._folder / name, lambda _: None))
            asyncio.run(generations.activate(self._settings, name))
        self._remove_older(name)
        reason = f"{name}; {noted['reason']}"
        return self._ended(self._outcome("activated", reason, served, name=name))

    def _remove_older(self, name: str) -> None:
        """Of what the trainer has made, and of `none`, only the model that is served and the one before stay."""
        report = Report.read(self._folder)
        gone = [made for made in report.made if made not in (name, report.previous)]
        free = asyncio.run(generations.let_go(self._settings, [*gone, no_model.NAME]))
        for one in set(gone) & free:
            shutil.rmtree(self._folder / one, ignore_errors=True)
        replace(report, made=tuple(made for made in report.made if made not in free)).write(self._folder)

    # ---- what is written down

    def _noted(self) -> dict[str, Any]:
        """Of this round; nothing before its data are complete."""
        try:
            noted: dict[str, Any] = json.loads((self._work / ROUND).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return noted

    def _note(self, **facts: object) -> None:
        _write(self._work / ROUND, json.dumps(self._noted() | facts, indent=2))

    def _made(self, name: str) -> None:
        report = Report.read(self._folder)
        replace(report, made=(*dict.fromkeys((*report.made, name)),)).write(self._folder)

    def _outcome(
        self, outcome: Literal["activated", "refused", "waiting"], reason: str, served: Artifact | None, **facts: Any
    ) -> Outcome:
        noted = {name: fact for name, fact in self._noted().items() if name in FACTS}
        stated: dict[str, Any] = {"served": _tag(served)} | noted | facts
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return Outcome(outcome, reason, at, seconds=round(time.monotonic() - self._begin_s, 1), **stated)

    def _ended(self, outcome: Outcome) -> Outcome:
        replace(Report.read(self._folder), last=asdict(outcome)).write(self._folder)
        self._clear()
        return outcome

    def _clear(self) -> None:
        (self._work / ROUND).unlink(missing_ok=True)  # first: without it, what is left over counts for nothing
        shutil.rmtree(self._work, ignore_errors=True)


def _served_ranks(judging: Exam, served: Artifact | None, past: pl.DataFrame) -> Ranks:
    if served is not None:
        return judging.ranks(served)
    return judging.ranks_by_counts(dict(past.group_by("item_id").len().sort("item_id").iter_rows()))


def _with_best_lift(model: Artifact, choosing: Exam) -> Artifact:
    """What followers gain depends on how rare items are. Training on everything leaves no validation to choose it."""
    unit = model.model.lift / (_strength(model) or STRENGTH)

    def found(strength: float) -> float:
        model.model.lift = unit * strength  # not into the memory that is mapped from the file
        return metrics(choosing.ranks(model))["ndcg_at_10"]

    best = max(STRENGTHS, key=found)
    model.model.lift = unit * best
    training = model.config.training.model_copy(update={"lift_strength": best})
    return replace(model, config=model.config.model_copy(update={"training": training}))


def _strength(model: Artifact) -> float | None:
    """Of the lift that the model was trained with; None where validation was to choose it."""
    return model.config.training.lift_strength if isinstance(model.config.training, TrainConfig) else None


def _made_at_ms(folder: Path, served: Artifact | None) -> int:
    """When the model was ready: what was logged since cannot have been in its training, wherever it comes from."""
    return 0 if served is None else int((folder / served.name / MANIFEST).stat().st_mtime * 1000)


def _tag(served: Artifact | None) -> str:
    return no_model.TAG.hex() if served is None else served.tag


def _new_name(folder: Path) -> str:
    """The minute, as 2026-11-21T0300, and a number where that is taken."""
    name = datetime.now(UTC).strftime("%Y-%m-%dT%H%M")
    taken = {place.name for place in folder.iterdir()} | set(Report.read(folder).made)
    return name if name not in taken else next(f"{name}.{n}" for n in range(2, 10_000) if f"{name}.{n}" not in taken)


def _due_in_s(folder: Path, every_s: float) -> float:
    """Seconds until the next round; at once where one was interrupted."""
    last = Report.read(folder).last
    if last is None or (folder / WORK / ROUND).exists():
        return 0.0
    has_none = last["outcome"] == "waiting" and last["served"] == no_model.TAG.hex()
    pause_s = min(LOOK_AGAIN_S, every_s) if has_none else every_s
    return max(0.0, datetime.fromisoformat(last["at"]).timestamp() + pause_s - time.time())


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another trainer is at work in '{folder}'; let it, or stop it") from None
        yield


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
