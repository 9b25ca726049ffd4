"""What is said where nothing can be said of the project: an engine that works, and a network that is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.containers.engine import DEBIAN, CannotTry, Engine, EngineFailed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("step", ["apt-get -q update && apt-get -q install -y hello", "false"])
def test_a_build_that_the_network_fails_is_told_apart_from_one_of_ours(
    engine: Engine, tmp_path: Path, step: str
) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {DEBIAN}\nRUN {step}\n")
    build = ["docker", "build", "--force-rm", "--network", "none", str(tmp_path)]
    with pytest.raises(EngineFailed) as failure:
        engine.download(*build, environment={"DOCKER_BUILDKIT": "0"})
    assert isinstance(failure.value, CannotTry) == ("apt-get" in step)
