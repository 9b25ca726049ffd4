"""An event and a recommendation pass through a limited number of files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from benchmarks.service import request_walk
from benchmarks.service.request_walk import Call, Length, length
from tests.app.conftest import write_model

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "explanation" / "architecture.md"
PATHS = re.compile(r"^## The path of an event\n.*?^## Why", re.MULTILINE | re.DOTALL)
# before the app, for Redis, and for requests with expressions
NOT_WALKED = {
    "app/http/protocol.py",
    "app/http/middleware/plain_requests.py",
    "storage/group_commit.py",
    "storage/redis/writer.py",
    "app/recommendation/filters.py",
}


def test_walks_respect_their_limits_and_pass_the_documented_steps(tmp_path: Path) -> None:
    """In its own process, so that every thread is profiled."""
    model = write_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "benchmarks.service.request_walk", "--model", str(model), "--verbose"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = "".join(re.findall(r"^\d\. .*", PATHS.findall(ARCHITECTURE.read_text())[0], re.MULTILINE))
    documented = {*re.findall(r"`(\w+/[\w/]+\.py)`", steps)}
    assert documented >= NOT_WALKED
    assert [file for file in documented - NOT_WALKED if file not in done.stdout] == []


def test_returns_to_earlier_files_are_counted() -> None:
    walk = [Call(file, f"function-{number}") for number, file in enumerate("aabacba")]
    assert length(walk) == Length(files=3, returns=3)


@pytest.mark.parametrize("limit", [Length(1, 9), Length(9, 0)])
def test_a_walk_beyond_its_limit_fails_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: Length
) -> None:
    async def walks(*_: Path) -> dict[str, list[Call]]:
        return {"event": [Call(file, "function") for file in "aba"]}

    monkeypatch.setattr(request_walk, "walks", walks)
    request_walk.main(tmp_path)
    monkeypatch.setattr(request_walk, "LIMITS", {"event": limit})
    with pytest.raises(typer.Exit):
        request_walk.main(tmp_path)
