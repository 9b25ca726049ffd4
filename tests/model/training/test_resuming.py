"""Trainings are reproducible, resumable, and refuse to mix two of them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from model.artifact import model_directory
from model.config import Config
from model.data.interactions import DataError
from model.training import train
from model.training.loop import BEST_CHECKPOINT, CHECKPOINT, LAST_CHECKPOINT, EpochReport, TrainError
from model.training.memory import Resources

Make = Callable[..., Any]
CHECKPOINT_FILES = (BEST_CHECKPOINT, LAST_CHECKPOINT)


def same_files(one: Path, other: Path) -> bool:
    """Compare weights, configuration and catalogue; metrics contain durations."""
    names = (model_directory.WEIGHTS, model_directory.CONFIG, model_directory.ITEMS)
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_the_same_seed_is_bit_identical_and_another_differs(
    shop: Path, trained: Path, tmp_path: Path, tiny_config: Make, silent: Make
) -> None:
    again = train.train(shop, tmp_path / "again", tiny_config(), progress=silent())
    assert same_files(trained, tmp_path / "again")
    other = train.train(shop, tmp_path / "other", tiny_config(seed=1), progress=silent())
    assert not torch.equal(again.model.codebooks, other.model.codebooks)


@pytest.fixture(scope="module")
def config(tiny_config: Make) -> Config:
    made: Config = tiny_config(epochs=4)
    return made


@pytest.fixture(scope="module")
def uninterrupted(shop: Path, config: Config, silent: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "model"
    train.train(shop, out, config, progress=silent())
    return out


class TestResuming:
    @pytest.fixture
    def interrupted(self, shop: Path, config: Config, silent: Make, tmp_path: Path) -> Path:
        """A training interrupted after its second epoch."""
        with pytest.raises(KeyboardInterrupt):
            train.train(shop, tmp_path / "model", config, progress=silent(stop_after=1))
        return tmp_path / "model"

    @pytest.mark.parametrize("stop_after", [0, 2, 3])
    def test_a_resumed_run_equals_an_uninterrupted_one(
        self, shop: Path, config: Config, uninterrupted: Path, silent: Make, tmp_path: Path, stop_after: int
    ) -> None:
        out = tmp_path / "model"
        with pytest.raises(KeyboardInterrupt):
            train.train(shop, out, config, progress=silent(stop_after=stop_after))
        assert not model_directory.exists(out)
        torch.rand(100)  # whatever else drew numbers in between
        rest = silent()
        resumed = train.train(shop, out, config, resume=True, progress=rest)
        assert [report.epoch for report in rest.reports] == list(range(stop_after + 1, 4))
        assert same_files(out, uninterrupted)
        without_time = [{**report, "elapsed_s": 0} for report in resumed.metrics["epochs"]]
        expected = model_directory.load(uninterrupted).metrics["epochs"]
        assert without_time == [{**report, "elapsed_s": 0} for report in expected]

    def test_a_run_interrupted_within_an_epoch_repeats_it(
        self, shop: Path, config: Config, uninterrupted: Path, silent: Make, tmp_path: Path
    ) -> None:
        progress = silent()
        plain_batch = progress.batch

        def batch(epoch: int, share: float, loss: float, events: int) -> None:
            plain_batch(epoch, share, loss, events)
            if epoch == 2 and share > 0.5:
                raise KeyboardInterrupt

        progress.batch = batch
        with pytest.raises(KeyboardInterrupt):
            train.train(shop, tmp_path / "model", config, progress=progress)
        train.train(shop, tmp_path / "model", config, resume=True, progress=silent())
        assert same_files(tmp_path / "model", uninterrupted)

    @pytest.mark.parametrize(
        "options",
        [{"seed": 9}, {"epochs": 5}, {"learning_rate": 0.02}, {"dropout": 0.5}, {"train_on": "validation"}],
        ids=str,
    )
    def test_different_options_are_refused(
        self, shop: Path, config: Config, interrupted: Path, silent: Make, options: dict[str, Any]
    ) -> None:
        parts = {
            name: part.model_copy(
                update={key: value for key, value in options.items() if key in type(part).model_fields}
            )
            for name, part in (("model", config.model), ("training", config.training), ("data", config.data))
        }
        (name, value), *_ = options.items()
        expected = rf"trained with other options; use the same options to resume: {name} was .*, now {value}$"
        with pytest.raises(TrainError, match=expected):
            train.train(shop, interrupted, config.model_copy(update=parts), resume=True, progress=silent())

    def test_options_missing_in_earlier_versions_are_no_difference(
        self, shop: Path, config: Config, silent: Make, tmp_path: Path
    ) -> None:
        temporal = config.model_copy(update={"data": config.data.model_copy(update={"split": "temporal"})})
        out = tmp_path / "model"
        with pytest.raises(KeyboardInterrupt):
            train.train(shop, out, temporal, progress=silent(stop_after=1))
        with safe_open(out / LAST_CHECKPOINT, "pt") as file:
            about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        written = json.loads(about["config"])
        assert written["data"].pop("cutoff_us")
        assert written["data"].pop("events_before_cutoff")
        save_file(tensors, out / LAST_CHECKPOINT, {**about, "config": json.dumps(written)})
        resumed = train.train(shop, out, temporal, resume=True, progress=silent())
        assert resumed.config.data.cutoff_us is not None

    def test_a_different_table_is_refused(
        self, config: Config, interrupted: Path, silent: Make, tmp_path: Path, write_rows: Make, rows: list[Any]
    ) -> None:
        other = write_rows(tmp_path / "other", [*rows, ("u1", "i1", 99_999_999)])
        with pytest.raises(TrainError, match="trained on other events; resume with the events it began with"):
            train.train(other, interrupted, config, resume=True, progress=silent())

    def test_an_unfinished_training_is_not_restarted(
        self, shop: Path, config: Config, interrupted: Path, silent: Make
    ) -> None:
        before = [(interrupted / name).read_bytes() for name in CHECKPOINT_FILES]
        with pytest.raises(TrainError, match="unfinished training; continue it with --resume, or delete it"):
            train.train(shop, interrupted, config, progress=silent())
        assert [(interrupted / name).read_bytes() for name in CHECKPOINT_FILES] == before

    @pytest.mark.parametrize("name", CHECKPOINT_FILES)
    def test_a_damaged_checkpoint_is_refused(
        self, shop: Path, config: Config, silent: Make, tmp_path: Path, name: str
    ) -> None:
        out = tmp_path / "model"
        with pytest.raises(KeyboardInterrupt):
            train.train(shop, out, config, progress=silent(stop_after=3))
        os.truncate(out / name, 1_000)
        with pytest.raises(TrainError, match=rf"{name} is damaged; delete '.*checkpoint', and train without --resume"):
            train.train(shop, out, config, resume=True, progress=silent())

    def test_without_a_checkpoint_there_is_nothing_to_resume(
        self, shop: Path, config: Config, silent: Make, tmp_path: Path
    ) -> None:
        progress = silent()
        with pytest.raises(TrainError, match=r"no checkpoint .* omit --resume"):
            train.train(shop, tmp_path / "model", config, resume=True, progress=progress)
        assert not progress.stages  # no time is spent on the data
        assert not (tmp_path / "model").exists()

    def test_an_unreadable_checkpoint_is_no_missing_one(
        self, shop: Path, config: Config, silent: Make, tmp_path: Path
    ) -> None:
        (tmp_path / "model" / LAST_CHECKPOINT).mkdir(parents=True)  # root may read every file
        progress = silent()
        with pytest.raises(OSError, match="Is a directory"):
            train.train(shop, tmp_path / "model", config, resume=True, progress=progress)
        assert not progress.stages

    def test_a_finished_training_leaves_no_checkpoint(self, uninterrupted: Path, interrupted: Path) -> None:
        assert all((interrupted / name).is_file() for name in CHECKPOINT_FILES)
        assert sorted(path.name for path in uninterrupted.iterdir()) == sorted(
            [*model_directory.FILES, model_directory.MANIFEST]
        )


class TestTwoTrainingsOfOneDirectory:
    def test_a_second_one_is_refused_while_the_first_one_works(
        self, shop: Path, config: Config, uninterrupted: Path, silent: Make, tmp_path: Path
    ) -> None:
        out, progress, refused = tmp_path / "model", silent(), []
        end_epoch = progress.epoch

        def epoch(report: EpochReport) -> None:
            end_epoch(report)
            with pytest.raises(TrainError, match=r"another training is working in .*; wait for it, or choose") as error:
                train.train(shop, out, config, resume=True, progress=silent())
            refused.append(error)

        progress.epoch = epoch
        train.train(shop, out, config, progress=progress)
        assert len(refused) == config.training.epochs
        assert same_files(out, uninterrupted)

    def test_a_second_one_is_refused_when_the_first_one_ends_meanwhile(
        self, shop: Path, config: Config, uninterrupted: Path, silent: Make, tmp_path: Path, monkeypatch: Any
    ) -> None:
        out = tmp_path / "model"
        create = Path.mkdir

        def create_late(path: Path, *args: Any, **options: Any) -> None:
            monkeypatch.setattr(Path, "mkdir", create)
            shutil.copytree(uninterrupted, out)
            path.mkdir(*args, **options)

        monkeypatch.setattr(Path, "mkdir", create_late)
        with pytest.raises(TrainError, match="already contains a model"):
            train.train(shop, out, config, progress=silent())
        assert sorted(os.listdir(out)) == sorted(os.listdir(uninterrupted))

    def test_after_a_killed_one_the_directory_is_free(
        self, shop: Path, config: Config, uninterrupted: Path, silent: Make, tmp_path: Path
    ) -> None:
        (tmp_path / "model" / CHECKPOINT).mkdir(parents=True)  # what a process leaves that is killed while it reads
        train.train(shop, tmp_path / "model", config, progress=silent())
        assert same_files(tmp_path / "model", uninterrupted)


class TestRefusals:
    def test_a_model_is_never_overwritten(self, shop: Path, trained: Path, tiny_config: Make, silent: Make) -> None:
        before = (trained / model_directory.MANIFEST).read_bytes()
        with pytest.raises(TrainError, match="already contains a model; choose another --out, or delete it"):
            train.train(shop, trained, tiny_config(), progress=silent())
        assert (trained / model_directory.MANIFEST).read_bytes() == before

    def test_a_missing_gpu(
        self, shop: Path, tmp_path: Path, tiny_config: Make, silent: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(TrainError, match="torch finds no GPU; use --device cpu"):
            train.train(shop, tmp_path / "model", tiny_config(), resources=Resources("cuda"), progress=silent())

    def test_uninformative_data(self, tmp_path: Path, write_rows: Make, tiny_config: Make, silent: Make) -> None:
        lonely = write_rows(tmp_path / "data", [("u", "a", 1), ("v", "b", 2)])
        with pytest.raises(DataError, match="nothing to learn; add more events"):
            train.train(lonely, tmp_path / "model", tiny_config(), progress=silent())
        assert not (tmp_path / "model").exists()

    def test_a_refused_one_leaves_the_directory_of_the_first_one(self, tmp_path: Path, monkeypatch: Any) -> None:
        out = tmp_path / "model"
        with train.reserved(out, resume=False):
            with monkeypatch.context() as patch:
                patch.setattr(Path, "exists", lambda _: False)  # as when both begin at the same time
                with pytest.raises(TrainError, match="another training"), train.reserved(out, resume=False):
                    pass
            with pytest.raises(TrainError, match="another training"), train.reserved(out, resume=False):
                pass
        assert not out.exists()

    def test_a_directory_that_the_first_one_removes_meanwhile_is_created_again(
        self, tmp_path: Path, monkeypatch: Any
    ) -> None:
        out, lock = tmp_path / "model", fcntl.flock

        def lock_late(descriptor: int, operation: int) -> None:
            monkeypatch.setattr(fcntl, "flock", lock)
            (out / CHECKPOINT).rmdir()
            out.rmdir()
            lock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", lock_late)
        with train.reserved(out, resume=False):
            assert (out / CHECKPOINT).is_dir()
            with pytest.raises(TrainError, match="another training"), train.reserved(out, resume=False):
                pass
