"""Compare attention by codeword histograms with softmax attention and its other replacements: time and memory.

Stepwise (figure 6 of the paper): one more event of a user with L events becomes a query. The complete step of LISA-Mini
reads a histogram. A layer of softmax attention of the same width, with its feed-forward, reads the keys and values of
all L events.

Forward (figure 4 and table 5): one layer of attention over a whole history of L events, each method in its own process.
The memory is the peak of the process, minus what it had before. Softmax is written out, or uses torch's fused kernel.
The other methods are the public packages, with two heads, and causal if they support it. LISA computes the histograms
of all positions, 1,024 at a time, and attends to them.

Clustered attention is left out, because its package has to be compiled. All weights are random.

    pip install -e '.[bench]' && python -m benchmarks.inference.attention --plots docs/images
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.machine import cpu, memory_bytes
from model.config import ModelConfig
from model.data.interactions import Histories
from model.holdout_ranks import states_of
from model.inference.step import Step
from model.lisa.histogram import running_histograms
from model.lisa.lisa_mini import LisaMini, attend

ITEMS = 10_000
WIDTH, HEADS = 128, 2
STEPS = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
LENGTHS = tuple(2**power for power in range(7, 17))  # 128 to 65,536
LARGEST_MATRIX = 8_192  # above this, softmax written out takes gigabytes
CHUNK_POSITIONS = 1_024
MIN_MEASUREMENT_S = 0.5  # a run that takes longer is not repeated

console = Console(width=180)


class Measurement(NamedTuple):
    """Seconds and megabytes of memory of one method, by length."""

    seconds: dict[int, float]
    megabytes: dict[int, float]


def random_model() -> tuple[LisaMini, NDArray[np.uint8]]:
    """Return a LISA-Mini with random codes, and its history codes."""
    rng, shape = np.random.default_rng(0), ModelConfig()
    history = rng.integers(0, shape.history_codewords, (ITEMS, shape.history_codebooks), np.uint8)
    target = rng.integers(0, shape.target_codewords, (ITEMS, shape.target_codebooks), np.uint8)
    model = LisaMini(shape, torch.from_numpy(history), torch.from_numpy(target))
    model.fold_norms_and_round()
    return model.eval(), history


# Stepwise


def lisa_step(length: int) -> tuple[Callable[[], Any], float]:
    """Return one step of a user with this many events, and the bytes of the user's state that it reads."""
    model, codes = random_model()
    items = np.random.default_rng(1).integers(0, ITEMS, length)
    histogram, last, recent = states_of(Histories.joined([items]), codes, model.config)
    step = Step(model, model.tables())
    return lambda: step(histogram, last, recent), histogram.nbytes


def softmax_step(length: int) -> tuple[Callable[[], Any], float]:
    """Return the same for a layer of softmax attention that caches keys and values."""
    block = SoftmaxLayer()
    keys, values = torch.randn(2, HEADS, length, WIDTH // HEADS)
    event = torch.randn(1, WIDTH)

    def run() -> Any:
        query, keys[:, -1], values[:, -1] = block.qkv(event).view(3, HEADS, WIDTH // HEADS)
        found = F.scaled_dot_product_attention(query[:, None], keys, values)
        return block.feed_forward(event + block.out(found.view(1, WIDTH)))

    return run, 2.0 * keys.nbytes


# Forward


class SoftmaxLayer(nn.Module):
    """A layer of softmax attention with its feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def heads(self, x: Tensor) -> Any:
        """Return queries, keys and values of each head, (3, H, L, D / H)."""
        return self.qkv(x).view(-1, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)


def softmax(length: int) -> Callable[[], Any]:
    """Return softmax attention, written out."""
    layer, x = SoftmaxLayer(), torch.randn(length, WIDTH)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)

    def run() -> Any:
        query, key, value = layer.heads(x)
        logits = query @ key.mT / (WIDTH // HEADS) ** 0.5
        share = logits.masked_fill_(future, -torch.inf).softmax(-1)
        return layer.out((share @ value).transpose(0, 1).reshape(length, WIDTH))

    return run


def fused_softmax(length: int) -> Callable[[], Any]:
    """Return softmax attention with torch's fused kernel."""
    layer, x = SoftmaxLayer(), torch.randn(1, length, WIDTH)

    def run() -> Any:
        query, key, value = layer.heads(x[0])[:, None]
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)[0]
        return layer.out(found.transpose(0, 1).reshape(length, WIDTH))

    return run


def lisa(length: int) -> Callable[[], Any]:
    """Return LISA-Mini's attention, including the histograms of all positions."""
    model, codes = random_model()
    tables, shape = model.tables(), model.config
    history = codes[np.random.default_rng(1).integers(0, ITEMS, length)]
    faded = np.exp(-np.outer(np.arange(1, CHUNK_POSITIONS + 1), shape.decay_rates)).astype(np.float32)[:, :, None, None]

    def run() -> Tensor:
        before, out = np.float32(0), torch.empty(length, WIDTH)
        for begin in range(0, length, CHUNK_POSITIONS):
            part = history[begin : begin + CHUNK_POSITIONS]
            ends, weights = np.array([0, len(part)]), np.ones(len(part), np.float32)
            histograms = running_histograms(part, weights, ends, shape.decay_rates, shape.history_codewords)
            histograms += faded[: len(part)] * before
            before = histograms[-1].copy()
            attended = attend(torch.from_numpy(histograms), torch.from_numpy(part), tables)
            out[begin : begin + CHUNK_POSITIONS] = attended
        return out

    return run


def linformer(length: int) -> Callable[[], Any]:
    """Return Linformer, which is not causal."""
    from linformer import LinformerSelfAttention

    layer, x = LinformerSelfAttention(WIDTH, length, k=min(256, length), heads=HEADS), torch.randn(1, length, WIDTH)
    return lambda: layer(x)


def reformer(length: int) -> Callable[[], Any]:
    """Return Reformer, with LSH."""
    from reformer_pytorch import LSHSelfAttention

    layer, x = LSHSelfAttention(WIDTH, HEADS, bucket_size=64, n_hashes=4, causal=True), torch.randn(1, length, WIDTH)
    return lambda: layer(x)


def sinkhorn(length: int) -> Callable[[], Any]:
    """Return the Sinkhorn transformer."""
    from sinkhorn_transformer.sinkhorn_transformer import SinkhornSelfAttention

    layer = SinkhornSelfAttention(WIDTH, bucket_size=64, max_seq_len=length, heads=HEADS, causal=True)
    x = torch.randn(1, length, WIDTH)
    return lambda: layer(x)


def routing(length: int) -> Callable[[], Any]:
    """Return the Routing transformer."""
    from routing_transformer.routing_transformer import SelfAttention

    layer = SelfAttention(WIDTH, 1, length, HEADS, 0, window_size=min(128, length), causal=True).eval()
    x = torch.randn(1, length, WIDTH)
    return lambda: layer(x)


FORWARD: dict[str, Callable[[int], Callable[[], Any]]] = {
    "LISA": lisa,
    "softmax": softmax,
    "softmax, fused": fused_softmax,
    "Linformer": linformer,
    "Reformer": reformer,
    "Sinkhorn": sinkhorn,
    "Routing": routing,
}


def seconds_of(run: Callable[[], Any], rounds: int) -> float:
    """Return the median of several runs, or the first one if it takes long."""
    begin = time.perf_counter()
    run()
    if (once := time.perf_counter() - begin) > MIN_MEASUREMENT_S:
        return once
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return median(found)


@torch.inference_mode()
def forward(name: str, lengths: list[int], rounds: int) -> Measurement | str:
    """Measure attention over whole histories; return the reason if it cannot run."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured = Measurement({}, {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            FORWARD[name](128)()
            for length in lengths:
                if name != "softmax" or length <= LARGEST_MATRIX:
                    run = FORWARD[name](length)
                    before = memory_bytes("VmRSS")
                    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
                    measured.seconds[length] = seconds_of(run, rounds)
                    measured.megabytes[length] = (memory_bytes("VmHWM") - before) / 2**20
    except (ImportError, RuntimeError, AttributeError) as exc:
        return f"{name}: {type(exc).__name__}: {exc}"
    return measured


@torch.inference_mode()
def stepwise(lengths: list[int], rounds: int) -> dict[str, Measurement]:
    """Measure one more event after histories of each length."""
    found = {}
    for name, make in (("LISA-Mini", lisa_step), ("softmax, cached", softmax_step)):
        found[name] = Measurement({}, {})
        for length in lengths:
            run, size = make(length)
            found[name].seconds[length], found[name].megabytes[length] = seconds_of(run, rounds), size / 1e6
    return found


def report(title: str, found: dict[str, Measurement], lengths: list[int], unit: tuple[str, float]) -> None:
    """Print a table of times and memory by length."""
    table = Table("L", *(f"{name}: {what}" for name in found for what in (unit[0], "MB")), title=title)
    for length in lengths:
        cells: list[str] = []
        for seconds, megabytes in found.values():
            known = length in seconds
            cells += [f"{seconds[length] * unit[1]:,.1f}", f"{megabytes[length]:,.3g}"] if known else ["", ""]
        table.add_row(f"{length:,}", *cells)
    console.print(table)


def plot(path: Path, found: dict[str, Measurement], title: str) -> None:
    """Draw times and memory against the length of the history."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = title  # equal figures give equal files
    from matplotlib import pyplot

    figure, (times, sizes) = pyplot.subplots(1, 2, figsize=(11, 4))
    for name, (seconds, megabytes) in found.items():
        times.plot(list(seconds), [value * 1e3 for value in seconds.values()], marker="o", label=name)
        sizes.plot(list(megabytes), [max(value, 1e-3) for value in megabytes.values()], marker="o", label=name)
    for axes, label in ((times, "milliseconds"), (sizes, "megabytes")):
        axes.set(xscale="log", yscale="log", xlabel="length of the history", ylabel=label)
        axes.grid(alpha=0.3)
    times.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(
    steps: Annotated[list[int], typer.Option(help="Lengths to step after; repeatable.")] = list(STEPS),  # noqa: B006
    lengths: Annotated[list[int], typer.Option(help="Lengths to attend to; repeatable.")] = list(LENGTHS),  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Timed turns of each.")] = 20,
    plots: Annotated[Path | None, typer.Option(help="Directory for two plots.")] = None,
) -> None:
    """Measure both, and plot them if a directory is given."""
    torch.set_num_threads(1)
    console.print(f"{cpu()}, one thread, torch {torch.__version__}")
    by_step = stepwise(steps, rounds)
    report("One more event", by_step, steps, ("µs", 1e6))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        results = {name: processes.apply(forward, (name, lengths, rounds)) for name in FORWARD}
    for reason in results.values():
        if isinstance(reason, str):
            console.print(f"left out: {reason}", highlight=False)
    by_length = {name: found for name, found in results.items() if isinstance(found, Measurement)}
    report("A whole history", by_length, lengths, ("ms", 1e3))
    if plots is not None:
        plot(plots / "attention-stepwise.svg", by_step, "One more event of a history")
        plot(plots / "attention-forward.svg", by_length, "Attention over a whole history")


if __name__ == "__main__":
    typer.run(main)
