"""The rules of the house that a machine can read: who imports whom, who reads the environment, what is never used."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {name: sorted((ROOT / name).rglob("*.py")) for name in ("app", "model", "storage")}
ALL_FILES = [file for files in FILES.values() for file in files]


def imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides which room it comes from"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def uses(file: Path, *names: str) -> list[str]:
    """Where the file imports one of the names, or reaches it through its module, as ``torch.load``."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    attributes = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    found = [*imported_modules(tree), *attributes]
    return [used for used in found for name in names if used == name or used.startswith(f"{name}.")]


def test_the_rooms_are_there() -> None:
    assert all(FILES.values())


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [("model", ("app", "storage", "fastapi", "redis")), ("storage", ("app", "model", "torch", "fastapi"))],
)
def test_imports_go_one_way(room: str, forbidden: tuple[str, ...]) -> None:
    assert [(file.name, used) for file in FILES[room] for used in uses(file, *forbidden)] == []


def test_everything_that_make_installs_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    # a beta where there is nothing else, as of the instrumentations of OpenTelemetry
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+(b[0-9]+)?", pin) for pin in pins)
    assert {re.split(r"[^A-Za-z0-9-]", name)[0] for name in wanted} <= {pin.split("==")[0] for pin in pins}


@pytest.mark.parametrize("file", ALL_FILES, ids=lambda file: str(file.relative_to(ROOT)))
class TestEveryFile:
    def test_is_named_after_what_it_holds(self, file: Path) -> None:
        assert file.stem not in ("utils", "util", "helpers", "helper", "common", "misc")

    def test_reads_the_environment_only_in_the_settings(self, file: Path) -> None:
        if file != ROOT / "app" / "settings.py":
            assert uses(file, "os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv") == []

    def test_never_uses_pickle(self, file: Path) -> None:
        assert uses(file, "pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal") == []
        assert uses(file, "torch.load", "torch.save") == []
        assert "allow_pickle=True" not in file.read_text(encoding="utf-8")
