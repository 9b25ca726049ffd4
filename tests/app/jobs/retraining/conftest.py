"""What the tests of the trainer share."""

from typing import Any

import pytest

from app.jobs import generations
from storage.maintenance.rebuild import Rebuilt


@pytest.fixture
def rebuilds(monkeypatch: pytest.MonkeyPatch) -> list[Rebuilt]:
    """What each rebuild has done."""
    found = []
    rebuild = generations.rebuild

    async def recorded(*arguments: Any) -> Rebuilt:
        found.append(await rebuild(*arguments))
        return found[-1]

    monkeypatch.setattr(generations, "rebuild", recorded)
    return found
