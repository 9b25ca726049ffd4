"""The profile `cluster` of docker-compose.yml in a real engine: six Redis nodes, and kills of primaries."""

from __future__ import annotations

import time

import pytest

from tests.containers.conftest import Measured
from tests.containers.deployment import CLUSTER, Deployment
from tests.containers.engine import EngineFailed
from tests.containers.shoppers import Shoppers, failed, failed_otherwise

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

NODES = [f"redis-{number}" for number in range(1, 7)]


def primaries(deployment: Deployment, without: str = "") -> list[str]:
    """Nodes that report to be primaries; one of them may be down."""
    ask = "REDISCLI_AUTH=$(cat /acl/admin_password) redis-cli --user admin role"
    nodes = [node for node in NODES if node != without]
    roles = {node: deployment.compose("exec", "-T", node, "sh", "-c", ask).splitlines()[0] for node in nodes}
    return [node for node, role in roles.items() if "master" in role]


@pytest.mark.usefixtures("key")  # without keys no replica gets ready
def test_compose_up_waits_until_all_slots_are_served(deployment: Deployment) -> None:
    deployment.files = CLUSTER
    deployment.compose("up", "--wait")
    assert len(primaries(deployment)) == 3
    assert deployment.compose("ps", "--all", "--quiet", "redis") == ""


def test_a_killed_primary_loses_no_event(
    deployment: Deployment, shoppers: Shoppers, long: bool, measured: Measured
) -> None:
    taken_over_s = []
    with shoppers.shop() as outcomes:
        for _ in range(5 if long else 1):
            node = primaries(deployment)[0]
            deployment.engine.docker("kill", deployment.container(node))
            begin_s = time.monotonic()
            deployment.wait_for(lambda: len(primaries(deployment, without=node)) == 3)  # noqa: B023
            taken_over_s.append(f"{time.monotonic() - begin_s:.0f}")
            deployment.compose("up", "--wait", "--no-recreate")
            deployment.wait_for(lambda: failed(shoppers.shop_for(1)) == {})  # every primary has a replica again
    measured.append(("a primary is killed until another node is one, s", ", ".join(taken_over_s)))
    measured.append(("requests while primaries were killed", f"{outcomes.total():,}; {failed(outcomes)}"))
    assert failed_otherwise(outcomes) == {}


def test_tls_is_enabled_on_nodes_with_data_by_one_line(deployment: Deployment, shoppers: Shoppers) -> None:
    deployment.set(COMPOSE_FILE="docker-compose.yml:docker/tls.yml")
    deployment.compose("up", "--wait")
    deployment.wait_for(lambda: failed(shoppers.shop_for(1)) == {})
    ask = "REDISCLI_AUTH=$(cat /acl/admin_password) redis-cli --user admin config get port"
    for node in NODES:
        assert deployment.compose("exec", "-T", node, "sh", "-c", ask).split() == ["port", "0"]
    assert len(primaries(deployment)) == 3


def test_replicas_with_tls_restart_without_failed_requests(
    deployment: Deployment, shoppers: Shoppers, measured: Measured
) -> None:
    with pytest.raises(EngineFailed):
        deployment.ask_replica("/readyz")  # without TLS
    with shoppers.shop() as outcomes:
        deployment.rolling_restart()
    measured.append(("requests while replicas with TLS restarted", f"{outcomes.total():,}; {failed(outcomes)}"))
    assert outcomes.total() > 0
    assert failed(outcomes) == {}


def test_no_anonymous_volume_is_left(deployment: Deployment) -> None:
    names = deployment.engine.docker("volume", "ls", "--quiet").split()
    assert [name for name in names if not name.startswith("lisarec_")] == []
