"""A small shop whose customers follow a ring of items, and models of it that train in a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model import config
from model.artifact import model_directory
from model.artifact.item_table import ItemTable
from model.lisa.lisa_mini import LisaMini
from model.training import train
from model.training.loop import EpochReport, Progress

TINY_MODEL = config.ModelConfig(
    width=16,
    decay_rates=(0.0, 0.5),
    history_codebooks=3,
    history_codewords=8,
    target_codebooks=2,
    target_codewords=32,
    ffn_multiple=2,
    dropout=0.1,
)
SHOP_ITEMS = 40
SHOP_USERS = 150


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Silent(Progress):
    """Progress without output, which may interrupt the training after an epoch."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.reports: list[EpochReport] = []
        self.stages: list[str] = []

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def batch(self, epoch: int, share: float, loss: float, events: int) -> None:
        assert 0 < share <= 1
        assert np.isfinite(loss)

    def epoch(self, report: EpochReport) -> None:
        self.reports.append(report)
        if self.stop_after == report.epoch:
            raise KeyboardInterrupt


@pytest.fixture(scope="session")
def silent() -> type[Silent]:
    return Silent


def tiny_config(**training: Any) -> config.Config:
    training = {"epochs": 2, "learning_rate": 0.01, "batch_size": 128, "patience": 10} | training
    return config.Config(model=TINY_MODEL, training=config.TrainConfig(**training))


@pytest.fixture(name="tiny_config", scope="session")
def tiny_config_maker() -> Callable[..., config.Config]:
    """Makes the configuration of a tiny model; keywords go to its TrainConfig."""
    return tiny_config


def shop_rows() -> list[tuple[str, str, int]]:
    """Rows (user_id, item_id, timestamp): four steps in five lead to the next item of the ring, the others anywhere."""
    rng = np.random.default_rng(0)
    # the first customer buys everything, so that every item trains and the item order does not depend on the others
    rows = [("u0", f"i{item}", item * 60) for item in range(SHOP_ITEMS)]
    for user in range(1, SHOP_USERS):
        item, time_s = int(rng.integers(SHOP_ITEMS)), int(rng.integers(1_000_000))
        for _ in range(int(rng.integers(3, 30))):
            rows.append((f"u{user}", f"i{item}", time_s))
            item = (item + 1) % SHOP_ITEMS if rng.random() < 0.8 else int(rng.integers(SHOP_ITEMS))
            time_s += int(rng.integers(1, 5_000))
    return rows


def write_rows(directory: Path, rows: Sequence[tuple[Any, ...]], columns: str = "user_id item_id timestamp") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    lines = [columns.split(), *rows]
    text = "".join("\t".join(map(str, line)) + "\n" for line in lines)
    (directory / "interactions.tsv").write_text(text, encoding="utf-8")
    return directory


@pytest.fixture(name="write_rows", scope="session")
def rows_writer() -> Callable[..., Path]:
    """Writes rows as the interactions.tsv of a directory and returns the directory."""
    return write_rows


@pytest.fixture
def rows() -> list[tuple[str, str, int]]:
    return shop_rows()


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of the shop."""
    directory = write_rows(tmp_path_factory.mktemp("shop"), shop_rows())
    titles = "".join(f"i{item}\tItem {item}\tshelf-{item // 10}|all\n" for item in range(SHOP_ITEMS))
    (directory / "items.tsv").write_text("item_id\ttitle\tcategories\n" + titles, encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def trained(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model directory of two epochs on the shop; copy it before changing it."""
    out = tmp_path_factory.mktemp("models") / "tiny"
    train.train(shop, out, tiny_config(), progress=Silent())
    return out


def random_model(shape: config.ModelConfig, items: int, seed: int = 0) -> LisaMini:
    torch.manual_seed(seed)
    history = torch.randint(shape.history_codewords, (items, shape.history_codebooks))
    target = torch.randint(shape.target_codewords, (items, shape.target_codebooks))
    model = LisaMini(shape, history, target)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.1 * torch.randn_like(weights))
        distinct = torch.rand(items, items).argsort(dim=1)[:, : shape.followers]
        model.followers[:, : distinct.shape[1]] = distinct.int()
        model.followers[torch.rand(model.followers.shape) < 0.3] = -1
        model.lift.copy_(torch.rand(model.lift.shape) * (model.followers >= 0))
    model.fold_norms_and_round()
    return model.eval()


@pytest.fixture(name="random_model", scope="session")
def random_model_maker() -> Callable[..., LisaMini]:
    """Makes a model of random codes and weights: ``random_model(shape, items, seed)``."""
    return random_model


@pytest.fixture(scope="session")
def in_memory() -> Callable[[LisaMini], model_directory.Artifact]:
    """Wraps a model as an artifact that was never saved."""

    def wrap(model: LisaMini) -> model_directory.Artifact:
        count = len(model.bias)
        names = [f"i{item}" for item in range(count)]
        items = ItemTable(names, [""] * count, [()] * count, np.zeros(count, np.int64))
        with torch.no_grad():
            tables = model.tables()
        return model_directory.Artifact("random", "0" * 16, config.Config(model=model.config), items, model, tables, {})

    return wrap


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every available device."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return str(request.param)
