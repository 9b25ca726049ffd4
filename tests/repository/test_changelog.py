"""The changelog: dated versions, one-line entries, and one version everywhere."""

from __future__ import annotations

import json
import re
import tomllib
from datetime import date
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
MAX_WORDS = 22


def test_versions_are_dated_newest_first_below_unreleased() -> None:
    unreleased, *released = [line for line in LINES if line.startswith("## ")]
    assert unreleased == "## [Unreleased]"
    found = [re.fullmatch(r"## \[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d{2}-\d{2})", line) for line in released]
    assert all(found)
    order = [(tuple(map(int, one.groups()[:3])), date.fromisoformat(one[4])) for one in found if one]
    assert order == sorted(order, reverse=True)
    assert len({version for version, _ in order}) == len(order)
    assert order[0][0] == tuple(map(int, VERSION.split(".")))


def test_entries_are_one_line_below_a_category() -> None:
    """A category may have topics. Explanations belong to the documentation."""
    kinds: list[str] = []
    for number, line in enumerate(LINES, 1):
        where = f"CHANGELOG.md:{number}: {line}"
        if line.startswith("## "):
            kinds = []
        elif line.startswith("### "):
            kinds.append(line.removeprefix("### "))
            assert kinds == sorted(set(kinds), key=KINDS.index), where
        elif line.startswith("- "):
            assert kinds, where
            assert line.endswith((".", ")")), where
            assert len(line.split()) - 1 <= MAX_WORDS, where
        elif kinds:
            assert line == "" or line.startswith("#### "), where


def test_everything_released_together_has_one_version() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/lisarec/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    clients = ROOT / "clients"
    assert {tomllib.loads(file.read_text())["project"]["version"] for file in clients.glob("*/pyproject.toml")} <= {
        VERSION
    }
    assert {json.loads(file.read_text())["version"] for file in clients.glob("*/package.json")} <= {VERSION}
    deploy = ROOT / "docs" / "how-to" / "deploy"
    named = {
        "systemd.md": r"^version=(\S+)$",
        "kubernetes.md": r"registry\.example/lisarec(?:, tag: |:)([^\s}]+)",
    }
    for page, version in named.items():
        assert set(re.findall(version, (deploy / page).read_text(), re.MULTILINE)) == {VERSION}, page
    assert f"version {VERSION}, one family of models" in (ROOT / "docs/explanation/comparison.md").read_text()
