"""Commands for an existing tenant refuse a name that no service has served."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.settings import Settings
from tests.app.conftest import Client, item_id, write_model
from tests.app.support import run_command


@pytest.mark.parametrize(
    "command",
    [
        "recommend --out lists.parquet",
        f"items drop-counts {item_id(1)}",
        "items drop-vectors",
        "erase-tenant mian --yes",
        "drop june",
        "compare",
        "audit",
        "backup --out backup.jsonl.gz",
        "publish --brokers 127.0.0.1:9 --topic events --positions positions --once",
    ],
)
def test_a_misspelt_tenant_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    client = Client(Settings(model_dir=write_model(tmp_path / "models" / "may"), data_dir=tmp_path / "state"))
    client.close()
    monkeypatch.setenv("LISAREC_TENANT", "mian")
    for _ in range(2):
        assert run_command(*command.split(), "--data-dir", tmp_path / "state") == 1
        assert "no service has served tenant 'mian' from this store, only others: main;" in capsys.readouterr().err
