"""Architecture rules that can be checked: sizes, imports, access to the environment, and unused code.

Who may import whom stands in pyproject.toml, for `lint-imports`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PRODUCT = ("app", "lisarec", "model", "storage")
PACKAGES = (*PRODUCT, "benchmarks", "clients", "docker", "tests", "website")
FACE = ("__init__.py", "__main__.py", "py.typed")  # of a package
MAX_ENTRIES = 12  # beside its face, of every folder but the root, whose files are named by the tools that read them
MAX_FILE_LINES = 400
MAX_CLASS_LINES = 250
MAX_FUNCTION_LINES = 60
# numba compiles each kernel from the functions of one file
KERNELS = ("model/inference/scan_kernel.py", "model/inference/step_kernel.py")

# the client that others copy, one folder, into their projects, and what they import of the service
RE_EXPORTING = ["clients/lisarec_client/__init__.py", "lisarec/__init__.py"]


def files_of(*packages: str) -> list[Path]:
    """Python files of the packages, tracked or untracked but not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *packages],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return [path for name in sorted(set(listed.stdout.splitlines())) if (path := ROOT / name).exists()]


FILES = [path for path in files_of(".") if path.suffix == ".py"]
PRODUCT_FILES = [path for path in FILES if path.relative_to(ROOT).parts[0] in PRODUCT]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides which package it comes from"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def used_names(file: Path) -> frozenset[str]:
    """Names that the file imports, or reaches through a module, such as ``torch.load``."""
    tree = parsed(file)
    dotted = (dotted_name(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return frozenset((*imported_modules(tree), *filter(None, dotted)))


def dotted_name(node: ast.expr) -> str | None:
    """The dotted name as written; None for attributes of other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{owner}.{node.attr}" if (owner := dotted_name(node.value)) else None
    return node.id if isinstance(node, ast.Name) else None


def uses(file: Path, *names: str) -> list[str]:
    """The names from this set that the file uses."""
    prefixes = tuple(f"{name}." for name in names)
    return [used for used in used_names(file) if f"{used}.".startswith(prefixes)]


def test_every_package_has_files() -> None:
    assert {name_of(path).split("/")[0] for path in FILES if path.parent != ROOT} == set(PACKAGES)
    assert all((ROOT / kernel) in FILES for kernel in KERNELS)


def is_marker(path: Path) -> bool:
    """Whether an `__init__.py` only marks a package."""
    tree = parsed(path)
    return len(tree.body) == int(ast.get_docstring(tree) is not None)


def test_init_files_contain_no_code() -> None:
    """An `__init__.py` contains a docstring, and re-exports in packages for others."""
    others = [name_of(path) for path in FILES if path.name == "__init__.py" and not is_marker(path)]
    assert others == RE_EXPORTING
    for path in RE_EXPORTING:
        _docstring, *imports, names = parsed(ROOT / path).body
        assert all(isinstance(node, ast.ImportFrom) for node in imports)
        assert isinstance(names, ast.Assign)
        assert ast.unparse(names.targets[0]) == "__all__"


def test_no_folder_has_too_many_entries() -> None:
    entries: dict[Path, set[Path]] = {}
    for path in files_of("."):
        if path.name in FACE:
            continue
        for entry in (path, *path.parents):
            if entry.parent == ROOT:
                break
            entries.setdefault(entry.parent, set()).add(entry)
    assert {name_of(folder): len(found) for folder, found in entries.items() if len(found) > MAX_ENTRIES} == {}


def test_every_package_is_seen_by_the_import_linter() -> None:
    """It skips folders without an `__init__.py`."""
    folders = {path.parent for path in FILES if name_of(path).split("/")[0] in (*PRODUCT, "benchmarks", "website")}
    assert [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_no_file_class_or_function_is_too_long() -> None:
    found = []
    for path in FILES:
        if name_of(path) in KERNELS:
            continue
        if (lines := path.read_text(encoding="utf-8").count("\n")) > MAX_FILE_LINES:
            found.append(f"{name_of(path)} has {lines} lines")
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            most = MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES
            if (lines := int(node.end_lineno or 0) - node.lineno + 1) > most:
                found.append(f"{name_of(path)}: {node.name} has {lines} lines")
    assert found == []


def test_every_file_named_in_a_text_exists() -> None:
    """Except in the changelog, and files of an earlier commit that the text names."""
    named = re.compile(rf"(?<![\w/.])((?:{'|'.join(PACKAGES)}|docs)/[\w./-]*\w\.[a-z]{{1,4}})\b(?!`? of commit)")
    module = re.compile(rf"python -m ((?:{'|'.join(PACKAGES)})(?:\.\w+)*)")
    missing = []
    for path in files_of("."):
        if path.suffix not in (".md", ".py", ".toml", ".yml", "") or path.name == "CHANGELOG.md":
            continue
        text = path.read_text(encoding="utf-8")
        missing += [f"{name_of(path)}: {name}" for name in named.findall(text) if not (ROOT / name).exists()]
        missing += [
            f"{name_of(path)}: {name}"
            for name in module.findall(text)
            if not ((ROOT / name.replace(".", "/")).is_dir() or (ROOT / f"{name.replace('.', '/')}.py").exists())
        ]
    assert missing == []


def test_everything_make_installs_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    optional_groups = ("docs", "kafka", "mcp", "test")
    wanted = [*project["dependencies"], *(name for group in optional_groups for name in optional[group])]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    # a beta where there is nothing else, as of the instrumentations of OpenTelemetry
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+(b[0-9]+|\.post[0-9]+)?", pin) for pin in pins)
    assert {re.split(r"[^A-Za-z0-9-]", name)[0] for name in wanted} <= {pin.split("==")[0] for pin in pins}


def test_no_file_has_a_meaningless_name() -> None:
    unspecific = ("utils", "util", "helpers", "helper", "common", "misc")
    assert [name_of(path) for path in FILES if path.stem in unspecific] == []


def test_no_test_file_is_imported() -> None:
    tests = {path for path in FILES if name_of(path).startswith("tests/")}
    modules = [name_of(path).removesuffix(".py").replace("/", ".") for path in tests if path.stem.startswith("test_")]
    assert {name_of(path): found for path in tests if (found := uses(path, *modules))} == {}


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=name_of)
class TestEveryProductFile:
    def test_reads_the_environment_only_in_settings(self, path: Path) -> None:
        if path != ROOT / "app" / "settings.py":
            assert uses(path, "os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv") == []

    def test_never_uses_pickle(self, path: Path) -> None:
        assert uses(path, "pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal") == []
        assert uses(path, "torch.load", "torch.save") == []
        assert "allow_pickle=True" not in path.read_text(encoding="utf-8")
