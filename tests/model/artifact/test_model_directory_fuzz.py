"""Thousands of mutated model directories: each is loaded completely or refused in one sentence.

The manifest agrees with every one of them, as if somebody had made it so; what it does not agree with never gets far.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model import config
from model.artifact import model_directory
from model.artifact.item_statistics import COMPLEMENTS, CONTENT, INTERVALS, ItemStatistics
from model.artifact.item_table import ItemTable
from model.artifact.model_directory import (
    CONFIG,
    ITEMS,
    MANIFEST,
    METRICS,
    PACKED,
    WEIGHTS,
    ArtifactError,
)
from model.content.content_map import learned_content
from model.content.text_features import Description
from model.lisa.item_complements import Complements
from model.lisa.item_intervals import Intervals, Purchases, due_items
from model.lisa.lisa_mini import LisaMini

CASES = 200  # of each kind of file
BOUGHT = Purchases(np.array([0, 0, 1, 2, 9]), np.array([0.0, 30.0, 400.0, 1e6, 7.0]))
SHAPE = config.ModelConfig(
    width=4,
    decay_rates=(0.1,),
    history_codebooks=2,
    history_codewords=4,
    target_codebooks=2,
    target_codewords=4,
    ffn_multiple=1,
    hops=1,
    recent_items=2,
    followers=2,
)
ODD_NUMBERS = (0, -1, 1, 2, 3, 255, 256, 2**31, 2**53, 2**63, 2**64, 10**30, 1e308, 0.5, -0.0)
ODD_TEXTS = ("", "none", "\0", "\ud83d\ude00" * 50)
ODD_VALUES: tuple[Any, ...] = (*ODD_NUMBERS, None, True, *ODD_TEXTS, [], {}, [[]], [0.1] * 500)


@pytest.fixture(scope="module")
def whole(random_model: Callable[..., LisaMini], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "whole"
    items = ItemTable(["a", "b", "c"], ["A", "", "C"], [("p",), (), ("p", "q")], np.array([3, 2, 1]))
    complements = Complements(np.array([[1, 2], [0, -1], [1, -1]], np.int32), np.ones((3, 2), np.float32))
    log_days, spread, share = (np.full(4, part, np.float32) for part in (2.0, 0.5, 0.25))
    intervals = Intervals(log_days, spread, share, of_purchases=True)
    served = config.Config(model=SHAPE)
    titles = [Description(text) for text in ("green tea", "black tea", "cup")]
    targets = np.arange(3 * SHAPE.width, dtype=np.float32).reshape(3, -1)
    titles = [Description(text) for text in ("green tea", "black tea", "cup")]
    content = learned_content(targets, np.ones(3, int), titles, np.eye(3))
    statistics = ItemStatistics(complements, intervals, content)
    model_directory.save(directory, random_model(SHAPE, 3), served, items, {"loss": 1.5}, statistics)
    return directory


def bytes_changed(content: bytes, rng: random.Random) -> bytes:
    """A few bytes replaced, removed, duplicated or inserted, often near the beginning."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        place = min(int(rng.random() ** rng.choice((1, 3)) * len(changed)), max(len(changed) - 1, 0))
        match rng.randrange(5):
            case 0 if changed:
                changed[place] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del changed[place : place + rng.choice((1, 8, 100))]
            case 3:
                changed[place:place] = changed[place : place + rng.choice((1, 8, 100))]
            case 4:
                changed[place : place + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1)))
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.1 else changed)


def json_changed(content: bytes, rng: random.Random) -> bytes:
    """A value replaced by an unusual one, or a key added or removed, at any depth."""
    found = json.loads(content)
    holder: Any = found
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = rng.choice(keys) if keys else None
        if key is None or not isinstance(holder[key], dict | list) or rng.random() < 0.3:
            break
        holder = holder[key]
    match rng.randrange(4):
        case 0 if key is not None:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("unknown", "", "__metadata__"))] = rng.choice(ODD_VALUES)
        case _ if key is not None:
            holder[key] = rng.choice(ODD_VALUES)
    return json.dumps(found).encode()


def header_changed(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file with shapes, types or offsets that do not match its data."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json_changed(content[8 : 8 + length], rng)
    stated = len(header) if rng.random() < 0.8 else rng.choice((0, 1, length + 1, 2**31, 100_000_001, 2**63, 2**64 - 1))
    return struct.pack("<Q", stated) + header + content[8 + length :]


def cases(content: bytes, name: str) -> Iterator[bytes]:
    rng = random.Random(name)
    of_tensors = [bytes_changed, header_changed]
    of_file = {**dict.fromkeys((WEIGHTS, PACKED, COMPLEMENTS, INTERVALS, CONTENT), of_tensors), ITEMS: [bytes_changed]}
    changes = of_file.get(name, [bytes_changed, json_changed])
    for number in range(CASES):
        yield changes[number % len(changes)](content, rng)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, ITEMS, PACKED, COMPLEMENTS, INTERVALS, CONTENT, METRICS, MANIFEST])
def test_mutated_directories_are_loaded_completely_or_refused(whole: Path, tmp_path: Path, name: str) -> None:
    directory = tmp_path / "forged"
    directory.mkdir()
    for file in whole.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    hashes = json.loads((whole / MANIFEST).read_bytes())
    if name == ITEMS:  # which is read where the packed form of it is missing
        (directory / PACKED).unlink()
        del hashes[PACKED]
    messages: list[str] = []
    for number, content in enumerate(cases((whole / name).read_bytes(), name)):
        (directory / name).write_bytes(content)
        if name != MANIFEST:
            hashes[name] = hashlib.sha256(content).hexdigest()
            (directory / MANIFEST).write_text(json.dumps(hashes))
        try:
            loaded = model_directory.load(directory)
        except ArtifactError as exc:
            messages.append(str(exc))
        else:
            assert len(loaded.items) == 3
            assert name == PACKED or len(set(loaded.items.ids)) == 3, number
            texts = [
                *loaded.items.ids,
                *loaded.items.titles,
                *(name for names in loaded.items.categories for name in names),
            ]
            assert all(isinstance(text, str) for text in texts), number
            assert all(loaded.items.rows.get(text) in (None, 0, 1, 2) for text in texts), number
            assert all(tensor.isfinite().all() for tensor in loaded.tables), number
            found, scores = loaded.complements.of(np.arange(1))
            assert set(found.tolist()) <= {1, 2}, number
            assert np.isfinite(scores).all(), number
            due = due_items(BOUGHT, loaded.intervals)
            assert all(np.isfinite(part).all() for part in due), number
            assert due.scores.min() > 0, number
            if loaded.content.exists:
                predicted, _ = loaded.content.of_descriptions([Description("green cup"), Description("")])
                assert np.isfinite(predicted).all(), number
                assert np.isfinite(loaded.content.of_shop_vectors(np.eye(3))).all(), number
            assert loaded.history_codes.max() < loaded.config.model.history_codewords, number
    assert len(messages) > CASES / 10
    assert max(map(len, messages)) < 4_000
