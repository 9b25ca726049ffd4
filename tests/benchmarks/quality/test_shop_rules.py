"""The cost of a shop's rules, shortened: every recipe is served, and its lists follow the rule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.harness.service_process import running_service
from benchmarks.quality import shop_rules, shops
from model.artifact import model_directory
from model.config import Config, DataCard, ModelConfig, TrainConfig
from model.data.interactions import DataError, Interactions
from model.evaluation.evaluate import prepare_trial
from model.evaluation.trial import Trial
from model.training.loop import Progress
from model.training.train import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape, card = ModelConfig(width=16), DataCard(split="temporal")
    config = Config(model=shape, training=TrainConfig(epochs=1), data=card)
    directory = tmp_path_factory.mktemp("model") / "model"
    train(data, directory, config, progress=Progress())
    return directory


@pytest.fixture(scope="module")
def trial(data: Path, model: Path) -> Trial:
    return prepare_trial(model_directory.load(model), data, "temporal", "none")


@pytest.fixture(scope="module")
def raw(trial: Trial, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw tables of the synthetic shop in the format of Complete Journey, with numeric ids."""
    directory, interactions = tmp_path_factory.mktemp("raw"), trial.interactions
    rows = np.arange(len(interactions))
    price = 1.0 + interactions.item % 7
    pl.DataFrame(
        {
            "household_id": pl.Series(interactions.user_ids).gather(interactions.user),
            "product_id": pl.Series(interactions.item_ids).gather(interactions.item),
            "transaction_timestamp": pl.Series(interactions.timestamp_us).cast(pl.Datetime("us")),
            "store_id": 300 + interactions.user % 3,
            "quantity": 2 + rows % 2,
            "sales_value": (2 + rows % 2) * price,
            "retail_disc": (2 + rows % 2) * (interactions.user % 2).astype(float),
            "coupon_match_disc": 0.0,
        }
    ).write_parquet(directory / "transactions.parquet")
    items = np.arange(len(interactions.item_ids))
    pl.DataFrame(
        {
            "product_id": interactions.item_ids,
            "manufacturer_id": items % 5,
            "brand": ["Private" if item % 5 == 0 else "National" for item in items],
            "product_category": ["LIQUOR" if item % 4 == 0 else f"KIND {item % 6}" for item in items],
        }
    ).write_parquet(directory / "products.parquet")
    bands = {"household_id": interactions.user_ids[::2], "age": ["19-24", "65+"] * 75}
    pl.DataFrame(bands).write_parquet(directory / "demographics.parquet")
    return directory


def test_every_list_follows_its_rule(
    data: Path, model: Path, trial: Trial, raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shop = shops.described(raw, trial.interactions, trial.parts)
    margins = shops.drawn(data, trial.interactions, trial.parts).items["margin"]
    shop = shop._replace(items=shop.items.with_columns(margins))
    with running_service(model) as url:
        answers, asked = shop_rules.measure(url, shop, trial.interactions, trial.parts, users=20)
    items = {row["item_id"]: row for row in shop.items.to_dicts()}
    assert len(asked) == 20
    shop_rules.report("", answers)
    assert "new arrivals first" in capsys.readouterr().out
    shown = {name.split(",")[0]: found.shown for name, found in answers.items()}
    for place, asker in enumerate(asked):
        lists = {name: [items[one] for one in found[place]] for name, found in shown.items()}
        user, page = shop.users[asker.user_id], items[asker.page]
        price = "member_price" if user.get("member") else "price"
        assert all(item["stock"] > 0 for item in lists["in stock only"])
        assert all(item[price] <= shop.most for item in lists["members' prices"])
        for column in ("brand", "kind"):
            assert {item[column] for item in lists[f"same {column} as this page"]} <= {page[column]}
            assert max(Counter(item[column] for item in lists[f"no more than two of a {column}"]).values()) <= 2
        assert all(user.get("region") in item["regions"].split("|") for item in lists["region"])
        assert not {item["item_id"] for item in lists["not what is in the cart"]} & set(asker.cart)
        assert user.get("age", 0) >= 21 or not any(item["age_limit"] for item in lists["age limit"])
        lately = bought_lately(trial.interactions, asker)
        assert not {item["item_id"] for item in lists["not what was bought in the last 90 days"]} & lately
        gone = lists["a tenth is sold out until tomorrow"]
        assert all(shops.share("gone", item["item_id"]) >= shop_rules.SOLD_OUT_SHARE for item in gone)
    assert all(len(found) == shop_rules.K for found in shown["no rule"])


def bought_lately(interactions: Interactions, asker: shop_rules.Asker) -> set[str]:
    begin = interactions.starts[interactions.user_ids.index(asker.user_id)]
    before = range(begin, begin + asker.place)
    return {
        interactions.item_ids[interactions.item[row]]
        for row in before
        if interactions.timestamp_us[row] / 1e6 >= asker.at_s - 90 * 86_400
    }


def test_properties_come_from_raw_lines_of_the_training_part(trial: Trial, raw: Path) -> None:
    interactions, parts = trial.interactions, trial.parts
    shop = shops.described(raw, interactions, parts)
    learned = set(interactions.item[parts.train].tolist())
    for place, row in enumerate(shop.items.iter_rows(named=True)):
        assert row["item_id"] == interactions.item_ids[place]
        assert row["member_price"] == (1.0 + place % 7 if place in learned else None)
        assert row["age_limit"] == (None if place % 4 else 21)
        assert row["own_brand"] == (place % 5 == 0)
    trained = set(interactions.user[parts.train].tolist())
    for place, user_id in enumerate(interactions.user_ids):
        known = {"member": place % 2 == 1, "region": str(300 + place % 3)} if place in trained else {}
        ages = {} if place % 2 else {"age": 65 if place % 4 else 19}
        assert shop.users[user_id] == known | ages


def test_raw_lines_of_another_table_are_refused(trial: Trial, raw: Path, tmp_path: Path) -> None:
    for name in shops.RAW_TABLES:
        pl.read_parquet(raw / name).slice(1).write_parquet(tmp_path / name)
    with pytest.raises(DataError, match="not the lines"):
        shops.described(tmp_path, trial.interactions, trial.parts)


def test_raw_prices_replace_random_ones(data: Path, trial: Trial, tmp_path: Path) -> None:
    first, *_ = trial.interactions.item_ids
    (tmp_path / "lines.csv").write_text(f"InvoiceNo,StockCode,UnitPrice\n1,{first},2.5\n2,{first},4.5\n3,{first},0\n")
    shop = shops.drawn(data, trial.interactions, trial.parts, tmp_path / "lines.csv")
    assert shop.items["price"].to_list() == [3.5, *[None] * (len(trial.interactions.item_ids) - 1)]
    assert shop.most == 3.5
