"""The first process's preparation in files that the others map: histories, codes and the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.config import Config
from model.data.arrays import Arrays
from model.data.interactions import Histories
from model.lisa.lisa_mini import LisaMini
from model.training.loop import CHECKPOINT
from model.training.trainer import Preparation

FOLDER, CONFIG = f"{CHECKPOINT}/preparation", "config.json"


def write(directory: Path, recipe: Config, prepared: Preparation) -> None:
    """Write the parts of a preparation that other processes need. They get the weights from the first process."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    histories, model = prepared.histories, prepared.model
    arrays: dict[str, NDArray[Any]] = {"item": histories.item, "weights": histories.weights, "starts": histories.starts}
    arrays |= {"history_codes": model.history_codes.numpy(), "target_codes": model.target_codes.numpy()}
    for name, array in arrays.items():
        prepared.arrays.save(folder / f"{name}.npy", array)
    (folder / CONFIG).write_text(recipe.model_dump_json(), encoding="utf-8")


def read(directory: Path, arrays: Arrays) -> tuple[Config, Preparation]:
    """Read the preparation. The events stay in the files, which all processes of a machine share.

    arrays  opens the files, and releases their pages if memory is limited
    """
    folder = directory / FOLDER

    def mapped(name: str) -> NDArray[Any]:
        return arrays.saved(folder / f"{name}.npy")

    recipe = Config.model_validate_json((folder / CONFIG).read_bytes())
    codes = (torch.from_numpy(np.array(mapped(name))) for name in ("history_codes", "target_codes"))
    histories = Histories(mapped("item"), mapped("weights"), np.array(mapped("starts")))
    return recipe, Preparation(histories, LisaMini(recipe.model, *codes), None, None, arrays)
