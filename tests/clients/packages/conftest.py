"""The npm package, built and installed in a project."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import ROOT

SOURCES = ROOT / "clients" / "npm"
OFFLINE = ("--prefer-offline", "--no-audit", "--no-fund", "--no-update-notifier")


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def npm_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources of the package with the locked build tools."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("there is no Node.js; .ci/install brings Debian's nodejs and npm")
    sources = tmp_path_factory.mktemp("npm") / "package"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("node_modules", "dist"))
    run("npm", "ci", *OFFLINE, cwd=sources)
    return sources


@pytest.fixture(scope="session")
def npm_project(npm_sources: Path) -> Path:
    """An empty project with the package installed from the file that would be published."""
    project = npm_sources.parent / "project"
    project.mkdir()
    run("npm", "pack", "--pack-destination", str(project), cwd=npm_sources)
    (archive,) = project.glob("lisarec-client-*.tgz")
    (project / "package.json").write_text('{"private": true, "type": "module"}')
    run("npm", "install", *OFFLINE, f"./{archive.name}", cwd=project)
    return project
