"""The bill of materials lists every package of the image with the version and hashes of the lock file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = [ROOT / "docker" / "requirements" / name for name in ("requirements.txt", "torch.txt")]


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Output of `make sbom` with the tools of this environment."""
    folder, tools = tmp_path_factory.mktemp("dist"), sys.prefix
    command = ["make", "sbom", f"TOOLS={tools}", f"DIST={folder}", "-o", f"{tools}/.installed"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    found = json.loads((folder / "lisarec.cdx.json").read_text())
    assert isinstance(found, dict)
    return found


def locked() -> dict[str, tuple[str, set[str]]]:
    """Version and hashes of each package, parsed from the lock files independently."""
    found: dict[str, tuple[str, set[str]]] = {}
    name = ""
    for line in "\n".join(lock.read_text() for lock in LOCKS).splitlines():
        if match := re.match(r"([a-z0-9-]+)==([0-9a-z.]+)", line):
            name = match[1]
            found[name] = match[2], set()
        found[name][1].update(re.findall(r"sha256:([0-9a-f]{64})", line))
    return found


def test_the_sbom_is_valid_cyclonedx_of_this_version(bill: dict[str, object]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    metadata = bill["metadata"]
    assert isinstance(metadata, dict)
    assert (metadata["component"]["name"], metadata["component"]["version"]) == ("lisarec", project["version"])
    assert metadata["component"]["licenses"][0]["license"]["id"] == project["license"]


def test_every_locked_package_is_listed_once_with_hashes(bill: dict[str, object]) -> None:
    components = bill["components"]
    assert isinstance(components, list)
    found = {
        one["name"]: (
            one["version"],
            {each["content"] for reference in one["externalReferences"] for each in reference["hashes"]},
        )
        for one in components
    }
    assert len(found) == len(components)
    assert found == locked()
    assert len(found) > 40
    assert all(one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}" for one in components)
