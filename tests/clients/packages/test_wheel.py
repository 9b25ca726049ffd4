"""The wheel, installed alone: one package that trains, serves and recommends.

It lies in var/wheel, and numba's files beside it, so that kernels which have not changed are not compiled again.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from app.observability.version import own_version
from benchmarks.harness.service_process import free_port
from hatch_build import INNER, moved
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[3]
PLACE = ROOT / "var" / "wheel"
BUILD_SOURCES = "from hatchling import build; import sys; build.build_sdist(sys.argv[1])"
BUILD_WHEEL = "from hatchling import build; import sys; build.build_wheel(sys.argv[1])"
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys
import lisarec
assert lisarec.__file__.startswith(sys.prefix), lisarec.__file__
assert not [name for name in ("app", "clients", "model", "storage") if importlib.util.find_spec(name)]
names = {one.name for one in pkgutil.walk_packages(lisarec.__path__, "lisarec.")}
names |= {"lisarec.clients.lisarec_client", "lisarec.clients.lisarec_client.mcp_server"}
for name in sorted(names):
    if not name.endswith((".__main__", ".scan_gpu")):  # one needs a GPU's compiler
        importlib.import_module(name)
print(len(names))
"""


class Installation:
    """A Python with the wheel and the packages of the tests, but without the checkout."""

    def __init__(self, place: Path) -> None:
        self.python = place / "venv" / "bin" / "python"
        self.packages = Path(sysconfig.get_path("purelib", vars={"base": str(place / "venv"), "platbase": ""}))
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("LISAREC_")}
        # named so, the folder's own .pth files do not count, one of which leads to the checkout
        self.environment |= {"PYTHONPATH": sysconfig.get_path("purelib"), "NUMBA_CACHE_DIR": str(place / "kernels")}
        self.environment |= {"OMP_NUM_THREADS": "1"}

    def run(self, *command: str, cwd: Path, **environment: str) -> str:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        done = self.popen(*command, cwd=cwd, environment=environment, text=True, **pipes)
        said, errors = done.communicate(timeout=600)
        assert done.returncode == 0, said + errors
        return str(said)

    def popen(
        self, *command: str, cwd: Path, environment: Mapping[str, str] = MappingProxyType({}), **options: Any
    ) -> subprocess.Popen[Any]:
        command = (str(self.python.parent / command[0]), *command[1:])
        return subprocess.Popen(command, cwd=cwd, env={**self.environment, **environment}, **options)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source archive as for an index."""
    directory = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, "-c", BUILD_SOURCES, str(directory)], cwd=ROOT, check=True, timeout=300)
    (archive,) = directory.glob("*.tar.gz")
    shutil.unpack_archive(archive, directory)
    (sources,) = directory.glob("lisarec-*/")
    subprocess.run([sys.executable, "-c", BUILD_WHEEL, str(directory)], cwd=sources, check=True, timeout=300)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(built: Path) -> Installation:
    shutil.rmtree(PLACE / "venv", ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(PLACE / "venv")], check=True, timeout=300)
    installation = Installation(PLACE)
    pip = [sys.executable, "-m", "pip", "--python", str(installation.python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", str(built)], check=True, timeout=300)
    for path in installation.packages.rglob("*.py"):  # numba goes by a file's time and size
        time_s = int.from_bytes(hashlib.sha256(path.read_bytes()).digest()[:4])
        os.utime(path, (time_s, time_s))
    return installation


def test_the_build_is_reproducible(built: Path, tmp_path: Path) -> None:
    """With another time, time zone and permissions, so that releases can be compared with their sources."""
    (sources,) = built.parent.glob("lisarec-*/")
    again = shutil.copytree(sources, tmp_path / "elsewhere", copy_function=shutil.copy)
    for path in again.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    environment = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    for build in (BUILD_SOURCES, BUILD_WHEEL):
        command = ["sh", "-c", 'umask 077; exec "$@"', "sh", sys.executable, "-c", build, str(tmp_path)]
        subprocess.run(command, cwd=again, env=environment, check=True, timeout=300)
    for file in (built, *built.parent.glob("*.tar.gz")):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_one_importable_package_is_installed(installed: Installation, tmp_path: Path) -> None:
    assert {path.name.partition("-")[0] for path in installed.packages.iterdir()} == {"lisarec"}
    assert not [path for path in installed.packages.rglob("*") if path.name in ("npm", "tests", "node_modules")]
    assert int(installed.run("python", "-c", IMPORT_ALL, cwd=tmp_path)) > 300
    assert installed.run("lisarec", "--version", cwd=tmp_path) == f"lisarec {own_version()}\n"


@contextmanager
def serving(installed: Installation, directory: Path, *options: str) -> Iterator[str]:
    port = str(free_port())
    with (directory / "log").open("w") as log:
        process = installed.popen(
            "lisarec", "serve", "--port", port, *options, cwd=directory, stdout=log, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, (directory / "log").read_text()
        try:
            return httpx.get(f"{url}/readyz", timeout=PATIENCE_S).is_success
        except httpx.TransportError:
            return False

    try:
        wait_until(is_ready, (directory / "log").read_text)
        yield url
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) in (0, -15), (directory / "log").read_text()


def test_the_wheel_trains_serves_and_recommends(installed: Installation, tmp_path: Path) -> None:
    with (tmp_path / "events.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["user_id", "item_id", "timestamp"])
        table.writerows(
            [f"user-{user}", f"item-{(user + step) % 20}", 1_700_000_000 + 100 * user + step]
            for user in range(40)
            for step in range(6)
        )
    # the kernels of a training would be compiled for longer than so few events take without
    options = "--data", "events.csv", "--out", "models/shop", "--epochs", "1"
    trained = installed.run("lisarec", "train", *options, cwd=tmp_path, NUMBA_DISABLE_JIT="1")
    assert "models/shop: 20 items" in trained
    # first, as it compiles kernels for longer than a service is waited for on a busy machine
    asked = "import lisarec; print([one['item_id'] for one in lisarec.load('models/shop').recommend(['item-3'], k=3)])"
    listed = installed.run("python", "-c", asked, cwd=tmp_path)
    # two processes: the server imports the application by its name in each
    with serving(installed, tmp_path, "--model", "models/shop", "--workers", "2", "--playground") as url:
        event = {"user_id": "ann", "item_id": "item-3"}
        assert httpx.post(f"{url}/v1/events", json=event, timeout=PATIENCE_S).json()["accepted"] == 1
        answer = httpx.get(f"{url}/v1/users/ann/recommendations?k=3", timeout=PATIENCE_S).json()
        assert (answer["source"], len(answer["items"])) == ("personalised", 3)
        assert httpx.get(f"{url}/client.js").content == (ROOT / "clients" / "client.js").read_bytes()
        assert "playground.js" in httpx.get(f"{url}/playground/").text
    assert listed == f"{[item['item_id'] for item in answer['items']]}\n"
    assert "lisarec.app" in (tmp_path / "log").read_text()  # its own loggers, whose lines are shown


SOURCE = """import lisarec
from app.main import a  # from model
if a:
    from model import (
        b,
    )
c = 'é'; from storage.x import y
"""


def test_only_imports_are_rewritten() -> None:
    expected = SOURCE.replace("from app", "from lisarec.app").replace("from model import", "from lisarec.model import")
    assert moved(SOURCE, "it") == expected.replace("from storage", "from lisarec.storage")
    for refused in ("import app.main", "import os, model", "from  app import main", "from \\\n app import main"):
        with pytest.raises(ValueError, match="it:1: write"):
            moved(refused, "it")


def test_no_text_names_a_module() -> None:
    """Module names differ in the wheel."""
    of_a_module = re.compile(rf"[\"']((?:{'|'.join(INNER)})(?:\.\w+)+)[\"':]")
    for path in [file for folder in (*INNER, "lisarec") for file in (ROOT / folder).rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        named = [ROOT / name.replace(".", "/") for name in of_a_module.findall(text)]
        assert not [name for name in named if name.is_dir() or name.with_suffix(".py").exists()], path
        assert '"-m", "app"' not in text
