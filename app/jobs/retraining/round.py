"""One round of retraining: train the next generation, and activate it if it passes the gate.

A round has four steps. It may be killed in any of them, and the next start continues it. Its files are in
MODELS/.retraining, where the presence of `round.json` means that the data are complete:

  prepare   write the archive's events as training data, and the past: those before the held-out ones
  try       train a model on the past, and compare it with the served one on the held-out events
  train     train a model on all events, if the first one passes
  go live   move the model to MODELS/NAME, signed if there is a key, fold all events for it, activate it, and remove
            older models

MODELS/retrain.json has the outcome of the last round, and the models that the trainer has made. The trainer removes no
other models.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import polars as pl
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console

from app.jobs import generations
from app.jobs.reports.job_progress import announced, counted, print_line
from app.jobs.reports.phase_times import PhaseTimes, peak_bytes
from app.jobs.reports.training_progress import TrainingProgress
from app.jobs.retraining.gate import Gate, ModelComparison, Ranks
from app.jobs.retraining.plan import RetrainingPlan
from app.jobs.retraining.report import ROUND, WORK, RoundOutcome, TrainerReport
from app.jobs.retraining.round_data import RoundData
from app.jobs.retraining.shop_items import items_of_store
from app.serving import empty_model
from app.serving.model_locations import models_of
from app.serving.store_factory import opened_tenant
from app.settings import StoreSettings
from model.artifact import model_directory
from model.artifact.model_directory import MANIFEST, Artifact
from model.artifact.signatures import SignatureError, TrustedKeys, read_signing_key, sign
from model.artifact.tensor_file import sync
from model.config import TrainConfig
from model.data.table import SUFFIXES
from model.evaluation.holdout_comparison import HoldoutComparison
from model.lisa.item_followers import Lift
from model.training.lift_choice import chosen_lift
from model.training.loop import CHECKPOINT, LAST_CHECKPOINT
from model.training.memory import Resources
from model.training.threads import cores_in_use
from model.training.train import train, train_warm
from model.training.warm_start import WarmStartError
from storage.archive.training_events import TrainingEvents
from storage.folders.local_folder import LocalFolder
from storage.records import KnownGeneration

MIN_HELD_OUT_EVENTS = 100
OUTCOME_NOTES = {field.name for field in fields(RoundOutcome)} - {"outcome", "reason", "at", "name"}
"""The notes of a round that its outcome repeats."""


class RetrainingRound:
    """One round, new or continued after an interruption."""

    def __init__(self, settings: StoreSettings, plan: RetrainingPlan, console: Console) -> None:
        if settings.archive is None:
            raise ValueError("no archive; pass --archive-dir DIR or set LISAREC_ARCHIVE_DIR")
        self._settings = settings
        self._plan = plan
        self._console = console
        self._models = models_of(settings)
        self._folder = self._models.work
        self._work = self._folder / WORK
        self._data = RoundData(self._work)
        self._archive = settings.archive
        self._begin_s = time.monotonic()
        self._phases = PhaseTimes()

    def run(self) -> RoundOutcome:
        """Run the remaining steps of the round, and return its outcome.

        raises  ArtifactError, StorageError, ValueError, OSError  when a step fails; the next run tries it again
        """
        signing_key = _signing_key(self._settings)
        served = self._served_model()
        try:
            return self._run(served, signing_key)
        except generations.Superseded as exc:
            return self._finish(self._outcome("waiting", f"{exc}; the next round compares with it", served))

    def _run(self, served: Artifact | None, signing_key: Ed25519PrivateKey | None) -> RoundOutcome:
        if self._has_new_model(served):
            return self._go_live(served)
        if not self._is_prepared(served):
            waiting = self._prepare(served)
            if waiting is not None:
                return self._finish(waiting)
        last = TrainerReport.read(self._models.folder).last
        start = self._plan.model_to_continue(served, last)
        past, holdout = self._data.split(self._trained_at_ms(served))
        validation, test = holdout.halves()
        trained, start = self._train_past(served, start)
        gate = Gate(test.values, self._plan.criterion, self._plan.max_loss)
        with announced("comparing models", self._console), self._phases.during("comparing"):
            candidate, lift = _with_best_lift(trained, validation)
            ranks = test.ranks(candidate)
            comparison = gate.compare(ranks, _served_ranks(test, served, past), is_first=served is None)
        if comparison.passes:
            final = self._train("all", served, lift, start)
            comparison = self._check_final_model(gate, test, final, ranks, comparison)
        self._add_notes(**{**asdict(comparison), "questions": len(test), "is_warm": start is not None})
        if not comparison.passes:
            return self._finish(self._outcome("refused", comparison.reason, served))
        asyncio.run(generations.require_active(self._settings, _tag(served)))
        self._record_model(self._read_notes()["name"])
        model_folder = self._work / "all" / "model"
        shutil.rmtree(model_folder / CHECKPOINT, ignore_errors=True)
        if signing_key is not None:
            sign(model_folder, (model_folder / MANIFEST).read_bytes(), signing_key)
        named = model_folder.rename(self._folder / self._read_notes()["name"])
        for folder in (named, self._folder):
            sync(folder)
        return self._go_live(served)

    def _served_model(self) -> Artifact | None:
        """Return the active model, else the one that a process serves; None if there is none yet."""
        known = asyncio.run(self._known_generations())
        chosen = [one for one in known if one.is_active] or [one for one in known if one.is_live]
        names = [one.named for one in chosen if one.named.tag != empty_model.TAG]
        if not names:
            return None
        loaded = self._models.load(names[0].name)
        if loaded.tag != names[0].tag.hex():
            raise ValueError(
                f"the model {names[0].name!r} in '{self._models.folder}' is not the active model; activate another one"
            )
        return loaded

    async def _known_generations(self) -> list[KnownGeneration]:
        async with opened_tenant(self._settings, may_be_new=True) as store:
            return await store.generations.known()

    def _trained_at_ms(self, served: Artifact | None) -> int:
        """Return the time at which the model was ready: later events cannot be in its training data."""
        return 0 if served is None else int((self._models.path(served.name) / MANIFEST).stat().st_mtime * 1000)

    # ---- steps

    def _has_new_model(self, served: Artifact | None) -> bool:
        """Return whether the round's model is in the models folder, and is active or to replace the served one."""
        notes = self._read_notes()
        if "name" not in notes or not model_directory.exists(self._folder / notes["name"]):
            return False
        return _tag(served) in (notes["served"], model_directory.load(self._folder / notes["name"]).tag)

    def _is_prepared(self, served: Artifact | None) -> bool:
        notes = self._read_notes()
        is_same = notes.get("plan") == asdict(self._plan) and notes.get("recipe") == self._recipe(served)
        return is_same and notes.get("served") == _tag(served) and self._data.exist()

    def _recipe(self, served: Artifact | None) -> dict[str, Any]:
        """Return the configuration of the training. A version that has another one cannot continue it."""
        return self._plan.config(served).model_dump(mode="json")

    def _prepare(self, served: Artifact | None) -> RoundOutcome | None:
        """Write the data of a round from the archive, and return None; or return the outcome if it has to wait."""
        _clear(self._work)
        archived = TrainingEvents(self._archive, self._settings.tenant)
        entries = len(archived) if archived.exist() else 0
        if entries < self._plan.min_events:
            reason = f"{entries:,} events are archived; the first model needs {self._plan.min_events:,}"
            return self._outcome("waiting", reason, served, events=entries)
        with announced("reading the archive", self._console), self._phases.during("archive"):
            unknown = self._data.read(archived, self._plan.max_events, self._plan.config(served).event_weights)
        if unknown:
            print_line(self._console, f"ignored {unknown:,} events of types without a weight, or with weight 0")
        trained_at_ms = self._trained_at_ms(served)
        past, holdout = self._data.split(trained_at_ms)
        events = self._data.count()
        if len(holdout) < MIN_HELD_OUT_EVENTS:
            reason = _why_too_few(len(holdout), trained_at_ms)
            return self._outcome("waiting", reason, served, events=events, questions=len(holdout))
        of_store = asyncio.run(items_of_store(self._settings, self._data.item_ids()))
        folders = archived.item_folders()
        if "" not in folders and any(self._archive.has(f"items{suffix}") for suffix in SUFFIXES):
            own = f"each needs its own table in its folder, such as '{folders[0]}'"
            print_line(self._console, f"ignored the archive's table of items: of several tenants, {own}")
        self._data.write_directories(past, self._archive, folders, of_store)
        name = self._new_name()
        about = {"plan": asdict(self._plan), "recipe": self._recipe(served), "events": events}
        self._add_notes(name=name, served=_tag(served), **about)
        print_line(self._console, f"round {name}: {events:,} events, {len(holdout):,} held out")
        return None

    def _train_past(self, served: Artifact | None, start: Artifact | None) -> tuple[Artifact, Artifact | None]:
        """Return the model of the past, and the one that it continues from, if any: it may know none of the items."""
        try:
            trained = self._train("past", served, None, start)
        except WarmStartError as exc:
            print_line(self._console, f"training from scratch: {exc}")
            trained = self._train("past", served, None, None)
        training = trained.config.training
        return trained, start if isinstance(training, TrainConfig) and training.warm_from else None

    def _train(self, name: str, served: Artifact | None, lift: Lift | None, start: Artifact | None) -> Artifact:
        """Return a model trained on these data, by this run or an earlier one."""
        out = self._work / name / "model"
        if model_directory.exists(out):
            return model_directory.load(out)
        config = self._plan.config(served, lift, is_warm=start is not None)
        events = "all events" if name == "all" else "all but the held-out events"
        begin = "" if start is None else f", continuing from {start.name}"
        print_line(self._console, f"training on {events}{begin}, on {cores_in_use()}")
        resume, resources = (out / LAST_CHECKPOINT).exists(), Resources(memory=self._plan.memory)
        with TrainingProgress(config.training.epochs, config.training.patience, self._console) as progress:
            data = self._data.directory(name)
            how: dict[str, Any] = {"resources": resources, "resume": resume, "progress": progress}
            made = train(data, out, config, **how) if start is None else train_warm(start, data, out, config, **how)
        self._phases.add(progress.phases.seconds)
        return made

    def _check_final_model(
        self, gate: Gate, test: HoldoutComparison, final: Artifact, candidate: Ranks, comparison: ModelComparison
    ) -> ModelComparison:
        """Refuse a model that training on all events made worse on the held-out ones, which it has now seen."""
        fell = gate.fell(test.ranks(final), candidate)
        if fell is None:
            return comparison
        return replace(comparison, passes=False, reason=f"after training on all events, {fell}; {comparison.reason}")

    def _go_live(self, served: Artifact | None) -> RoundOutcome:
        notes = self._read_notes()
        name: str = notes["name"]
        if _tag(served) == notes["served"]:
            previous = None if served is None else served.name
            replace(TrainerReport.read(self._models.folder), previous=previous).write(self._models.folder)
            self._models.publish(name)
            print_line(self._console, f"folding all events for {name}")
            with counted("events folded", self._console) as on_progress, self._phases.during("folding"):
                folder = self._folder / name
                done = asyncio.run(generations.rebuild(self._settings, folder, lambda one: on_progress(one.events)))
            print_line(self._console, f"{name}: {done.carried:,} states carried over, {done.users:,} users folded")
        # also if it is active already: the round that activated it may have ended before this was logged
        asyncio.run(generations.activate(self._settings, name, replaces=notes["served"]))
        self._remove_old_models(name)
        reason = f"{name}; {notes['reason']}"
        return self._finish(self._outcome("activated", reason, served, name=name))

    def _remove_old_models(self, name: str) -> None:
        """Remove the models that the trainer made before the previous one, and the states of the empty model."""
        report = TrainerReport.read(self._models.folder)
        old_models = [made for made in report.made if made not in (name, report.previous)]
        free = asyncio.run(generations.drop_unserved(self._settings, [*old_models, empty_model.NAME]))
        for one in set(old_models) & free:
            self._models.remove(one)
        replace(report, made=tuple(made for made in report.made if made not in free)).write(self._models.folder)

    def _new_name(self) -> str:
        """Return the current minute, as 2026-11-21T0300, with a number if that name is taken."""
        name = datetime.now(UTC).strftime("%Y-%m-%dT%H%M")
        here = {place.name for place in self._folder.iterdir()}
        taken = here.union(TrainerReport.read(self._models.folder).made, self._models.names())
        return next(one for one in (name, *(f"{name}.{n}" for n in range(2, 10_000))) if one not in taken)

    # ---- notes and report

    def _read_notes(self) -> dict[str, Any]:
        """Return the notes of this round; none before its data are complete, or if they cannot be parsed."""
        path = self._work / ROUND
        try:
            notes: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as exc:
            print_line(self._console, f"starting the round from the beginning: '{path}' is damaged: {exc}")
            path.unlink()
            return {}
        return notes

    def _add_notes(self, **facts: object) -> None:
        LocalFolder(self._work).add(ROUND, json.dumps(self._read_notes() | facts, indent=2).encode())

    def _record_model(self, name: str) -> None:
        report = TrainerReport.read(self._models.folder)
        replace(report, made=(*dict.fromkeys((*report.made, name)),)).write(self._models.folder)

    def _outcome(
        self, outcome: Literal["activated", "refused", "waiting"], reason: str, served: Artifact | None, **facts: Any
    ) -> RoundOutcome:
        notes = {name: fact for name, fact in self._read_notes().items() if name in OUTCOME_NOTES}
        details: dict[str, Any] = {"served": _tag(served), **self._costs()} | notes | facts
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return RoundOutcome(outcome, reason, at, seconds=round(time.monotonic() - self._begin_s, 1), **details)

    def _costs(self) -> dict[str, Any]:
        """Return the time and memory that the round took in this process, and print the time."""
        if self._phases.seconds:
            print_line(self._console, f"time of the round: {self._phases}")
        seconds = {phase: round(one, 1) for phase, one in self._phases.seconds.items()}
        return {"phases_s": seconds, "peak_bytes": peak_bytes()}

    def _finish(self, outcome: RoundOutcome) -> RoundOutcome:
        replace(TrainerReport.read(self._models.folder), last=asdict(outcome)).write(self._models.folder)
        _clear(self._work)
        return outcome


def _clear(work: Path) -> None:
    """Remove the files of a round."""
    (work / ROUND).unlink(missing_ok=True)  # first: without it, the other files are ignored
    if work.exists():
        sync(work)  # so that a power cut does not bring it back without them
    shutil.rmtree(work, ignore_errors=True)


def _signing_key(settings: StoreSettings) -> Ed25519PrivateKey | None:
    """Return the key that signs the new model; None if there is none, and models need no signature.

    raises  SignatureError  when services would reject the signature
    """
    key_file, keys_file = settings.model_signing_key_file, settings.model_keys_file
    key = None if key_file is None else read_signing_key(key_file)
    if keys_file is not None and (key is None or key.public_key() not in TrustedKeys.read(keys_file)):
        raise SignatureError(
            f"'{keys_file}' requires a signature, and services would reject the new model; "
            "set LISAREC_MODEL_SIGNING_KEY_FILE to the private key of one of its keys"
        )
    return key


def _served_ranks(test: HoldoutComparison, served: Artifact | None, past: pl.LazyFrame) -> Ranks:
    if served is not None:
        return test.ranks(served)
    counts = past.group_by("item_id").len().collect(engine="streaming").sort("item_id")
    return test.ranks_by_counts(dict(counts.iter_rows()))


def _with_best_lift(model: Artifact, validation: HoldoutComparison) -> tuple[Artifact, Lift]:
    """Return the model with the lift that is best on the held-out events, and that lift.

    The best lift depends on the data, and training on all events leaves no validation events to choose it.
    """
    usual = Lift(**model.metrics["lift"])
    best = chosen_lift(validation.lifted_ranks(model, usual), usual).lift
    model.model.set_followers(model.model.shares_of_followers(usual), best)
    return replace(model, config=model.config.model_copy(update={"model": model.model.config})), best


def _why_too_few(held_out: int, trained_at_ms: int) -> str:
    reason = f"{held_out} users have new events; a comparison needs {MIN_HELD_OUT_EVENTS}"
    if trained_at_ms > time.time() * 1000:
        reason += f"; '{MANIFEST}' of the active model is dated in the future, so nothing counts as new: 'touch' it"
    return reason


def _tag(served: Artifact | None) -> str:
    return empty_model.TAG.hex() if served is None else served.tag
