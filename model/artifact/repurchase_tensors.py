"""Repurchase intervals as the tensors of a model directory's file."""

from __future__ import annotations

import torch
from torch import Tensor

from model.lisa.item_intervals import Intervals

MAX_LOG_DAYS = 20.0  # more than a million years
OF_PURCHASES = "of_purchases"


def to_tensors(intervals: Intervals) -> dict[str, Tensor]:
    """Return the tensors to save."""
    parts = {name: torch.from_numpy(part) for name, part in intervals._asdict().items() if name != OF_PURCHASES}
    return parts | {OF_PURCHASES: torch.tensor([intervals.of_purchases], dtype=torch.uint8)}


def from_tensors(tensors: dict[str, Tensor], items: int) -> Intervals:
    """Return the intervals in tensors, without a copy; raises ValueError, KeyError, TypeError if they do not fit."""
    of_purchases = tensors[OF_PURCHASES]
    parts = tensors["log_days"], tensors["spread"], tensors["repeat_share"]
    if of_purchases.dtype != torch.uint8 or any(part.dtype != torch.float32 for part in parts):
        raise TypeError("the intervals have the wrong type")
    if of_purchases.shape != (1,) or any(part.shape != (items + 1,) for part in parts):
        raise ValueError("the intervals do not have the shape of the catalogue")
    log_days, spread, repeat_share = parts
    is_share = (repeat_share >= 0) & (repeat_share <= 1)
    fits = is_share & (log_days.abs() <= MAX_LOG_DAYS) & (spread > 0) & spread.isfinite()  # NaN fits nowhere
    if not fits.all():
        raise ValueError("an item has no interval")
    return Intervals(log_days.numpy(), spread.numpy(), repeat_share.numpy(), bool(of_purchases.item()))
