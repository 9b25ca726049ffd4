"""The benchmark of states that visitors keep, in short."""

from pathlib import Path

import pytest

from benchmarks.attack import sealed_states
from tests.app.conftest import write_model


def test_wrong_states_are_refused_and_a_right_one_gives_the_list_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_states, "TIMED", 3)
    assert sealed_states.run(write_model(tmp_path / "tiny"), states=300)
