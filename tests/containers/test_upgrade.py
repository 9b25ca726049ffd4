"""The upgrade of a deployment of an earlier version under load, as docs/how-to/deploy/upgrade.md describes it."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from benchmarks.harness.compose import COMPOSE_FILE, ROOT
from hatch_build import assemble
from tests.containers.conftest import Measured
from tests.containers.deployment import IMAGE, Deployment
from tests.containers.shoppers import FEW_CLIENTS, Shoppers, failed

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

CODE = ("app", "clients", "docker/compile.py", "docker/redis", "lisarec", "model", "storage")
LAYOUTS = ("storage/redis/layout/keys.py", "storage/archive/manifest.py")
PACKAGE = "/opt/lisarec/lib/python3.11/site-packages/lisarec"
COMPILED = "/opt/lisarec/compiled"
COMPILE = f"RUN rm -r {COMPILED} && NUMBA_CACHE_DIR={COMPILED} OMP_NUM_THREADS=1 python -P -m lisarec.compile_kernels"


def git(*command: str) -> bytes:
    """Run a git command; return its output."""
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, check=True).stdout


def earlier_version() -> str:
    """The first commit with the same dependencies and layouts; earlier ones need a backup and restore."""
    dependencies = git("log", "-1", "--format=%H", "--", "docker/requirements")
    layouts = git("log", "-1", "--format=%H", "-G", "^(LAYOUT_)?VERSION = ", "--", *LAYOUTS)
    commits = [commit.decode().strip() for commit in (dependencies, layouts)]
    return git("rev-list", "--no-walk", "--max-count=1", *commits).decode().strip()  # the newer one


def image_of(deployment: Deployment, commit: str, name: str, context: Path) -> int:
    """Build an image of the commit's code with current dependencies; return how many files differ."""
    sources = context / "sources"
    files = git("ls-tree", "-r", "--name-only", commit, "--", *CODE).decode().splitlines()
    (sources / "lisarec").mkdir(parents=True)
    (sources / "lisarec" / "__init__.py").touch()  # a version may have no such package
    shutil.copy(ROOT / "lisarec" / "__main__.py", sources / "lisarec")
    for file in files:
        (sources / file).parent.mkdir(parents=True, exist_ok=True)
        (sources / file).write_bytes(git("show", f"{commit}:{file}"))
    assemble(sources, context / "code")
    shutil.rmtree(sources)
    lines = [f"FROM {IMAGE}", "USER root", f"RUN rm -r {PACKAGE}", f"COPY code {PACKAGE}", COMPILE]
    (context / "Dockerfile").write_text("\n".join([*lines, "LABEL release=earlier", "USER 10001:10001", ""]))
    build = ["docker", "build", "--force-rm", "--tag", name, str(context)]
    deployment.engine.run(*build, environment={"DOCKER_BUILDKIT": "0"})
    return len(git("diff", "--no-renames", "--name-only", commit, "--", *CODE).decode().splitlines())


def check_out(deployment: Deployment, commit: str) -> None:
    """Copy the compose file of the commit, and the files that it mounts, into the deployment."""
    with tarfile.open(fileobj=BytesIO(git("archive", commit, "docker", COMPOSE_FILE.name))) as files:
        files.extractall(deployment.folder, filter="data")


def test_upgrading_fails_no_request_and_loses_no_event(
    deployment: Deployment, shoppers: Shoppers, measured: Measured, tmp_path: Path
) -> None:
    earlier = earlier_version()
    changed = image_of(deployment, earlier, "lisarec:earlier", tmp_path)
    check_out(deployment, earlier)
    deployment.set(LISAREC_VERSION="earlier")
    deployment.compose("up", "--wait")
    with shoppers.shop(FEW_CLIENTS) as outcomes:  # until there is a model, which the new version takes over
        deployment.wait_for(lambda: "personalised" in shoppers.sources)
    assert failed(outcomes) == {}
    redis = deployment.container("redis")
    begun = deployment.state(redis, "StartedAt")
    deployment.check_out()
    deployment.set(LISAREC_VERSION="local")
    with shoppers.shop() as outcomes:
        deployment.renew()
        personalised = shoppers.sources["personalised"]
        deployment.wait_for(lambda: shoppers.sources["personalised"] > personalised + 100)
    assert failed(outcomes) == {}
    measured.append(
        (f"requests while {earlier[:7]} was replaced, {changed} files of which differ", f"{outcomes.total():,}; 0")
    )
    assert (deployment.container("redis"), deployment.state(redis, "StartedAt")) == (redis, begun)
    new = deployment.engine.inspect("image", IMAGE, "{{.Id}}")
    for service in ("app", "archive", "trainer"):
        for container in deployment.containers(service):
            assert deployment.engine.inspect("container", container, "{{.Image}}") == new
