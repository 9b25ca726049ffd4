"""What a mechanism with hard codes starts from, and what each part of that is worth, on validation: no test is read.

A Transformer is trained without the last two events of each user. From what it has learned a mechanism takes codes, by
residual k-means over the item vectors, and all the rest (codewords, positions, norms, feed-forward layer), or just one
of the two, or neither; where codes are taken from nothing they are those of the first weights, as good as random, or
learned straight-through in the first half of the epochs. Each start is trained alike and judged after every epoch.

    OMP_NUM_THREADS=1 python -m benchmarks.mechanisms_start --data $LISAREC_DATA/ml-1m
    OMP_NUM_THREADS=1 python -m benchmarks.mechanisms_start --data $LISAREC_DATA/ml-1m --preset lisa-base-paper \\
        --start both --epochs 12
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.mechanisms import Said
from benchmarks.scan import cpu
from model import artifact
from model.config import MECHANISMS, DataCard, MechanismRecipe, MechanismTraining
from model.loop import CHECKPOINT
from model.mechanisms.network import MechanismNetwork
from model.mechanisms.train import MechanismTrainer, load
from model.mechanisms.train import train as train_mechanism
from model.train import begin

LEARNED_SHARE = 0.5  # of the epochs

console = Console(width=120)


def neither(network: MechanismNetwork, transformer: MechanismNetwork) -> None:
    network.freeze_codes()


def codes(network: MechanismNetwork, transformer: MechanismNetwork) -> None:
    """The Transformer's codes, and all else as drawn."""
    drawn = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network.migrate(transformer)
    network.load_state_dict(drawn, strict=False)


def rest(network: MechanismNetwork, transformer: MechanismNetwork) -> None:
    """All that the Transformer has learned but for which item has which codes: each has those of another one."""
    network.migrate(transformer)
    another = torch.randperm(network.embedding.num_embeddings, generator=torch.Generator().manual_seed(0))
    for kept in (network.frozen_codes, network.frozen_target_codes):
        if kept is not None:
            kept.copy_(kept[another])


def both(network: MechanismNetwork, transformer: MechanismNetwork) -> None:
    network.migrate(transformer)


def learned(network: MechanismNetwork, transformer: MechanismNetwork) -> None: ...


STARTS: dict[str, Callable[[MechanismNetwork, MechanismNetwork], None]] = {
    each.__name__: each for each in (learned, neither, rest, codes, both)
}
NAMES = list(STARTS)


def main(
    data: Annotated[Path, typer.Option(help="Data directory.")],
    runs: Annotated[Path, typer.Option(help="What was trained is kept here.")] = Path("runs/start"),
    preset: Annotated[str, typer.Option(help="One with hard codes.")] = "lisa-mini-paper",
    start: Annotated[list[str], typer.Option(help="One of those there are; repeatable.")] = NAMES,
    epochs: Annotated[int, typer.Option(min=1)] = 4,
    transformer_epochs: Annotated[int, typer.Option(min=1)] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Histories of a batch.")] = 16,
) -> None:
    torch.set_num_threads(1)
    runs = runs / data.name
    source = runs / "transformer-paper"
    if not artifact.exists(source):
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir(parents=True)
        train_mechanism(
            data, source, recipe_of("transformer-paper", transformer_epochs, batch, 1.0), progress=Said(source)
        )
    table = Table("start", "validation NDCG@10 after each epoch", "HR@10 at its best")
    table.title = f"{data.name}, {preset}, {epochs} epochs: {cpu()}, one thread, torch {torch.__version__}"
    for name in start:
        reports = started(
            name, data, runs / f"{preset}-{name}-{epochs}", source, recipe_of(preset, epochs, batch, LEARNED_SHARE)
        )
        best = max(reports, key=lambda report: report["ndcg_at_10"])
        table.add_row(name, " ".join(f"{report['ndcg_at_10']:.4f}" for report in reports), f"{best['hr_at_10']:.4f}")
    console.print(table)


def recipe_of(preset: str, epochs: int, batch: int, codes_learned_share: float) -> MechanismRecipe:
    training = MechanismTraining(
        epochs=epochs,
        loss="softmax",
        histories_per_batch=batch,
        learning_rate=0.002,
        codes_learned_share=codes_learned_share,
    )
    return MechanismRecipe(model=MECHANISMS[preset], training=training, data=DataCard(train_on="train"))


def started(name: str, data: Path, out: Path, source: Path, recipe: MechanismRecipe) -> list[dict[str, Any]]:
    """The reports of a training from this start, whole ones of before among them."""
    kept = out / "reports.json"
    if kept.exists():
        found: list[dict[str, Any]] = json.loads(kept.read_text())
        return found
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    begun = begin(data, out, recipe, "cpu", False)
    torch.manual_seed(recipe.training.seed)
    network = MechanismNetwork(recipe.model, len(begun.interactions.item_ids))
    STARTS[name](network, load(source).network)
    trainer = MechanismTrainer(network, begun.interactions, begun.parts, begun.recipe, out, "cpu")
    trainer.fit(Said(out), False)
    shutil.rmtree(out / CHECKPOINT)
    found = [report._asdict() for report in trainer.reports]
    kept.write_text(json.dumps(found, indent=2) + "\n")
    return found


if __name__ == "__main__":
    typer.run(main)
