"""docker/redis/redis-cluster-keep with real nodes: it creates the cluster once, and finds nodes at new addresses."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from benchmarks.harness.compose import MAKE_SECRETS, ROOT, make_users, node_command
from benchmarks.harness.redis_cluster import cluster_client, command, free_node_port, is_whole
from benchmarks.harness.topology import program
from tests.app.http.connection.ipv6 import needs_ipv6
from tests.storage.redis.servers import find_servers
from tests.waiting import PATIENCE_S, wait_until

KEEP_CLUSTER = ROOT / "docker" / "redis" / "redis-cluster-keep"
FIRST, SECOND = "127.0.1", "127.0.2"  # networks, in which the nodes have the addresses 1 to 6, or to 8
OF_IPV6 = "::1"  # the address of all nodes


class Site:
    """Nodes of docker-compose.yml with their data, in one of two networks, and their keeper."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        self.users = make_users(directory)
        self.acl = self.users.acl_file.parent
        self.ports = [free_node_port() for _ in range(8)]
        self._directory = directory

    @contextmanager
    def nodes(self, network: str, count: int = 6) -> Iterator[list[redis.Redis]]:
        """Run this many nodes; yields their clients."""
        with ExitStack() as stack:
            yield [stack.enter_context(self.node(network, number)) for number in range(1, count + 1)]

    @contextmanager
    def node(self, network: str, number: int, *options: str) -> Iterator[redis.Redis]:
        """Run one of the nodes; yields its client."""
        port, host = self.ports[number - 1], address_in(network, number)
        (data := self._directory / str(port)).mkdir(exist_ok=True)
        where = ("--bind", host, "--bind-source-addr", host)
        node = node_command(program("redis-server"), data, self.users, port, *where, *options)
        with (
            self._running(*node),
            redis.Redis.from_url(self.users.admin_url(port, f"[{host}]" if ":" in host else host)) as client,
        ):
            yield client

    @contextmanager
    def keeper(self, network: str, count: int = 6, *, moved: Collection[int] = ()) -> Iterator[None]:
        """Run the keeper of this many nodes; moved ones are in the second network."""
        keep = ("sh", str(KEEP_CLUSTER), str(self.acl / "admin_password"))
        with self._running(*keep, *self._addresses(network, count, moved), LISAREC_KEEP_EVERY_S="1"):
            yield

    def create_primaries(self, network: str) -> None:
        """Create a cluster of the first three nodes only, like an interrupted creation."""
        create = ["redis-cli", "--user", "admin", "--cluster", "create", *self._addresses(network, 3), "--cluster-yes"]
        environment = {**os.environ, "REDISCLI_AUTH": self.users.admin_password}
        with self.log.open("ab") as log:
            subprocess.run(create, stdout=log, stderr=log, env=environment, check=True, timeout=PATIENCE_S)

    def wait_until_whole(self, running: list[redis.Redis]) -> None:
        wait_until(lambda: all(is_whole(node) for node in running), self.log.read_text)

    def _addresses(self, network: str, count: int, moved: Collection[int] = ()) -> list[str]:
        networks = {number: SECOND if number in moved else network for number in range(1, count + 1)}
        return [f"{address_in(where, number)}:{self.ports[number - 1]}" for number, where in networks.items()]

    @contextmanager
    def _running(self, *words: str, **environment: str) -> Iterator[None]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, **environment})
        try:
            yield
        finally:
            process.kill()
            process.wait(PATIENCE_S)


@pytest.fixture
def site(tmp_path: Path, alpine_shell: None) -> Site:
    if "redis-server" not in find_servers():
        pytest.skip("there is no redis-server")
    return Site(tmp_path)


def layout(node: Any) -> dict[str, tuple[str, list[str]]]:
    """Primary and slots of each node by id, without nodes in handshake."""
    known = map(str.split, command(node, "CLUSTER", "NODES").decode().splitlines())
    return {name: (primary, rest[4:]) for name, _, flags, primary, *rest in known if "handshake" not in flags}


def address_in(network: str, number: int) -> str:
    """Address of a node."""
    return network if network == OF_IPV6 else f"{network}.{number}"


def answers(node: Any) -> bool:
    """Return whether the node responds."""
    try:
        return bool(node.ping())
    except redis.RedisError:
        return False


def name_of(node: Any) -> str:
    """Id of the node."""
    return str(command(node, "CLUSTER", "MYID").decode())


def primary_of(node: Any) -> str:
    """Id of the node's primary as it knows it; `-` for a primary."""
    return layout(node)[name_of(node)][0]


def address_of(node: Any, name: str) -> str:
    """Address of another node as known by this one."""
    return _line_of(node, name)[1]


def flags_of(node: Any, name: str) -> list[str]:
    """Flags of another node as known by this one."""
    return _line_of(node, name)[2].split(",")


def _line_of(node: Any, name: str) -> list[str]:
    known = map(str.split, command(node, "CLUSTER", "NODES").decode().splitlines())
    return next(line for line in known if line[0] == name)


def introductions(node: Any) -> int:
    """Number of CLUSTER MEET calls on the node."""
    return int(node.info("commandstats").get("cmdstat_cluster|meet", {"calls": 0})["calls"])


def test_a_cluster_is_created_once_and_found_at_new_addresses(site: Site) -> None:
    with site.nodes(FIRST) as running:
        with site.keeper(FIRST):
            site.wait_until_whole(running)
        roles = [node.info("replication")["role"] for node in running]
        assert sorted(roles) == ["master"] * 3 + ["slave"] * 3
        with redis.Redis.from_url(site.users.url(site.ports[0], f"{FIRST}.1")) as service:
            config = service.config_get("*")
        assert config["masterauth"] == (site.acl / "replica_password").read_text()
        assert site.users.admin_password not in config.values()
        before, introduced = layout(running[0]), introductions(running[0])
        with site.keeper(FIRST):  # which finds no key yet
            wait_until(lambda: introductions(running[0]) > introduced + 5, site.log.read_text)
        assert layout(running[0]) == before
        with cluster_client(site.users.url(site.ports[0], f"{FIRST}.1")) as service:
            for number in range(100):
                service.eval("redis.call('SET', KEYS[1], 1)", 1, f"key-{number}")
    with site.nodes(SECOND) as running, site.keeper(SECOND):
        site.wait_until_whole(running)
        assert sum(node.dbsize() for node in running if node.info("replication")["role"] == "master") == 100
        assert layout(running[0]).keys() == before.keys()


def arguments_of_processes() -> str:
    """Output of `ps` for any user of the machine."""
    shown = b""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            shown += (process / "cmdline").read_bytes() + b"\n"
    return shown.replace(b"\0", b" ").decode(errors="replace")


def test_no_password_is_in_the_arguments_of_a_node(site: Site, tmp_path: Path) -> None:
    """Redis hides its own arguments, but not those of the start script."""
    (given := tmp_path / "given").mkdir()
    password = r"""a "quoted" back\slash, a 'tick', a $HOME and a #"""
    (given / "replica_password").write_text(password)
    subprocess.run([MAKE_SECRETS, tmp_path / "secrets", site.acl, given], check=True, timeout=PATIENCE_S)
    with site.node(FIRST, 1) as node:
        wait_until(lambda: answers(node), site.log.read_text)
        assert node.config_get("master*") == {"masteruser": "replica", "masterauth": password}
        shown = arguments_of_processes()
    assert f"{site.acl}/users.acl" in shown
    assert [word for word in (password, site.users.password, site.users.admin_password) if word in shown] == []


def test_a_replica_with_a_stale_primary_address_is_reattached(site: Site) -> None:
    with site.nodes(FIRST) as running:
        with site.keeper(FIRST):
            site.wait_until_whole(running)
        names = [name_of(node) for node in running]
        replica = next(number for number, node in enumerate(running, 1) if primary_of(node) != "-")
        primary = names.index(primary_of(running[replica - 1])) + 1
    moved = (replica, primary)
    # The primary knows only the former address of its replica, which hears of the primary's new one from others.
    soon, late = ("--cluster-node-timeout", "1000"), ("--cluster-node-timeout", "600000")
    with ExitStack() as nodes:
        for number in set(range(1, 7)) - {*moved}:
            nodes.enter_context(site.node(FIRST, number, *soon))
        lost = nodes.enter_context(site.node(SECOND, replica, *soon, "--cluster-replica-no-failover", "yes"))
        wait_until(lambda: answers(lost) and "fail" in flags_of(lost, names[primary - 1]), site.log.read_text)
        nodes.enter_context(site.node(SECOND, primary, *late))
        wait_until(lambda: address_of(lost, names[primary - 1]).startswith(f"{SECOND}.{primary}:"), site.log.read_text)
        asked = lost.info("replication")
        assert (asked["master_host"], asked["master_link_status"]) == (f"{FIRST}.{primary}", "down")
        with site.keeper(FIRST, moved=moved):
            wait_until(lambda: lost.info("replication")["master_link_status"] == "up", site.log.read_text)
    found = f"{SECOND}.{replica}:{site.ports[replica - 1]} asks for its primary at a former address"
    assert found in site.log.read_text()


@needs_ipv6
def test_a_replica_that_reconnects_over_ipv6_is_left_alone(site: Site) -> None:
    """Assigning its primary again would end a synchronisation that is under way."""
    with site.nodes(OF_IPV6) as running, site.keeper(OF_IPV6):
        site.wait_until_whole(running)
        replica = next(node for node in running if primary_of(node) != "-")
        replica.config_set("masterauth", "wrong")
        for node in running:
            node.client_kill_filter(_type="replica")
        wait_until(lambda: replica.info("replication")["master_link_status"] == "down", site.log.read_text)
        introduced = introductions(replica)
        wait_until(lambda: introductions(replica) > introduced + 2 * len(running), site.log.read_text)
    assert "former address" not in site.log.read_text()


def test_an_interrupted_creation_restarts_unless_there_are_data(site: Site) -> None:
    with site.nodes(FIRST) as running:
        first, second, *_ = running

        def starts() -> bool:
            try:
                command(first, "CLUSTER", "ADDSLOTSRANGE", 0, 5460)
            except redis.RedisError:
                return False
            return True

        def sets() -> bool:
            try:
                return bool(first.set("bar", 1))  # in slot 5061
            except redis.RedisError:
                return False

        wait_until(starts, site.log.read_text)
        wait_until(sets, site.log.read_text)  # it takes nothing in its first seconds
        command(second, "CLUSTER", "MEET", f"{FIRST}.1", site.ports[0])
        with site.keeper(FIRST):
            wait_until(lambda: "5461 of 16384 slots have a node; 0 of 3 replicas; 1 keys" in site.log.read_text())
            assert first.get("bar") == b"1"
            first.delete("bar")
            site.wait_until_whole(running)


def test_replicas_are_attached_after_an_interrupted_creation_with_data(site: Site) -> None:
    with site.nodes(FIRST) as running:
        first, *_ = running
        wait_until(lambda: all(map(answers, running)), site.log.read_text)
        site.create_primaries(FIRST)
        names = [name_of(node) for node in running]
        wait_until(lambda: command(first, "CLUSTER INFO")["cluster_state"] == "ok", site.log.read_text)
        first.set("bar", 1)  # in slot 5061
        assert first.wait(1, 1) == 0  # events get a 503
        with site.keeper(FIRST):
            site.wait_until_whole(running)
            assert first.getset("bar", 2) == b"1"
            assert first.wait(1, int(PATIENCE_S * 1000)) == 1
        assert [name_of(node) for node in running] == names  # of those that were not reset
        assert [primary_of(node) for node in running] == ["-", "-", "-", names[2], names[0], names[1]]


def test_a_replica_without_data_is_reattached(site: Site) -> None:
    with site.nodes(FIRST) as running, site.keeper(FIRST):
        site.wait_until_whole(running)
        replica = next(node for node in running if primary_of(node) != "-")
        names, primary = [name_of(node) for node in running], primary_of(replica)
        command(replica, "CLUSTER", "RESET")
        wait_until(lambda: "16384 of 16384 slots have a node; 2 of 3 replicas; 0 keys" in site.log.read_text())
        wait_until(lambda: primary_of(replica) == primary, site.log.read_text)
        assert [name_of(node) for node in running] == names


def test_new_nodes_are_left_to_the_operator_until_they_have_slots(site: Site) -> None:
    with site.nodes(FIRST, 8) as running:
        *old, new, its_replica = running
        with site.keeper(FIRST):
            site.wait_until_whole(old)
        primary, name = old[0], name_of(new)
        with site.keeper(FIRST, 8):
            wait_until(lambda: all(command(node, "CLUSTER", "SLOTS") for node in (new, its_replica)))
            introduced = introductions(primary)
            wait_until(lambda: introductions(primary) > introduced + 20, site.log.read_text)
            assert primary_of(new) == primary_of(its_replica) == "-"
            command(new, "CLUSTER", "SETSLOT", 0, "IMPORTING", name_of(primary))
            command(primary, "CLUSTER", "SETSLOT", 0, "MIGRATING", name)
            for node in (new, primary):
                command(node, "CLUSTER", "SETSLOT", 0, "NODE", name)
            wait_until(lambda: primary_of(its_replica) == name, site.log.read_text)
            assert primary_of(new) == "-"
