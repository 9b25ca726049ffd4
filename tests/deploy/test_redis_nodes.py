"""The chart's Redis Cluster: its objects, and its pods as processes, with a node that returns at another address."""

from __future__ import annotations

import base64
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import redis

from benchmarks.harness.redis_cluster import free_node_port, is_whole
from benchmarks.harness.topology import program
from tests.deploy.certificates import Authority, answers_without_tls
from tests.deploy.chart import (
    CLUSTER,
    RELEASE,
    TLS_CLUSTER,
    environment_of,
    named,
    peers,
    pods,
    render,
    rendered_variant,
)
from tests.deploy.kubelet import Place, Pod, wait_until_ready
from tests.storage.redis.servers import find_servers
from tests.waiting import wait_until

HOST = re.compile(r"[\w-]+\.lisarec-redis-node\.[\w.]+")
VALUES = {"redis": {"cluster": {"primaries": 3, "replicas": 2}}}


def test_each_primary_has_the_configured_number_of_replicas() -> None:
    manifests = render(VALUES)
    keeper = pods(manifests)["redis-cluster"]["containers"][0]
    assert len(keeper["args"]) == named(manifests, "StatefulSet", "redis-node")["spec"]["replicas"] == 9
    assert environment_of(keeper)["LISAREC_KEEP_REPLICAS"] == "2"
    own = {"settings": {"LISAREC_REDIS_REPLICAS": "2"}}  # what the operator says counts
    assert environment_of(pods(render(VALUES | own))["app"]["containers"][0])["LISAREC_REDIS_REPLICAS"] == "2"


def test_nodes_start_in_parallel_and_stop_one_by_one() -> None:
    """Otherwise a replica and its primary could wait for each other."""
    manifests = rendered_variant("a cluster")
    assert named(manifests, "StatefulSet", "redis-node")["spec"]["podManagementPolicy"] == "Parallel"
    assert named(manifests, "Service", "redis-node")["spec"]["publishNotReadyAddresses"] is True
    budget = named(manifests, "PodDisruptionBudget", "redis-node")["spec"]
    assert budget["maxUnavailable"] == 1
    assert "unhealthyPodEvictionPolicy" not in budget  # which would let the last copy go while another one is away
    spread = pods(manifests)["redis-node"]["topologySpreadConstraints"]
    assert [one["topologyKey"] for one in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


def test_only_nodes_reach_the_cluster_bus() -> None:
    policies = {
        component: named(rendered_variant("a cluster"), "NetworkPolicy", component)["spec"]
        for component in ("app", "redis-cluster", "redis-node")
    }

    def reached(component: str, rules: str, direction: str) -> dict[object, set[str]]:
        found: dict[object, set[str]] = {}
        for rule in policies[component][rules]:
            for port in rule["ports"]:
                found.setdefault(port["port"], set()).update(peers(rule, direction))
        return found

    services = {"app", "archive", "redis-cluster", "trainer"}
    assert reached("redis-node", "ingress", "from") == {
        "redis": services,
        6379: {"redis-node"},
        16379: {"redis-node"},
    }
    assert reached("redis-node", "egress", "to") == {6379: {"redis-node"}, 16379: {"redis-node"}}
    of_the_store = {53: {"anybody"}, 6379: {"redis-node"}}
    assert reached("app", "egress", "to") == reached("redis-cluster", "egress", "to") == of_the_store
    assert policies["redis-cluster"]["ingress"] == []


def test_only_redis_and_its_keeper_get_the_admin_password() -> None:
    entries: dict[str, set[str]] = {}
    for component, pod in pods(rendered_variant("a cluster")).items():
        for volume in pod["volumes"]:
            if volume.get("secret", {}).get("secretName") == f"{RELEASE}-redis":
                entries[component] = {item["key"] for item in volume["secret"].get("items", ())}
    services = {name: {"redis_password"} for name in ("app", "archive", "trainer")}
    assert entries == {**services, "redis-cluster": {"admin_password"}, "redis-node": set()}  # all


class Nodes:
    """Six nodes at loopback addresses, and the keeper that creates their cluster."""

    def __init__(self, root: Path, authority: Authority | None = None) -> None:
        self.manifests = render(CLUSTER if authority is None else TLS_CLUSTER)
        self._tls: dict[str, Any] = {}
        if authority is not None:
            names = ",".join(f"IP:127.0.3.{number + 1}" for number in range(6))
            self.manifests.append(authority.secret("redis-tls", names))
            self._tls = {"ssl": True, "ssl_ca_certs": str(authority.certificate)}
        self.specs = pods(self.manifests)
        for name in ("redis-node", "redis-cluster"):
            self.specs[name]["containers"][0]["readinessProbe"] |= {"periodSeconds": 1}  # asked more often
        self.port = free_node_port()
        self.running: dict[int, Pod] = {}
        self._root = root
        self._clients: list[redis.Redis] = []
        addresses = {}
        for number, name in enumerate(self.specs["redis-cluster"]["containers"][0]["args"]):
            (root / str(number)).mkdir()
            self.start(number, f"127.0.3.{number + 1}")
            addresses[name] = f"127.0.3.{number + 1}:{self.port}"
        self.keeper = self._pod("redis-cluster", "127.0.0.1", addresses, root)

    def start(self, number: int, address: str) -> None:
        """Start a node on its volume at this address."""
        port = f"--tls-port {self.port}" if self._tls else f"--port {self.port}"
        replacements = {
            "redis-server": program("redis-server"),
            "redis-cli": f"redis-cli -h {address} -p {self.port}",
            "--dir": f"--bind {address} --bind-source-addr {address} {port} --dir",
        }
        self.running[number] = self._pod("redis-node", address, replacements, self._root / str(number))

    def lose(self, number: int) -> None:
        """Kill a node and delete its volume."""
        self.running[number].vanish()
        volume = self._root / str(number)
        shutil.rmtree(volume)
        volume.mkdir()

    def client(self, number: int) -> redis.Redis:
        """An operator client of the node, closed with the nodes."""
        client = redis.Redis(**self._login(number, "admin", "admin_password"))
        self._clients.append(client)
        return client

    def cluster_client(self, number: int) -> redis.RedisCluster:
        """A service client of the cluster that knows this node."""
        return redis.RedisCluster(**self._login(number, "lisarec", "redis_password"))

    def wait_until_whole(self) -> None:
        """Wait until all nodes are in one cluster and ready."""
        clients = [self.client(number) for number in self.running]
        wait_until(lambda: all(is_whole(client) for client in clients), self.log)
        wait_until_ready(*self.running.values(), self.keeper)

    def log(self) -> str:
        """Logs of all nodes and their keeper."""
        return "\n\n".join(pod.log() for pod in (*self.running.values(), self.keeper))

    def close(self) -> None:
        """End everything at once."""
        for client in self._clients:
            client.close()
        for pod in (*self.running.values(), self.keeper):
            pod.vanish()

    def _login(self, number: int, user: str, entry: str) -> dict[str, Any]:
        password = base64.b64decode(named(self.manifests, "Secret", "redis")["data"][entry]).decode()
        address = self.running[number].place.address
        return {"host": address, "port": self.port, "username": user, "password": password, **self._tls}

    def _pod(self, component: str, address: str, replacements: dict[str, str], data: Path) -> Pod:
        root = Path(mkdtemp(prefix=f"{component}-", dir=self._root))
        variables = {"LISAREC_KEEP_EVERY_S": "1", "HOSTNAME": f"{RELEASE}-{component}-{data.name}"}
        place = Place(root, address, {}, variables, replacements, (), self.manifests, {"data": data})
        return Pod(self.specs[component], place)


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    if "redis-server" not in find_servers():
        pytest.skip("there is no redis-server")
    has_tls = getattr(request, "param", "") == "TLS"
    nodes = Nodes(tmp_path, Authority(tmp_path / "authority") if has_tls else None)
    try:
        yield nodes
    finally:
        nodes.close()


def test_a_cluster_forms_and_a_node_returns_at_another_address(nodes: Nodes) -> None:
    nodes.wait_until_whole()
    with nodes.cluster_client(0) as service:
        for number in range(20):
            service.set(f"key-{number}", number)
    roles = {number: nodes.client(number).info("replication")["role"] for number in nodes.running}

    # a replica without its primary's data is not ready, so that a roll-out and a drain wait for it
    number = next(number for number, role in roles.items() if role == "slave")
    replica, client = nodes.running[number], nodes.client(number)
    client.config_set("masterauth", "another-one")
    client.client_kill_filter(_type="master")
    wait_until(lambda: not replica.ready, replica.log)
    replica.execute("redis-load-users", "/acl/users.acl", "-h", replica.place.address, "-p", str(nodes.port))
    wait_until_ready(replica)

    # a primary that comes back after a replica has taken over is ready as the replica that it is now
    number = next(number for number, role in roles.items() if role == "master")
    nodes.running[number].delete()
    assert nodes.running[number].exit_code == 0
    others = [nodes.client(other) for other in nodes.running if other != number]
    wait_until(lambda: sum(other.info("replication")["role"] == "master" for other in others) == 3, nodes.log)
    nodes.start(number, "127.0.4.1")
    wait_until_ready(nodes.running[number])
    assert nodes.client(number).info("replication")["master_link_status"] == "up"
    nodes.wait_until_whole()
    assert "becomes a replica" not in nodes.keeper.log()  # it became one by itself
    with nodes.cluster_client(number) as service:
        assert [service.get(f"key-{number}") for number in range(20)] == [b"%d" % number for number in range(20)]


def test_a_node_without_its_volume_is_ready_after_resync(nodes: Nodes) -> None:
    nodes.wait_until_whole()
    clients = {number: nodes.client(number) for number in nodes.running}
    links = {number: client.info("replication") for number, client in clients.items()}
    number = next(number for number, link in links.items() if link["role"] == "slave")
    nodes.keeper.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: not any(map(meets, clients.values())))
    nodes.lose(number)
    nodes.start(number, nodes.running[number].place.address)
    client = nodes.client(number)
    wait_until(lambda: questions(client) > 3, nodes.running[number].log)
    assert not nodes.running[number].ready  # it answers, but belongs to no cluster

    nodes.keeper.process.send_signal(signal.SIGCONT)
    nodes.wait_until_whole()
    assert client.info("replication")["master_host"] == links[number]["master_host"]


@pytest.mark.parametrize("nodes", ["TLS"], indirect=True)
def test_nodes_with_a_certificate_use_only_tls_and_announce_its_names(nodes: Nodes) -> None:
    nodes.wait_until_whole()
    for number, pod in nodes.running.items():
        assert not answers_without_tls(pod.place.address, nodes.port)
        assert nodes.client(number).config_get("port") == {"port": "0"}
    hosts = {word.partition(":")[0] for word in nodes.specs["redis-cluster"]["containers"][0]["args"]}
    assert len(hosts) == 6
    node = nodes.client(0)
    wait_until(lambda: set(HOST.findall(str(node.execute_command("CLUSTER SLOTS")))) == hosts, nodes.keeper.log)


def meets(node: Any) -> bool:
    """Whether the node is in a handshake with another one."""
    return b"handshake" in node.execute_command("CLUSTER", "NODES")


def questions(node: redis.Redis) -> int:
    """How often a probe has asked a node for its role."""
    try:
        return int(node.info("commandstats").get("cmdstat_role", {"calls": 0})["calls"])
    except redis.RedisError:
        return 0
