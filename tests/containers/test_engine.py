"""Failures of the container engine and of the network are distinguished from those of the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.containers.engine import DEBIAN, CannotTry, Engine, EngineFailed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("step", ["apt-get -q update && apt-get -q install -y hello", "false"])
def test_a_build_failed_by_the_network_is_recognised(engine: Engine, tmp_path: Path, step: str) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {DEBIAN}\nRUN {step}\n")
    build = ["docker", "build", "--force-rm", "--network", "none", str(tmp_path)]
    with pytest.raises(EngineFailed) as failure:
        engine.download(*build, environment={"DOCKER_BUILDKIT": "0"})
    assert isinstance(failure.value, CannotTry) == ("apt-get" in step)
