"""The documentation site: a clean build, no external resources, and llms.txt."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S
from website.build_hooks import MERMAID

ROOT = Path(__file__).parents[2]
FROM_ELSEWHERE = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*\"")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(site),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=config.parent, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", built)
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def test_every_page_is_built_and_listed_in_llms_txt(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").glob("*/**/*.md")] + [Path("index.md")]
    addresses = {page.with_suffix(".html").as_posix() for page in pages}
    assert {path.relative_to(site).as_posix() for path in site.rglob("*.html")} == {*addresses, "404.html"}
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", (site / "llms.txt").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(addresses)
    whole = (site / "llms-full.txt").read_text()
    assert all(f"<!-- {address} -->" in whole for address in addresses)


def test_pages_load_no_external_resources(site: Path) -> None:
    found = {path.name: FROM_ELSEWHERE.findall(path.read_text()) for path in site.rglob("*.html")}
    assert {name: addresses for name, addresses in found.items() if addresses} == {}
    with_diagrams = [path for path in site.rglob("*.html") if 'class="mermaid"' in path.read_text()]
    for path in with_diagrams:
        own = re.findall(r'<script src="([^"]*mermaid[^"]*)">', path.read_text())
        assert [(path.parent / address).resolve() for address in own] == [(site / MERMAID).resolve()]


def test_search_is_enabled(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    lowered = {entry["location"].partition("/")[0] for entry in entries if entry.get("boost", 1) < 1}
    assert lowered == {"measurements", "explanation"}
    assert all(entry["boost"] < 1 for entry in entries if entry["location"].startswith("measurements/"))
    assert all("boost" not in entry for entry in entries if entry["location"].startswith(("how-to/", "reference/")))


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("See [this](nowhere.md).", "link 'nowhere.md', but the target"),
        ("See [this](other.md#nothing).", "does not contain an anchor '#nothing'"),
        ("See [this](/other.md).", "absolute link"),
        ("![](nowhere.png)", "link 'nowhere.png', but the target"),
    ],
    ids=["page", "anchor", "absolute", "image"],
)
def test_a_broken_link_fails_the_build(page: str, problem: str, tmp_path: Path) -> None:
    done = build(small_site(tmp_path, page, ["index.md", "other.md"]), tmp_path / "site")
    assert done.returncode == 1
    assert problem in done.stderr


def test_a_page_missing_in_the_navigation_fails_the_build(tmp_path: Path) -> None:
    done = build(small_site(tmp_path, "A page.", ["index.md"]), tmp_path / "site")
    assert done.returncode == 1
    assert "other.md" in done.stderr


def small_site(folder: Path, page: str, nav: list[str]) -> Path:
    """Write a site of two pages in a folder, with the project's configuration; return its configuration."""
    pages = folder / "docs" / "pages"
    pages.mkdir(parents=True)
    (pages / "index.md").write_text(f"# Page\n\n{page}\n")
    (pages / "other.md").write_text("# Other\n\nAnother page.\n")
    config = folder / "mkdocs.yml"
    lines = [f"INHERIT: {ROOT / 'mkdocs.yml'}", "hooks: []", "nav:", *(f"  - pages/{name}" for name in nav)]
    config.write_text("\n".join(lines) + "\n")
    return config
