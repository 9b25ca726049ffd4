"""Run the services of docker-compose.yml as local processes: HAProxy, any number of replicas, Redis.

They read the same configuration files (docker/haproxy.cfg, docker/redis/redis.conf). Loopback addresses, one for each
replica, replace Docker's network. A name server replaces Docker's DNS: it lists a replica from the start of its process
to its end. Requires HAProxy, and Redis or Valkey; Debian, Ubuntu: apt install haproxy redis-server.

    python -m benchmarks.harness.topology --model models/ml-1m --replicas 3     # prints the URL, until Ctrl-C
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Annotated

import typer
from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry
from rich.console import Console

from benchmarks.harness.compose import ROOT, make_users, redis_command
from benchmarks.harness.redis_cluster import Admin
from benchmarks.harness.service_process import (
    END_TIMEOUT_S,
    fetch,
    free_port,
    inherited_environment,
    is_ready,
    wait_for,
)

HAPROXY_CONFIG = ROOT / "docker" / "haproxy.cfg"

BALANCER_LOG = "haproxy.log"
MAX_REPLICAS = 8
MAX_DISCOVERED = 11  # replicas that the load balancer looks for: one, and the most that may be added at a time
FIRST_ADDRESS = IPv4Address("127.0.0.11")
# a file system where a sync takes no time; what a kill leaves there is what it leaves on a disk
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 1 << 30 else None
STOP_TIMEOUT_S = 40.0  # Docker's, from docker-compose.yml

console = Console()


class NameServer:
    """Returns the addresses of the name `app`, over UDP on a free port; other names do not exist."""

    NAME = b"\x03app\x00"
    TYPE_A = b"\x00\x01"
    NO_SUCH_NAME = 3

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.addresses: set[IPv4Address] = set()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering.

        The socket is closed only after the thread has left it: a thread that waits on a closed socket may wake up on
        the next one with the same number.
        """
        with suppress(OSError):  # "not connected", but the thread wakes up
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(4096)
            if not query:  # shut down
                return
            self._socket.sendto(self._answer(query), sender)

    def _answer(self, query: bytes) -> bytes:
        """Return the question and an answer for each address, without compression or other records (RFC 1035, 4)."""
        end = query.index(0, 12) + 5
        question = query[12:end]
        name, kind = question[:-4], question[-4:-2]
        known = name.lower() == self.NAME and bool(self.addresses)
        found = sorted(self.addresses) if known and kind == self.TYPE_A else []
        flags = 0x8580 if known else 0x8580 | self.NO_SUCH_NAME
        head = query[:2] + b"".join(n.to_bytes(2, "big") for n in (flags, 1, len(found), 0, 0))
        to_live_s = bytes(4)
        return head + question + b"".join(question + to_live_s + b"\x00\x04" + address.packed for address in found)


@dataclass(frozen=True)
class Replica:
    """A process of the service, and the address on which it listens."""

    address: IPv4Address
    process: subprocess.Popen[bytes]


class Topology:
    """Replicas behind a load balancer, which listens at `url`."""

    def __init__(
        self,
        model: Path,
        store_options: Sequence[str],
        names: NameServer,
        directory: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.replica_port = free_port()
        self.replicas: list[Replica] = []
        self.redis_url: str | None = None
        self.killed = 0
        self._model = model
        self.store_options = store_options
        self.names = names
        self.balancer_environment = balancer_environment(self.url.removeprefix("http://"), names, self.replica_port)
        self._directory = directory
        self._environment = environment

    def scale(self, replicas: int) -> None:
        """Start or stop replicas, all at the same time; return when the new ones are ready and the others gone."""
        if replicas > MAX_REPLICAS:
            raise ValueError(f"the load balancer finds at most {MAX_REPLICAS} replicas")
        self._stop(self.replicas[replicas:])
        del self.replicas[replicas:]
        added = [self._start() for _ in range(replicas - len(self.replicas))]
        for replica in added:
            self._wait_until_ready(replica)

    def restart_one_by_one(self) -> None:
        """Replace each replica by a new one before the next one is stopped."""
        for replica in list(self.replicas):
            self._stop([replica])
            self.replicas.remove(replica)
            self._wait_until_ready(self._start())

    def kill_one(self) -> None:
        """Kill and replace the replica that has run for longest, once the balancer knows all replicas."""
        wait_for(lambda: self._known_to_balancer() >= len(self.replicas), self.replicas[-1].process)
        lost = self.replicas.pop(0)
        lost.process.kill()
        lost.process.wait()
        self.killed += 1
        self.names.addresses.discard(lost.address)
        self._wait_until_ready(self._start())

    def _known_to_balancer(self) -> int:
        """Return the number of replicas to which the load balancer sends requests."""
        metrics = fetch(f"http://{self.balancer_environment['LISAREC_METRICS_BIND']}/metrics").text
        return len(re.findall(r'^haproxy_server_status{.*state="UP"} 1', metrics, re.MULTILINE))

    def targets(self) -> list[str]:
        """Return the addresses of the replicas that the name server currently lists."""
        return [f"{address}:{self.replica_port}" for address in sorted(self.names.addresses)]

    def resent(self) -> int:
        """Return how many requests the load balancer has sent more than once, according to its log."""
        # connections at the end: actconn/feconn/beconn/srv_conn/retries, a + if another replica got it
        return len(re.findall(r" \d+/\d+/\d+/\d+/\+?[1-9]\d* ", self.balancer_log()))

    def balancer_log(self) -> str:
        """Return the log of the load balancer."""
        return (self._directory / BALANCER_LOG).read_text(encoding="utf-8", errors="replace")

    def replica_logs(self) -> str:
        """Return the logs of all replicas, including those that have ended."""
        logs = sorted(self._directory.glob("127.*.log"))
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)

    def _start(self) -> Replica:
        taken = {replica.address for replica in self.replicas}
        address = next(free for n in range(MAX_REPLICAS) if (free := FIRST_ADDRESS + n) not in taken)
        command = replica_command(self._model, self.store_options, address, self.replica_port)
        process = _spawn(command, self._directory / f"{address}.log", self._environment)
        self.replicas.append(replica := Replica(address, process))
        self.names.addresses.add(address)
        return replica

    def _stop(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            replica.process.terminate()
        for replica in replicas:
            status = replica.process.wait(timeout=END_TIMEOUT_S)
            self.names.addresses.discard(replica.address)
            if status != 0:
                raise RuntimeError(f"replica {replica.address} ended with {status}")

    def _wait_until_ready(self, replica: Replica) -> None:
        scheme = "https" if "LISAREC_TLS_CERTIFICATE" in self._environment else "http"
        wait_for(lambda: is_ready(f"{scheme}://{replica.address}:{self.replica_port}"), replica.process)


def replica_command(model: Path, store_options: Sequence[str], address: IPv4Address, port: int) -> list[str]:
    """Return the command of a replica, the service `app`."""
    listen_options = ["--host", str(address), "--port", str(port)]
    return [sys.executable, "-m", "app", "serve", "--model", str(model), *store_options, *listen_options]


def balancer_command() -> list[str]:
    """Return the command of the load balancer, the service `haproxy`."""
    return [program("haproxy"), "-db", "-f", str(HAPROXY_CONFIG)]


def balancer_environment(bind: str, names: NameServer, replica_port: int) -> dict[str, str]:
    """Return the environment variables that docker/haproxy.cfg reads."""
    return {
        "LISAREC_BIND": bind,
        "LISAREC_METRICS_BIND": f"127.0.0.1:{free_port()}",
        "LISAREC_DNS": names.address,
        "LISAREC_APP": "app",
        "LISAREC_APP_PORT": str(replica_port),
        "LISAREC_MAX_REPLICAS": str(MAX_DISCOVERED),
        # as tune.memory.hot-size in HAProxy 3.0 and later: keep buffers instead of returning them to the kernel
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    }


@contextmanager
def topology(
    model: Path,
    replicas: int,
    *,
    redis: bool = True,
    server: str | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    balancer: Mapping[str, str] = MappingProxyType({}),
    parent: str | None = None,
) -> Iterator[Topology]:
    """Run replicas over an empty store behind a load balancer, ready for requests; remove everything at the end.

    redis        whether they use Redis; otherwise they share one SQLite file
    server       binary of the Redis or Valkey server; None: the one on the PATH
    environment  of the replicas: LISAREC_...
    balancer     additional environment of the load balancer
    parent       folder for the files of all processes, such as MEMORY; None: the system's for temporary files
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(dir=parent)))
        names = NameServer()
        stack.callback(names.close)
        if redis:
            redis_url = stack.enter_context(redis_server(directory, server=server))
            store_options = ["--redis-url", redis_url]
        else:
            redis_url = None
            store_options = ["--data-dir", str(directory / "state")]
        running = Topology(model, store_options, names, directory, environment)
        running.redis_url = redis_url
        stack.callback(lambda: _end(*(replica.process for replica in running.replicas)))
        running.balancer_environment |= balancer
        process = _spawn(balancer_command(), directory / BALANCER_LOG, running.balancer_environment)
        stack.callback(_end, process)
        running.scale(replicas)
        wait_for(lambda: is_ready(running.url), process)
        yield running


@contextmanager
def redis_server(directory: Path, *options: str, server: str | None = None) -> Iterator[str]:
    """Run the Redis of docker-compose.yml with its users and data below the directory; yield the URL for services."""
    port = free_port()
    data = directory / "redis"
    data.mkdir(exist_ok=True)
    users = make_users(directory)
    command = redis_command(server or program("redis-server", "valkey-server"), data, users, port, *options)
    process = _spawn(command, directory / "redis.log")
    try:
        wait_for(lambda: answers_ping(users, port), process)
        yield users.url(port)
    finally:
        _end(process)


def answers_ping(users: Admin, port: int) -> bool:
    """Return whether the server answers the health check of docker-compose.yml; it does not while it loads."""
    try:
        with Redis.from_url(users.admin_url(port), socket_timeout=3, retry=Retry(NoBackoff(), 0)) as client:
            return bool(client.ping())
    except RedisError:
        return False


def program(*names: str) -> str:
    """Return the path of the first of these programs that is installed; Debian keeps some outside a user's PATH."""
    # an active virtual environment may contain the old redis-server of a wheel for tests
    folders = [folder for folder in os.get_exec_path() if Path(folder) != Path(sys.executable).parent]
    path = os.pathsep.join([*folders, "/usr/sbin", "/usr/local/sbin"])
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    raise FileNotFoundError(f"{' or '.join(names)} is not installed; on Debian and Ubuntu: apt install {names[0]}")


def _spawn(
    command: list[str], log: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        own = {**inherited_environment(), **environment}
        return subprocess.Popen(command, stdout=file, stderr=file, env=own, cwd=ROOT, start_new_session=True)


def _end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.send_signal(signal.SIGCONT)  # a test may have stopped it
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    replicas: Annotated[int, typer.Option(min=1, max=MAX_REPLICAS)] = 3,
    redis: Annotated[bool, typer.Option(help="Redis, or one SQLite file for all replicas.")] = True,
) -> None:
    """Run the topology until Ctrl-C."""
    with topology(model, replicas, redis=redis) as running:
        console.print(f"{running.url} has {replicas} replicas; Ctrl-C ends them")
        signal.pause()


if __name__ == "__main__":
    typer.run(main)
