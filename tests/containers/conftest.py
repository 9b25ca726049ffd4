"""The engine, and one deployment in it that the tests of a file use in turn; a table of what they measured.

make test-containers        the short form
make bench-containers       `--long`: more of everything
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.harness.compose import ROOT
from tests.containers.deployment import Deployment
from tests.containers.engine import Engine, EngineFailed, make_images_of_others, running_engine, what_is_missing
from tests.containers.shoppers import Shoppers, failed

Measured = list[tuple[str, str]]
MEASURED = pytest.StashKey[Measured]()
MISSING = pytest.StashKey[str]()
ENGINE_FOLDER = ROOT / "var" / "containers"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="more load and more faults in the tests of containers")


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether this is the long form."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> Measured:
    """What was measured, and the number: rows of the table at the end."""
    return pytestconfig.stash.setdefault(MEASURED, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, value in config.stash.get(MEASURED, []):
        terminalreporter.write_line(f"| {name} | {value} |")
    if missing := config.stash.get(MISSING, ""):
        terminalreporter.write_sep(
            "!", "docker-compose.yml WAS NOT TRIED in an engine of containers", red=True, bold=True
        )
        terminalreporter.write_line(missing, red=True)


@pytest.fixture(scope="session")
def engine(pytestconfig: pytest.Config, measured: Measured) -> Iterator[Engine]:
    """An engine with the images that the project's files name, kept in var/containers; skipped where none starts."""
    with ExitStack() as stack:
        try:
            if missing := what_is_missing():
                raise EngineFailed(missing)
            engine = stack.enter_context(running_engine(ENGINE_FOLDER))
        except EngineFailed as exc:
            pytestconfig.stash[MISSING] = str(exc)
            pytest.skip(f"no engine of containers: {exc}")
        begin_s = time.monotonic()
        make_images_of_others(engine)
        measured.append(("images of others, s", f"{time.monotonic() - begin_s:.0f}"))
        yield engine


@pytest.fixture(scope="module")
def deployment(engine: Engine, measured: Measured) -> Iterator[Deployment]:
    """A checkout whose image is built; what runs is stopped, and its volumes are removed, at the end."""
    deployment = Deployment(engine, ENGINE_FOLDER / "checkout")
    deployment.remove()  # what a run that was killed has left
    begin_s = time.monotonic()
    deployment.build()
    measured.append(("build, s", f"{time.monotonic() - begin_s:.0f}"))
    yield deployment
    deployment.remove()


@pytest.fixture(scope="module")
def key(deployment: Deployment) -> str:
    """A key that may do what shoppers do, and read what they have sent."""
    return deployment.add_key("events:write", "recs:read", "users:admin")


@pytest.fixture(scope="module")
def shoppers(
    request: pytest.FixtureRequest, deployment: Deployment, key: str, measured: Measured
) -> Iterator[Shoppers]:
    """Clients of the deployment; the table tells how they fared."""
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
    """Hold, after each test of requests, that every acknowledged event is there once."""
    yield
    if "shoppers" in request.fixturenames:
        shoppers: Shoppers = request.getfixturevalue("shoppers")
        assert shoppers.compare() == (0, 0), f"lost and doubled, of {shoppers.events} events"
