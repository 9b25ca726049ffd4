"""Commands with s3:// URLs: backups are restored completely, and trainings read what was collected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli.options import place_of
from app.jobs.archive import ArchiverMetrics, ArchiverPlan, run_archiver
from app.jobs.datasets.bucket import local_copy
from app.jobs.datasets.synthetic_shop import generate
from app.serving.bucket_models import BucketModels
from app.settings import Settings
from benchmarks.harness.service_process import free_port
from model.data.readers import read_interactions, read_items
from storage.folders.folder import add_file
from storage.folders.object_folder import ObjectFolder
from storage.folders.place import ObjectUrl
from tests.app.conftest import Client, item_id, write_model
from tests.app.support import run_command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a command; return its exit status and output."""

    def run(*arguments: object) -> tuple[int, str]:
        status = run_command(*arguments)
        printed = capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split())

    return run


def test_a_backup_in_a_bucket_is_restored_into_another_store(
    s3: Callable[[], str],
    tmp_path: Path,
    model_dir: Path,
    command: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = s3()
    models = BucketModels(ObjectUrl(f"{url}/models"), tmp_path / "cache")
    write_model(models.work / "may")
    models.publish("may")
    clicked = [item_id(row) for row in range(12)]
    client = Client(Settings(model_dir=model_dir, data_dir=tmp_path / "state"))
    client.click("ada", *clicked)
    out = f"{url}/backups/log.jsonl.gz"
    with monkeypatch.context() as patch:
        patch.setattr(ObjectFolder, "names", None)  # a bucket may have millions
        status, printed = command("backup", "--data-dir", tmp_path / "state", "--out", out)
        assert (status, f"{out}: 12 log entries" in printed) == (0, True)
        status, printed = command("backup", "--data-dir", tmp_path / "state", "--out", out)
        assert (status, "exists already" in printed) == (1, True)
        patch.setattr(ObjectFolder, "has", lambda *_: False)  # as if both had begun at once
        client.click("ada", item_id(12))
        status, printed = command("backup", "--data-dir", tmp_path / "state", "--out", out)
        assert (status, "another process" in printed, "Traceback" in printed) == (1, True, False)
    client.close()
    status, printed = command("restore", out, "--model", f"{url}/models/may", "--data-dir", tmp_path / "other")
    assert (status, "12 entries restored" in printed) == (0, True)
    restored = Client(Settings(model_dir=place_of(f"{url}/models/may"), data_dir=tmp_path / "other"))
    assert [event.item_id for event in restored.log("ada")] == clicked
    assert restored.recommend("ada")["source"] == "personalised"
    restored.close()
    assert list((tmp_path / "cache").glob("backup-*")) == []


def test_a_failed_upload_of_a_backup_leaves_no_local_copy(
    s3: Callable[[], str],
    tmp_path: Path,
    model_dir: Path,
    command: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client(Settings(model_dir=model_dir, data_dir=tmp_path / "state"))
    client.click("ada", item_id(1))
    client.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")  # where nobody listens
    status, printed = command("backup", "--data-dir", tmp_path / "state", "--out", f"{s3()}/log.jsonl.gz")
    assert (status, "failed" in printed, "Traceback" in printed) == (1, True, False)
    assert list((tmp_path / "cache").glob("backup-*")) == []


def test_a_data_directory_in_a_bucket_is_read_unchanged(s3: Callable[[], str], tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    generate(tmp_path / "shop", shoppers=30)
    url, cache = s3(), tmp_path / "cache"
    folder = ObjectFolder(url, cache)
    for path in (tmp_path / "shop").iterdir():
        add_file(folder, path.name, path)
    copy = local_copy(ObjectUrl(url), cache)
    assert read_interactions(copy).sha256 == read_interactions(tmp_path / "shop").sha256
    assert read_items(copy) == read_items(tmp_path / "shop")


def test_a_run_keeps_its_copy_while_others_copy_newer_data(s3: Callable[[], str], tmp_path: Path) -> None:
    url, cache = s3(), tmp_path / "cache"
    folder = ObjectFolder(url, cache)
    shops = [tmp_path / f"shop-{shoppers}" for shoppers in (20, 30)]
    copies = []
    for shoppers, shop in zip((20, 30), shops, strict=True):
        shop.mkdir()
        generate(shop, shoppers=shoppers)
        for path in shop.iterdir():
            add_file(folder, path.name, path)
        copies.append(local_copy(ObjectUrl(url), cache))
    for copy, shop in zip(copies, shops, strict=True):
        assert read_interactions(copy).sha256 == read_interactions(shop).sha256


def test_copies_of_ended_runs_are_deleted_by_the_next(s3: Callable[[], str], tmp_path: Path) -> None:
    url, cache = s3(), tmp_path / "cache"
    ObjectFolder(url, cache).add("interactions.tsv.gz", b"x")
    first = local_copy(ObjectUrl(url), cache)
    left = first.with_name("left")
    left.mkdir()
    (left / "interactions.tsv.gz").touch()
    second = local_copy(ObjectUrl(url), cache)
    assert set(first.parent.iterdir()) == {first, second}


def test_an_archive_in_a_bucket_reads_like_a_directory(s3: Callable[[], str], tmp_path: Path, model_dir: Path) -> None:
    url, cache, once = s3(), tmp_path / "cache", ArchiverPlan(None, 0, None)
    client = Client(Settings(model_dir=model_dir, data_dir=tmp_path / "state"))
    for turn in range(3):
        for user in range(5):
            client.click(f"u{user}", *(item_id(row) for row in range(turn, turn + user + 1)))
        for place in (tmp_path / "archive", ObjectUrl(url)):
            run_archiver(
                client.settings.model_copy(update={"archive_dir": place, "cache_dir": cache}),
                once,
                lambda _: None,
                ArchiverMetrics(),
            )
        for tenant in ("", "/tenant=main"):
            copied = read_interactions(local_copy(ObjectUrl(f"{url}{tenant}"), cache))
            assert copied.sha256 == read_interactions(tmp_path / "archive").sha256
    client.close()
    ObjectFolder(url, cache).add("tenant=main/items.csv", b"item_id,title\ntea,Tea\n")
    assert read_items(local_copy(ObjectUrl(f"{url}/tenant=main"), cache)).titles == {"tea": "Tea"}


def test_a_model_is_trained_into_a_bucket(
    s3: Callable[[], str],
    tmp_path: Path,
    command: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop, out = tmp_path / "shop", f"{s3()}/models/may"
    shop.mkdir()
    generate(shop, shoppers=30)
    train = ("train", "--data", shop, "--out", out, "--epochs", 1)

    def fail(*_: object) -> None:
        raise OSError("the bucket is away")

    with monkeypatch.context() as patch:
        patch.setattr(BucketModels, "publish", fail)
        status, printed = command(*train)
        assert (status, "the bucket is away" in printed, "--resume" in printed) == (1, True, True)
    status, printed = command(*train)
    assert (status, "trained, but not uploaded" in printed) == (2, True)
    status, printed = command(*train, "--resume")
    assert (status, f"lisarec serve --model {out}" in printed, "epoch 1" in printed) == (0, True, False)
    models = BucketModels(ObjectUrl(out).parent, tmp_path / "another-machine")
    assert models.names() == ["may"]
    assert f"generation {models.load('may').tag}" in printed
    for more in ([], ["--resume"]):
        status, printed = command(*train, *more)
        assert (status, "already contains a model" in printed) == (2, True)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--out", "s3://models"], "s3://shop/models/june"),
        (["--out", "s3://a/b", "--preset", "lisa-base"], "directory"),
    ],
)
def test_a_model_in_a_bucket_needs_a_name(
    options: list[str], hint: str, s3: Callable[[], str], tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    status, printed = command("train", "--data", tmp_path, *[option.replace("s3://a", s3()) for option in options])
    assert (status, hint in printed) == (2, True)


def test_a_url_is_not_accepted_as_a_path(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, printed = command("evaluate", "--model", tmp_path, "--data", tmp_path, "--report", "s3://shop/report")
    assert (status, "a bucket's URL; pass a path on this machine" in printed) == (2, True)
    monkeypatch.chdir(tmp_path)
    status, printed = command("check", "s3/events.csv")  # a directory of that name
    assert (status, "bucket" in printed) == (1, False)
