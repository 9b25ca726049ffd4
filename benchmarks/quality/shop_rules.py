"""Measure what the rules of a shop cost: HR@10 with each recipe of docs/recipes.md beside the plain list.

A real service gets the items with their properties, the users with theirs, and each user's events before the held-out
one. Then each user's ten best items are asked for over HTTP, without a rule and with each one. Strengths of boosts are
chosen on the validation events: the strongest that keeps 95 % of HR@10. The test events are asked for once, with those.

    python -m benchmarks.quality.shop_rules --data $LISAREC_DATA/online-retail --model models/retail

The model is one of ``lisarec train --protocol temporal``. What a data set lacks is drawn from the hashes of ids, and so
has nothing to do with taste: margins, prices and regions. Its own are the departments of Complete Journey, what an item
is (the commodity there, the last word of the title elsewhere), when items were first and last sold, and what was bought
together. The last four weeks of training are the shop's present, which is moved to now.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import httpx
import numpy as np
import polars as pl
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from app.jobs import import_items
from app.jobs.replay import EventJson, histories, replay
from benchmarks.harness.service_process import running_service
from benchmarks.machine import cpu
from model.artifact import model_directory
from model.data.interactions import Interactions
from model.data.readers import read_items
from model.data.splits import Split
from model.evaluation.evaluate import prepare_trial
from model.metrics import difference, difference_interval_95, interval_95, metrics

K = 10
NOT_SHOWN = K + 1  # the rank of what is not recommended
ASKED_AT_ONCE = 40
PRESENT_US = 28 * 86_400 * 1_000_000
STRENGTHS = (0.1, 0.2, 0.4, 0.7, 1.0)
KEPT = 0.95  # of HR@10, by the strongest boost that is chosen
REGIONS = ("north", "east", "south", "west")
ABSENT = 0.1  # share of the items that a region lacks, and of those that are sold out until tomorrow
AGED_DEPARTMENT, AGE = "SPIRITS", 21

console = Console()
Wishes = dict[str, Any]


class Asker(NamedTuple):
    """A user and the held-out event.

    place   how many events the user has before it
    target  what the user chose
    page    the item before it
    cart    what was bought with it so far
    """

    user_id: str
    place: int
    target: str
    page: str
    cart: Sequence[str]


@dataclass(frozen=True)
class Recipe:
    """A rule of a shop.

    wishes    what it adds to a request, by the strength of its boost where it has one
    strength  that was chosen
    """

    name: str
    wishes: Callable[[Asker, float], Wishes]
    is_boost: bool = False


ALWAYS = (
    Recipe("in stock only", lambda asker, _: {"filter": "item.stock > 0.0"}),
    Recipe(
        "same kind as this page",
        lambda asker, _: {"filter": "item.kind == current.kind", "current_item": asker.page},
    ),
    Recipe(
        "members' prices, at most 50",
        lambda asker, _: {
            "filter": "(user.member ? item.member_price : item.price) <= params.most",
            "params": {"most": 50},
        },
    ),
    Recipe("no more than two of a kind", lambda asker, _: {"max_per": {"kind": 2}}),
    Recipe(
        "new arrivals first",
        lambda asker, strength: {"boost": f'item.published_at > now - duration("672h") ? {strength} : 0.0'},
        is_boost=True,
    ),
    Recipe(
        "margin as a boost",
        lambda asker, strength: {"boost": f"{strength} * item.margin"},
        is_boost=True,
    ),
    Recipe("not what is in the cart", lambda asker, _: {"exclude": list(asker.cart)}),
    Recipe("region", lambda asker, _: {"filter": "user.region in item.regions"}),
)
AGE_LIMIT = Recipe(
    "age limit, no age known", lambda asker, _: {"filter": "!known(item.age_limit) || user.age >= item.age_limit"}
)
PLAIN = Recipe("no rule", lambda asker, _: {})
SOLD_OUT = Recipe("a tenth is sold out until tomorrow", lambda asker, _: {})


class Answers(NamedTuple):
    """What was shown to each asker: ranks of the targets, and the items."""

    ranks: NDArray[np.int64]
    shown: Sequence[Sequence[str]]


def drawn(name: str, item_id: str) -> float:
    """Return a number from 0 to 1 that depends on nothing but the two texts."""
    digest = hashlib.sha256(f"{name}/{item_id}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


def kind(categories: Sequence[str], title: str) -> str | None:
    """Return what an item is: its second category, or else the last word of its title."""
    return next(iter([*categories[1:2], *title.split()[-1:]]), None)


def item_table(directory: Path, interactions: Interactions, parts: Split) -> pl.DataFrame:
    """Return the items with their properties, as a shop's file has them."""
    ids, items = interactions.item_ids, read_items(directory)
    times = interactions.timestamp_us[parts.train]
    end_us = int(times.max())
    sold = interactions.item[parts.train]
    firsts_us = np.full(len(ids), np.iinfo(np.int64).max)
    np.minimum.at(firsts_us, sold, times)
    stock = np.bincount(sold[times > end_us - PRESENT_US], minlength=len(ids))
    moved = datetime.now(UTC) - datetime.fromtimestamp(end_us / 1e6, UTC)
    categories = [items.categories.get(one, ()) for one in ids]
    departments = [one[0] if len(one) > 1 else None for one in categories]
    first_sold = [
        datetime.fromtimestamp(one / 1e6, UTC) + moved if one <= end_us else None for one in firsts_us.tolist()
    ]
    columns: dict[str, Sequence[Any]] = {
        "item_id": ids,
        "kind": [kind(own, items.titles.get(one, "")) for own, one in zip(categories, ids, strict=True)],
        "stock": stock.tolist(),
        "published_at": [one and one.isoformat() for one in first_sold],
        "price": [round(100 * drawn("price", one), 2) for one in ids],
        "member_price": [round(80 * drawn("price", one), 2) for one in ids],
        "margin": [round(drawn("margin", one), 3) for one in ids],
        "regions": ["|".join(region for region in REGIONS if drawn(region, one) >= ABSENT) for one in ids],
        "department": departments,
        "age_limit": [AGE if one == AGED_DEPARTMENT else None for one in departments],
    }
    return pl.DataFrame({name: column for name, column in columns.items() if any(one is not None for one in column)})


def user_properties(user_id: str) -> dict[str, Any]:
    """Return what the shop knows of a user: half are members, and each has a region. Nobody has said an age."""
    return {
        "member": drawn("member", user_id) < 0.5,
        "region": REGIONS[int(len(REGIONS) * drawn("region", user_id))],
    }


def askers(interactions: Interactions, positions: NDArray[np.int64]) -> list[Asker]:
    """Return who asks before each of the held-out events."""
    found = []
    for position in positions.tolist():
        user = int(interactions.user[position])
        begin = int(interactions.starts[user])
        before = interactions.timestamp_us[begin:position]
        names = [interactions.item_ids[item] for item in interactions.item[begin : position + 1].tolist()]
        together = np.flatnonzero(before == interactions.timestamp_us[position]).tolist()
        cart = list(dict.fromkeys(names[place] for place in together if names[place] != names[-1]))
        found.append(
            Asker(interactions.user_ids[user], position - begin, names[-1], names[-2], list(dict.fromkeys(cart)))
        )
    return found


def parts_of_histories(
    interactions: Interactions, begins: Mapping[str, int], ends: Mapping[str, int]
) -> Iterator[Sequence[EventJson]]:
    """Yield the events of each user from one place of the user's history to another."""
    for events in histories(interactions):
        user_id = str(events[0]["user_id"])
        if part := events[begins.get(user_id, 0) : ends.get(user_id, 0)]:
            yield part


def ask(client: httpx.Client, asking: Sequence[Asker], recipe: Recipe, strength: float = 0.0) -> Answers:
    """Return what the service shows with a recipe."""
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


def choose_strengths(client: httpx.Client, asking: Sequence[Asker]) -> dict[str, float]:
    """Return the strongest boost of each recipe that keeps most of the hits on the validation events."""
    plain = metrics(ask(client, asking, PLAIN).ranks)["hr_at_10"]
    table = Table("validation HR@10", *(f"{one:g}" for one in STRENGTHS), title=f"no rule: {plain:.4f}")
    chosen = {}
    for recipe in ALWAYS:
        if recipe.is_boost:
            found = [metrics(ask(client, asking, recipe, one).ranks)["hr_at_10"] for one in STRENGTHS]
            kept = [one for one, hits in zip(STRENGTHS, found, strict=True) if hits >= KEPT * plain]
            chosen[recipe.name] = max(kept, default=STRENGTHS[0])
            table.add_row(recipe.name, *(f"{hits:.4f}" for hits in found))
    console.print(table)
    return chosen


def sell_out(client: httpx.Client, item_ids: Sequence[str]) -> None:
    """Let a tenth of the items be sold out until tomorrow, and wait until the service goes by it."""
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    gone = [one for one in item_ids if drawn("gone", one) < ABSENT]
    import_items.send([{"item_id": one, "available_from": tomorrow} for one in gone], str(client.base_url))
    wanted = {"history": [], "candidates": gone[:1000], "exclude_seen": "none"}
    while client.post("/v1/recommendations", json=wanted).json()["items"]:
        time.sleep(0.1)


def measure(
    url: str, directory: Path, interactions: Interactions, parts: Split, users: int | None
) -> tuple[dict[str, Answers], Sequence[Asker]]:
    """Return the answers on the test events by recipe, and who asked."""
    validating, testing = (
        askers(interactions, np.sort(np.random.default_rng(0).permutation(positions)[:users]))
        for positions in (parts.validation, parts.test)
    )
    validated, tested = ({one.user_id: one.place for one in asking} for asking in (validating, testing))
    with TemporaryDirectory() as scratch, httpx.Client(base_url=url, timeout=120) as client:
        file = Path(scratch) / "items.tsv"
        table = item_table(directory, interactions, parts)
        table.write_csv(file, separator="\t")
        import_items.send(import_items.read(file, {}), url)
        client.put("/v1/admin/properties", json={"users": {"age": "number"}}).raise_for_status()
        for user_id in sorted(validated.keys() | tested.keys()):
            path = f"/v1/users/{user_id}/properties"
            client.put(path, json={"properties": user_properties(user_id)}).raise_for_status()
        asyncio.run(replay(parts_of_histories(interactions, {}, validated), url))
        strengths = choose_strengths(client, validating)
        asyncio.run(replay(parts_of_histories(interactions, validated, tested), url))
        recipes = [PLAIN, *ALWAYS, *([AGE_LIMIT] if "age_limit" in table.columns else [])]
        answers = {_title(one, strengths): ask(client, testing, one, strengths.get(one.name, 0)) for one in recipes}
        sell_out(client, interactions.item_ids)
        answers[SOLD_OUT.name] = ask(client, testing, SOLD_OUT)
    return answers, testing


def _title(recipe: Recipe, strengths: Mapping[str, float]) -> str:
    return f"{recipe.name}, {strengths[recipe.name]:g}" if recipe.is_boost else recipe.name


def main(
    data: Annotated[Path, typer.Option(help="Data directory with real times and titles.")],
    model: Annotated[Path, typer.Option(help="Model of it, trained with --protocol temporal.")],
    users: Annotated[int | None, typer.Option(help="Ask for so many users only.")] = None,
) -> None:
    """Print what each rule costs."""
    trial = prepare_trial(model_directory.load(model), data, "temporal", "none")
    with running_service(model) as url:
        answers, asked = measure(url, data, trial.interactions, trial.parts, users)
    table = Table(
        title=f"{data.name}, table {trial.interactions.sha256[:16]}, temporal, seen rule none, ties against the model; "
        f"{len(asked):,} users; {cpu()}"
    )
    for name in ("rule", "HR@10 (95 %)", "minus no rule (paired 95 %)", "items replaced", "lists below ten"):
        table.add_column(name)
    plain = answers[PLAIN.name]
    for name, found in answers.items():
        low, high = interval_95(found.ranks, "hr_at_10")
        worse, better = difference_interval_95(found.ranks, plain.ranks, "hr_at_10")
        replaced = [len(set(before) - set(now)) / K for before, now in zip(plain.shown, found.shown, strict=True)]
        table.add_row(
            name,
            f"{metrics(found.ranks)['hr_at_10']:.4f} ({low:.4f} to {high:.4f})",
            f"{difference(found.ranks, plain.ranks, 'hr_at_10'):+.4f} ({worse:+.4f} to {better:+.4f})",
            f"{np.mean(replaced):.1%}",
            f"{np.mean([len(one) < K for one in found.shown]):.1%}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
