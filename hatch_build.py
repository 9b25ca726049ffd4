"""The build of the wheel: the repository's folders become one package, `lisarec`.

In a checkout `app`, `clients`, `model` and `storage` stand beside `lisarec`; in the wheel they stand in it, and what
they import of each other is written so. An editable installation leaves everything where it is.
"""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "lisarec"
INNER = ("app", "clients", "model", "storage")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "npm", "pyproject.toml", "README.md", "LICENSE")
OTHERS = {  # what the service finds beside its folders, as in a checkout
    "docker/compile.py": "compile_kernels.py",
    "docker/redis": "docker/redis",
}


def moved(source: str, name: str) -> str:
    """Return a file's code with its imports of the inner folders as they are called in the package.

    raises  ValueError  for an import that cannot be written so on its line
    """
    lines = source.encode().splitlines(keepends=True)
    places: list[tuple[int, int]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in INNER for alias in node.names):
            raise ValueError(f"{name}:{node.lineno}: write `from {node.names[0].name} import ...`, which can be moved")
        if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).partition(".")[0] in INNER:
            places.append((node.lineno - 1, node.col_offset + len("from ")))
    for line, column in places:
        text = lines[line]
        if text[column - 5 : column] != b"from " or not text[column:].startswith(tuple(one.encode() for one in INNER)):
            raise ValueError(f"{name}:{line + 1}: write `from` and the module on one line, with one space between them")
        lines[line] = text[:column] + f"{PACKAGE}.".encode() + text[column:]
    return b"".join(lines).decode()


def assemble(root: Path, package: Path) -> None:
    """Write the package of the wheel into an empty folder."""
    shutil.copytree(root / PACKAGE, package, ignore=LEFT_OUT, dirs_exist_ok=True)
    for name in INNER:
        shutil.copytree(root / name, package / name, ignore=LEFT_OUT)
    for name, target in OTHERS.items():
        (package / target).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (root / name).is_dir() else shutil.copy2
        copy(root / name, package / target)
    for path in package.rglob("*.py"):
        path.write_text(moved(path.read_text(encoding="utf-8"), path.name), encoding="utf-8")


class CustomBuildHook(BuildHookInterface[Any]):
    """Gives the wheel the package that `assemble` writes."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write it, unless the installation is an editable one."""
        if version == "editable":
            return
        self._folder = Path(mkdtemp(prefix="lisarec-wheel-"))
        assemble(Path(self.root), self._folder / PACKAGE)
        build_data["force_include"][str(self._folder / PACKAGE)] = PACKAGE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was written."""
        if version != "editable":
            shutil.rmtree(self._folder)
