"""The cost of a shop's rules in short: every recipe is served, and its lists keep the rule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from app.jobs.datasets import synthetic_shop
from benchmarks.harness.service_process import running_service
from benchmarks.quality import shop_rules
from model.config import Config, DataCard, ModelConfig, TrainConfig
from model.evaluation.evaluate import prepare_trial
from model.training.train import train
from tests.benchmarks.support import Silent

pytestmark = pytest.mark.slow


def test_every_list_keeps_its_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shop_rules, "AGED_DEPARTMENT", "Music")
    data, model = tmp_path / "shop", tmp_path / "model"
    data.mkdir()
    synthetic_shop.generate(data, shoppers=300)
    shape, card = ModelConfig(width=16), DataCard(split="temporal")
    config = Config(model=shape, training=TrainConfig(epochs=1), data=card)
    trial = prepare_trial(train(data, model, config, progress=Silent()), data, "temporal", "none")
    with running_service(model) as url:
        answers, asked = shop_rules.measure(url, data, trial.interactions, trial.parts, users=20)
    items = {row["item_id"]: row for row in shop_rules.item_table(data, trial.interactions, trial.parts).to_dicts()}
    assert len(asked) == 20
    assert "new arrivals first" in capsys.readouterr().out
    shown = {name.split(",")[0]: found.shown for name, found in answers.items()}
    for place, asker in enumerate(asked):
        lists = {name: [items[one] for one in found[place]] for name, found in shown.items()}
        user = shop_rules.user_properties(asker.user_id)
        price = "member_price" if user["member"] else "price"
        assert all(item["stock"] > 0 for item in lists["in stock only"])
        assert {item["kind"] for item in lists["same kind as this page"]} <= {items[asker.page]["kind"]}
        assert all(item[price] <= 50 for item in lists["members' prices"])
        assert max(Counter(item["kind"] for item in lists["no more than two of a kind"]).values()) <= 2
        assert all(user["region"] in item["regions"].split("|") for item in lists["region"])
        assert not {item["item_id"] for item in lists["not what is in the cart"]} & set(asker.cart)
        assert all(item["department"] != "Music" for item in lists["age limit"])
        gone = lists["a tenth is sold out until tomorrow"]
        assert all(shop_rules.drawn("gone", item["item_id"]) >= shop_rules.ABSENT for item in gone)
    assert all(len(found) == shop_rules.K for found in shown["no rule"])
