"""Workflows, issue forms and Dependabot configuration: valid, safe, and without dangling references."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.github-issue-forms": sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")),
}
# what a job may have beyond reading the repository, and which steps need it
WRITES = {
    "release.yml": {
        "dist": {"id-token", "attestations"},
        "clients": {"id-token", "attestations"},
        "image": {"id-token", "attestations", "packages"},
        "pypi": {"id-token"},
        "pypi-client": {"id-token"},
        "npm": {"id-token"},
        "github": {"contents"},
    }
}
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROGRAMS = Path(sysconfig.get_path("scripts"))


def jobs_of(workflow: Path) -> dict[str, dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    assert isinstance(jobs, dict)
    return jobs


def steps_of(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in jobs_of(workflow).values():
        yield from job.get("steps", [{"uses": job.get("uses")}])


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_match_their_schemas(schema: str) -> None:
    assert SCHEMAS[schema]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, SCHEMAS[schema])]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_zizmor_finds_nothing() -> None:
    """Such as unpinned actions, persisted credentials, and code injection by strangers."""
    command = [str(PROGRAMS / "zizmor"), "--offline", "--no-progress", "--min-severity=medium", str(GITHUB)]
    audited = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert audited.returncode == 0, audited.stdout + audited.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
class TestEveryWorkflow:
    def test_has_read_only_permissions_unless_listed(self, workflow: Path) -> None:
        assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
        written = {}
        for name, job in jobs_of(workflow).items():
            permissions = job.get("permissions", {})
            assert set(permissions.values()) <= {"read", "write"}
            if writes := {scope for scope, access in permissions.items() if access == "write"}:
                written[name] = writes
        assert written == WRITES.get(workflow.name, {})

    def test_pins_actions_by_commit(self, workflow: Path) -> None:
        for step in steps_of(workflow):
            if uses := step.get("uses"):
                assert re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40}", uses) or (ROOT / uses).is_file(), uses
                if uses.startswith("actions/checkout@"):
                    assert step["with"]["persist-credentials"] is False

    def test_has_timeouts(self, workflow: Path) -> None:
        assert all("timeout-minutes" in job or "uses" in job for job in jobs_of(workflow).values())

    def test_runs_what_exists(self, workflow: Path) -> None:
        """Makefile targets and files of the repository."""
        script = "\n".join(step.get("run", "") for step in steps_of(workflow))
        assert set(re.findall(r"\bmake ([a-z-]+)", script)) <= TARGETS
        files = re.findall(r"(?<![\w$/.-])((?:\.ci|app|docker|docs|clients|tests)/[\w./*-]*\w)", script)
        assert [file for file in files if not any(ROOT.glob(file))] == []
        named = re.findall(r"(?<![\w$/.*-])([\w-]+\.(?:md|toml|txt))(?!\w)", script)
        assert [file for file in named if file not in ("notes.md",) and not any(ROOT.rglob(file))] == []


def test_tested_python_versions_are_supported() -> None:
    (matrix,) = (
        job["strategy"]["matrix"]["python"]
        for job in jobs_of(GITHUB / "workflows/test.yml").values()
        if "strategy" in job
    )
    assert matrix[0] == "3.11"
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11"' in project
    assert re.findall(r'"Programming Language :: Python :: ([0-9.]+)"', project) == matrix
    page = (ROOT / "docs/explanation/decisions/dependencies.md").read_text()
    assert f"on Python {', '.join(matrix[:-1])} and {matrix[-1]}." in page


class TestRelease:
    def run(self, job: str, step: str, cwd: Path, tag: str, path: str = "/usr/bin:/bin") -> int:
        """Run a step of the release workflow without `gh` and `sha256sum`."""
        (script,) = (
            one["run"] for one in jobs_of(GITHUB / "workflows/release.yml")[job]["steps"] if one.get("name") == step
        )
        script = "\n".join(line for line in script.splitlines() if "gh release" not in line and "sha256sum" not in line)
        environment = {
            "GITHUB_REF_NAME": tag,
            "GITHUB_SERVER_URL": "https://github.com",
            "GITHUB_REPOSITORY": "o/lisarec",
            "IMAGE": "ghcr.io/o/lisarec",
            "DIGEST": "sha256:1",
            "PATH": path,
        }
        return subprocess.run(["bash", "-e", "-c", script], cwd=cwd, env=environment, timeout=PATIENCE_S).returncode

    def test_a_tag_releases_the_declared_version_and_no_other(self) -> None:
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        step = "Compare the tag with the declared version and the changelog"
        assert self.run("version", step, ROOT, f"v{version}") == 0
        for other in (f"{version}0", "9.9.9", f"{version}.dev1"):
            assert self.run("version", step, ROOT, f"v{other}") != 0

    def test_release_notes_equal_the_changelog(self, tmp_path: Path) -> None:
        sections = [
            "[Unreleased]\n\n- no",
            "[1.2.3] - 2026-01-02\n\n### Added\n\n- yes",
            "[1.2.2] - 2026-01-01\n\n- no",
        ]
        (tmp_path / "CHANGELOG.md").write_text("".join(f"## {section}\n\n" for section in sections))
        step = "Make the release, with the changes of this version and the image's digest"
        assert self.run("github", step, tmp_path, "v1.2.3") == 0
        notes = (tmp_path / "notes.md").read_text().split()
        assert notes == ["###", "Added", "-", "yes", "Image:", "`ghcr.io/o/lisarec@sha256:1`"]

    def test_third_party_images_are_pinned_by_digest(self, tmp_path: Path) -> None:
        """A fake registry knows only the tags that this repository names."""
        for name in ("docker-compose.yml", "docker/Dockerfile", "docker/pin"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
        (tmp_path / "dist").mkdir()
        registry = tmp_path / "bin" / "docker"
        registry.parent.mkdir()
        answer = '[ "$1 $2 $3" = "buildx imagetools inspect" ] && printf "sha256:%064d\\n" "${#4}"'
        registry.write_text(f"#!/bin/sh\n{answer}\n")
        registry.chmod(0o755)
        step = "Pin the images of others by digest"
        assert self.run("dist", step, tmp_path, "v1.2.3", path=f"{registry.parent}:/usr/bin:/bin") == 0
        named = re.compile(r"^(?:FROM|\s*image:) (?!lisarec:)(\S+)", re.MULTILINE)
        for name in ("docker-compose.yml", "docker/Dockerfile"):
            images = named.findall((ROOT / name).read_text())
            assert images
            pinned = (tmp_path / "dist" / Path(name).name).read_text()
            assert named.findall(pinned) == [f"{image}@sha256:{len(image):064d}" for image in images]
            assert re.sub(r"@sha256:\d{64}", "", pinned) == (ROOT / name).read_text()

    def test_the_npm_package_names_its_provenance_repository(self, tmp_path: Path) -> None:
        source = ROOT / "clients" / "npm" / "package.json"
        shutil.copy(source, tmp_path)
        assert (
            self.run("clients", "Name the repository, which npm compares with the provenance", tmp_path, "v1.2.3") == 0
        )
        repository = {"type": "git", "directory": "clients/npm", "url": "git+https://github.com/o/lisarec.git"}
        named = json.loads((tmp_path / "package.json").read_text())
        assert named == {**json.loads(source.read_text()), "repository": repository}

    def test_each_index_gets_its_own_packages(self, tmp_path: Path) -> None:
        names = {"pypi": "lisarec-1.2.3", "pypi-client": "lisarec_client-1.2.3"}
        others = "lisarec-client-1.2.3.tgz", "lisarec.cdx.json"
        for job, name in names.items():
            dist = tmp_path / job / "dist"
            dist.mkdir(parents=True)
            packages = {f"{name}-py3-none-any.whl", f"{name}.tar.gz"}
            for file in (*packages, *others):
                (dist / file).touch()
            assert self.run(job, "Keep what an index takes", dist.parent, "v1.2.3") == 0
            assert {file.name for file in dist.iterdir()} == packages


def test_dependabot_covers_every_lock_file() -> None:
    updates = yaml.safe_load((GITHUB / "dependabot.yml").read_text())["updates"]
    covered = {(one["package-ecosystem"], one["directory"]) for one in updates}
    locks = subprocess.run(
        ["git", "ls-files", "*package-lock.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    ).stdout.split()
    assert locks
    assert {("npm", f"/{Path(lock).parent.as_posix()}") for lock in locks} <= covered
