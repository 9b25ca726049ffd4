"""The version that commands and logs print is the declared one."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from app.cli.main import main

ROOT = Path(__file__).parents[3]


def test_the_command_line_prints_the_declared_version(capsys: pytest.CaptureFixture[str]) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"lisarec {declared}\n"
