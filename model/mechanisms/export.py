"""The conversion of a trained mechanism into a servable model, with fixed codes and weights that read a state."""

from __future__ import annotations

import torch

from model.config import MechanismRecipe, ModelConfig, ServedRecipe
from model.lisa.lisa_paper import LisaPaper
from model.mechanisms.histograms import DECAY_RATE, Histograms
from model.mechanisms.network import MechanismNetwork

SMALLEST_SHARE = 1e-9  # of a codeword in an item; smaller ones change no query, and denormal sums would be slow


def served_recipe(recipe: MechanismRecipe) -> ServedRecipe:
    """Return the recipe of the servable model that a mechanism of this recipe becomes."""
    shape = recipe.model
    has_own_targets = shape.target_codewords > 0
    model = ModelConfig(
        preset=shape.preset,
        width=shape.width,
        decay_rates=(DECAY_RATE,),
        history_codebooks=shape.codebooks,
        history_codewords=shape.codewords,
        target_codebooks=shape.target_codebooks if has_own_targets else shape.codebooks,
        target_codewords=shape.target_codewords if has_own_targets else shape.codewords,
        ffn_multiple=1,
        hops=0,
        recent_items=1,
        followers=0,
        dropout=shape.dropout,
        block="post-norm",
        soft=shape.soft,
    )
    return ServedRecipe(**{**recipe.model_dump(), "model": model, "training": recipe.training})


@torch.no_grad()
def served_model(network: MechanismNetwork) -> LisaPaper:
    """Convert a network of histograms, without positions and with coded targets, into an equivalent model."""
    mechanism, history = network.mechanism, network.quantiser
    assert isinstance(mechanism, Histograms)
    assert history is not None
    encoded = network.distinct().history
    codes = encoded.indices()
    targets, target_codes = history, codes.clone()
    if network.target_quantiser is not None:
        targets, target_codes = network.target_quantiser, network.target_codes()
    shape = served_recipe(MechanismRecipe(model=network.config)).model
    model = LisaPaper(shape, codes, target_codes)
    if model.shares is not None:
        assert encoded.codes is not None
        model.shares.copy_(encoded.codes.where(encoded.codes >= SMALLEST_SHARE, 0))
    model.codebooks.copy_(history.codebooks * network.read_scale)
    model.target_codebooks.copy_(targets.codebooks)
    for name in ("query", "key", "value"):
        getattr(model, name).copy_(getattr(mechanism, name)[None])
    model.norms.load_state_dict(network.norms.state_dict())
    model.feed_forward.load_state_dict(network.feed_forward.state_dict())
    return model.eval()
