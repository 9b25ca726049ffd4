"""A model directory: the one way to save a trained model and the one way to load it. Never pickle.

``model.safetensors``  weights, codes and tables
``config.json``        what ``model.config.Config`` says
``items.parquet``      item_id, title, categories, count: the catalogue in item order
``metrics.json``       how training went
``manifest.json``      SHA-256 of each file above; those of the first three together name the generation
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as to_bytes
from torch import Tensor

from model.config import Config
from model.lisa import AttentionTables, LisaMini

WEIGHTS, CONFIG, ITEMS, METRICS, MANIFEST = (
    "model.safetensors",
    "config.json",
    "items.parquet",
    "metrics.json",
    "manifest.json",
)
FILES = (WEIGHTS, CONFIG, ITEMS, METRICS)
BROKEN = (
    ValidationError,
    SafetensorError,
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,  # no Exception, but all that a broken table may come to
    KeyError,
    TypeError,
    RuntimeError,
    RecursionError,
    ValueError,
)


class ArtifactError(ValueError):
    """A model directory that cannot be used; the message names the way out."""


@dataclass(frozen=True)
class Items:
    """The catalogue in item order, which breaks ties.

    counts  (N,)  int64, training events of each item
    """

    ids: list[str]
    titles: list[str]
    categories: list[tuple[str, ...]]
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Artifact:
    """A loaded model directory. ``tag``: 16 hex digits, the same for the same files wherever they lie."""

    name: str
    tag: str
    config: Config
    items: Items
    model: LisaMini
    tables: AttentionTables
    metrics: dict[str, Any]

    @property
    def history_codes(self) -> NDArray[np.uint8]:
        """(N, B) codes of what a user did."""
        return self.model.history_codes.numpy().astype(np.uint8)

    @property
    def target_codes(self) -> NDArray[np.uint8]:
        """(N, B') codes of what can be recommended."""
        return self.model.target_codes.numpy().astype(np.uint8)


def save(directory: Path, model: LisaMini, config: Config, items: Items, metrics: dict[str, Any]) -> None:
    """Write a model directory; the manifest comes last, so a directory is complete or has none."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    with torch.no_grad():
        tables = model.tables()
    tensors = {f"weights.{name}": tensor for name, tensor in model.state_dict().items() if not name.endswith("_codes")}
    tensors |= {"tables.match": tables.match, "tables.values": tables.values}
    tensors |= {"codes.history": model.history_codes.byte(), "codes.target": model.target_codes.byte()}
    (directory / WEIGHTS).write_bytes(to_bytes({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))
    (directory / CONFIG).write_text(config.model_dump_json(indent=2) + "\n")
    (directory / METRICS).write_text(json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    _items_frame(items).write_parquet(directory / ITEMS)
    hashes = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in FILES}
    unfinished = directory / f"{MANIFEST}.unfinished"
    unfinished.write_text(json.dumps(hashes, indent=2) + "\n")
    os.replace(unfinished, directory / MANIFEST)


def load(directory: Path) -> Artifact:
    """Read a model directory onto the CPU; raises ArtifactError when a file is missing, changed or does not fit."""
    tag = _checked_tag(directory)
    try:
        config = Config.model_validate_json((directory / CONFIG).read_bytes())
        tensors = load_tensors((directory / WEIGHTS).read_bytes())
        frame = pl.read_parquet(directory / ITEMS)
        metrics = json.loads((directory / METRICS).read_text())
        model, tables = _assemble(config, tensors)
        items = _items(frame)
    except BROKEN as exc:
        raise ArtifactError(
            f"model directory {str(directory)!r} was made by another version: {str(exc)[:1000]}"
        ) from exc
    if len(items) != len(model.bias):
        raise ArtifactError(f"model directory {str(directory)!r} has {len(items)} items but {len(model.bias)} codes")
    return Artifact(directory.resolve().name, tag, config, items, model, tables, metrics)


def exists(directory: Path) -> bool:
    """Whether a complete model stands there."""
    return (directory / MANIFEST).is_file()


def _checked_tag(directory: Path) -> str:
    if not exists(directory):
        raise ArtifactError(
            f"model directory {str(directory)!r} has no {MANIFEST}; run 'lisarec train --out {directory}'"
        )
    raw = (directory / MANIFEST).read_bytes()
    try:
        hashes = json.loads(raw)
        for name in FILES:
            found = hashlib.sha256((directory / name).read_bytes()).hexdigest()
            if found != hashes[name]:
                raise ArtifactError(
                    f"{directory / name} is not the file its manifest names; copy or train the model again"
                )
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as exc:
        raise ArtifactError(f"{directory / MANIFEST} is broken; copy or train the model again") from exc
    except FileNotFoundError as exc:
        raise ArtifactError(
            f"model directory {str(directory)!r} lacks {exc.filename}; copy or train the model again"
        ) from exc
    served = json.dumps([hashes[name] for name in (WEIGHTS, CONFIG, ITEMS)])  # how long training took is no matter
    return hashlib.sha256(served.encode()).hexdigest()[:16]


def _assemble(config: Config, tensors: dict[str, Tensor]) -> tuple[LisaMini, AttentionTables]:
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise ValueError(f"{broken[0]} is not finite; train it again")
    history, target = tensors["codes.history"], tensors["codes.target"]
    shape = config.model
    pairs = len(shape.decay_rates), shape.history_codebooks, shape.history_codewords
    shapes = {
        "codes.history": (len(target), shape.history_codebooks),
        "codes.target": (len(target), shape.target_codebooks),
        "tables.match": (*pairs, shape.history_codewords),
        "tables.values": (*pairs, shape.width),
    }
    misfit = [name for name, expected in shapes.items() if tensors[name].shape != expected]
    if misfit:
        raise ValueError(f"{misfit[0]} does not have the shape that {CONFIG} tells")
    if int(history.max()) >= shape.history_codewords or int(target.max()) >= shape.target_codewords:
        raise ValueError("codes point beyond their codebooks")
    if shape.followers and int(tensors["weights.followers"].max()) >= len(target):
        raise ValueError("followers point beyond the catalogue")
    model = LisaMini(shape, history, target)
    weights = {name.removeprefix("weights."): tensor for name, tensor in tensors.items() if name.startswith("weights.")}
    model.load_state_dict(weights | {"history_codes": history.long(), "target_codes": target.long()})
    return model.eval(), AttentionTables(tensors["tables.match"], tensors["tables.values"])


def _items_frame(items: Items) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "item_id": items.ids,
            "title": items.titles,
            "categories": [list(names) for names in items.categories],
            "count": items.counts,
        },
        schema={"item_id": pl.String, "title": pl.String, "categories": pl.List(pl.String), "count": pl.Int64},
    )


def _items(frame: pl.DataFrame) -> Items:
    """raises ValueError for a table that `_items_frame` has not made"""
    names = frame["categories"].explode(empty_as_null=False)
    if frame.null_count().sum_horizontal().sum() or names.null_count() or frame["item_id"].is_duplicated().any():
        raise ValueError(f"{ITEMS} has an item without an id, or twice")
    categories: Sequence[list[str]] = frame["categories"].to_list()
    return Items(
        frame["item_id"].to_list(),
        frame["title"].to_list(),
        [tuple(names) for names in categories],
        frame["count"].to_numpy().copy(),
    )
