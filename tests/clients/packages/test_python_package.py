"""The built `lisarec-client` package, and clients generated from the OpenAPI document."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest

from tests.clients.conftest import ROOT, Service
from tests.clients.packages.conftest import run
from tests.waiting import PATIENCE_S

FOLDER = ROOT / "clients" / "lisarec_client"
BUILD = "from hatchling import build; import sys; build.build_sdist(sys.argv[1]); build.build_wheel(sys.argv[1])"
SHOP = """
import sys
import lisarec_client
assert lisarec_client.__file__.startswith(sys.argv[1]), lisarec_client.__file__
with lisarec_client.Client(sys.argv[2], sys.argv[3], timeout_s=60.0) as client:
    client.check()
    client.event(sys.argv[4], "item-1")
    assert client.flush(60.0)
    print(client.recommendations(sys.argv[4], k=3).source)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and the source archive."""
    directory = tmp_path_factory.mktemp("built")
    sources = directory / "sources"
    shutil.copytree(FOLDER, sources, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-c", BUILD, str(directory), cwd=sources)
    return directory


def test_the_package_installs_and_reaches_the_service(built: Path, tmp_path: Path, service: Service, ann: str) -> None:
    (wheel,) = built.glob("*.whl")
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--quiet",
        "--target",
        str(tmp_path),
        str(wheel),
        cwd=tmp_path,
    )
    done = subprocess.run(
        [sys.executable, "-c", SHOP, str(tmp_path), service.url, service.key, ann],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (0, "personalised\n"), done.stderr
    assert [event["item_id"] for event in service.log(ann)] == ["item-1"]


def test_the_package_contains_all_files_and_types(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert packed == {f"lisarec_client/{path.name}" for path in FOLDER.iterdir() if path.suffix in (".py", ".typed")}
    assert licences
    assert (FOLDER / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    (sources,) = built.glob("*.tar.gz")
    shutil.unpack_archive(sources, tmp_path)
    run(sys.executable, "-c", BUILD, str(tmp_path / "again"), cwd=next(tmp_path.glob("lisarec_client-*")))
    (again,) = (tmp_path / "again").glob("*.whl")
    assert again.read_bytes() == wheel.read_bytes()


def test_every_package_has_the_version_of_the_service() -> None:
    versions = {
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"] for folder in (ROOT, FOLDER)
    }
    assert versions == {json.loads((ROOT / "clients" / "npm" / "package.json").read_text())["version"]}


# lists are posted: the generator sends a query parameter that is called `params` wrongly, as its own variable
USE = """
import sys
from lisarec_client import AuthenticatedClient
from lisarec_client.api.events import post_events
from lisarec_client.api.items import search_items
from lisarec_client.api.recommendations import post_recommendations
from lisarec_client.models import ErrorBody, PostedEvent, RecommendationBatch, RecommendationRequest

url, key, user = sys.argv[1:]
with AuthenticatedClient(url, token=key) as client:
    event = PostedEvent(user_id=user, item_id="item-1", event_id="first")
    assert post_events.sync(client=client, body=[event]).accepted == 1
    assert len(search_items.sync(client=client, query="thing", limit=3, user_id=user).items) == 3
    asked = [RecommendationRequest(user_id=user, k=2), RecommendationRequest(history=["item-2"])]
    batch = RecommendationBatch(requests=asked)
    assert [len(one.items) for one in post_recommendations.sync(client=client, body=batch).results] == [2, 10]
    refused = post_events.sync(client=client, body=PostedEvent(user_id=user, item_id="no\\nid", event_id="second"))
    assert isinstance(refused, ErrorBody) and refused.error.code == "invalid_events"
"""


def test_openapi_python_client_generates_every_operation_without_a_warning(
    tmp_path: Path, service: Service, ann: str
) -> None:
    document = httpx.get(f"{service.url}/openapi.json").json()
    description = tmp_path / "openapi.json"
    description.write_text(json.dumps({**document, "info": {**document["info"], "title": "lisarec"}}))
    tools = Path(sys.executable).parent
    said = subprocess.run(
        [
            str(tools / "openapi-python-client"),
            "generate",
            "--path",
            str(description),
            "--output-path",
            "generated",
            "--fail-on-warning",
        ],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert "warning" not in (said.stdout + said.stderr).lower()
    generated = tmp_path / "generated"
    made = {path.stem for path in (generated / "lisarec_client" / "api").glob("*/*.py")} - {"__init__"}
    assert made == {one["operationId"] for methods in document["paths"].values() for one in methods.values()}
    done = subprocess.run(
        [sys.executable, "-c", USE, service.url, service.key, ann],
        cwd=generated,
        env={**os.environ, "PYTHONPATH": str(generated)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
