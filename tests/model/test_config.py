"""Settings of a model: those that are gone are left out of what earlier versions wrote."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from model.config import TrainConfig


def test_retired_settings_of_an_earlier_version_are_left_out_and_others_refused() -> None:
    earlier = {"seed": 3, "lift_choice": "table", "regularisation": "by-density"}
    assert TrainConfig.model_validate(earlier) == TrainConfig(seed=3)
    with pytest.raises(ValidationError, match="unheard_of"):
        TrainConfig.model_validate({"unheard_of": 1})
