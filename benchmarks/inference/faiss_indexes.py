"""Compare the exact top k with FAISS, on one thread, in turns in one run.

FAISS's residual quantizer gets the same codebooks and codes, so it must find the same items, which is checked. The
other indexes contain as many items. The flat index stores the vectors themselves. Product quantizers have 8 bytes an
item, like the scan: 8 parts of 256 centroids, or 16 parts of 16 for the fast scan. Their codes are random, because
their speed does not depend on the codes; they only approximate vectors. No index has a bias, which FAISS does not
support.

    pip install -e '.[bench]' && python -m benchmarks.inference.faiss_indexes --items 1000000
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import faiss
import numpy as np
import torch
import typer
from rich.table import Table

from benchmarks.inference.scan import BOOKS, QUERIES, WIDTH, console, random_data, ratio, structured_data, timed
from benchmarks.machine import cpu
from model.inference import bitmap
from model.inference.scan import Lifted, Scan, supported_paths

Timer = tuple[str, int, Callable[[int], Any]]
RESIDUAL = "FAISS residual quantizer, the same codes"
DENSE_ITEMS = 2_000_000


def residual_quantizer(codes: Any, codebooks: Any) -> Any:
    """Return the FAISS index with exactly these codes."""
    kind = faiss.AdditiveQuantizer.ST_LUT_nonorm  # by a table of inner products, as the scan: FAISS's fastest way
    index = faiss.IndexResidualQuantizer(WIDTH, BOOKS, 8, faiss.METRIC_INNER_PRODUCT, kind)
    faiss.copy_array_to_vector(codebooks.ravel(), index.rq.codebooks)
    index.rq.is_trained = index.is_trained = True
    return filled(index, codes)


def product_quantizer(codes: Any, parts: int, bits: int) -> Any:
    """Return FAISS's product quantizer for as many items, with random codes."""
    index = faiss.IndexPQ(WIDTH, parts, bits, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.niter = 1
    index.train(np.random.default_rng(0).standard_normal((50 * 2**bits, WIDTH), np.float32))
    return filled(index, codes)


def filled(index: Any, codes: Any) -> Any:
    """Add the codes to the index, and return it."""
    faiss.copy_array_to_vector(codes.ravel(), index.codes)
    index.ntotal = len(codes)
    return index


def timers_of(items: int, data: tuple[Any, ...], k: int) -> Iterator[Timer]:
    """Yield the name of each measurement, 0 bytes, and a function of the turn."""
    codes, codebooks, queries, _ = data
    no_lift = Lifted(torch.zeros((1, 0), dtype=torch.int64), torch.zeros(1, 0))
    no_exclusions = bitmap.empty(items)[None]
    books = torch.from_numpy(codebooks)

    def scanning(scan: Scan) -> Callable[[int], Any]:
        def run(turn: int) -> Any:
            asked = torch.from_numpy(queries[turn % QUERIES][None])
            products = torch.einsum("qd,bpd->bqp", asked, books).transpose(0, 1).contiguous()
            return scan.top_k(products, no_lift, k, no_exclusions)

        return run

    def searching(index: Any) -> Callable[[int], Any]:
        return lambda turn: index.search(queries[turn % QUERIES][None], k)

    for path in supported_paths():
        yield path, 0, scanning(Scan(codes, np.zeros(items, np.float32), path))
    yield RESIDUAL, 0, searching(residual_quantizer(codes, codebooks))
    yield "FAISS product quantizer, 8 x 8 bits", 0, searching(product_quantizer(codes, 8, 8))
    fast = faiss.IndexPQFastScan(product_quantizer(codes, 16, 4))
    yield "FAISS fast scan, 16 x 4 bits", 0, searching(fast)
    if items <= DENSE_ITEMS:
        flat = faiss.IndexFlatIP(WIDTH)
        for part in np.array_split(codes, max(items // 100_000, 1)):
            flat.add(codebooks[np.arange(BOOKS), part].sum(axis=1))
        yield "FAISS flat", 0, searching(flat)


def check(timers: list[Timer], k: int) -> None:
    """Check that scan and residual quantizer find the same scores, and the same items unless scores are equal."""
    runs = {name: run for name, _, run in timers}
    for turn in range(QUERIES):
        items, scores = (part[0] for part in runs[supported_paths()[-1]](turn))
        theirs, their_items = (part[0] for part in runs[RESIDUAL](turn))
        np.testing.assert_allclose(np.sort(scores), np.sort(theirs), rtol=1e-4, atol=1e-4)
        apart = np.abs(np.diff(scores, append=-np.inf, prepend=np.inf)) > 1e-3
        clear = apart[:-1] & apart[1:]
        clear[-1] = False  # an item with an equal score may be missing
        if not set(items[clear]) <= set(their_items):
            raise AssertionError(f"query {turn}: {sorted(items)} are not {sorted(their_items)}")


def main(
    items: Annotated[list[int], typer.Option(help="Size of the catalogue; repeatable.")] = [1_000_000],  # noqa: B006
    k: Annotated[int, typer.Option(help="Items asked for.")] = 10,
    rounds: Annotated[int, typer.Option(help="Timed turns of each.")] = 15,
) -> None:
    """Print the times of each index, compared with the scan."""
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    console.print(f"{cpu()}, one thread, FAISS {faiss.__version__} ({faiss.get_compile_options().strip()})")
    for count in items:
        for name, make in (("random", random_data), ("structured", structured_data)):
            timers = list(timers_of(count, make(np.random.default_rng(0), count), k))
            check(timers, k)
            seconds = timed(timers, rounds)
            table = Table(
                "",
                "median",
                *(f"times slower than {path}" for path in supported_paths()),
                title=f"{count:,} {name} items",
            )
            for way, _, _ in timers:
                slower = [f"{ratio(seconds[way], seconds[path]):.1f}" for path in supported_paths()]
                table.add_row(way, f"{np.median(seconds[way]) * 1e3:,.2f} ms", *slower)
            console.print(table)


if __name__ == "__main__":
    typer.run(main)
