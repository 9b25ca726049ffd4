"""The engine, and one deployment in it that the tests of a file use in turn; a table of what they measured.

make test-containers        the short form
make bench-containers       `--long`: more of everything
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.harness.compose import ROOT
from tests.containers.deployment import Deployment
from tests.containers.engine import Engine, EngineFailed, make_images_of_others, running_engine, what_is_missing

MEASURED = pytest.StashKey[list[tuple[str, str]]]()
ENGINE_FOLDER = ROOT / "var" / "containers"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="more load and more faults in the tests of containers")


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether this is the long form."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> list[tuple[str, str]]:
    """What was measured, and the number: rows of the table at the end."""
    return pytestconfig.stash.setdefault(MEASURED, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, value in config.stash.get(MEASURED, []):
        terminalreporter.write_line(f"| {name} | {value} |")


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """An engine with the images that the project's files name, kept in var/containers; skipped where none starts."""
    if missing := what_is_missing():
        pytest.skip(missing)
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(running_engine(ENGINE_FOLDER))
        except EngineFailed as exc:
            pytest.skip(f"no engine of containers starts on this machine: {exc}")
        make_images_of_others(engine)
        yield engine


@pytest.fixture(scope="module")
def deployment(engine: Engine) -> Iterator[Deployment]:
    """A checkout whose image is built; what runs is stopped, and its volumes are removed, at the end."""
    deployment = Deployment(engine, ENGINE_FOLDER / "checkout")
    deployment.build()
    yield deployment
    deployment.files = ()
    deployment.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5")
