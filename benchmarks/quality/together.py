"""Measure complements: how often the held-out item of an order is among the ten that go with the rest of it.

An order is what one user buys within an hour of the previous purchase, or under one ``order_id``. Orders that begin in
the first 80 % of the time (a quantile of the events) are counted, and methods are chosen on the next 10 %, where one
drawn item of each order is held out. With ``--test`` the last 10 % are the test, with that choice and counts from the
first 90 %. Items without counts are left out of orders, and so are orders of fewer than two items. The rest of an order
is a basket of at most 50 items. All items except the basket's are ranked, seen or not; ties count against the method.

``complements``    the table that training creates, with the constants of ``model.lisa.item_complements``
``one order``      how often items are in the same order: the sum of ``P(item | item of the basket)``
``co-visitation``  the same for items that follow within 10 events of a user's history, decayed
``popularity``     the items in the most orders

With a model of ``lisarec train --protocol temporal`` the lists of the service are also compared, on the orders after
its training. A user's history is everything before the order. One half of the users shows the effect of the strength of
complements; the other half is the test, with the strength of the service.

    python -m benchmarks.quality.together --data $LISAREC_DATA/online-retail [--test]
    python -m benchmarks.quality.together --data $LISAREC_DATA/online-retail --model models/retail
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias
from unittest.mock import patch

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy import sparse

from app.schemas.recommendations import RecommendationRequest
from app.serving.lifespan import Service
from benchmarks.machine import cpu
from benchmarks.quality.cold.items import service_of
from benchmarks.quality.rotation import interval_95, with_interval
from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.data.interactions import Interactions
from model.data.orders import NO_ORDER, WINDOW_S, order_numbers
from model.data.readers import read_interactions
from model.lisa import item_codes, item_complements
from model.lisa.item_complements import Complements, strongest_complements

K = 10
MAX_BASKET = 50
TRAIN_SHARE, VALIDATION_SHARE = 0.8, 0.9
BASKETS_AT_ONCE = 256
FOLLOW_WINDOW, FOLLOW_DECAYS = 10, (0.1, 0.4)
CHANGES: tuple[dict[str, Any], ...] = (
    *({"SHRINKAGE": value} for value in (5.0, 80.0)),
    *({"POPULARITY": value} for value in (0.0, 0.25, 0.5)),
    *({"SHARPNESS": value} for value in (1.0, 2.0)),
    *({"NEAR": value} for value in (5, 50)),
)
MAX_HISTORY = 300
ASKED_AT_ONCE = 64
WAYS = (
    "with basket",
    "with basket, cart as events",
    "cart as events",
    "without the cart",
    "basket alone",
)
STRENGTHS = (32.0, 64.0, 128.0)
WINDOWS_S = (0.0, WINDOW_S, 86_400.0)

console = Console()
Weights: TypeAlias = sparse.csr_array
"""What each item of a basket (rows) adds to the score of each item (columns)."""


class Question(NamedTuple):
    """The rest of an order, and the item that was held out of it."""

    basket: NDArray[np.int64]
    held_out: int


class Orders(NamedTuple):
    """Purchases by order, and when each order began; both by event.

    numbers  (events,)
    item     (events,)
    begin_us (events,)
    """

    numbers: NDArray[np.int64]
    item: NDArray[np.int32]
    begin_us: NDArray[np.int64]

    @classmethod
    def of(cls, interactions: Interactions, window_s: float = WINDOW_S) -> Orders:
        """Return the orders of a table."""
        numbers = order_numbers(interactions, window_s)
        is_bought = numbers != NO_ORDER
        numbers, item = numbers[is_bought], interactions.item[is_bought]
        begin_us = np.full(numbers.max(initial=-1) + 1, np.iinfo(np.int64).max)
        np.minimum.at(begin_us, numbers, interactions.timestamp_us[is_bought])
        return cls(numbers, item, begin_us[numbers])

    def between(self, begin_us: float, end_us: float) -> Orders:
        """Return the orders that begin within a period."""
        chosen = (begin_us <= self.begin_us) & (self.begin_us < end_us)
        return Orders(self.numbers[chosen], self.item[chosen], self.begin_us[chosen])


def questions_of(orders: Orders, known: NDArray[np.bool_], most: int, seed: int) -> list[Question]:
    """Return questions of at most `most` orders, which are drawn."""
    draw = np.random.default_rng(seed)
    pairs = np.unique(np.stack([orders.numbers, orders.item])[:, known[orders.item]], axis=1)
    begins = np.flatnonzero(np.diff(pairs[0], prepend=-1))
    found = []
    for items in np.split(pairs[1], begins[1:]) if len(begins) else ():
        if len(items) >= 2:
            shuffled = draw.permutation(items)
            found.append(Question(shuffled[1 : 1 + MAX_BASKET], int(shuffled[0])))
    return [found[place] for place in draw.permutation(len(found))[:most].tolist()]


def hits(weights: Weights | None, prior: NDArray[np.float64], questions: Sequence[Question]) -> NDArray[np.float64]:
    """Return 1 for each question whose item is among the first K, else 0; ties count against it."""
    found = []
    for begin in range(0, len(questions), BASKETS_AT_ONCE):
        some = questions[begin : begin + BASKETS_AT_ONCE]
        scores = np.tile(prior, (len(some), 1))
        if weights is not None:
            sizes = [len(one.basket) for one in some]
            cells = np.repeat(np.arange(len(some)), sizes), np.concatenate([one.basket for one in some])
            baskets = sparse.csr_array((np.ones(sum(sizes)), cells), shape=(len(some), len(prior)))
            scores += (baskets @ weights).toarray()
        for place, one in enumerate(some):
            scores[place, one.basket] = -np.inf
            found.append(np.count_nonzero(scores[place] >= scores[place, one.held_out]) <= K)
    return np.array(found, np.float64)


def weights_of(complements: Complements) -> Weights:
    """Return the scores of a table of complements as weights."""
    items, count = complements.items.shape
    exists = complements.items >= 0
    cells = np.repeat(np.arange(items), count)[exists.ravel()], complements.items[exists]
    return sparse.csr_array((complements.scores[exists].astype(np.float64), cells), shape=(items, items))


def _shares(counts: Weights) -> Weights:
    totals = np.asarray(counts.sum(axis=1)).ravel()
    return sparse.csr_array(sparse.diags_array(1 / np.maximum(totals, 1e-9)) @ counts)


def one_order(orders: Orders, items: int) -> Weights:
    """Return how often items are in the same order as another one, as shares of all pairs of that one."""
    pairs = np.unique(np.stack([orders.numbers, orders.item]), axis=1)
    baskets = sparse.csr_array(
        (np.ones(pairs.shape[1], np.float32), (pairs[0], pairs[1])), shape=(pairs[0, -1] + 1, items)
    )
    counts = sparse.csr_array(baskets.T @ baskets)
    counts.setdiag(0)
    return _shares(counts)


def co_visitation(train: Interactions, items: int, decay: float) -> Weights:
    """Return how often items follow each item within some events of a user's history, as shares."""
    return _shares(item_codes.follower_counts(train.item, train.starts, items, FOLLOW_WINDOW, decay))


def choose(interactions: Interactions, most: int, seed: int) -> float:
    """Print the hit rates on validation, and return the best decay of co-visitation."""
    items, first_us, last_us = _parts(interactions)
    by_window = {window_s: Orders.of(interactions, window_s) for window_s in WINDOWS_S}
    prior = _prior(by_window[WINDOW_S].between(-np.inf, first_us), items)
    asked = questions_of(by_window[WINDOW_S].between(first_us, last_us), prior > 0, most, seed)
    table = Table("validation", f"HR@{K}", title=f"{len(asked):,} orders")
    decays = {
        one: float(hits(co_visitation(_before(interactions, first_us), items, one), prior, asked).mean())
        for one in FOLLOW_DECAYS
    }
    for decay, share in decays.items():
        table.add_row(f"co-visitation, decay {decay:g}", f"{share:.4f}")
    variants: list[tuple[float, dict[str, Any]]] = [(window_s, {}) for window_s in WINDOWS_S]
    for window_s, changed in [*variants, *((WINDOW_S, one) for one in CHANGES)]:
        own = by_window[window_s].between(-np.inf, first_us)
        with patch.multiple(item_complements, **{"NEAR": item_complements.NEAR, **changed}):
            found = strongest_complements(own.numbers, own.item, items)
        share = float(hits(weights_of(found), prior, asked).mean())
        name = ", ".join(f"{name.lower()} {value:g}" for name, value in changed.items()) or "as served"
        table.add_row(f"complements, window {window_s / 60:g} min, {name}", f"{share:.4f}")
    console.print(table)
    return max(decays, key=decays.__getitem__)


def measure(interactions: Interactions, decay: float, most: int, seed: int) -> Mapping[str, NDArray[np.float64]]:
    """Return the hits of each method on the test."""
    items, _, last_us = _parts(interactions)
    orders = Orders.of(interactions, WINDOW_S)
    counted = orders.between(-np.inf, last_us)
    prior = _prior(counted, items)
    asked = questions_of(orders.between(last_us, np.inf), prior > 0, most, seed + 1)
    methods: dict[str, Callable[[], Weights | None]] = {
        "complements": lambda: weights_of(strongest_complements(counted.numbers, counted.item, items)),
        "one order": lambda: one_order(counted, items),
        "co-visitation": lambda: co_visitation(_before(interactions, last_us), items, decay),
        "popularity": lambda: None,
    }
    return {name: hits(make(), prior, asked) for name, make in methods.items()}


def _parts(interactions: Interactions) -> tuple[int, float, float]:
    """Return the number of items, and when validation and test begin."""
    first_us, last_us = np.quantile(interactions.timestamp_us, [TRAIN_SHARE, VALIDATION_SHARE], method="lower").tolist()
    return len(interactions.item_ids), first_us, last_us


def _prior(counted: Orders, items: int) -> NDArray[np.float64]:
    return np.bincount(counted.item, minlength=items).astype(np.float64) * 1e-9


def _before(interactions: Interactions, end_us: float) -> Interactions:
    return interactions.where(interactions.timestamp_us < end_us)


def report(found: Mapping[str, NDArray[np.float64]]) -> None:
    """Print the hit rates on the test, and the difference of the first method to each other one."""
    first = next(iter(found.values()))
    table = Table("test", f"HR@{K}", "95 %", "first minus it, paired 95 %", title=f"{len(first):,} orders, {cpu()}")
    for name, own in found.items():
        low, high = interval_95(own)
        difference = "" if own is first else with_interval(first - own, "+")
        table.add_row(name, f"{own.mean():.4f}", f"{low:.4f} to {high:.4f}", difference)
    console.print(table)


class Visit(NamedTuple):
    """A question of one user, with the items before the order, oldest first."""

    user: int
    history: Sequence[str]
    basket: Sequence[str]
    held_out: str


def visits_of(trained: Artifact, interactions: Interactions, most: int, seed: int) -> list[Visit]:
    """Return questions of orders after the training's end, of users with a history."""
    last_us = np.quantile(interactions.timestamp_us, VALIDATION_SHARE, method="lower")
    orders, ids = Orders.of(interactions), np.array(interactions.item_ids)
    known = np.array([name in trained.items.rows for name in interactions.item_ids])
    numbers, draw = order_numbers(interactions), np.random.default_rng(seed)
    later = np.unique(orders.numbers[orders.begin_us >= last_us])
    found = []
    for number in draw.permutation(later).tolist():
        places = np.flatnonzero(numbers == number)
        user, items = interactions.user[places[0]], interactions.item[places]
        items = draw.permutation(np.unique(items[known[items]]))
        before = slice(max(int(interactions.starts[user]), int(places[0]) - MAX_HISTORY), int(places[0]))
        if len(items) >= 2 and before.start < before.stop:
            history, basket = (ids[part].tolist() for part in (interactions.item[before], items[1 : 1 + MAX_BASKET]))
            found.append(Visit(int(user), history, basket, str(ids[items[0]])))
        if len(found) == most:
            break
    return found


async def served_hits(service: Service, visits: Sequence[Visit], how: str) -> NDArray[np.float64]:
    """Return 1 for each visit whose held-out item is in the list of the service, else 0."""

    def request(one: Visit) -> RecommendationRequest:
        history = [*one.history, *one.basket] if "cart as events" in how else one.history
        wishes = {"history": history, "k": K, "exclude_seen": "none", "exclude": one.basket}
        if "basket" in how:
            wishes |= {"basket": one.basket, "basket_only": "alone" in how}
        return RecommendationRequest.model_validate(wishes)

    found = []
    for begin in range(0, len(visits), ASKED_AT_ONCE):
        some = visits[begin : begin + ASKED_AT_ONCE]
        answers = await service.switcher.recommender.recommend([request(one) for one in some])
        lists = [[item["item_id"] for item in answer["items"]] for answer in answers]
        found += [one.held_out in own for one, own in zip(some, lists, strict=True)]
    return np.array(found, np.float64)


async def measure_served(
    trained: Artifact, model: Path, interactions: Interactions, most: int, seed: int
) -> Mapping[str, NDArray[np.float64]]:
    """Print the hit rates of one half of the users by strength, and return the hits of the other half as served."""
    visits = visits_of(trained, interactions, most, seed)
    is_chooser = np.array([one.user % 2 == 0 for one in visits])
    choosing, testing = (
        [one for one, own in zip(visits, is_chooser, strict=True) if own == of] for of in (True, False)
    )
    with tempfile.TemporaryDirectory() as directory:
        async with service_of(trained, model, Path(directory)) as service:
            table = Table("validation, lists of the service", f"HR@{K}", title=f"{len(choosing):,} orders")
            for way in WAYS:
                for strength in STRENGTHS if "with basket" in way else (item_complements.LIFT_STRENGTH,):
                    with patch.object(item_complements, "LIFT_STRENGTH", strength):
                        share = float((await served_hits(service, choosing, way)).mean())
                    table.add_row(f"{way}, strength {strength:g}", f"{share:.4f}")
            console.print(table)
            return {way: await served_hits(service, testing, way) for way in WAYS}


def main(
    data_dir: Annotated[Path, typer.Option("--data", help="Data directory.")],
    model: Annotated[Path | None, typer.Option(help="Trained model directory, whose lists are compared.")] = None,
    most: Annotated[int, typer.Option("--orders", help="Orders at most, of each part.")] = 5_000,
    seed: Annotated[int, typer.Option(help="Of the items that are held out, and of the orders that are taken.")] = 0,
    test: Annotated[bool, typer.Option("--test", help="Read the test too, which is for once.")] = False,
) -> None:
    """Choose on validation, and compare on the test."""
    interactions = read_interactions(data_dir)
    console.print(
        f"{data_dir.name}, table {interactions.sha256}; held-out item of an order, split by time 80/10/10, seen rule "
        f"none, ties against the method, seed {seed}"
    )
    if model is None:
        decay = choose(interactions, most, seed)
        if test:
            report(measure(interactions, decay, most, seed))
        return
    trained = model_directory.load(model)
    report(asyncio.run(measure_served(trained, model, interactions, most, seed)))


if __name__ == "__main__":
    typer.run(main)
