"""How often codes change while they are learned straight-through, and what is learned meanwhile.

An item's codes are those of the nearest codewords, and every step moves items, codewords and similarities alike. Where
a code changes the item's vector jumps, in the history and among the targets. Beside it, the same network with the codes
that it began with, which are as good as drawn at random, and only the codewords learning.

    OMP_NUM_THREADS=1 python -m benchmarks.churn --data $LISAREC_DATA/ml-1m
"""

from __future__ import annotations

import tempfile
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.scan import cpu
from model.config import MECHANISMS, DataCard, MechanismRecipe, MechanismTraining
from model.mechanisms.network import MechanismNetwork
from model.mechanisms.train import MechanismTrainer
from model.train import Begun, begin

STEPS_BETWEEN = 20  # looks at the codes
EPOCHS = 20  # of the training whose first steps these are
CASES = {"learned": (0.002, False), "learned, slower": (0.0005, False), "kept from the beginning": (0.002, True)}

console = Console(width=120)


def main(
    data: Annotated[Path, typer.Option(help="Data directory.")],
    preset: Annotated[str, typer.Option(help="One with hard codes.")] = "lisa-base-paper",
    steps: Annotated[int, typer.Option(help="Of 16 histories each.")] = 200,
) -> None:
    torch.set_num_threads(1)
    table = Table(
        "codes", "learning rate", "loss, first and last quarter", f"codes that change in {STEPS_BETWEEN} steps"
    )
    table.title = f"{data.name}, {preset}, {steps} steps: {cpu()}, one thread, torch {torch.__version__}"
    for name, (learning_rate, is_kept) in CASES.items():
        training = MechanismTraining(
            epochs=EPOCHS,
            loss="softmax",
            histories_per_batch=16,
            learning_rate=learning_rate,
            warmup_share=0.005,
            codes_learned_share=0.0 if is_kept else 1.0,
        )
        recipe = MechanismRecipe(model=MECHANISMS[preset], training=training, data=DataCard(train_on="train"))
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "model"
            losses, changed = first_steps(begin(data, out, recipe, "cpu", False), out, steps)
        quarter = steps // 4
        row = f"{mean(losses[:quarter]):.2f}, {mean(losses[-quarter:]):.2f}", f"{mean(changed):.0%}"
        table.add_row(name, f"{learning_rate:g}", *row)
    console.print(table)


def first_steps(begun: Begun[MechanismRecipe], out: Path, steps: int) -> tuple[list[float], list[float]]:
    """The losses, and between looks the share of all items' codes that have changed."""
    torch.manual_seed(begun.recipe.training.seed)
    network = MechanismNetwork(begun.recipe.model, len(begun.interactions.item_ids)).train()
    trainer = MechanismTrainer(network, begun.interactions, begun.parts, begun.recipe, out, "cpu")
    if begun.recipe.training.codes_learned_share == 0:
        network.freeze_codes()
    losses: list[float] = []
    changed, done = [], 0.0
    before = codes_of(network)
    for batch, share in chain.from_iterable(trainer._batches(epoch) for epoch in range(EPOCHS)):
        trainer._set_learning_rate(done / EPOCHS)
        losses.append(trainer._step(batch))
        done += share
        if len(losses) % STEPS_BETWEEN == 0:
            after = codes_of(network)
            changed.append(float((after != before).float().mean()))
            before = after
        if len(losses) == steps:
            break
    return losses, changed


@torch.no_grad()
def codes_of(network: MechanismNetwork) -> torch.Tensor:
    return network.distinct().history.indices()


if __name__ == "__main__":
    typer.run(main)
