"""Compare the mechanisms: train them, test them by three protocols, and measure their size and speed.

The results are a table, JSON and a plot. A training resumes after its last complete epoch, and a tested model is not
tested again, so the command can be interrupted and repeated, and more presets can be added later.

The presets train 200 epochs of binary cross-entropy with one negative each, as in the paper. With few cores, use fewer
epochs, a smaller batch and the sampled softmax, which learns more from each position; the table shows the epochs.

    python -m benchmarks.quality.mechanisms --data $LISAREC_DATA/ml-1m --loss softmax --epochs 8 --batch 16 --plot x.svg
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from safetensors import safe_open

from app.cli.option_groups import ungrouped
from app.jobs.reports.svg import Spot, scatter
from benchmarks.machine import cpu
from model.artifact import model_directory
from model.config import MECHANISMS, DataCard, MechanismConfig, MechanismRecipe, MechanismTraining
from model.data.interactions import Histories
from model.data.readers import read_interactions
from model.evaluation import evaluate
from model.evaluation.trial import scorer_of
from model.holdout_ranks import NegativeSampling, Scorer, ranks_sampled
from model.mechanisms import train as mechanisms
from model.mechanisms.network import MechanismNetwork
from model.metrics import interval_95, metrics
from model.training.loop import CHECKPOINT, LAST_CHECKPOINT, OPTIMIZER_PREFIX, EpochReport, Progress

MIGRATED_PRESETS = {  # presets with the codes of another preset's model
    "lisa-base-migrated": ("lisa-base-paper", "transformer-codes"),
    "lisa-base-kmeans": ("lisa-base", "transformer-paper"),
    "lisa-base-paper-kmeans": ("lisa-base-paper", "transformer-paper"),
    "lisa-soft-kmeans": ("lisa-soft", "transformer-paper"),
    "lisa-mini-kmeans": ("lisa-mini-paper", "transformer-paper"),
}
NAMES = [*MECHANISMS, *MIGRATED_PRESETS]
PAPERS_HR_AT_10 = {  # HR@10 on ML-1M, from tables 4 and 6
    "transformer-paper": 0.791,
    "lisa-base-paper": 0.796,
    "lisa-soft-paper": 0.789,
    "lisa-mini-paper": 0.789,
    "lisa-base-migrated": 0.795,
}
PAPERS_TRAINING = MechanismTraining()
DRAWS = {
    "sampled100": NegativeSampling(),
    "ties": NegativeSampling(ties_favour_the_target=True),
    "replacement": NegativeSampling(with_replacement=True),
    "paper100": NegativeSampling(with_replacement=True, ties_favour_the_target=True),
}
NEGATIVE_DRAWS = 5  # HR@10 varies by about 0.004 between single draws
STEPPED_EVENTS = 200
MAX_CACHED_SCORES = 2**28  # scores, a gigabyte

console = Console(width=200)


class TrainingRecorder(Progress):
    """Prints the progress of a training, and records the processor time and the share of changed codes of each epoch.

    Both are stored in files next to the model, so that they survive interruptions.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begun_s = time.process_time()
        self._codes = codes_at(directory / LAST_CHECKPOINT) if (directory / LAST_CHECKPOINT).exists() else None

    def epoch(self, report: EpochReport) -> None:
        """Record and print the epoch."""
        old, self._codes = self._codes, codes_at(self._directory / LAST_CHECKPOINT)
        changed = None if old is None or self._codes is None else float((self._codes != old).float().mean())
        self._store_figure("codes_changed.json", report.epoch, changed)
        spent_s, self._begun_s = time.process_time() - self._begun_s, time.process_time()
        self._store_figure("cpu_s.json", report.epoch, spent_s)
        minutes = f"{report.elapsed_s / 60:.1f} minutes, of one core {spent_s / 60:.1f}"
        about = f"epoch {report.epoch + 1}: loss {report.loss:.4f}, {minutes}"
        about += "" if changed is None else f", codes that changed {changed:.2%}"
        console.print(f"{self._directory.name}: {about}", highlight=False)

    def _store_figure(self, name: str, epoch: int, value: float | None) -> None:
        file = self._directory / name
        known: list[float | None] = json.loads(file.read_text()) if file.exists() else []
        known += [None] * (epoch - len(known))
        file.write_text(json.dumps([*known[:epoch], value]))


def codes_at(checkpoint: Path) -> torch.Tensor | None:
    """Return the hard codes of all items, those of histories and of targets, (N, B + B'); None if there are none."""
    with safe_open(checkpoint, "pt") as opened:
        recipe = MechanismRecipe.model_validate_json(opened.metadata()["config"])
        names = [name for name in opened.keys() if not name.startswith(OPTIMIZER_PREFIX)]  # noqa: SIM118 (no mapping)
        weights = {name: opened.get_tensor(name) for name in names}
    with torch.random.fork_rng(), torch.no_grad():
        network = MechanismNetwork(recipe.model, len(weights["embedding.weight"]))
        network.load_state_dict(weights)
        codes = [] if recipe.model.soft or network.quantiser is None else [network.distinct().history.indices()]
        codes += [network.target_codes()] if network.target_quantiser is not None else []
    return torch.cat(codes, dim=1) if codes else None


Trained = mechanisms.TrainedMechanism | model_directory.Artifact


def trained_model(name: str, data: Path, runs: Path, recipe: MechanismRecipe) -> Trained:
    """Return the model of a run; train it to the end first, if necessary."""
    out = runs / name
    if model_directory.exists(out):
        return evaluate.load_model(out)
    resume = (out / CHECKPOINT / "last.safetensors").exists()
    codes_from = runs / MIGRATED_PRESETS[name][1] if name in MIGRATED_PRESETS else None
    out.mkdir(parents=True, exist_ok=True)
    return mechanisms.train(data, out, recipe, codes_from=codes_from, resume=resume, progress=TrainingRecorder(out))


def cached_scorer(scorer: Scorer) -> Scorer:
    """Return a scorer that scores each block of histories once, as long as all scores together are not too many."""
    known: dict[bytes, NDArray[np.float32]] = {}

    def scored(prefixes: Histories) -> NDArray[np.float32]:
        key = prefixes.starts.tobytes() + prefixes.item.tobytes()
        if key in known:
            return known[key].copy()
        scores = scorer(prefixes)
        if sum(each.size for each in known.values()) + scores.size <= MAX_CACHED_SCORES:
            known[key] = scores.copy()
        return scores

    return scored


def cached_figures(model: Trained, file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the cached results of this model, or compute and cache them."""
    if file.exists():
        kept: dict[str, Any] = json.loads(file.read_text())
        if kept["generation"] == model.tag:
            return kept
    found = {"generation": model.tag, **make()}
    file.write_text(json.dumps(found, indent=2) + "\n")
    return found


def test_quality(model: Trained, data: Path) -> dict[str, Any]:
    """Return the quality by each protocol."""
    trial = evaluate.prepare_trial(model, data, "loo_full", None, rows_of_model=True)
    scorer = cached_scorer(scorer_of(model))
    ranks = {"full": trial.test(model.name, {}, scorer).ranks}
    ranks |= {name: ranks_sampled(trial.events, scorer, 0, draw) for name, draw in DRAWS.items()}
    found: dict[str, Any] = {"users": len(trial.events), "items": trial.items}
    for name, those in ranks.items():
        numbers = metrics(those)
        found[name] = {"hr_at_10": numbers["hr_at_10"], "ndcg_at_10": numbers["ndcg_at_10"]}
        found[name]["hr_at_10_interval_95"] = interval_95(those, "hr_at_10")
    found["share_of_items_whose_codes_collide"] = collisions(model)
    return found


def quality_over_draws(model: Trained, data: Path) -> dict[str, Any]:
    """Return mean and standard error over several draws: the effects of replacement and ties, and both protocols."""
    trial = evaluate.prepare_trial(model, data, "loo_full", None, rows_of_model=True)
    scorer = cached_scorer(scorer_of(model))

    def hr_at_10(name: str) -> NDArray[np.float64]:
        draws = range(1, NEGATIVE_DRAWS + 1)
        ranks = (ranks_sampled(trial.events, scorer, seed, DRAWS[name]) for seed in draws)
        return np.array([metrics(each)["hr_at_10"] for each in ranks])

    ours, replaced, papers = (hr_at_10(name) for name in ("sampled100", "replacement", "paper100"))
    found = {"replacement": replaced - ours, "ties": papers - replaced, "sampled100": ours, "paper100": papers}
    return {
        name: {"mean": float(each.mean()), "standard_error": float(each.std(ddof=1) / math.sqrt(NEGATIVE_DRAWS))}
        for name, each in found.items()
    }


def collisions(model: Trained) -> float:
    """Return the share of items with the target vector of another item, which therefore score equal for any query."""
    with torch.no_grad():
        if isinstance(model, model_directory.Artifact):
            targets = model.model.item_vectors()
        else:
            targets = model.network.distinct().targets
    _, counts = torch.unique(targets, dim=0, return_counts=True)
    return 1 - int((counts == 1).sum()) / len(targets)


class StepCost(NamedTuple):
    """The cost of a user: bytes of state, and microseconds of one more event, alone and in a batch."""

    state_bytes: int
    alone_us: float
    together_us: float


def step_cost(network: MechanismNetwork, rounds: int) -> StepCost:
    """Measure a step; softmax attention and decoupled positions have a cache of keys and values instead of a state."""
    items = torch.randint(network.embedding.num_embeddings, (256, STEPPED_EVENTS))
    with torch.inference_mode():
        distinct = network.eval().distinct()
        shape = network.mechanism.state_shape

        def step(users: int) -> Callable[[], Any]:
            if shape is None:
                lengths = torch.full((users,), STEPPED_EVENTS)
                return lambda: network(items[:users], lengths, distinct)
            state, count = torch.ones(users, *shape), torch.full((users,), STEPPED_EVENTS)
            return lambda: network.step(state, count, items[:users, 0], distinct)

        alone = microseconds(step(1), rounds)
        together = microseconds(step(256 if shape else 8), rounds) / (256 if shape else 8)
    floats = math.prod(shape) if shape else 2 * network.config.window * network.config.width
    return StepCost(4 * floats, alone, together)


def microseconds(run: Callable[[], Any], rounds: int) -> float:
    """Return the median microseconds of a call."""
    took = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        run()
        took.append(time.perf_counter() - begun)
    return median(took[1:]) * 1e6


def compression_ratio(items: int, width: int, codebooks: list[tuple[int, int]]) -> float:
    """Return by which factor the item table shrinks: four-byte floats against codewords and packed indices.

    codebooks  (B, W) of each set of codebooks that encodes an item

    Source: Wu et al., LISA, WWW 2021, table 2: an index takes log2(W) bits.
    """
    table = 32 * items * width
    packed = sum(books * (32 * words * width + items * math.log2(words)) for books, words in codebooks)
    return table / packed


def item_table_ratio(shape: MechanismConfig, items: int) -> float:
    """Return the compression of the item table by the paper's formula; 1 without codes."""
    books = [(shape.codebooks, shape.codewords)] if shape.codewords and not shape.soft else []
    books += [(shape.target_codebooks, shape.target_codewords)] if shape.target_codewords else []
    return compression_ratio(items, shape.width, books) if books else 1.0


def costs_of(name: str, network: MechanismNetwork, rounds: int) -> dict[str, Any]:
    """Return the costs that do not depend on what a network has learned."""
    ratio_of_items = item_table_ratio(network.config, network.embedding.num_embeddings)
    return {"preset": name, **step_cost(network, rounds)._asdict(), "item_table_ratio": ratio_of_items}


def results_of(name: str, model: Trained, data: Path, runs: Path) -> dict[str, Any]:
    """Return the results of a preset's training and tests."""
    found = cached_figures(model, runs / name / "tested.json", lambda: test_quality(model, data))
    again = cached_figures(model, runs / name / "drawn_again.json", lambda: quality_over_draws(model, data))
    spent_s = json.loads((runs / name / "cpu_s.json").read_text())
    changed = runs / name / "codes_changed.json"
    training = model.config.training
    assert isinstance(training, MechanismTraining)
    return {
        "epochs": len(model.metrics["epochs"]),
        "loss": training.loss,
        "histories_per_batch": training.histories_per_batch,
        "learning_rate": training.learning_rate,
        "codes_learned_share": training.codes_learned_share,
        **{key: found[key] for key in ("full", *DRAWS)},
        "drawn_again": again,
        "paper_hr_at_10": PAPERS_HR_AT_10.get(name),
        "share_of_items_whose_codes_collide": found["share_of_items_whose_codes_collide"],
        "training_minutes": sum(report["elapsed_s"] for report in model.metrics["epochs"]) / 60,
        "training_core_minutes": sum(spent_s) / 60,
        "codes_changed": json.loads(changed.read_text()) if changed.exists() else None,
    }


def table(rows: Sequence[dict[str, Any]], title: str) -> str:
    """Return a Markdown table that can be copied to a document."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "epochs": epochs_of,
        "`loo_full` HR@10 / NDCG@10": lambda row: quality(row["full"]),
        "`loo_sampled100`": lambda row: quality(row["sampled100"]),
        "`loo_paper100`": lambda row: quality(row["paper100"]),
        "the paper's HR@10": lambda row: f"{row['paper_hr_at_10']:.3f}" if row["paper_hr_at_10"] else "",
        f"HR@10 over {NEGATIVE_DRAWS} draws": lambda row: with_error(row["drawn_again"]["paper100"]),
        "of it by ties": lambda row: with_error(row["drawn_again"]["ties"], "+"),
        "by replacement": lambda row: with_error(row["drawn_again"]["replacement"], "+"),
        "items that tie": lambda row: f"{row['share_of_items_whose_codes_collide']:.1%}",
        "training, core minutes": lambda row: f"{row['training_core_minutes']:.1f}",
    }
    costs: dict[str, Callable[[dict[str, Any]], str]] = {
        "state, bytes": lambda row: f"{row['state_bytes']:,}",
        "a step, microseconds": lambda row: f"{row['alone_us']:,.0f}",
        "of many together": lambda row: f"{row['together_us']:,.1f}",
        "item table": lambda row: f"{row['item_table_ratio']:.2f} times smaller",
    }
    if not any("epochs" in row for row in rows):
        columns = {}
    lines = [" | ".join(["preset", *columns, *costs]), "|".join("---" for _ in ["preset", *columns, *costs])]
    for row in rows:
        qualities = [cell(row) if "epochs" in row else "" for cell in columns.values()]
        lines.append(" | ".join([f"`{row['preset']}`", *qualities, *(cell(row) for cell in costs.values())]))
    return f"{title}\n\n" + "\n".join(f"| {line} |" for line in lines)


def epochs_of(row: dict[str, Any]) -> str:
    """Return the number of epochs and, if the preset has hard codes, the number of epochs that learned them."""
    shape, learned = shape_of(row["preset"]), round(row["epochs"] * row["codes_learned_share"])
    if not (shape.target_codewords or (shape.codewords and not shape.soft)):
        return f"{row['epochs']}"
    return f"{row['epochs']}, hard codes learned in {0 if row['preset'] in MIGRATED_PRESETS else learned}"


def quality(found: dict[str, float]) -> str:
    """Return HR@10 and NDCG@10 as text."""
    return f"{found['hr_at_10']:.4f} / {found['ndcg_at_10']:.4f}"


def with_error(found: dict[str, float], sign: str = "") -> str:
    """Return a mean and its standard error as text."""
    return f"{found['mean']:{sign}.4f} ± {found['standard_error']:.4f}"


@dataclass(frozen=True)
class TrainingOptions:
    """Training options of the presets; the fields are those of `MechanismTraining`."""

    epochs: Annotated[int, typer.Option(min=1)] = PAPERS_TRAINING.epochs
    loss: Annotated[Literal["binary", "softmax"], typer.Option(help="The paper's is the binary one.")] = "binary"
    histories_per_batch: Annotated[int, typer.Option("--batch", min=1, help="Histories of a batch.")] = (
        PAPERS_TRAINING.histories_per_batch
    )
    learning_rate: Annotated[float, typer.Option(min=0)] = PAPERS_TRAINING.learning_rate
    codes_learned_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of the epochs; from then on hard codes stay as they are.")
    ] = PAPERS_TRAINING.codes_learned_share


def main(
    data: Annotated[Path, typer.Option(help="Data directory.")],
    runs: Annotated[Path, typer.Option(help="Models and results are kept here.")] = Path("runs"),
    preset: Annotated[list[str], typer.Option(help="One of those there are; repeatable.")] = NAMES,
    *,
    training: TrainingOptions,
    rounds: Annotated[int, typer.Option(help="Timed steps.")] = 200,
    only_report: Annotated[
        bool, typer.Option("--only-report", help="Train nothing; the others show costs alone.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Where to draw quality against bytes.")] = None,
) -> None:
    """Train, test and time the presets."""
    torch.set_num_threads(1)
    runs = runs / data.name
    unknown = sorted(set(preset) - set(NAMES))
    if unknown:
        raise typer.BadParameter(f"no preset {unknown[0]!r}; there are: {', '.join(NAMES)}")
    items = len(read_interactions(data).item_ids)
    rows = []
    for name in preset:
        recipe = MechanismRecipe(
            model=shape_of(name), training=MechanismTraining(**vars(training)), data=DataCard(train_on="validation")
        )
        rows.append(costs_of(name, MechanismNetwork(recipe.model, items), rounds))
        if not only_report or model_directory.exists(runs / name):
            rows[-1] |= results_of(name, trained_model(name, data, runs, recipe), data, runs)
        runs.mkdir(parents=True, exist_ok=True)
        (runs / "mechanisms.json").write_text(json.dumps(rows, indent=2) + "\n")
    console.print(table(rows, f"{data.name}: {cpu()}, one thread, torch {torch.__version__}"), soft_wrap=True)
    spots = [Spot(row["preset"], row["state_bytes"], row["sampled100"]["hr_at_10"]) for row in rows if "epochs" in row]
    if plot is not None and spots:
        plot.write_text(scatter(spots, f"HR@10 (loo_sampled100, {data.name}) against bytes of state", "bytes of state"))


def shape_of(name: str) -> MechanismConfig:
    """Return the mechanism of a preset."""
    return MECHANISMS[MIGRATED_PRESETS[name][0] if name in MIGRATED_PRESETS else name]


if __name__ == "__main__":
    typer.run(ungrouped(main))
