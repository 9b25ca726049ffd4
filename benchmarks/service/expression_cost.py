"""Compare filters, boosts and objectives with the plain request, in processor time of one process.

Each request takes the whole path from the ASGI call to the bytes of the response, over the embedded store and without a
network; the kinds of request take turns. Items have a price, one of a thousand brands, a flag, two of a hundred labels,
and a log-normal margin whose logarithm has a standard deviation of 1.

    python -m benchmarks.service.expression_cost --model models/ml-1m --items 100000 --items 1000000

The command fails if a known filter costs more than 20 % above the plain request, a known objective more than 25 %, or a
new value of a filter's parameter more than 3 ms. It also fails if a change of an item takes more than 1 ms, a number
more than 9 bytes an item, or a text more than 4 (a number of 2 bytes, a bit, and the distinct texts).
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from app.catalogue.live_catalogue import LiveCatalogue
from app.jobs.loadtest import synthetic_catalogue
from app.settings import Settings
from benchmarks.harness.service_process import in_process_service
from storage.records import HeldProperties, PropertyType

USERS, HISTORY = 64, 30
BURST = 10  # consecutive requests of one kind
MAX_SHARE, MAX_NEW_S, MAX_CHANGE_S, MAX_NUMBER_BYTES, MAX_TEXT_BYTES = 0.2, 3e-3, 1e-3, 9.0, 4.0
MAX_OBJECTIVE_SHARE = 0.25
PLAIN, SEEN, NEW, OBJECTIVE = "plain", "filter, seen before", "filter, another value", "objective, seen before"
FILTER = "item.price < params.max_price && item.brand != params.brand && !item.sold_out"

console = Console()
numbers = count(1)


def requests() -> dict[str, Callable[[], dict[str, Any]]]:
    """Return a factory of options for each kind of request."""
    like_page = "item.brand == current.brand"
    boost = "item.price < params.max_price ? 0.7 : 0.0"
    week = 'item.published_at > now - duration("168h")'
    labels = 'item.labels.exists(l, l in ["label-1", "label-2"])'

    def filtered(text: str, value: float) -> dict[str, Any]:
        return {"filter": text, "params": {"max_price": value, "brand": "brand-7"}}

    return {
        PLAIN: dict,
        SEEN: lambda: filtered(FILTER, 50.0),
        NEW: lambda: filtered(FILTER, 50.0 + next(numbers) / 1e4),
        "same brand as this page, another page": lambda: {
            "filter": like_page,
            "current_item": synthetic_catalogue.item_id(next(numbers)),
        },
        "of this week": lambda: {"filter": week},
        "labels, another value": lambda: filtered(f"item.price < params.max_price && {labels}", next(numbers) / 1e2),
        "boost, seen before": lambda: {"boost": boost, "params": {"max_price": 50.0}},
        "boost, another value": lambda: {"boost": boost, "params": {"max_price": 50.0 + next(numbers) / 1e4}},
        OBJECTIVE: lambda: {"objective": {"property": "margin"}},
        "objective, another strength": lambda: {
            "objective": {"property": "margin", "strength": next(numbers) % 1e6 / 1e6},
        },
    }


def set_properties(catalogue: LiveCatalogue) -> dict[str, float]:
    """Set the properties of all items; return the bytes an item that each property takes."""
    rng, items = np.random.default_rng(0), len(catalogue)
    values: dict[str, list[Any]] = {
        "price": rng.random(items).tolist(),
        "brand": [f"brand-{n}" for n in rng.integers(0, 1_000, items).tolist()],
        "sold_out": (rng.random(items) < 0.05).tolist(),
        "labels": [(f"label-{a}", f"label-{b}") for a, b in rng.integers(0, 100, (items, 2)).tolist()],
        "margin": np.exp(rng.normal(size=items)).tolist(),
    }
    values["price"] = [100 * price for price in values["price"]]
    types: dict[str, PropertyType] = {"brand": "text", "sold_out": "boolean", "labels": "set"}
    types |= dict.fromkeys(("price", "margin"), "number")
    catalogue.properties.hold(HeldProperties({"item": types, "user": {}}))
    took = {}
    for name, of_items in values.items():
        tracemalloc.start()
        for begin in range(0, items, 1_000):
            rows = np.arange(begin, min(begin + 1_000, items))
            catalogue.properties.set(name, rows, of_items[begin : begin + 1_000])
        gc.collect()
        took[name] = tracemalloc.get_traced_memory()[0] / items
        tracemalloc.stop()
    return took


async def measure(model: Path, data_dir: Path, rounds: int) -> tuple[dict[str, float], dict[str, float], float]:
    """Return the median seconds of each kind of request, the bytes of each property, and the seconds of a change.

    The seconds of requests are processor time of this process, because other programs share the machine.
    """
    async with in_process_service(Settings(model_dir=model, data_dir=data_dir)) as service:
        catalogue = service.tenant.catalogue
        await service.add_histories(USERS, HISTORY)
        took = set_properties(catalogue)

        async def answer(options: dict[str, Any], user: int) -> float:
            body = json.dumps({"user_id": f"user-{user}", **options}).encode()
            response = await service.call("POST", "/v1/recommendations", body)
            if response.status != 200:
                raise RuntimeError(f"{options} was answered {response.status}")
            return response.cpu_s

        kinds = requests()
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        rng = np.random.default_rng(0)
        for turn in range(rounds // BURST):
            for kind in rng.permutation(list(kinds)).tolist():
                await answer(kinds[kind](), 0)  # a warm-up: the previous kind has filled the caches
                found[kind] += [await answer(kinds[kind](), (turn * BURST + n) % USERS) for n in range(BURST)]
        return {kind: float(np.median(taken)) for kind, taken in found.items()}, took, change_s(catalogue, rounds)


def change_s(catalogue: LiveCatalogue, rounds: int) -> float:
    """Return the median seconds of a change of two properties of an item."""
    taken = []
    for n in range(rounds):
        begin_s = time.perf_counter()
        catalogue.properties.set("price", np.array([n % len(catalogue)]), [float(n)])
        catalogue.properties.set("brand", np.array([n % len(catalogue)]), [f"brand-{n % 1_000}"])
        taken.append(time.perf_counter() - begin_s)
    return float(np.median(taken))


def faults_of(found: dict[str, float], took: dict[str, float], change: float) -> list[str]:
    """Return the exceeded bounds."""
    bounds = {
        "a filter seen before": (found[SEEN] / found[PLAIN] - 1, MAX_SHARE),
        "an objective seen before": (found[OBJECTIVE] / found[PLAIN] - 1, MAX_OBJECTIVE_SHARE),
        "another value": (found[NEW] - found[PLAIN], MAX_NEW_S),
        "a change": (change, MAX_CHANGE_S),
        "bytes of a number": (took["price"], MAX_NUMBER_BYTES),
        "bytes of a text": (took["brand"], MAX_TEXT_BYTES),
    }
    return [f"{name}: {value:.3g}, at most {most:g}" for name, (value, most) in bounds.items() if value > most]


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory.")],
    items: Annotated[list[int] | None, typer.Option(help="Items: the model's, and copies; several times.")] = None,
    rounds: Annotated[int, typer.Option(help="Requests of each kind.")] = 200,
) -> None:
    """Print the cost of filters and boosts compared with the plain request, and the size of properties."""
    faults = []
    for size in items or [100_000]:
        with TemporaryDirectory() as directory:
            large = Path(directory) / "large"
            synthetic_catalogue.write_enlarged(large, model, size, "trained")
            found, took, change = asyncio.run(measure(large, Path(directory) / "state", rounds))
        table = Table(f"one of {size:,} items", "median ms", "beside plain")
        for kind, taken_s in found.items():
            table.add_row(kind, f"{taken_s * 1e3:.2f}", f"{taken_s / found[PLAIN] - 1:+.0%}")
        console.print(table)
        console.print(f"a change of two properties: {change * 1e6:.0f} µs")
        console.print("bytes an item:", ", ".join(f"{name} {size:.1f}" for name, size in took.items()))
        faults += [f"{size:,} items: {fault}" for fault in faults_of(found, took, change)]
    for fault in faults:
        console.print(fault, style="red")
    raise typer.Exit(int(bool(faults)))


if __name__ == "__main__":
    typer.run(main)
