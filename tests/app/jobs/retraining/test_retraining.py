"""The trainer on a shop without a model: when it activates a generation, when not, and what happens after kills."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console

from app.jobs import generations
from app.jobs.retraining import loop, round_data
from app.jobs.retraining import round as retraining_round
from app.jobs.retraining.gate import Gate
from app.jobs.retraining.loop import run_trainer
from app.jobs.retraining.metrics import OUTCOMES, TrainerMetrics
from app.jobs.retraining.report import REPORT, RoundOutcome, TrainerReport
from app.jobs.retraining.round import RetrainingRound
from app.serving import empty_model
from app.serving.model_locations import models_of
from app.settings import Settings
from model.artifact import model_directory
from model.artifact.model_directory import MANIFEST, Artifact
from model.artifact.signatures import SignatureError, make_key
from model.training.train import train as train_model
from storage.errors import StorageUnavailable
from storage.folders.folder import Folder
from storage.folders.local_folder import LocalFolder
from storage.folders.object_folder import ObjectFolder
from storage.folders.place import ObjectUrl
from storage.maintenance.rebuild import Rebuilt
from storage.sqlite.items.audit import SQLiteAudit
from tests.app.jobs.retraining.shops import PLAN, WARM_PLAN, Shop
from tests.app.support import run_command


class Killed(BaseException):
    """Simulates kill -9 inside the process: no cleanup runs."""


def test_the_trainer_activates_generations_and_keeps_the_last_two(shop: Shop, rebuilds: list[Rebuilt]) -> None:
    for _ in range(2):
        outcome = shop.retrain()
        assert (outcome.outcome, outcome.served, shop.names()) == ("waiting", empty_model.TAG.hex(), [])
        assert "needs 600" in outcome.reason
        shop.client.click("early", "school-bag-red", "tea-tin-steel")
        shop.archive()
    made: list[str] = []
    for shoppers in (200, 110):
        shop.collect(shoppers)
        outcome = shop.retrain(WARM_PLAN)
        assert outcome.outcome == "activated", outcome
        assert outcome.is_warm == bool(made)
        assert {"reading", "preparing", "epochs", "folding"} <= outcome.phases_s.keys()
        assert outcome.ndcg_at_10 is not None
        assert outcome.served_ndcg_at_10 is not None
        assert outcome.name is not None
        assert (outcome.valued_events, outcome.decided_by) == (outcome.questions, "ndcg")
        assert outcome.value_hr_at_10 is not None
        assert 0 < outcome.value_hr_at_10 <= 1
        assert shop.report()["last"]["value_hr_at_10"] == outcome.value_hr_at_10
        before = model_directory.load(shop.models / made[-1]).tag if made else empty_model.TAG.hex()
        assert (outcome.served, outcome.questions >= 50) == (before, True)
        made.append(outcome.name)
        assert shop.names() == made[-2:]
        assert shop.report()["last"]["name"] == outcome.name
        if len(made) == 1:
            assert outcome.ndcg_at_10 > outcome.served_ndcg_at_10
        shop.follows(outcome.name)
        answer = shop.client.recommend("u3")
        assert (answer["generation"], answer["source"]) == (outcome.name, "personalised")
    store, runner = shop.client.service.store, shop.client.runner
    known = {one.named.name for one in runner.run(store.generations.known())}
    assert known == set(made), "no states of others are left"

    earlier, later = (model_directory.load(shop.models / name) for name in made)
    assert list(later.items.ids)[: len(earlier.items)] == list(earlier.items.ids)
    assert (later.history_codes[: len(earlier.items)] == earlier.history_codes).all()
    assert [(one.carried > 300, one.carried + one.users) for one in rebuilds] == [(False, 201), (True, 311)]
    assert shop.sample("warm") == 1
    assert (shop.sample("events") or 0) > 600
    assert (shop.sample("phase_seconds", phase="epochs") or 0) > 0
    assert (shop.sample("peak_memory_bytes") or 0) > 1 << 20

    runner.run(generations.activate(shop.settings, made[0]))
    shop.follows(made[0])
    outcome = shop.retrain()
    assert (outcome.outcome, shop.names()) == ("activated", [made[0], outcome.name]), "what was left goes first"
    outcome = shop.retrain()
    assert (outcome.outcome, "users have new events" in outcome.reason) == ("waiting", True)
    assert {kind: shop.sample("rounds_total", outcome=kind) for kind in OUTCOMES} == {
        "activated": 3,
        "refused": 0,
        "waiting": 3,
        "failed": 0,
    }
    assert shop.sample("succeeded_timestamp_seconds") == datetime.fromisoformat(outcome.at).timestamp()
    assert shop.sample("generation_timestamp_seconds") == (shop.models / shop.names()[-1] / MANIFEST).stat().st_mtime
    assert 0 < (shop.sample("ndcg_at_10", model="new") or 0) <= 1
    assert 0 < (shop.sample("value_hr_at_10", model="new") or 0) <= 1


def test_a_model_from_the_future_is_reported(shop: Shop) -> None:
    shop.collect(200)
    assert shop.retrain().outcome == "activated"
    assert "touch" not in shop.retrain().reason
    tomorrow_s = time.time() + 86_400
    os.utime(shop.models / shop.names()[-1] / MANIFEST, (tomorrow_s, tomorrow_s))
    shop.collect(110)
    outcome = shop.retrain()
    assert (outcome.outcome, "'touch' it" in outcome.reason) == ("waiting", True)


def test_archive_and_models_work_in_a_bucket(
    shop: Shop, visits: list[list[str]], s3: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills before the new model is published, and at each of its objects."""
    in_bucket = Shop(tmp_path / "bucket", visits, ObjectUrl(s3()))
    models = models_of(in_bucket.settings)
    in_bucket.collect(200)
    for objects in range(3):
        with monkeypatch.context() as patch:
            put, left = ObjectFolder.add, iter(range(objects))

            def killed(folder: ObjectFolder, name: str, data: bytes, put: Any = put, left: Any = left) -> None:
                if name != REPORT and next(left, None) is None:
                    raise Killed
                put(folder, name, data)

            patch.setattr(ObjectFolder, "add", killed)
            with pytest.raises(Killed):
                in_bucket.retrain()
        assert models.names() == []
    made: list[str] = []
    for shoppers in (0, 110):
        if shoppers:
            in_bucket.collect(shoppers)
        outcome = in_bucket.retrain()
        assert outcome.outcome == "activated", outcome
        made.append(outcome.name or "")
        assert models.names() == made
        in_bucket.follows(outcome.name)
        assert in_bucket.client.recommend("u3")["source"] == "personalised"
    assert TrainerReport.read(models.folder).made == tuple(made)
    in_bucket.client.close()


def test_a_round_signs_its_model(shop: Shop, tmp_path: Path) -> None:
    """A round does not start if no service could load its model."""
    key, keys, others = tmp_path / "key", tmp_path / "keys", tmp_path / "others"
    make_key(key, keys)
    make_key(tmp_path / "other", others)
    shop.collect(200)
    for signing_key, trusted in ((None, keys), (key, others)):
        files = {"model_signing_key_file": signing_key, "model_keys_file": trusted}
        shop.settings = shop.settings.model_copy(update=files)
        with pytest.raises(
            SignatureError, match=r"services would reject the new model.*LISAREC_MODEL_SIGNING_KEY_FILE"
        ):
            shop.retrain()
        assert shop.names() == []
    shop.settings = shop.settings.model_copy(update={"model_signing_key_file": key, "model_keys_file": keys})
    outcome = shop.retrain()
    assert (outcome.outcome, shop.names()) == ("activated", [outcome.name])
    assert model_directory.load(shop.models / shop.names()[0], keys).name == outcome.name


def test_metrics_show_failures_and_earlier_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The alert needs the last success, possibly of an earlier process."""
    metrics, pauses = TrainerMetrics(), []
    at = datetime.now(UTC) - timedelta(days=3)
    costs = {"events": 7_000, "peak_bytes": 1 << 30, "phases_s": {"epochs": 12.5}}
    last = {"outcome": "refused", "served": "ab", "at": at.isoformat(), "ndcg_at_10": 0.2, **costs}
    TrainerReport(last).write(LocalFolder(tmp_path))

    def fail(_: RetrainingRound) -> RoundOutcome:
        raise OSError("the archive is gone")

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > 4:
            raise Killed

    monkeypatch.setattr(RetrainingRound, "run", fail)
    monkeypatch.setattr("time.sleep", pause)
    monkeypatch.setattr("os.nice", lambda _: 0)
    with pytest.raises(Killed):
        run_trainer(Settings(models_dir=tmp_path, archive_dir=tmp_path), PLAN, 60.0, Console(quiet=True), metrics)
    sample = metrics.registry.get_sample_value
    assert sample("lisarec_trainer_rounds_total", {"outcome": "failed"}) == 2
    assert sample("lisarec_trainer_succeeded_timestamp_seconds") == pytest.approx(at.timestamp(), abs=1)
    assert sample("lisarec_trainer_every_seconds") == 60
    assert sample("lisarec_trainer_events") == 7_000
    assert sample("lisarec_trainer_peak_memory_bytes") == 1 << 30
    assert sample("lisarec_trainer_phase_seconds", {"phase": "epochs"}) == 12.5
    assert sample("lisarec_trainer_ndcg_at_10", {"model": "new"}) == 0.2


def test_an_outage_of_the_models_folder_does_not_end_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call is the start of a round, or the report of a finished one."""
    metrics, reads, pauses = TrainerMetrics(), 0, []
    read = TrainerReport.read
    done = RoundOutcome("waiting", "no events", datetime.now(UTC).isoformat())
    rounds = iter([done])

    def run(_: RetrainingRound) -> RoundOutcome:
        for outcome in rounds:
            return outcome
        raise OSError("the bucket is gone")

    def read_before_outage(folder: Folder) -> TrainerReport:
        nonlocal reads
        reads += 1
        if reads in (1, 2, 4):
            return read(folder)
        raise OSError("the bucket is gone")

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            raise Killed

    monkeypatch.setattr(RetrainingRound, "run", run)
    monkeypatch.setattr(TrainerReport, "read", read_before_outage)
    monkeypatch.setattr("time.sleep", pause)
    monkeypatch.setattr("os.nice", lambda _: 0)
    with pytest.raises(Killed):
        run_trainer(Settings(models_dir=tmp_path, archive_dir=tmp_path), PLAN, 60.0, Console(quiet=True), metrics)
    assert pauses == [0, 60, 0, 60, 60, 60]
    assert metrics.registry.get_sample_value("lisarec_trainer_rounds_total", {"outcome": "failed"}) == 4


def test_a_killed_trainer_resumes(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills at the beginning and at the end of every step."""
    shop.collect(200)
    trained: list[str] = []
    steps: list[tuple[Any, str]] = [
        (round_data, "split_for_comparison"),
        (round_data, "put_over_file"),
        (retraining_round, "train"),
        (Gate, "compare"),
        (RetrainingRound, "_check_final_model"),
        (RetrainingRound, "_record_model"),
        (generations, "rebuild"),
        (generations, "activate"),
        (RetrainingRound, "_remove_old_models"),
        (RetrainingRound, "_finish"),
        (retraining_round, "_clear"),
    ]

    def train(data: Path, *arguments: Any, **options: Any) -> Any:
        trained.append(data.parent.name)
        return train_model(data, *arguments, **options)

    monkeypatch.setattr(retraining_round, "train", train)
    names = set()
    for owner, name in steps:
        for kill in (killed_before, killed_after):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, kill(getattr(owner, name)))
                with pytest.raises(Killed):
                    shop.retrain()
            noted = shop.models / ".retraining" / "round.json"
            if noted.exists():
                names.add(json.loads(noted.read_text())["name"])
    (name,) = names
    assert trained == ["past", "all"], "what was trained is not trained again"
    shop.follows(name)
    assert (shop.report()["last"]["outcome"], shop.report()["made"], shop.names()) == ("activated", [name], [name])
    assert shop.client.recommend("u3")["source"] == "personalised"


def killed_before(step: Callable[..., Any]) -> Callable[..., Any]:
    def killed(*_: Any, **__: Any) -> Any:
        raise Killed

    return killed


def killed_after(step: Callable[..., Any]) -> Callable[..., Any]:
    def killed(*arguments: Any, **options: Any) -> Any:
        result = step(*arguments, **options)
        if hasattr(result, "__await__"):
            asyncio.run(result)
        raise Killed

    return killed


def killed_within(directory: Path, **_: Any) -> None:
    """Kill the process while a directory is partly removed."""
    for events in directory.glob("events"):
        next(events.iterdir()).unlink()
        raise Killed


def test_a_worse_model_is_rejected(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its events have shuffled items, either all of them or only the newest."""
    shop.collect(200)
    first = shop.retrain().name
    shop.collect(200)
    for spoiled in ("past", "all"):

        def train(data: Path, *arguments: Any, spoiled: str = spoiled, **options: Any) -> Any:
            if data.parent.name == spoiled:
                events = pl.read_parquet(data / "interactions.parquet")
                events.with_columns(pl.col("item_id").shuffle(seed=1)).write_parquet(data / "interactions.parquet")
            return train_model(data, *arguments, **options)

        monkeypatch.setattr(retraining_round, "train", train)
        with monkeypatch.context() as patch:
            patch.setattr("shutil.rmtree", killed_within)
            with pytest.raises(Killed):
                shop.retrain()
        arguments = ["retrain", "--data-dir", shop.settings.data_dir, "--archive-dir", shop.settings.archive_dir]
        arguments += ["--models-dir", shop.models, "--preset", "tiny", "--epochs", 1, "--min-events", 600, "--no-warm"]
        assert run_command(*arguments) == 3
        assert "refused: " in capsys.readouterr().out
        assert (shop.report()["last"]["outcome"], shop.names()) == ("refused", [first])
    assert "fell to" in shop.report()["last"]["reason"]
    shop.follows(first)


def test_a_model_activated_by_an_operator_during_a_round_stays_active(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During training, and during the rebuild."""
    rebuild = generations.rebuild
    trained: list[Artifact] = []

    async def activated(name: str) -> None:
        copied = trained[-1]
        training = copied.config.training.model_copy(update={"seed": len(shop.names())})  # which gives another tag
        config = copied.config.model_copy(update={"training": training})
        model_directory.save(shop.models / name, copied.model, config, copied.items, copied.metrics)
        await generations.activate(shop.settings, name)

    def train(data: Path, *arguments: Any, **options: Any) -> Artifact:
        trained.append(train_model(data, *arguments, **options))
        if len(trained) == 2:
            asyncio.run(activated("june"))
        return trained[-1]

    async def rebuilt(*arguments: Any) -> Rebuilt:
        done = await rebuild(*arguments)
        await activated("july")
        return done

    with monkeypatch.context() as patch:
        patch.setattr(retraining_round, "train", train)
        patch.setattr(generations, "rebuild", rebuilt)
        for name, shoppers in (("june", 200), ("july", 110)):
            shop.collect(shoppers)
            outcome = shop.retrain()
            assert (outcome.outcome, f"'{name}' was activated meanwhile" in outcome.reason) == ("waiting", True)
            shop.follows(name)
    shop.collect(110)
    outcome = shop.retrain()
    assert (outcome.outcome, shop.report()["previous"]) == ("activated", "july")
    assert shop.names() == sorted(["june", "july", outcome.name or ""])


def test_an_unlogged_activation_is_logged_by_the_next_round(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> bool:
        raise StorageUnavailable("full", "disk_full")

    def logged() -> list[tuple[str, str]]:
        entries = shop.client.runner.run(shop.client.service.store.audit.entries("main"))
        return [(one.entry.action, one.entry.subject) for one in entries]

    shop.collect(200)
    with monkeypatch.context() as failing:
        failing.setattr(SQLiteAudit, "append", full)
        with pytest.raises(StorageUnavailable):
            shop.retrain()
    assert logged() == []
    outcome = shop.retrain()
    assert (outcome.outcome, logged()) == ("activated", [("model.activate", outcome.name)])


def test_a_second_trainer_is_refused(shop: Shop) -> None:
    with loop.locked(shop.models), pytest.raises(ValueError, match="another trainer is running"):
        shop.retrain()
