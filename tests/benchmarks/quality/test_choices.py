"""The comparison of settings on validation, shortened."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file

from benchmarks.quality.training import choices
from benchmarks.quality.training.variants import (
    TEACHER,
    GatedFeedForward,
    GatedResidual,
    RepeatedRecentItems,
    Variant,
)
from model.lisa.feed_forward import FeedForward
from model.lisa.item_followers import Lift
from model.lisa.lisa_mini import LisaMini, sum_of_codewords
from model.training.loop import BEST_CHECKPOINT
from tests.model.conftest import shop_rows, write_rows


@pytest.mark.parametrize(("patience", "kept"), [(1, 1), (2, 3), (3, 6), (9, 6)])
def test_the_kept_epoch_equals_that_of_a_training(patience: int, kept: int) -> None:
    quality = [0.1, 0.3, 0.2, 0.4, 0.3, 0.3, 0.4]
    trial = choices.LiftTrial({}, {}, [])
    assert choices.Run(7.0, 0.2, quality, {}, {}, trial).kept(patience) == kept


def test_variants_are_trained_once_and_compared_user_by_user(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "shop", shop_rows()[:600])
    texts = ["lisa-mini,epochs=1", "lisa-recent,epochs=1,recent_items=8,twice", "lisa-mini,dropout=0.5,epochs=2,gated"]
    run = partial(choices.main, [data], tmp_path / "runs", variant=texts, seed=[0])
    run(processes=2)
    printed = capfd.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("| shop ")]
    assert [line.split("|")[3].strip() for line in lines[:3]] == texts
    assert len(lines) == 4, "and one of the lift"
    files = sorted((tmp_path / "runs").rglob("run.json"))
    made = [file.stat().st_mtime_ns for file in files]
    run()
    assert capfd.readouterr().out.count("epoch 1,") == 0 < printed.count("epoch 1,")
    assert [file.stat().st_mtime_ns for file in files] == made
    first, _, other = (choices.train(data, Variant.of(text), 0, tmp_path / "runs", "cpu") for text in texts)
    margin = np.mean(other.by_user["hr_at_10"] - first.by_user["hr_at_10"])
    assert f"{margin:+.4f} (" in lines[2]
    assert max(first.ndcg_at_10) == pytest.approx(first.by_user["ndcg_at_10"].mean())
    assert [lift._replace(strength=1.5) for lift in first.lift_trial.lifts] == [Lift(16, 1.5, 0.4, 0.01)] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lisa-huge", "unknown preset"),
        ("lisa-mini,drop=0.5", "drop"),
        ("lisa-mini,dropout=2", "dropout"),
        ("lisa-mini,thrice", "no part 'thrice'"),
    ],
)
def test_unknown_variants_are_refused(text: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        Variant.of(text)


def test_targets_of_a_student_are_quantised_vectors_of_its_teacher(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "shop", shop_rows()[:600])
    student = Variant.of("lisa-mini,epochs=1,taught")
    with pytest.raises(typer.BadParameter, match="train the variant lisa-recent,free first"):
        choices.train(data, student, 0, tmp_path / "runs", "cpu")
    for text in (TEACHER, "lisa-mini,epochs=1,taught", "lisa-mini,epochs=1"):
        choices.train(data, Variant.of(text), 0, tmp_path / "runs", "cpu")
    teacher, taught, plain = (
        load_file(tmp_path / "runs" / "shop" / f"{text}-seed-0" / BEST_CHECKPOINT)
        for text in (TEACHER, "lisa-mini,epochs=1,taught", "lisa-mini,epochs=1")
    )
    assert torch.equal(taught["history_codes"], plain["history_codes"])
    vectors = sum_of_codewords(teacher["target_codes"], teacher["target_codebooks"]) + teacher["free"]
    assert teacher["free"].any()
    # with fewer items than codewords, each item has a first codeword of its own only where its vector is another's
    first, vector_of = taught["target_codes"][:, 0], [tuple(vector) for vector in vectors.tolist()]
    assert len(set(first.tolist())) == len(set(vector_of))


def test_a_residual_gate_starts_nearly_open() -> None:
    shape, _ = Variant.of("lisa-mini").settings()
    gated, hidden = GatedResidual(shape).eval(), torch.randn(3, shape.width)
    torch.nn.init.zeros_(gated.gate.weight)
    torch.nn.init.zeros_(gated.gate.bias)
    torch.testing.assert_close(gated(hidden), FeedForward.forward(gated, hidden))


def test_parts_replace_the_model_s_own_during_construction() -> None:
    codes = torch.zeros((5, 8), dtype=torch.uint8)
    variant = Variant.of("lisa-recent,gated,twice")
    shape, _ = variant.settings()
    with variant.parts(Path()):
        model = LisaMini(shape, codes, codes)
    assert isinstance(model.recent, RepeatedRecentItems)
    assert isinstance(model.feed_forward, GatedFeedForward)
    assert isinstance(model.recent.second.feed_forward, GatedFeedForward)
    assert type(LisaMini(shape, codes, codes).feed_forward) is FeedForward
