"""docker-compose.yml in a real engine: full disks and clock skew between containers."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness.faults.faulty_machine import FaultyMachine, library
from tests.containers.conftest import Measured
from tests.containers.deployment import Deployment
from tests.containers.disks import SmallDisk, small_disk
from tests.containers.shoppers import Shoppers, failed, failed_otherwise

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

SERVICE, REDIS = 10001, 999  # users of the images
VOLUMES = {"redis": (512, REDIS), "archive": (16, SERVICE), "models": (128, SERVICE)}  # MB, owner
CLOCKS_S = {"app-elsewhere": 3600.0, "redis": -3600.0, "archive": 86_400.0, "trainer": -3600.0}
NO_SPACE = "No space left on device"
# the first where nothing more fits, the second where the beginning does
REDIS_SAYS = (f"Error writing to the AOF file: {NO_SPACE}", "Short write while writing to the AOF file")

Disks = dict[str, SmallDisk]
Machines = dict[str, FaultyMachine]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    """Simulated machines for the services whose clocks differ."""
    folder = tmp_path_factory.mktemp("machines")
    machines = {service: FaultyMachine(folder / service) for service in CLOCKS_S}
    for machine in machines.values():
        shutil.copy(library(), machine.root / "machine.so")
        machine.root.chmod(0o755)
        (machine.root / "control").chmod(0o666)
    return machines


@pytest.fixture(scope="module")
def disks(
    request: pytest.FixtureRequest,
    deployment: Deployment,
    machines: Machines,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Disks]:
    """File systems of the deployment's volumes; one more replica is on a machine of its own."""
    folder: Path = tmp_path_factory.mktemp("disks")
    with ExitStack() as mounted:
        disks = {
            volume: mounted.enter_context(small_disk(folder / volume, megabytes, owner))
            for volume, (megabytes, owner) in VOLUMES.items()
        }
        services: dict[str, dict[str, object]] = {
            service: {
                "environment": {"LD_PRELOAD": "/machine/machine.so", "MACHINE_ROOT": "/machine"},
                "volumes": [f"{machine.root}:/machine"],
            }
            for service, machine in machines.items()
        }
        services["app-elsewhere"] |= {
            "extends": {"file": "docker-compose.yml", "service": "app"},
            "scale": 1,
            "networks": {"middle": {"aliases": ["app"]}, "back": {}},
        }
        deployment.override(services=services, volumes={name: disk.volume for name, disk in disks.items()})
        request.getfixturevalue("key")  # without keys no replica gets ready
        deployment.compose("up", "--wait")
        yield disks
        deployment.remove()


def is_refused(outcomes: Counter[str]) -> bool:
    """Return whether the store refused events."""
    return any(name.startswith("events 503 storage_") for name in list(outcomes))


def is_said(deployment: Deployment, service: str, *words: str) -> bool:
    """Return whether the service's log contains one of the texts."""
    log = deployment.compose("logs", "--no-color", service)  # also of one that is being started again
    return any(one in log for one in words)


def test_events_are_accepted_again_after_a_full_redis_disk(
    deployment: Deployment, disks: Disks, shoppers: Shoppers, measured: Measured
) -> None:
    """Events get 503, no acknowledged one is lost, Redis logs the reason and recovers."""
    with shoppers.shop() as outcomes:
        deployment.wait_for(lambda: shoppers.events > 500)
        with disks["redis"].full():
            deployment.wait_for(lambda: is_refused(outcomes))
            deployment.wait_for(lambda: is_said(deployment, "redis", *REDIS_SAYS))
    assert failed_otherwise(outcomes) == {}
    measured.append(("requests while Redis's disk was full", f"{outcomes.total():,}; {failed(outcomes)}"))
    begin_s = time.monotonic()
    deployment.wait_for(lambda: failed(shoppers.shop_for(0.5)) == {})
    measured.append(("room on Redis's disk until events are taken, s", f"{time.monotonic() - begin_s:.1f}"))


def test_archive_and_training_continue_after_a_full_disk(
    deployment: Deployment, disks: Disks, key: str, shoppers: Shoppers
) -> None:
    """No request is affected, and logs name the reason."""
    for name, service in (("archive", "archive"), ("models", "trainer")):
        with shoppers.shop() as outcomes:
            with disks[name].full():
                deployment.wait_for(lambda: is_said(deployment, service, NO_SPACE))  # noqa: B023
                assert deployment.generation(key) == "none"
            deployment.wait_for(lambda: name == "archive" or deployment.generation(key) != "none")  # noqa: B023
        assert failed(outcomes) == {}


def test_clock_skew_fails_no_request_and_loses_no_event(
    deployment: Deployment, disks: Disks, machines: Machines, key: str, shoppers: Shoppers, long: bool
) -> None:
    now = "import time; print(time.time())"
    replica = deployment.container("app-elsewhere")
    archived = archived_events(deployment)
    with shoppers.shop() as outcomes:
        for service, by_s in CLOCKS_S.items():
            machines[service].jump_clock(by_s)
        assert float(deployment.execute(replica, "python", "-c", now)) > time.time() + 3000
        deployment.rolling_restart("app-elsewhere")  # which believes its clock from the start
        deployment.wait_for(lambda: archived_events(deployment) > archived)
        before = deployment.generation(key)
        deployment.wait_for(lambda: deployment.generation(key) != before)
        if long:
            time.sleep(70)  # clocks are followed after a minute
        for machine in machines.values():
            machine.jump_clock(0)
        deployment.rolling_restart("app-elsewhere")
    assert failed(outcomes) == {}


def archived_events(deployment: Deployment) -> int:
    """Number of events that the archiver has archived since its start."""
    code = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
    lines = deployment.execute(deployment.container("archive"), "python", "-c", code).splitlines()
    (line,) = (line for line in lines if line.startswith('lisarec_archive_events_total{done="archived"}'))
    return int(float(line.split()[-1]))
