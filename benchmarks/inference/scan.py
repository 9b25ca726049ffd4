"""Measure the exact top k: each path of the scan, a dense product in torch, and a plain read of the codes.

All are timed in turns in one run on one thread, so that their ratios hold even on a busy machine; the times themselves
depend on its load. A scan begins with the inner products of one query with all codewords, whose own time is printed.
torch begins with the query and ends with `topk`. Reading sums the bytes that a scan reads.

Structured items are clustered: later codebooks are finer, as residuals are; items share the first codes of their
cluster; queries are near items; the bias decreases with popularity. With a model, codes, bias and queries are the
model's; its catalogue is enlarged to each size, and in the order of codes.

    python -m benchmarks.inference.scan
    python -m benchmarks.inference.scan --model models/ml-1m --items 10000000
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numba
import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from app.jobs.loadtest import synthetic_catalogue
from benchmarks.machine import cpu
from model.artifact import model_directory
from model.data.interactions import Histories
from model.holdout_ranks import states_of
from model.inference import bitmap
from model.inference.engine import Engine
from model.inference.scan import Lifted, Scan, supported_paths

BOOKS, WORDS, WIDTH = 8, 256, 128
QUERIES = 32  # distinct queries, one at a time
CLUSTERS = 1000
DENSE_ITEMS = 2_000_000  # above this, the vectors take gigabytes
MASKED = 0.5

console = Console(width=140)


@numba.njit(nogil=True, cache=True)
def read(words):  # type: ignore[no-untyped-def]
    """Sum the words, to time a plain read."""
    total = np.uint64(0)
    for word in words:
        total += word
    return total


def random_data(rng: np.random.Generator, items: int) -> tuple[Any, ...]:
    """Return codes (N, B'), codebooks (B', W', D), queries (Q, D) and bias (N,), all random."""
    codes = rng.integers(0, WORDS, (items, BOOKS), np.uint8)
    codebooks = rng.standard_normal((BOOKS, WORDS, WIDTH), np.float32)
    return codes, codebooks, rng.standard_normal((QUERIES, WIDTH), np.float32), rng.standard_normal(items, np.float32)


def structured_data(rng: np.random.Generator, items: int) -> tuple[Any, ...]:
    """Return the same for clustered items."""
    fineness = 0.7 ** np.arange(BOOKS, dtype=np.float32)
    codebooks = rng.standard_normal((BOOKS, WORDS, WIDTH), np.float32) * fineness[:, None, None]
    cluster = np.minimum(rng.zipf(1.3, items) - 1, CLUSTERS - 1)
    codes = rng.integers(0, WORDS, (CLUSTERS, BOOKS), np.uint8)[cluster]
    for book in range(BOOKS):  # the later the codebook, the more items differ from their cluster
        away = rng.random(items) < 0.15 * (book + 1)
        codes[away, book] = rng.integers(0, WORDS, int(away.sum()), np.uint8)
    near = codebooks[np.arange(BOOKS), codes[rng.integers(0, items, QUERIES)]].sum(axis=1)
    queries = (near + rng.standard_normal((QUERIES, WIDTH), np.float32)) / np.sqrt(WIDTH)
    bias = -0.5 * np.log1p(rng.permutation(items) / items * 1000)
    return codes, codebooks, queries.astype(np.float32), bias.astype(np.float32)


def catalogues(model: Path | None, items: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the name and the data of each catalogue with this many items."""
    if model is None:
        yield "random", random_data(np.random.default_rng(0), items)
        yield "structured", (data := structured_data(np.random.default_rng(0), items))
        yield "structured, in the order of codes", in_code_order(*data)
    else:
        yield f"{model.name}'s", trained_data(model, items)


def in_code_order(codes: Any, codebooks: Any, queries: Any, bias: Any) -> tuple[Any, ...]:
    """Return the same for items in the order in which training writes them."""
    order = np.lexsort([-bias, *codes.T[::-1]])  # the first codebook is the widest
    return codes[order], codebooks, queries, bias[order]


def trained_data(model: Path, items: int) -> tuple[Any, ...]:
    """Return the codes, codebooks, queries and bias of an enlarged model; the users have twenty items each."""
    with TemporaryDirectory() as directory:
        synthetic_catalogue.write_enlarged(Path(directory), model, items, "trained")
        trained = model_directory.load(Path(directory))
    histories = Histories.joined([*np.random.default_rng(0).integers(0, items, (QUERIES, 20))])
    states = states_of(histories, trained.history_codes, trained.config.model)
    queries = Engine(trained).step(*states).vectors_on_cpu.numpy()
    weights = trained.model.state_dict()
    return trained.target_codes, weights["target_codebooks"].numpy(), queries, weights["bias"].numpy()


def timers_of(items: int, data: tuple[Any, ...], ks: list[int]) -> Iterator[tuple[str, int, Callable[[int], Any]]]:
    """Yield the name of each measurement, the bytes of codes that it reads, and a function of the turn."""
    codes, codebooks, queries, bias = data
    asked, books = torch.from_numpy(queries), torch.from_numpy(codebooks)
    products = torch.einsum("qd,bpd->qbp", asked, books).contiguous()
    no_exclusions = bitmap.empty(items)[None]
    half = bitmap.empty(items)[None]
    bitmap.add(half[0], np.flatnonzero(np.random.default_rng(1).random(items) < MASKED))
    no_lift = Lifted(torch.zeros((1, 0), dtype=torch.int64), torch.zeros(1, 0))
    rows = codes.shape[1] + 1  # including the bias
    words: NDArray[np.uint64] = np.zeros(-(-items * rows // 8), np.uint64) + np.uint64(1)

    def scanning(scan: Scan, k: int, excluded: Any) -> Callable[[int], Any]:
        return lambda turn: scan.top_k(products[turn % QUERIES][None], no_lift, k, excluded)

    yield "reading the codes", items * rows, lambda turn: read(words)
    yield "inner products", 0, lambda turn: torch.einsum("qd,bpd->qbp", asked[turn % QUERIES][None], books)
    for path in supported_paths():
        scan = Scan(codes, bias, path)
        for k in ks:
            yield f"{path}, k {k}", items * rows, scanning(scan, k, no_exclusions)
        yield f"{path}, k {ks[0]}, half masked", items * rows, scanning(scan, ks[0], half)
    if items <= DENSE_ITEMS:
        vectors = sum(book[torch.from_numpy(column).long()] for book, column in zip(books, codes.T, strict=True))
        biases = torch.from_numpy(bias)

        def multiplying(k: int) -> Callable[[int], Any]:
            return lambda turn: (asked[turn % QUERIES][None] @ vectors.T + biases).topk(k)

        for k in ks:
            yield f"torch, k {k}", 0, multiplying(k)


def timed(timers: list[tuple[str, int, Callable[[int], Any]]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each turn of each measurement."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds):
        for name, _, run in timers:
            run(turn)  # a warm-up, as in a service that does nothing else
            begin = time.perf_counter()
            run(turn)
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def report(title: str, timers: list[tuple[str, int, Callable[[int], Any]]], seconds: dict[str, list[float]]) -> None:
    """Print the times, and their ratios to torch and to reading."""
    table = Table("", "median", "minimum", "times torch's", "GB/s", "of reading", title=title)
    reading = seconds["reading the codes"]
    for name, size, _ in timers:
        own = seconds[name]
        dense = seconds.get(f"torch, {','.join(name.split(',')[1:2]).strip()}")
        table.add_row(
            name,
            *(f"{value * 1e6:,.0f} µs" for value in (median(own), min(own))),
            f"{ratio(dense, own):.1f}" if dense else "",
            f"{size / median(own) / 1e9:.0f}" if size else "",
            f"{ratio(reading, own):.0%}" if size else "",
        )
    console.print(table)


def ratio(others: list[float], own: list[float]) -> float:
    """Return the median of the ratios, turn by turn."""
    return median(other / mine for other, mine in zip(others, own, strict=True))


def main(
    items: Annotated[list[int], typer.Option(help="Size of the catalogue; repeatable.")] = [1_000_000, 10_000_000],  # noqa: B006
    k: Annotated[list[int], typer.Option(help="Items asked for; repeatable.")] = [10, 100],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Timed turns of each.")] = 50,
    model: Annotated[
        Path | None, typer.Option(help="Model directory whose items to scan instead, and copies of them.")
    ] = None,
) -> None:
    """Print the times for catalogues of each size."""
    torch.set_num_threads(1)
    console.print(f"{cpu()}, one thread, torch {torch.__version__}, numba {numba.__version__}, {rounds} rounds")
    for count in items:
        for name, data in catalogues(model, count):
            timers = list(timers_of(count, data, k))
            report(f"{count:,} {name} items", timers, timed(timers, rounds))


if __name__ == "__main__":
    typer.run(main)
