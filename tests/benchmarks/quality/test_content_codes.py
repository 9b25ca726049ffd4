"""The benchmark of codes from content, shortened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.catalogue.description_codes import sample_audience
from benchmarks.quality.cold import content, questions
from model import cold_items
from model.inference.engine import Engine
from tests.model.conftest import write_rows

COLOURS = ("green", "black", "white", "oolong", "yellow", "red")
ITEMS = 120


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Customers who buy items of one colour, which titles name."""
    rng, rows = np.random.default_rng(0), list[tuple[str, str, int]]()
    for user in range(300):
        own, time_s = user % len(COLOURS), int(rng.integers(100_000))
        for _ in range(12):
            rows.append((f"u{user}", f"i{len(COLOURS) * int(rng.integers(ITEMS // len(COLOURS))) + own}", time_s))
            time_s += int(rng.integers(1, 20_000))
    directory = write_rows(tmp_path_factory.mktemp("teas"), rows)
    titles = "".join(f"i{item}\t{COLOURS[item % len(COLOURS)]} tea no {item}\tall\n" for item in range(ITEMS))
    (directory / "items.tsv").write_text("item_id\ttitle\tcategories\n" + titles, encoding="utf-8")
    return directory


def test_codes_from_titles_find_interested_users(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content.main(data, tmp_path / "tenth", epochs=2)
    chosen = " ".join(capsys.readouterr().out.split())
    assert "seen rule none, ties against the method, seed 0" in chosen
    assert "codewords" in chosen
    assert "minus vectors" not in chosen  # differences are of the test
    content.main(data, tmp_path / "tenth", test=True)
    assert "minus vectors" in " ".join(capsys.readouterr().out.split())

    world = questions.prepare(data, tmp_path / "tenth", None)
    assert len(world.new) == ITEMS / 10
    engine = Engine(world.trained)
    sample = sample_audience(world.trained, engine)
    asked = questions.questions_at(world, engine, questions.positions_of(world, "test", 0)[0])
    assert set(asked.target.tolist()) <= set(world.new.tolist())
    by_titles, _ = questions.ranks(world, asked, content.by_texts(world, sample, world.described))
    by_categories, _ = questions.ranks(world, asked, content.by_categories(world, sample))
    assert by_titles.mean() < by_categories.mean()


def test_ranks_equal_those_of_the_engine_with_cold_items(data: Path, tmp_path: Path) -> None:
    world = questions.prepare(data, tmp_path / "tenth", 1)
    engine = Engine(world.trained)
    sample = sample_audience(world.trained, engine)
    codes = content.by_texts(world, sample, world.described)
    names = [world.interactions.item_ids[row] for row in codes]
    extended = cold_items.with_cold_items(world.trained, names, cold_items.ColdItems.of(codes.values()))
    whole = world._replace(trained=extended, rows=extended.items.rows.places_of(world.interactions.item_ids))
    for positions in questions.positions_of(world, "test", 0):
        asked = questions.questions_at(world, engine, positions)
        found, _ = questions.ranks(world, asked, codes)
        # histories lack the new items in both, so these have to be taken out of the whole one's
        is_plain = np.array([_has_no_new_item_before(world, position) for position in positions.tolist()])
        expected = questions.questions_at(whole, Engine(extended), positions[is_plain]).rank
        np.testing.assert_allclose(np.minimum(found[is_plain], 11), np.minimum(expected, 11), atol=2)  # for ties
        assert is_plain.any()


def _has_no_new_item_before(world: questions.World, position: int) -> bool:
    interactions = world.interactions
    before = interactions.item[interactions.starts[interactions.user[position]] : position]
    return bool((world.rows[before] >= 0).all())
