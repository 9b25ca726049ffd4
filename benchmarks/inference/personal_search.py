"""Compare searches with the plain request, in one process without a network: for a user, anonymous, and with typos.

Each request takes the whole path from the ASGI call to the bytes of the response, over the embedded store; the kinds of
request take turns. Titles are those of a model's items, or five random words with a Zipf distribution and a unique
number. A shop can also replace some of them.

    python -m benchmarks.inference.personal_search --model models/ml-1m --items 1000000 --words 50000
    python -m benchmarks.inference.personal_search --model models/ml-1m --items 1000000 --put 200000
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from urllib.parse import urlencode

import numpy as np
import polars as pl
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from app.jobs.loadtest import synthetic_catalogue
from app.settings import Settings
from benchmarks.harness.service_process import InProcessService, in_process_service
from benchmarks.machine import cpu
from model.artifact import model_directory
from model.artifact.item_statistics import ItemStatistics
from model.artifact.model_directory import ITEMS, WEIGHTS

USERS = 64
HISTORY = 30
BURST = 5  # consecutive requests of one kind
TITLE_WORDS = 5
SYLLABLES = [f"{consonant}{vowel}" for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]

PAGE = 1_000  # items in a request of the shop

LONG_WORD = re.compile("[a-z]{5,}")

console = Console()
Seconds = NDArray[np.float64]
Asked = tuple[str, dict[str, str]]


def made_up_titles(items: int, words: int, seed: int = 0) -> list[str]:
    """Return titles of random words, which become rarer with their number, followed by the item's own number."""
    rng = np.random.default_rng(seed)
    chosen = (rng.zipf(1.2, (items, TITLE_WORDS)) - 1) % words
    size = len(SYLLABLES)
    vocabulary = [
        "".join(SYLLABLES[part % size] for part in (n, n // size, n // size**2 + 7, 3 * n + 1)) for n in range(words)
    ]
    return [f"{' '.join(vocabulary[n] for n in row)} {number}" for number, row in enumerate(chosen.tolist())]


def write_titled(directory: Path, model: Path, words: int) -> None:
    """Write a model directory with random titles for the items of another one."""
    artifact, catalogue = model_directory.load(model), pl.read_parquet(model / ITEMS)
    titled = catalogue.with_columns(pl.Series("title", made_up_titles(len(catalogue), words)))
    statistics = ItemStatistics(artifact.complements)
    model_directory.write(directory, load_file(model / WEIGHTS), artifact.config, titled, {}, statistics)


def searches(titles: Sequence[str], rounds: int) -> Mapping[str, list[str]]:
    """Return searches of each kind for words of titles with two long words."""
    rng = np.random.default_rng(1)
    found: dict[str, list[str]] = defaultdict(list)
    usable = [words for title in titles if len(words := LONG_WORD.findall(title.lower())) > 1]
    for place in rng.integers(len(usable), size=rounds).tolist():
        one, other = usable[place][0], usable[place][-1]
        found["a word"].append(one)
        found["two words"].append(f"{other} {one}")
        found["a typo"].append(_swapped(one))
        found["two typos"].append(f"{_swapped(other)} {_swapped(one)}")
        found["a beginning"].append(one[:3])
        found["two letters"].append(one[:2])
        found["three digits"].append(f"{place:03}"[:3])
    return {**found, "a letter": ["a"] * rounds, "nothing": ["qqqqqq"] * rounds}


def _swapped(word: str) -> str:
    return word[:2] + word[3] + word[2] + word[4:]


async def put_titles(service: InProcessService, item_ids: Sequence[str], words: int) -> None:
    """Replace titles by random ones, as a shop does."""
    titles = made_up_titles(len(item_ids), words, seed=1)
    titled = [{"item_id": one, "title": title} for one, title in zip(item_ids, titles, strict=True)]
    for begin in range(0, len(titled), PAGE):
        answer = await service.call("POST", "/v1/items", json.dumps(titled[begin : begin + PAGE]).encode())
        assert answer.status == 200


async def measure(
    model: Path, data_dir: Path, rounds: int, put: Sequence[str] = (), words: int = 1
) -> dict[str, Seconds]:
    """Return the seconds, and CPU seconds of all threads, of each request, by kind: (rounds, 2).

    The first entry is the search that indexes the words.

    put    ids of items to which the shop gives titles
    words  the number of distinct words of these titles
    """
    async with in_process_service(Settings(model_dir=model, data_dir=data_dir)) as service:
        await put_titles(service, put, words)
        await service.add_histories(USERS, HISTORY)

        async def answer(path: str, asked: Mapping[str, str]) -> tuple[float, float]:
            found = await service.call("GET", path, query=urlencode(asked))
            assert found.status == 200
            return found.seconds, found.cpu_s

        kinds = _kinds(searches(model_directory.load(model).items.titles, rounds))
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        first = await answer("/v1/items", {"query": "qqqqqq"})
        rng = np.random.default_rng(0)
        for begin in range(0, rounds, BURST):
            for kind in rng.permutation(list(kinds)).tolist():
                for turn in range(begin, min(begin + BURST, rounds)):
                    found[kind].append(await answer(*kinds[kind](turn)))
    return {"the first search": np.array([first])} | {kind: np.array(taken) for kind, taken in found.items()}


def _kinds(wanted: Mapping[str, list[str]]) -> dict[str, Callable[[int], Asked]]:
    """Return the kinds of request: each a function from the number of the turn to a path and query."""
    kinds: dict[str, Callable[[int], Asked]] = {"plain": _plain}
    for name, texts in wanted.items():
        kinds[name] = partial(_search, texts)
        kinds[f"{name}, for a user"] = partial(_search_for_user, texts)
    return kinds


def _plain(turn: int) -> Asked:
    return f"/v1/users/user-{turn % USERS}/recommendations", {}


def _search(texts: Sequence[str], turn: int) -> Asked:
    return "/v1/items", {"query": texts[turn]}


def _search_for_user(texts: Sequence[str], turn: int) -> Asked:
    return "/v1/items", {"query": texts[turn], "user_id": f"user-{turn % USERS}"}


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory.")],
    items: Annotated[int, typer.Option(help="Items of the catalogue: the model's, and copies of them.")] = 1_000_000,
    words: Annotated[int, typer.Option(help="Different words of made-up titles; 0: the model's titles.")] = 50_000,
    rounds: Annotated[int, typer.Option(help="Requests of each kind.")] = 200,
    put: Annotated[int, typer.Option(help="Items of the catalogue to which the shop gives another title.")] = 0,
) -> None:
    """Print the cost of searches compared with the plain request."""
    with TemporaryDirectory() as directory:
        large, titled = Path(directory) / "large", Path(directory) / "titled"
        synthetic_catalogue.write_enlarged(large, model, items, "trained")
        if words:
            write_titled(titled, large, words)
        retitled = [synthetic_catalogue.item_id(number) for number in range(put)]
        chosen = titled if words else large
        found = asyncio.run(measure(chosen, Path(directory) / "state", rounds, retitled, max(words, 1)))
    plain = float(np.median(found["plain"][:, 0]))
    table = Table("ms", "median", "98 %", "CPU, median", "of plain", title=f"{cpu()}, {items:,} items")
    for kind, taken_s in found.items():
        median, cpu_median = np.median(taken_s, axis=0)
        late = np.quantile(taken_s[:, 0], 0.98)
        cells = [f"{1e3 * one:.2f}" for one in (median, late, cpu_median)]
        table.add_row(kind, *cells, f"{median / plain:.1f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
