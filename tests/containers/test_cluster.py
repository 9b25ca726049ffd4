"""The profile `cluster` of docker-compose.yml in a real engine: six nodes of Redis, of which primaries are killed."""

from __future__ import annotations

import pytest

from tests.containers.deployment import CLUSTER, Deployment
from tests.containers.shoppers import Shoppers, failed, failed_otherwise

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

NODES = [f"redis-{number}" for number in range(1, 7)]


def primaries(deployment: Deployment) -> list[str]:
    """Return the nodes that say that they are primaries."""
    ask = "REDISCLI_AUTH=$(cat /acl/admin_password) redis-cli --user admin role"
    roles = {node: deployment.compose("exec", "-T", node, "sh", "-c", ask).splitlines()[0] for node in NODES}
    return [node for node, role in roles.items() if "master" in role]


def test_up_waits_until_every_slot_has_a_node(deployment: Deployment, key: str) -> None:
    assert key  # which is made before: without keys no replica gets ready
    deployment.files = CLUSTER
    deployment.compose("up", "--wait")
    assert len(primaries(deployment)) == 3
    assert deployment.compose("ps", "--all", "--quiet", "redis") == ""


def test_a_killed_primary_loses_nothing(deployment: Deployment, shoppers: Shoppers, long: bool) -> None:
    with shoppers.shop() as outcomes:
        for _ in range(5 if long else 1):
            node = primaries(deployment)[0]
            deployment.engine.docker("kill", deployment.container(node))
            deployment.wait_for(lambda: failed(shoppers.shop_for(1)) == {})
            deployment.compose("up", "--wait", "--no-recreate")
    assert failed_otherwise(outcomes) == {}


def test_no_volume_is_left_that_has_no_name(deployment: Deployment) -> None:
    names = deployment.engine.docker("volume", "ls", "--quiet").split()
    assert [name for name in names if not name.startswith("lisarec_")] == []
