"""BusyBox, the shell of the Redis image (Alpine), for scripts of docker/redis."""

from __future__ import annotations

import os
import subprocess

import pytest

from benchmarks.harness import compose
from benchmarks.harness.topology import program


@pytest.fixture
def alpine_shell(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use BusyBox as `sh`, the shell of redis-start, and for all its tools."""
    try:
        busybox = program("busybox")
    except FileNotFoundError as exc:  # CI turns this into a failure
        pytest.skip(str(exc))
    tools = tmp_path_factory.mktemp("tools")
    subprocess.run([busybox, "--install", "-s", tools], check=True)
    script = tools / "redis-start"
    shebang, rest = compose.REDIS_START.read_text().split("\n", 1)
    assert shebang == "#!/bin/sh"
    script.write_text(f"#!{tools}/sh\n{rest}")
    script.chmod(0o755)
    monkeypatch.setattr(compose, "REDIS_START", script)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
