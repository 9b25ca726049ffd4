"""Train a preset with a teacher: soft targets from the scores of finished trainings, or codes from their item vectors.

The teacher's scores are the mean of the scores of its models, without a lift. Its queries at all positions are computed
once, in half precision. Only validation events judge; no test event is read.

    python -m benchmarks.quality.training.distil --data $LISAREC_DATA/ml-1m --out runs/recent --variant lisa-recent
    python -m benchmarks.quality.training.distil --data $LISAREC_DATA/ml-1m --out runs/taught --teacher runs/recent
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import override

from benchmarks.quality.training.choices import TEMPORAL
from benchmarks.quality.training.epoch_printer import EpochPrinter
from benchmarks.quality.training.variants import Variant
from model.config import Config, DataCard
from model.data.interactions import Histories
from model.holdout_ranks import Scorer
from model.lisa.item_codes import codes_of
from model.lisa.lisa_mini import LisaMini, build_lisa_mini
from model.training.batches.positions import BatchMaker, PositionBatch
from model.training.loop import BEST_CHECKPOINT, LAST_CHECKPOINT
from model.training.loss import ROWS_PER_BLOCK
from model.training.memory import Resources
from model.training.threads import use_threads
from model.training.train import prepare_training
from model.training.trainer import FirstModel, Trainer, prepare

console = Console(width=200)


def trained(folder: Path) -> LisaMini:
    """Return the best weights of a training, finished or not."""
    with safe_open(folder / LAST_CHECKPOINT, "pt") as checkpoint:
        config = Config.model_validate_json(checkpoint.metadata()["config"])
    tensors = load_file(folder / BEST_CHECKPOINT)
    model = LisaMini(config.model, tensors["history_codes"], tensors["target_codes"])
    model.load_state_dict(tensors)
    return model.eval()


class Teacher(NamedTuple):
    """The queries of M models after each event (E, M D), and what they are multiplied with: (N, M D), (N,)."""

    queries: NDArray[np.float16]
    vectors: Tensor
    bias: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, models: Sequence[LisaMini], histories: Histories) -> Teacher:
        """Read all positions of the histories."""
        width = models[0].config.width
        queries = np.zeros((len(histories.item), len(models) * width), np.float16)
        for number, model in enumerate(models):
            tables, columns = model.tables(), slice(number * width, (number + 1) * width)
            maker = BatchMaker(histories, model.history_codes.numpy(), model.config, 2048)
            for batch in maker.batches(0):
                read = model.read(batch.histogram, batch.last, batch.recent, tables)
                queries[batch.event.numpy(), columns] = read.numpy()
        vectors = torch.cat([model.item_vectors() for model in models], dim=1) / len(models)
        return cls(queries, vectors, torch.stack([model.bias.detach() for model in models]).mean(dim=0))


class Lesson(NamedTuple):
    """What a teacher says about Q positions: queries (Q, M D), item vectors (N, M D) and biases (N,).

    weight       of the teacher's distribution; that of the next items is 1 - weight
    temperature  of both distributions where they are compared
    """

    queries: Tensor
    vectors: Tensor
    bias: Tensor
    weight: float
    temperature: float


class _DistilledCrossEntropy(torch.autograd.Function):
    """Cross-entropy of the next items and of the teacher's distribution, over the catalogue.

    The value is that of the next items alone, which compares with trainings without a teacher.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        queries: Tensor,
        vectors: Tensor,
        bias: Tensor,
        targets: Tensor,
        lesson: Lesson,
    ) -> Tensor:
        surprise = torch.empty((len(queries), len(vectors)))  # d loss / d logits
        loss = torch.zeros(())
        weight, temperature = lesson.weight, lesson.temperature
        for begin in range(0, len(queries), ROWS_PER_BLOCK):
            block = slice(begin, begin + ROWS_PER_BLOCK)
            target = targets[block, None]
            logits = torch.addmm(bias, queries[block], vectors.T)
            wanted = torch.addmm(lesson.bias, lesson.queries[block], lesson.vectors.T)
            wanted = wanted.div_(temperature).softmax(dim=-1)
            share = logits.softmax(dim=-1)
            loss -= share.gather(1, target).log().sum()
            if temperature == 1:
                share.sub_(wanted, alpha=weight)
            else:
                own = logits.div_(temperature).softmax(dim=-1)
                share.mul_(1 - weight).add_(own.sub_(wanted), alpha=weight * temperature)
            share.scatter_add_(1, target, torch.full_like(target, weight - 1, dtype=share.dtype))
            surprise[block] = share.div_(len(queries))
        ctx.save_for_backward(surprise @ vectors, surprise.T @ queries, surprise.sum(dim=0))
        return loss / len(queries)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_queries, of_vectors, of_bias = ctx.saved_tensors  # type: ignore[attr-defined]
        return of_queries * gradient, of_vectors * gradient, of_bias * gradient, None, None


class TaughtTrainer(Trainer):
    """A trainer whose loss includes the teacher's distribution."""

    teacher: Teacher
    weight: float
    temperature: float

    @override
    def _loss(self, batch: PositionBatch) -> Tensor:
        queries, vectors = self.model.read(batch.histogram, batch.last, batch.recent), self.model.item_vectors()
        taught = torch.from_numpy(self.teacher.queries[batch.event.numpy()]).float()
        lesson = Lesson(taught, *self.teacher[1:], self.weight, self.temperature)
        found: Tensor = _DistilledCrossEntropy.apply(  # type: ignore[no-untyped-call]
            queries, vectors, self.model.bias, batch.targets, lesson
        )
        return found

    def judge(self, models: Sequence[LisaMini]) -> str:
        """Return the quality of the mean of the models' scores, with the best lift and without one."""
        scorers = [self._scorer_of(model) for model in models]

        def mean(histories: Histories) -> NDArray[np.float32]:
            scores: NDArray[np.float32] = np.mean([scorer(histories) for scorer in scorers], axis=0)
            return scores

        assert self.validation is not None
        with torch.inference_mode():
            found = self._judge(self.validation, mean)
        assert self.chosen is not None
        plain = self.chosen.ndcg_at_10_by_strength[0.0]
        return f"{found.hr_at_10:.4f} / {found.ndcg_at_10:.4f}, without lift {plain:.4f}, {found.lift}"

    def _scorer_of(self, model: LisaMini) -> Scorer:
        own = self.model, self.history_codes, self.config
        self.model, self.history_codes = model, model.history_codes.numpy()
        self.config = self.config.model_copy(update={"model": model.config})
        scorer = self._scorer()
        self.model, self.history_codes, self.config = own
        return scorer


def first_model(config: Config, codes_from: Path) -> FirstModel:
    """Return a function that makes a fresh model with codes from the item vectors of a training."""
    vectors = trained(codes_from).item_vectors().detach().numpy()
    return lambda _: build_lisa_mini(config.model, codes_of(vectors, config.model, config.training.seed))


def main(
    data: Annotated[Path, typer.Option(help="Data directory.")],
    out: Annotated[Path, typer.Option(help="Where the training is kept; one that is there is continued.")],
    variant: Annotated[str, typer.Option(help="PRESET[,SETTING=VALUE...].")] = "lisa-mini",
    teacher: Annotated[list[Path] | None, typer.Option(help="A training; repeatable.")] = None,
    weight: Annotated[float, typer.Option(help="Of the teacher's distribution.")] = 0.7,
    temperature: float = 1.0,
    codes_from: Annotated[Path | None, typer.Option(help="A training.")] = None,
) -> None:
    """Train, or continue a training, and print the quality on validation."""
    use_threads(1)
    shape, training = Variant.of(variant).settings()
    config = Config(model=shape, training=training, data=DataCard(split="temporal" if data.name in TEMPORAL else "loo"))
    resume = (out / LAST_CHECKPOINT).exists()
    inputs = prepare_training(data, out, config, Resources(), resume)
    first = first_model(inputs.recipe, codes_from) if codes_from else (lambda _: trained(out)) if resume else None
    prepared = prepare(inputs.interactions, inputs.parts, inputs.recipe, first)
    trainer = (TaughtTrainer if teacher else Trainer)(prepared, inputs.recipe, out, "cpu")
    if isinstance(trainer, TaughtTrainer):
        models = [trained(folder) for folder in teacher or ()]
        trainer.teacher = Teacher.of(models, prepared.histories)
        trainer.weight, trainer.temperature = weight, temperature
        console.print(f"teacher: {trainer.judge(models)}", soft_wrap=True)
    trainer.fit(EpochPrinter(out.name, console), resume)
    chosen = trainer.chosen
    assert chosen is not None
    quality = f"{chosen.mean('hr_at_10'):.4f} / {chosen.mean('ndcg_at_10'):.4f}"
    console.print(
        f"{out.name}: {quality}; NDCG@10 by strength of the lift: {chosen.ndcg_at_10_by_strength}", soft_wrap=True
    )


if __name__ == "__main__":
    typer.run(main)
