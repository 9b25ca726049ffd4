"""The benchmark of sealed states, shortened."""

from pathlib import Path

import pytest

from benchmarks.attack import sealed_states
from tests.app.conftest import write_model


def test_forged_states_are_refused_and_valid_ones_give_the_list_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_states, "TIMED", 3)
    assert sealed_states.run(write_model(tmp_path / "tiny"), states=300)
