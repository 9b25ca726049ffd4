"""The image of docker/Dockerfile, built in a real engine."""

from __future__ import annotations

import pytest

from tests.containers.conftest import Measured
from tests.containers.deployment import IMAGE, Deployment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MAX_IMAGE_BYTES = 1_400_000_000


def test_the_image_is_small_and_runs_unprivileged(deployment: Deployment, measured: Measured) -> None:
    size = int(deployment.engine.inspect("image", IMAGE, "{{.Size}}"))
    measured.append(("size of the image, MB", f"{size / 1e6:.0f}"))
    assert size <= MAX_IMAGE_BYTES
    assert deployment.engine.inspect("image", IMAGE, "{{.Config.User}}") == "10001:10001"
    unwanted = "( -path */torch/include -o -path */torch/test -o -name tests -o -perm -4000 )"
    found = deployment.engine.docker("run", "--rm", "--entrypoint", "find", IMAGE, "/opt/lisarec", *unwanted.split())
    assert found == ""
