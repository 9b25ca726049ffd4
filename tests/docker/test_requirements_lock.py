"""The image's lock file: every file by its hash, and the same versions as everywhere else."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import metadata, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = {path.name: path for path in sorted((ROOT / "docker" / "requirements").glob("*.txt"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMAGE_PYTHON = {"python_version": "3.11", "python_full_version": "3.11.14"}
PERMISSIVE = re.compile(
    r"0BSD|Apache.*|(3-Clause )?BSD(-[23]-Clause| License)|BSL-1\.0|CC0-1\.0|ISC.*|MIT(-0| License)?|PSF-2\.0|"
    r"Python Software Foundation License|Zlib"
)
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1].isalnum())


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """Version and hashes of each package in a lock file; any other line fails."""
    entries = LOCKS[name].read_text().replace("\\\n", " ").splitlines()
    found = {}
    for entry in entries:
        match = re.fullmatch(r"([a-z0-9-]+)==([0-9a-z.]+)((?: +--hash=sha256:[0-9a-f]{64})+) *", entry)
        assert match is not None, f"{name}: {entry[:80]}"
        found[match[1]] = match[2], match[3].split()
    return found


def needed(names: list[str]) -> set[str]:
    """The packages and their dependencies in the image, by the versions installed here."""
    found: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if name in found and extras == {""}:
            continue
        found.add(name)
        for text in requires(name) or []:
            needs = Requirement(text)
            if needs.marker is None or any(needs.marker.evaluate({**IMAGE_PYTHON, "extra": extra}) for extra in extras):
                waiting.append(needs)
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_versions_equal_the_constraints(name: str) -> None:
    for package, (pinned, hashes) in locked(name).items():
        assert hashes
        if package in PINS:
            assert pinned == PINS[package], f"{package} in docker/requirements/{name}; run docker/lock"
        else:
            assert name in ("cuda.txt", "build.txt"), f"{package} is in no constraint"


def test_the_lock_is_complete_and_minimal() -> None:
    optional = PROJECT["project"]["optional-dependencies"]
    wanted = needed([*PROJECT["project"]["dependencies"], *optional["kafka"]])
    assert locked("requirements.txt").keys() | locked("torch.txt").keys() >= wanted
    assert locked("torch.txt").keys() == {"torch"}
    assert all(version(name).partition("+")[0] == PINS[name] for name in wanted)
    tools = [Requirement(text).name for text in PROJECT["build-system"]["requires"]]
    assert locked("build.txt").keys() >= set(tools)
    assert locked("sbom.txt").keys() == needed([text for text in optional["test"] if text.startswith("cyclonedx-bom")])
    tests = {Requirement(text).name for text in optional["test"]} - wanted
    assert not tests & locked("requirements.txt").keys(), "tests are not in the image"


def licences(name: str) -> set[str]:
    """Licences that an installed package declares: SPDX expressions, classifiers or a name."""
    declared = metadata(name)
    if expression := declared["License-Expression"]:
        return {one for one in re.split(r" AND | OR |[()]", expression) if one}
    classifiers = declared.get_all("Classifier") or []
    classified = {one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License :: OSI Approved :: ")}
    return classified or {*declared.get_all("License", [])}


def test_licences_equal_the_page() -> None:
    found = {name: licences(name) for name in locked("requirements.txt").keys() | locked("torch.txt").keys()}
    assert all(found.values())
    others = {name: left for name, all_ in found.items() if (left := {x for x in all_ if not PERMISSIVE.fullmatch(x)})}
    assert all("MPL" in one for left in others.values() for one in left), others
    page = (ROOT / "docs" / "how-to" / "trust" / "verify-a-release.md").read_text()
    (named,) = re.findall(r"^Two have MPL-2\.0 and are unchanged: (.*)\.$", page, re.MULTILINE)
    assert named == ", ".join(f"`{name}`" for name in sorted(others))


def test_releases_install_only_hashed_packages() -> None:
    """The tools that build the wheel and its SBOM run in the job that attests them."""
    installs = re.findall(r"\$\(TOOLS\)/bin/python -m pip install (.*)", (ROOT / "Makefile").read_text())
    locks = [f"--no-deps --require-hashes -r docker/requirements/{name}" for name in ("build.txt", "sbom.txt")]
    assert installs == locks


def test_the_image_installs_only_hashed_packages() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install [^&;\n]*", text)
    assert len(installs) == 4
    for install in installs:
        assert "--no-deps" in install
        assert "--require-hashes" in install or install.strip().endswith("wheels/*.whl"), install
    wheel = re.search(r"pip wheel [^&;\n]*", text)
    assert wheel is not None
    assert "--no-build-isolation" in wheel[0]


def test_the_lock_has_torch_for_arm(tmp_path: Path) -> None:
    (remove,) = re.findall(r"rm -.*; \\\n *find .*", (ROOT / "docker" / "Dockerfile").read_text())
    for name in ("bin/protoc", "bin/torch_shm_manager", "include/torch.h", "lib/libtorch.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["sh", "-ec", f"installed={tmp_path}; {remove}"], check=True)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"bin/torch_shm_manager", "lib/libtorch.so"}
