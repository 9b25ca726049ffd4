"""The processes on three hosts, and how a host fails and returns.

    every host   a primary of a Redis cluster and a replica of each of the other two, by docker-compose.yml's command;
                 a replica of the service; HAProxy, by docker/haproxy.cfg; keepalived
    one of them  archiver, trainer and a consumer of Kafka, too; when it dies, they are started on another one
    outside      object storage, Kafka's brokers, the name server, the clients, who know one address

The address floats by VRRP, as it does in front of most HAProxy pairs: clients need to know nothing, and it moves in
seconds. Several addresses in DNS would leave that to each client's library, of which many try the first one alone. A
host gives the address up where its HAProxy does not answer, or where it reaches no HAProxy of another host: clients may
still reach it then, but it reaches too few nodes of Redis.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

from app.serving.served_generation import generation_of
from benchmarks.harness.compose import RedisUsers, make_users, node_command
from benchmarks.harness.fork_server import fork_server
from benchmarks.harness.ledger import Ledger, StoreVerdict, judge
from benchmarks.harness.redis_cluster import SETTLED_WITHIN_S, ClusterAdmin, command, wait_until_settled
from benchmarks.harness.supervised_process import SupervisedProcess, is_loaded, is_ready, spawn_program
from benchmarks.harness.topology import HAPROXY_CONFIG, NameServer, balancer_environment, program
from benchmarks.machines import retraining
from benchmarks.machines.network import DISK, FLOATING, Host, Network
from benchmarks.machines.topic import FORWARDER, Topic, consume_command, running_topic
from benchmarks.storage.s3_server import S3Server, environment_for
from model.artifact.model_directory import Artifact
from storage.folders.place import ObjectUrl, open_folder
from storage.redis.store import RedisOptions, RedisStore
from storage.state.generation import Generation

HOSTS = 3
COPIES = 3  # of everything in Redis, each on another host
FIRST_PORT = 7_000
APP_PORT, BALANCER_PORT, STORAGE_PORT = 8_000, 8_080, 9_000
POLL_S = 0.5  # each look logs in to up to 18 nodes
ARCHIVE = "s3://lisarec/archive"

KEEPALIVED = """
global_defs {{
    script_user root
    enable_script_security
}}
vrrp_script balancer {{
    script "{check}"
    interval 1
    timeout 2
    fall 2
}}
vrrp_instance service {{
    state BACKUP
    nopreempt
    interface eth0
    virtual_router_id 51
    priority {priority}
    advert_int 1
    garp_master_refresh 5
    virtual_ipaddress {{
        {floating}/24
    }}
    track_script {{
        balancer
    }}
}}
"""

CHECK = """#!/bin/bash
reaches() {{ timeout 0.5 bash -c "</dev/tcp/$1/{port}"; }} 2>/dev/null
reaches 127.0.0.1 && {{ {others}; }}
"""


@dataclass(frozen=True)
class SiteAdmin:
    """The operator, who knows the host of each node's port."""

    users: RedisUsers
    hosts: list[Host]

    def host_of(self, port: int) -> Host:
        """Return the host of a node: the nth copy is n hosts further."""
        copy, third = divmod(port - FIRST_PORT, HOSTS)
        return self.hosts[(third + copy) % HOSTS]

    def admin_url(self, port: int) -> str:
        """Return the URL with which an operator logs in."""
        return self.users.admin_url(port, self.host_of(port).address)


@dataclass
class Machine:
    """A host and its processes, in start order.

    nodes  of Redis, by port
    jobs   what runs on one host at a time, as it would run on this one
    """

    host: Host
    nodes: dict[int, SupervisedProcess] = field(default_factory=dict)
    others: list[SupervisedProcess] = field(default_factory=list)
    jobs: list[SupervisedProcess] = field(default_factory=list)

    @property
    def processes(self) -> list[SupervisedProcess]:
        """Return all running processes."""
        return [*self.nodes.values(), *self.others, *self.jobs]


class Site:
    """The running hosts; clients use the floating address, and producers the brokers."""

    def __init__(self, network: Network, model: Path, node_timeout_ms: int, topic: Topic) -> None:
        self.network = network
        self.topic = topic
        self.machines = [Machine(host) for host in network.hosts]
        self.address = (FLOATING, BALANCER_PORT)
        self._users = make_users(DISK)
        self._known = SiteAdmin(self._users, network.hosts)
        self.admin = ClusterAdmin(self._known)
        self._ports = range(FIRST_PORT, FIRST_PORT + HOSTS * COPIES)
        nodes = ",".join(f"{self._known.host_of(port).address}:{port}" for port in self._ports)
        self._redis_url = f"redis://lisarec:{self._users.password}@{nodes}"
        self._names = NameServer(network.outside.address)
        self._names.addresses |= {IPv4Address(host.address) for host in network.hosts}
        self._storage = S3Server(network.outside.address, STORAGE_PORT)
        self._models = retraining.uploaded(model)
        store = ["--redis-url", self._redis_url, "--archive-dir", ARCHIVE]
        for port in self._ports:
            machine = self.machines[self._known.host_of(port).number]
            machine.nodes[port] = self._node(machine.host, port, node_timeout_ms)
        jobs = {
            "archive": ["archive", *store, "--every", "2", "--keep-tail", "5"],
            "consumer": consume_command(topic.brokers, f"http://{FLOATING}:{BALANCER_PORT}"),
            retraining.NAME: retraining.retrain_command(store, every_s=node_timeout_ms // 200),
        }
        serve = ["serve", "--model", str(model), "--models-dir", retraining.MODELS, "--insecure", *store]
        for machine in self.machines:
            where = ["--host", machine.host.address, "--port", str(APP_PORT)]
            app = self._command(machine.host, "app", [*serve, *where], APP_PORT)
            machine.others = [app, self._balancer(machine.host), self._keepalived(machine.host)]
            machine.jobs = [self._command(machine.host, name, command) for name, command in jobs.items()]

    async def start(self) -> None:
        """Start everything and wait until it is ready."""
        await asyncio.gather(*(node.start() for machine in self.machines for node in machine.nodes.values()))
        await asyncio.to_thread(self.admin.form, self._ports[:HOSTS], self._ports[HOSTS:])
        await asyncio.gather(*(self._start_others(machine) for machine in self.machines))
        await self._start_jobs(self.machines[0])
        async with asyncio.timeout(SETTLED_WITHIN_S):
            while not await is_ready(self.address):
                await asyncio.sleep(0.1)

    async def kill(self, machine: Machine) -> None:
        """Unplug the host, then kill its processes, so that peers see no closed connections. Its jobs move."""
        self.network.unplug(machine.host)
        await asyncio.gather(*(process.end() for process in machine.processes))
        if machine is self._at_work:
            await self._start_jobs(self.machines[machine.host.number - 1])

    def keep_disk(self, machine: Machine) -> None:
        """Copy the disk of a stopped host."""
        shutil.rmtree(_kept(machine), ignore_errors=True)
        shutil.copytree(_disk(machine.host), _kept(machine))

    def put_disk(self, machine: Machine) -> None:
        """Replace the disk of a stopped host by the copy."""
        shutil.rmtree(_disk(machine.host))
        shutil.copytree(_kept(machine), _disk(machine.host))

    async def bring_back(self, machine: Machine) -> None:
        """Start the host; wait until it has caught up."""
        machine.host.clear()
        self.network.heal()
        await asyncio.gather(*(node.start() for node in machine.nodes.values()))
        await self._start_others(machine)
        await self.settle()

    async def settle(self) -> None:
        """Wait until every primary has its replicas, and each host has one primary again.

        Who replaces a primary needs the votes of most of them: two on one host, and its death stops the cluster.
        """
        await wait_until_settled(self._is_whole, POLL_S)
        for home in self._ports[:HOSTS]:
            await wait_until_settled(partial(self._has_taken_over, home), POLL_S)
        await wait_until_settled(self._is_as_placed, POLL_S)

    async def _open_store(self, *generations: Generation) -> RedisStore:
        """Open the store for the verdict, with long timeouts for busy hosts."""
        patient = RedisOptions(connect_timeout_s=SETTLED_WITHIN_S, socket_timeout_s=SETTLED_WITHIN_S)
        archive = open_folder(ObjectUrl(ARCHIVE), DISK / "cache")
        return await RedisStore.open(self._redis_url, generations, archive_dir=archive, options=patient)

    async def judge(self, trained: Artifact, ledger: Ledger) -> StoreVerdict:
        """Compare store, archive and states of the active model with the acknowledged operations."""
        store = await self._open_store(generation_of(trained))
        try:
            active = [known.named.name for known in await store.generations.known() if known.is_active]
            served = self._models.load(active[0]) if active else trained
            return await judge(store, generation_of(served), ledger)
        finally:
            await store.close()

    async def accept_loss(self) -> None:
        """Accept a loss like an operator if services report missing acknowledged events."""
        store = await self._open_store()
        try:
            await store.repair(accept_loss=True)
        finally:
            await store.close()

    async def rounds(self) -> tuple[Counter[str], str]:
        """Return the outcomes of the trainer's rounds, including the end of one since its last start."""
        newest = await retraining.last_round(self._models, self._at_work_since_s)
        return retraining.rounds(), newest

    def refusals(self) -> int:
        """Return how often services have logged that a store lacks acknowledged events."""
        return sum(log.read_text().count("(wrong_store)") for log in DISK.glob("app-*.log"))

    def copy_logs(self, directory: Path) -> None:
        """Copy all logs there."""
        directory.mkdir(parents=True, exist_ok=True)
        for log in DISK.glob("*.log"):
            shutil.copy(log, directory)

    async def close(self) -> None:
        """Stop everything."""
        # first what needs the others to end
        await asyncio.gather(*(job.close() for machine in self.machines for job in machine.jobs))
        processes = [process for machine in self.machines for process in reversed(machine.processes)]
        await asyncio.gather(*(process.close() for process in processes))
        self._names.close()
        self._storage.close()

    async def _start_others(self, machine: Machine) -> None:
        for process in machine.others:
            await process.start()

    async def _start_jobs(self, machine: Machine) -> None:
        self._at_work, self._at_work_since_s = machine, time.time()
        for job in machine.jobs:
            await job.start()

    def _has_taken_over(self, port: int) -> bool:
        """Request a failover to the node unless it is a primary; Redis abandons requests after five seconds."""
        if self.admin.is_primary(port):
            return True
        with self.admin.client(port) as node:
            command(node, "CLUSTER", "FAILOVER")
        return False

    def _is_whole(self) -> bool:
        replicas = [port for port in self._ports if not self.admin.is_primary(port)]
        return len(replicas) == HOSTS * (COPIES - 1) and all(map(self.admin.is_in_sync, replicas))

    def _is_as_placed(self) -> bool:
        """Return whether every replica follows its designated primary on another host."""
        return self._is_whole() and all(
            self._primary_of(port) == FIRST_PORT + (port - FIRST_PORT) % HOSTS for port in self._ports[HOSTS:]
        )

    def _primary_of(self, replica: int) -> int:
        with self.admin.client(replica) as node:
            return int(node.info("replication").get("master_port", 0))

    def _node(self, host: Host, port: int, timeout_ms: int) -> SupervisedProcess:
        data = _disk(host) / str(port)
        data.mkdir(parents=True)
        options = ("--bind", host.address, "--cluster-node-timeout", str(timeout_ms))
        start = host.command(*node_command(program("redis-server"), data, self._users, port, *options))
        log = DISK / f"redis-{port}.log"
        return SupervisedProcess("redis", lambda: spawn_program(start, log), lambda: is_loaded(self._known, port))

    def _command(self, host: Host, name: str, arguments: list[str], port: int | None = None) -> SupervisedProcess:
        log = DISK / f"{name}-{host.number}.log"
        environment = {
            "LISAREC_REDIS_REPLICAS": "1",
            "LISAREC_CACHE_DIR": str(_disk(host) / "cache"),
            **self._storage.environment,
        }

        async def is_at_work() -> bool:
            return port is None or await is_ready((host.address, port))

        def spawn() -> int:
            return fork_server().spawn(arguments, log, environment=environment, network=host.namespace)

        return SupervisedProcess(name, spawn, is_at_work)

    def _balancer(self, host: Host) -> SupervisedProcess:
        environment = balancer_environment(f":{BALANCER_PORT}", self._names, APP_PORT)
        start = host.command("haproxy", "-db", "-f", str(HAPROXY_CONFIG), "-f", str(FORWARDER))
        log = DISK / f"haproxy-{host.number}.log"
        address = (host.address, BALANCER_PORT)
        return SupervisedProcess("haproxy", lambda: spawn_program(start, log, environment), lambda: is_ready(address))

    def _keepalived(self, host: Host) -> SupervisedProcess:
        place = DISK / f"keepalived-{host.number}"
        config = place.with_suffix(".conf")
        others = " || ".join(f"reaches {other.address}" for other in self.network.hosts if other is not host)
        check = place.with_suffix(".sh")
        check.write_text(CHECK.format(port=BALANCER_PORT, others=others))
        check.chmod(0o755)
        config.write_text(KEEPALIVED.format(check=check, priority=100 - host.number, floating=FLOATING))
        files = [f"--use-file={config}", f"--pid={place}.pid", f"--vrrp_pid={place}-vrrp.pid"]
        start = host.command("keepalived", "--vrrp", "--dont-fork", "--log-console", *files)

        async def is_at_work() -> bool:
            """Once it runs: which host has the address is up to them."""
            return True

        return SupervisedProcess("keepalived", lambda: spawn_program(start, place.with_suffix(".log")), is_at_work)


@asynccontextmanager
async def running_site(model: Path, node_timeout_ms: int, logs: Path | None) -> AsyncIterator[Site]:
    """Run three hosts; afterwards only a copy of their logs is left."""
    network = Network(HOSTS)
    os.environ.update(environment_for(f"http://{network.outside.address}:{STORAGE_PORT}"))
    async with running_topic(network.outside.address, HOSTS) as topic:
        site = Site(network, model, node_timeout_ms, topic)
        try:
            await site.start()
            yield site
        finally:
            if logs is not None:
                site.copy_logs(logs)
            await site.close()
            network.close()


def _disk(host: Host) -> Path:
    return DISK / f"host-{host.number}"


def _kept(machine: Machine) -> Path:
    return DISK / f"old-disk-{machine.host.number}"
