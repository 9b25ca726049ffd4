"""A model directory: the one way to save a trained model and the one way to load it, without pickle.

``model.safetensors``  weights, codes and tables
``config.json``        the fields of ``model.config.ServedRecipe``
``items.parquet``      item_id, title, categories, count: the catalogue in item order
``items.safetensors``  the same in the layout of ``model.artifact.item_table``, which is mapped and used directly
``complements.safetensors``  the items that were bought together with each item, if the data have orders
``intervals.safetensors``  the interval after which each item is bought again, if the data have repurchases
``content.safetensors``  the map from titles, categories and the shop's vectors to vectors of items not learned
``metrics.json``       the metrics of the training
``manifest.json``      SHA-256 of each file above; those of the first three together identify the generation
``manifest.sig``       the signature of the manifest, if it was signed: ``model.artifact.signatures``

Models of earlier versions have no ``items.safetensors``, or one of another layout; loading computes what they lack.
Complements, intervals and content change no state, and so do not change the generation. docs/reference/data-formats.md
describes the files for other programs.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Collection
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from model.artifact import item_statistics
from model.artifact.item_statistics import NO_STATISTICS, ItemStatistics
from model.artifact.item_table import LAYOUT, OTHER_INDEX, ItemTable
from model.artifact.signatures import SIGNATURE, SignatureError, TrustedKeys
from model.artifact.tensor_file import replace_tensors, sync
from model.config import ModelConfig, Recipe, ServedRecipe
from model.content.content_map import NO_CONTENT, ContentMap
from model.data.table import write_parquet
from model.lisa.item_complements import NO_COMPLEMENTS, Complements
from model.lisa.item_intervals import NO_INTERVALS, Intervals
from model.lisa.lisa_mini import AttentionTables, Lisa, LisaMini
from model.lisa.lisa_paper import LisaPaper

WEIGHTS, CONFIG, ITEMS, PACKED, METRICS, MANIFEST = (
    "model.safetensors",
    "config.json",
    "items.parquet",
    "items.safetensors",
    "metrics.json",
    "manifest.json",
)
FILES = (WEIGHTS, CONFIG, ITEMS, PACKED, *item_statistics.FILES, METRICS)
OPTIONAL_FILES = {PACKED, *item_statistics.FILES}
ITEM_DTYPES = {
    "codes.history": torch.uint8,
    "codes.target": torch.uint8,
    "weights.shares": torch.float32,
    "weights.bias": torch.float32,
    "weights.followers": torch.int32,
    "weights.lift": torch.float32,
}
BROKEN_FILE_ERRORS = (
    ValidationError,
    SafetensorError,
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,  # not an Exception, but what polars raises for some broken tables
    KeyError,
    TypeError,
    RuntimeError,
    RecursionError,
    ValueError,
    OSError,
)


class ArtifactError(ValueError):
    """A model directory cannot be used. The message says what to do."""


@dataclass(frozen=True)
class Artifact:
    """A loaded model directory. ``tag``: 16 hex digits, which depend only on the content of the files."""

    name: str
    tag: str
    config: ServedRecipe
    items: ItemTable
    model: Lisa
    tables: AttentionTables
    metrics: dict[str, Any]
    complements: Complements = NO_COMPLEMENTS
    intervals: Intervals = NO_INTERVALS
    content: ContentMap = NO_CONTENT

    def release_pages(self) -> None:
        """Release the memory of the mapped file's pages. A later access reads the file again."""
        model = self.model
        of_items = model.history_codes, model.target_codes, model.shares, model.bias, model.followers, model.lift
        for tensor in of_items:
            if tensor is not None:
                release_pages(tensor)

    @property
    def history_codes(self) -> NDArray[np.uint8]:
        """History codes (N, B), which a state counts."""
        return self.model.history_codes.numpy()

    @property
    def history_shares(self) -> NDArray[np.float32] | None:
        """Shares (N, B, W) of the history codewords in each item; None if an item has one of each codebook."""
        return None if self.model.shares is None else self.model.shares.numpy()

    @property
    def history_counts(self) -> NDArray[np.uint8] | NDArray[np.float32]:
        """Each item's contribution to a histogram: codes (N, B), or shares (N, B, W)."""
        return self.history_codes if self.history_shares is None else self.history_shares

    @property
    def target_codes(self) -> NDArray[np.uint8]:
        """Target codes (N, B'), which a query scores."""
        return self.model.target_codes.numpy()


def save(
    directory: Path,
    model: Lisa,
    config: ServedRecipe,
    items: ItemTable,
    metrics: dict[str, Any],
    statistics: ItemStatistics = NO_STATISTICS,
) -> None:
    """Write a trained model as a model directory."""
    write(directory, tensors_of(model), config, items.to_frame(), metrics, statistics)


def tensors_of(model: Lisa) -> dict[str, Tensor]:
    """Return a model's weights, codes and tables, by their names in a model directory."""
    with torch.no_grad():
        tables = model.tables()
    tensors = {f"weights.{name}": tensor for name, tensor in model.state_dict().items() if not name.endswith("_codes")}
    tensors |= {"tables.match": tables.match, "tables.values": tables.values}
    return tensors | {"codes.history": model.history_codes, "codes.target": model.target_codes}


def write(
    directory: Path,
    tensors: dict[str, Tensor],
    config: Recipe,
    items: pl.DataFrame,
    metrics: dict[str, Any],
    statistics: ItemStatistics = NO_STATISTICS,
) -> None:
    """Write a model directory; the manifest comes last, so a directory is complete or has none.

    When this returns, the directory survives a power cut.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, SIGNATURE):
        (directory / name).unlink(missing_ok=True)
    (directory / CONFIG).write_text(config.model_dump_json(indent=2) + "\n")
    (directory / METRICS).write_text(json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    write_parquet(items, directory / ITEMS)
    _save(directory / PACKED, ItemTable.from_frame(items).to_tensors(), {"layout": LAYOUT})
    _save(directory / WEIGHTS, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    for name in item_statistics.FILES:
        (directory / name).unlink(missing_ok=True)
    for name, parts in statistics.to_tensors().items():
        _save(directory / name, parts)
    hashes = {name: _sha256(directory / name) for name in FILES if (directory / name).exists()}
    unfinished = directory / f"{MANIFEST}.unfinished"
    unfinished.write_text(json.dumps(hashes, indent=2) + "\n")
    for name in (*hashes, unfinished.name):
        sync(directory / name)
    os.replace(unfinished, directory / MANIFEST)
    for place in (directory, directory.parent):
        sync(place)


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    replace_tensors(path, tensors, metadata, mode_of=path.with_name(CONFIG))


def load(directory: Path, keys_file: Path | None = None) -> Artifact:
    """Load a servable model onto the CPU; raises ArtifactError when a file is missing, changed or does not fit.

    With a file of keys, one of the keys must have signed the model.

    The tensors of items stay in the file, which is mapped: only pages that are read take memory, and all processes
    share it. So the file may be replaced, as ``write`` does, but must not be overwritten.
    """
    hashes = _read_manifest(directory, keys_file)
    with ThreadPoolExecutor() as pool:
        tag = pool.submit(_checked_tag, directory, hashes, pool)
        if keys_file is not None:
            tag.result()  # what nobody has signed is not even parsed
        _require_served(directory)
        try:
            config = ServedRecipe.model_validate_json((directory / CONFIG).read_bytes())
            metrics = json.loads((directory / METRICS).read_text())
            model, tables = _assemble(config, load_file(directory / WEIGHTS))
            items = _load_items(directory, PACKED in hashes)
        except BROKEN_FILE_ERRORS as exc:
            tag.result()  # a changed file explains the error better
            raise ArtifactError(
                f"model directory {str(directory)!r} comes from another version of lisarec: {str(exc)[:1000]}"
            ) from exc
        if len(items) != len(model.bias):
            tag.result()
            raise ArtifactError(
                f"model directory {str(directory)!r} has {len(items)} items but {len(model.bias)} codes"
            )
        name = directory.resolve().name
        try:
            statistics = _load_statistics(directory, hashes, len(items), config.model.width)
        except ArtifactError:
            tag.result()
            raise
        return Artifact(name, tag.result(), config, items, model, tables, metrics, *statistics)


def model_class(shape: ModelConfig) -> type[Lisa]:
    """Return the class of models of this shape."""
    return LisaPaper if shape.block == "post-norm" else LisaMini


def verified_tag(directory: Path, keys_file: Path | None = None) -> str:
    """Compare a model directory's files with its manifest, and its signature with the keys; return its tag.

    raises  ArtifactError  when a file is missing or changed, or no key of the file has signed the model
    """
    with ThreadPoolExecutor() as pool:
        return _checked_tag(directory, _read_manifest(directory, keys_file), pool)


def is_mechanism(directory: Path) -> bool:
    """Return whether the directory contains one of ``model.mechanisms``, which are evaluated but not served."""
    try:
        return "mechanism" in json.loads((directory / CONFIG).read_bytes())["model"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def _require_served(directory: Path) -> None:
    if is_mechanism(directory):
        raise ArtifactError(
            f"model directory {str(directory)!r} contains a mechanism, which can only be evaluated with "
            "'lisarec evaluate'; to serve a model, train with --preset lisa-mini"
        )


def exists(directory: Path) -> bool:
    """Return whether the directory contains a complete model."""
    return (directory / MANIFEST).is_file()


def _read_manifest(directory: Path, keys_file: Path | None) -> dict[str, str]:
    if not exists(directory):
        raise ArtifactError(
            f"model directory {str(directory)!r} has no {MANIFEST}; run 'lisarec train --out {directory}'"
        )
    manifest = (directory / MANIFEST).read_bytes()
    if keys_file is not None:
        try:
            TrustedKeys.read(keys_file).check(directory, manifest)
        except SignatureError as exc:
            raise ArtifactError(str(exc)) from exc
    try:
        hashes = dict(json.loads(manifest))
        is_whole = all(isinstance(hashes[name], str) for name in FILES if name not in OPTIONAL_FILES)
    except (LookupError, TypeError, ValueError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ArtifactError(f"{directory / MANIFEST} is damaged; copy or train the model again")
    for name in FILES:
        if name in hashes and not (directory / name).is_file():  # opening a pipe would block for ever
            raise ArtifactError(
                f"model directory {str(directory)!r} lacks {directory / name}; copy or train the model again"
            )
    return hashes


def _checked_tag(directory: Path, hashes: dict[str, str], pool: Executor) -> str:
    listed = [name for name in FILES if name in hashes]
    for name, found in zip(listed, pool.map(_sha256, [directory / name for name in listed]), strict=True):
        if found != hashes[name]:
            raise ArtifactError(f"{directory / name} does not match its manifest; copy or train the model again")
    named = json.dumps([hashes[name] for name in (WEIGHTS, CONFIG, ITEMS)])  # metrics contain times, which do not count
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _assemble(config: ServedRecipe, tensors: dict[str, Tensor]) -> tuple[Lisa, AttentionTables]:
    broken = [name for name, tensor in tensors.items() if not _is_finite(tensor)]
    if broken:
        raise ValueError(f"{broken[0]} contains NaN or infinity; train the model again")
    history, target = tensors["codes.history"], tensors["codes.target"]
    shape = config.model
    pairs = len(shape.decay_rates), shape.history_codebooks, shape.history_codewords
    shapes = {
        "codes.history": (len(target), shape.history_codebooks),
        "codes.target": (len(target), shape.target_codebooks),
        "weights.bias": (len(target),),
        "weights.followers": (len(target), shape.followers),
        "weights.lift": (len(target), shape.followers),
        "tables.match": (*pairs, shape.history_codewords),
        "tables.values": (*pairs, shape.width),
    }
    if shape.soft:
        shapes["weights.shares"] = (len(target), *pairs[1:])
    misfit = [name for name, expected in shapes.items() if tensors[name].shape != expected]
    if misfit:
        raise ValueError(f"{misfit[0]} does not have the shape in {CONFIG}")
    mistyped = [name for name, tensor in tensors.items() if tensor.dtype != ITEM_DTYPES.get(name, torch.float32)]
    if mistyped:
        raise ValueError(f"{mistyped[0]} has the wrong type")
    beyond = (_largest(history) >= shape.history_codewords, _largest(target) >= shape.target_codewords)
    if any(beyond):
        raise ValueError("codes point beyond their codebooks")
    if shape.soft and tensors["weights.shares"].lt(0).any():
        raise ValueError("an item has a negative weight for a codeword")
    if shape.followers and _largest(tensors["weights.followers"]) >= len(target):
        raise ValueError("followers point beyond the catalogue")
    weights = {
        name.removeprefix("weights."): tensor if name in ITEM_DTYPES else tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("weights.")
    } | {"history_codes": history, "target_codes": target}
    model = model_class(shape)(shape, history[:0], target[:0])  # the tensors of items are assigned below
    for name in ("history_codes", "target_codes", "shares", "followers", "lift"):
        setattr(model, name, weights.get(name))
    model.bias = torch.nn.Parameter(weights["bias"])
    model.load_state_dict(weights, assign=True)
    model.fold_norms_and_round()
    return model.eval(), AttentionTables(tensors["tables.match"].clone(), tensors["tables.values"].clone())


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    least, most = tensor.aminmax()  # NaN passes through
    return bool((most - least).isfinite())


def _largest(tensor: Tensor) -> int:
    return int(tensor.amax()) if tensor.numel() else 0


def release_pages(tensor: Tensor) -> None:
    """Release the memory of a tensor's pages if it maps a file. A later access reads the file again."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - begin
    if size >= mmap.PAGESIZE and _is_file_backed(begin):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _is_file_backed(address: int) -> bool:
    """Return whether a file is mapped at the address; other memory would lose its content. False except on Linux."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else []:
        span, _, _, _, inode, *_ = line.split()
        begin, end = (int(bound, 16) for bound in span.split("-"))
        if begin <= address < end:
            return inode != "0"
    return False


def _load_items(directory: Path, is_packed: bool) -> ItemTable:
    if is_packed:
        with safe_open(directory / PACKED, "pt") as file:
            layout = (file.metadata() or {}).get("layout")
        if layout in (LAYOUT, OTHER_INDEX):
            return ItemTable.from_tensors(load_file(directory / PACKED), has_index=layout == LAYOUT)
    return ItemTable.from_frame(pl.read_parquet(directory / ITEMS))


def _load_statistics(directory: Path, files: Collection[str], items: int, width: int) -> ItemStatistics:
    """Load the item statistics whose files exist; raises ArtifactError."""
    found = NO_STATISTICS
    for name in item_statistics.FILES:
        if name in files:
            try:
                found = found.with_file(name, load_file(directory / name), items, width)
            except BROKEN_FILE_ERRORS as exc:
                raise ArtifactError(f"{directory / name} was made by another version: {str(exc)[:1000]}") from exc
    return found
