"""The engine, one deployment that the tests of a file share, and a table of measurements.

make container-images       the images alone, `--idle`: with what other work leaves of the processors
make test-containers        the short form
make bench-containers       `--long`: more of everything, and the tests that are marked `full`
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.harness.compose import ROOT
from tests.containers.deployment import Deployment
from tests.containers.engine import CannotTry, Engine, check_machine, make_base, make_images_of_others, running_engine
from tests.containers.shoppers import Shoppers, failed

Measured = list[tuple[str, str]]
MEASURED = pytest.StashKey[Measured]()
MISSING = pytest.StashKey[str]()
ENGINE_FOLDER = ROOT / "var" / "containers"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="more load and more faults in the tests of containers")
    parser.addoption("--idle", action="store_true", help="let containers have what other work leaves of the processors")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        left = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether to run the long form."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> Measured:
    """Measurements for the table at the end."""
    return pytestconfig.stash.setdefault(MEASURED, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, value in config.stash.get(MEASURED, []):
        terminalreporter.write_line(f"| {name} | {value} |")
    if missing := config.stash.get(MISSING, ""):
        terminalreporter.write_line(f"docker-compose.yml WAS NOT TRIED in an engine: {missing}", red=True, bold=True)


@contextmanager
def skipped_where_it_cannot_be_tried(config: pytest.Config) -> Iterator[None]:
    """Skip if no engine runs here, and report it in the last line."""
    try:
        yield
    except CannotTry as exc:
        config.stash[MISSING] = str(exc)
        pytest.skip(str(exc))


@pytest.fixture(scope="session")
def engine(pytestconfig: pytest.Config, measured: Measured) -> Iterator[Engine]:
    """A container engine with the base image; var/containers keeps its data."""
    begin_s = time.monotonic()
    with ExitStack() as running:
        with skipped_where_it_cannot_be_tried(pytestconfig):
            check_machine()
            engine = running.enter_context(running_engine(ENGINE_FOLDER, idle=bool(pytestconfig.getoption("--idle"))))
            make_base(engine)
        measured.append(("images of Debian and Python, s", f"{time.monotonic() - begin_s:.0f}"))
        yield engine


@pytest.fixture(scope="module")
def deployment(pytestconfig: pytest.Config, engine: Engine, measured: Measured) -> Iterator[Deployment]:
    """A checkout with its image built; containers and volumes are removed at the end."""
    deployment = Deployment(engine, ENGINE_FOLDER / "checkout")
    deployment.remove()  # what a run that was killed has left
    begin_s = time.monotonic()
    with skipped_where_it_cannot_be_tried(pytestconfig), ThreadPoolExecutor() as beside:
        others = beside.submit(make_images_of_others, engine)
        deployment.build()
        others.result()
    measured.append(("images of lisarec and of others, s", f"{time.monotonic() - begin_s:.0f}"))
    yield deployment
    deployment.remove()


@pytest.fixture(scope="module")
def key(deployment: Deployment) -> str:
    """A key with the scopes of shoppers, which also reads their events."""
    return deployment.add_key("events:write", "recs:read", "users:admin")


@pytest.fixture(scope="module")
def shoppers(
    request: pytest.FixtureRequest, deployment: Deployment, key: str, measured: Measured
) -> Iterator[Shoppers]:
    """Clients of the deployment; the table shows their outcomes."""
    shoppers = Shoppers(deployment.port, key)
    yield shoppers
    name = request.path.stem.removeprefix("test_")
    measured.append(
        (f"{name}: requests; those that failed", f"{shoppers.answers.total():,}; {failed(shoppers.answers)}")
    )
    lost, doubled = shoppers.compared
    measured.append((f"{name}: events acknowledged; lost; doubled", f"{shoppers.events:,}; {lost}; {doubled}"))


@pytest.fixture(autouse=True)
def _nothing_is_lost(request: pytest.FixtureRequest) -> Iterator[None]:
    """Assert after each test with requests that every acknowledged event is logged once."""
    yield
    if "shoppers" in request.fixturenames:
        shoppers: Shoppers = request.getfixturevalue("shoppers")
        assert shoppers.compare() == (0, 0), f"lost and doubled, of {shoppers.events} events"
