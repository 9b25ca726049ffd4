"""docker-compose.yml merged with docker/tls.yml, and the certificates that it creates."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

from app.settings import PREFIX
from benchmarks.harness.compose import MAKE_SECRETS, ROOT
from tests.waiting import PATIENCE_S

IN_DOTENV = "COMPOSE_FILE=docker-compose.yml:docker/tls.yml\n"


@cache
def merged() -> Any:
    """docker-compose.yml as .env and docker/cluster.env change it."""
    if shutil.which("docker-compose") is None:
        pytest.skip("Docker Compose is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "COMPOSE_"))}
    with NamedTemporaryFile("w", suffix=".env") as dotenv:
        dotenv.write(IN_DOTENV)
        dotenv.flush()
        files = ["--env-file", dotenv.name, "--env-file", "docker/cluster.env"]
        done = subprocess.run(
            ["docker-compose", *files, "--profile", "*", "config", "--format", "json"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mounts(service: str) -> dict[str, str]:
    """Mounted sources by target."""
    return {volume["target"]: volume["source"] for volume in merged()["services"][service].get("volumes", ())}


def run_make_secrets(directory: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run the service `secrets` for a Redis with these names."""
    folders = [directory / name for name in ("secrets", "acl", "given", "tls")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return subprocess.run([MAKE_SECRETS, *folders, *names], capture_output=True, text=True, timeout=PATIENCE_S)
