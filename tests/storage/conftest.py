from pathlib import Path

import pytest

from tests.storage.stores import STORES, new_address


@pytest.fixture(params=STORES)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty store, for ``stores.open_store``; one of each kind."""
    return new_address(request.param, tmp_path / "store")
