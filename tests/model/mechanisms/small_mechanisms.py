"""Small networks of all mechanisms for stepping in tests."""

from __future__ import annotations

from typing import Any

import torch

from model.config import MECHANISMS, MechanismConfig
from model.mechanisms.network import MechanismNetwork

ITEMS = 50
SMALL = {"width": 12, "window": 40, "memory": 5, "interests": 3}


def small(name: str) -> MechanismConfig:
    shape = MECHANISMS[name]
    words = {"codebooks": 2, "target_codebooks": 3}
    words |= {"codewords": 7} if shape.codewords else {}
    words |= {"target_codewords": 9} if shape.target_codewords else {}
    return shape.model_copy(update=SMALL | words)


def network(name: str, **other: Any) -> MechanismNetwork:
    torch.manual_seed(0)
    made = MechanismNetwork(small(name).model_copy(update=other), ITEMS).eval()
    with torch.no_grad():
        for weights in made.parameters():
            weights.add_(0.1 * torch.randn_like(weights))
    return made
