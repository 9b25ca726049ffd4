"""Imported packages equal those that pyproject.toml declares."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Collection, Iterator
from functools import cache
from importlib.metadata import packages_distributions, requires
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PRODUCT = ("app", "clients", "lisarec", "model", "storage")
CLIENT = ROOT / "clients" / "lisarec_client"
EXTRAS = {  # what needs more, and the extra that brings it
    ROOT / "app" / "cli" / "kafka.py": "kafka",
    ROOT / "app" / "jobs" / "kafka": "kafka",
    CLIENT / "mcp_server.py": "mcp",
}
# what a declared package needs itself, and has in what it offers
PROVIDERS = {"mcp_types": "mcp", "pydantic_core": "pydantic", "starlette": "fastapi"}
OF_GPU_BUILDS = "triton"  # comes with torch's builds for GPUs
DISTRIBUTIONS = packages_distributions()


def normalised(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


@cache
def declared(project: Path, *extras: str) -> set[str]:
    """Distributions that an installation with these extras declares by name."""
    table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = (one for extra in extras for one in table["optional-dependencies"][extra])
    return {normalised(one) for one in (*table["dependencies"], *optional)}


def imported(path: Path) -> Iterator[str]:
    """Third-party packages that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        yield from {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {*PRODUCT}


def missing(project: Path, files: Collection[Path]) -> set[str]:
    """Imports without a declaration, as "FILE: PACKAGE"."""
    found = set()
    for path in files:
        extras = [extra for place, extra in EXTRAS.items() if path.is_relative_to(place)]
        brought = declared(project, *extras)
        for name in {PROVIDERS.get(name, name) for name in imported(path)} - {OF_GPU_BUILDS}:
            if brought.isdisjoint(map(normalised, DISTRIBUTIONS.get(name, [name]))):
                found.add(f"{path.relative_to(ROOT)}: {name}")
    return found


def test_product_imports_are_declared() -> None:
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py") if "node_modules" not in path.parts]
    assert len(files) > 300
    assert missing(ROOT, files) == set()


def test_client_imports_are_declared_by_the_client() -> None:
    assert missing(CLIENT, [*CLIENT.rglob("*.py")]) == set()


def test_a_package_has_one_lower_bound_in_all_tables() -> None:
    bounds: dict[str, set[str]] = {}
    for project in (ROOT, CLIENT):
        table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for one in map(Requirement, chain(table["dependencies"], *table["optional-dependencies"].values())):
            lower = [bound.version for bound in one.specifier if bound.operator in (">=", "==")]
            bounds.setdefault(normalised(one.name), set()).update(lower or ["none"])
    assert len(bounds) > 40
    assert {name: versions for name, versions in bounds.items() if len(versions) > 1 or "none" in versions} == {}


@pytest.mark.parametrize("name", ["numpy", "httpx", "protobuf", "uvicorn"])
def test_missing_declarations_are_detected(name: str, tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(re.sub(rf'^  "{name}\b.*\n', "", text, flags=re.MULTILINE))
    files = [path for folder in ("app", "model") for path in (ROOT / folder).rglob("*.py")]
    import_name = "google" if name == "protobuf" else name
    assert import_name in {one.partition(": ")[2] for one in missing(tmp_path, files)}


@pytest.mark.parametrize("module", PROVIDERS)
def test_transitive_packages_come_with_a_declared_one(module: str) -> None:
    distributions = {normalised(one) for one in DISTRIBUTIONS[module]}
    assert distributions & {normalised(one) for one in requires(PROVIDERS[module]) or ()}
