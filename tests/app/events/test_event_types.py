"""Event types: weights and unseen types of the command line belong to the generation; folding and filters use them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from app.serving.served_generation import generation_of
from app.settings import Settings
from model.artifact import model_directory
from model.config import EVENT_WEIGHTS
from model.data.interactions import DataError
from model.data.readers import read_interactions
from model.data.splits import split
from model.holdout_ranks import held_out_events, ranks_full
from tests.app.conftest import Client, item_id
from tests.app.support import run_command
from tests.storage.oracles.naive_fold import assert_histogram_is, fold

TYPES = ("glance", "purchase", "click")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """40 users, each with eight events of all types."""
    directory = tmp_path / "data"
    directory.mkdir()
    rng = np.random.default_rng(0)
    rows = [
        f"u{user}\t{item_id(int(rng.integers(12)))}\t{1000 + step}\t{TYPES[step % 3]}"
        for user in range(40)
        for step in range(8)
    ]
    (directory / "interactions.tsv").write_text("\n".join(["user_id\titem_id\ttimestamp\ttype", *rows]) + "\n")
    return directory


@pytest.mark.slow
def test_the_service_folds_and_hides_by_the_types_of_the_training(data: Path, tmp_path: Path) -> None:
    model = tmp_path / "models" / "own"
    weight_options = (
        "--event-weight",
        "glance=0.25",
        "--event-weight",
        "purchase=3",
        "--unseen",
        "glance",
        "--unseen",
        "view",
    )
    assert run_command("train", "--data", data, "--out", model, "--epochs", 1, *weight_options) == 0
    loaded = model_directory.load(model)
    assert loaded.config.event_weights == EVENT_WEIGHTS | {"glance": 0.25, "purchase": 3.0}
    assert loaded.config.unseen_types == ("glance", "view")
    client = Client(Settings(model_dir=model, data_dir=tmp_path / "state"))
    try:
        kinds = ["glance", "purchase", "view", "dislike", "never-heard-of"]
        events = [{"user_id": "ada", "item_id": item_id(row), "type": kind} for row, kind in enumerate(kinds)]
        assert client.post("/v1/events", json=events).json()["accepted"] == len(kinds)
        state = client.get("/v1/users/ada").json()
        expected = fold(generation_of(loaded), client.log("ada"))
        assert expected.steps == 3
        assert_histogram_is(state["histogram"], expected.histogram())
        hidden = {item_id(1), item_id(3), item_id(4)}  # whatever else was done to it is seen
        assert set(state["recent_items"]) == hidden
        for rule in ("recent", "all"):
            shown = {item["item_id"] for item in client.recommend("ada", k=100, exclude_seen=rule)["items"]}
            assert shown == set(loaded.items.ids) - hidden
    finally:
        client.close()


def test_event_types_are_part_of_the_generation(model_dir: Path, tmp_path: Path) -> None:
    tags = {model_directory.load(model_dir).tag}
    for name, old, new in (
        ("weights", '"purchase": 2.0', '"purchase": 2.5'),
        ("unseen", '"unseen_types": []', '"unseen_types": ["view"]'),
    ):
        shutil.copytree(model_dir, tmp_path / name)
        config = (tmp_path / name / "config.json").read_text()
        assert old in config
        loaded = model_directory.load(model_dir)
        changed = loaded.config.model_validate_json(config.replace(old, new))
        model_directory.save(tmp_path / name, loaded.model, changed, loaded.items, loaded.metrics)
        tags.add(model_directory.load(tmp_path / name).tag)
    assert len(tags) == 3


@pytest.mark.parametrize("unseen", [(), ("glance",), TYPES])
def test_an_evaluation_hides_the_same_items_as_the_service(
    data: Path, model_dir: Path, unseen: tuple[str, ...]
) -> None:
    config = model_directory.load(model_dir).config.model_copy(
        update={"event_weights": dict.fromkeys(TYPES, 1.0), "unseen_types": unseen}
    )
    table = read_interactions(data)
    positions = split(table, "loo").test
    events = held_out_events(table, positions, config)
    ranks = ranks_full(events, lambda histories: np.zeros((len(histories), len(table.item_ids)), np.float32), "all")
    for position, rank in zip(positions.tolist(), ranks.tolist(), strict=True):
        before = range(table.starts[table.user[position]], position)
        hidden = {int(table.item[event]) for event in before if table.type_names[table.type[event]] not in unseen}
        target = int(table.item[position])
        assert rank == (51 if target in hidden else len(table.item_ids) - len(hidden))


@pytest.mark.parametrize(
    "weight_options",
    [
        ("--event-weight", "purchase"),
        ("--event-weight", "purchase=much"),
        ("--event-weight", "purchase=-1"),
        ("--event-weight", "purchase=nan"),
        ("--event-weight", "purchase=1e9"),
        ("--event-weight", "a!b=1"),
        ("--event-weight", "=1"),
        ("--unseen", "a b"),
    ],
)
def test_invalid_types_and_weights_are_refused(
    weight_options: tuple[str, str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("train", "--data", data, "--out", tmp_path / "m", *weight_options) == 2
    assert "TYPE=WEIGHT" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_a_type_without_a_weight_is_named(data: Path) -> None:
    with pytest.raises(DataError, match="--event-weight glance=1"):
        read_interactions(data).weights(EVENT_WEIGHTS)


@pytest.mark.slow
def test_training_on_a_log_skips_unknown_types_with_a_warning(
    data: Path, client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Types that the API accepted must not block training."""
    found = read_interactions(data)
    events = [
        {"user_id": found.user_ids[user], "item_id": found.item_ids[item], "type": found.type_names[kind]}
        for user, item, kind in zip(found.user, found.item, found.type, strict=True)
    ]
    unknown = sum(event["type"] == "glance" for event in events)
    assert client.post("/v1/events", json=events).json()["unknown_types"] == unknown
    archive = ("--archive-dir", tmp_path / "archive")
    assert run_command("archive", "--data-dir", client.settings.data_dir, *archive, "--once") == 0
    model = tmp_path / "models" / "of-the-log"
    assert run_command("train", "--data", tmp_path / "archive", "--out", model, "--epochs", 1) == 0
    assert f"ignored {unknown} events of types without a weight: glance ({unknown})" in caplog.text
    card = model_directory.load(model).config.data
    assert card.events == len(events) - unknown
    out = tmp_path / "models" / "all"
    options = ("--epochs", 1, "--event-weight", "glance=1")
    assert run_command("train", "--data", tmp_path / "archive", "--out", out, *options) == 0
    assert model_directory.load(out).config.data.events == len(events)
