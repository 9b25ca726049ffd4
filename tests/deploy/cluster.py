"""The chart's pods as local processes, with what a cluster provides: names, endpoints, roll-outs and evictions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any

import httpx

from app.http.auth import keys
from benchmarks.harness.service_process import free_port
from benchmarks.harness.topology import NameServer, program
from tests.deploy.chart import NAMESPACE, RELEASE, Manifest, named, pods, render, secret
from tests.deploy.kubelet import Place, Pod, scheme_of, wait_until_ready
from tests.waiting import PATIENCE_S, wait_until

# How late others learn that a pod comes or ends: the name server, whose answers live for some seconds, and those that
# send requests. And how late network policies let a new balancer reach its replicas. A cluster's are longer; so are the
# times that the chart waits by default.
NAMES_LATE_S = 1.0
ENDPOINTS_LATE_S = 2.0
POLICIES_LATE_S = 2.0
CACHED_S = 30.0  # how old the answers of a cluster's name server may be: CoreDNS as kubeadm sets it up, and kube-dns
# by which the pods reach Redis, without and with TLS
REDIS_NAMES = (f"{RELEASE}-redis:6379", f"{RELEASE}-redis.{NAMESPACE}.svc.cluster.local:6379")


class ClusterNames(NameServer):
    """The cluster's name server, for the headless Service of the app."""

    NAME = b"".join(
        len(label).to_bytes() + label.encode() for label in [f"{RELEASE}-app", NAMESPACE, "svc", "cluster", "local", ""]
    )


class Cluster:
    """A release whose pods are processes; `start` starts Redis, load balancers and replicas."""

    def __init__(
        self,
        root: Path,
        models: Path,
        values: Mapping[str, Any],
        secrets: Mapping[str, Manifest] = MappingProxyType({}),
    ) -> None:
        self.manifests = render(values)
        self.specs = pods(self.manifests)
        self.names = ClusterNames()
        self.names_late_s = NAMES_LATE_S
        self._names_of_balancers: list[ClusterNames] = []
        self.redis: Pod | None = None
        self.apps: list[Pod] = []
        self.balancers: list[Pod] = []
        self.jobs: list[Pod] = []
        self.ended: list[Pod] = []
        self.endpoints: set[str] = set()  # of the balancer's Service, as those that send requests know them
        self.keys, self.models = root / "keys", models
        self.secrets = dict(secrets)  # of the operator, beside that of the keys
        self.headers = {"authorization": f"Bearer {self.add_key()}"}
        self._root = root
        self._count = 0
        self._app_port, self._redis_port = free_port(), free_port()
        self._redis_address = dict.fromkeys(REDIS_NAMES, f"127.0.0.1:{self._redis_port}")
        self._redis_by_tls = bool(values.get("redis", {}).get("tlsSecret"))
        self._volumes = {"models": models, "archive": root / "archive", "data": root / "data"}
        for folder in ("archive", "data"):
            (root / folder).mkdir()
        self.hurry("app", NAMES_LATE_S / CACHED_S)
        self.hurry("balancer", 0.3)

    def hurry(self, component: str, share: float) -> None:
        """Probe the readiness of new pods after this share of the configured time."""
        (container,) = self.specs[component]["containers"]
        probe = container["readinessProbe"]
        container["readinessProbe"] = probe | {"initialDelaySeconds": probe.get("initialDelaySeconds", 0) * share}

    def add_key(self) -> str:
        """Create a key with all scopes in the operator's file; return it."""
        text, key = keys.make("main", keys.SCOPES)
        keys.add(self.keys, key)
        return text

    def start(self) -> None:
        """Start Redis, then two of everything else; wait until all are ready and each load balancer has a replica."""
        self.start_redis()
        self.apps = [self._app() for _ in range(2)]
        self.balancers = [self._balancer() for _ in range(2)]
        wait_until_ready(*self.apps, *self.balancers)
        self.endpoints |= {url_of(pod) for pod in self.balancers}
        for url in self.endpoints:
            with self.client(url) as client:  # its probe says nothing of replicas, whose names come late
                wait_until(lambda client=client: client.get("/readyz").is_success)  # type: ignore[misc]

    def start_redis(self) -> Pod:
        """Start Redis on its volume; wait until it is ready."""
        commands = {
            "redis-server": program("redis-server", "valkey-server"),
            "redis-cli": f"redis-cli -p {self._redis_port}",
        }
        self.redis = self._pod(
            "redis",
            ports={"redis": self._redis_port},
            replacements=commands,
            arguments=("--bind", "127.0.0.1", "--tls-port" if self._redis_by_tls else "--port", str(self._redis_port)),
        )
        wait_until_ready(self.redis)
        return self.redis

    def start_job(self, component: str) -> Pod:
        """Start the archiver or the trainer."""
        port = free_port()
        of_metrics = dict.fromkeys(("[::]:9464", "[::]:9465"), f"127.0.0.1:{port}")
        replacements = {**self._redis_address, **of_metrics}
        pod = self._pod(component, ports={"metrics": port}, replacements=replacements)
        self.jobs.append(pod)
        return pod

    def close(self) -> None:
        """End everything at once."""
        for pod in (*self.apps, *self.balancers, *self.jobs, *([self.redis] if self.redis else ())):
            pod.vanish()
        for names in (self.names, *self._names_of_balancers):
            names.close()

    def upgrade(self) -> None:
        """Roll out a new version of everything that serves requests."""
        of_the_app = threading.Thread(target=self.roll_out_app)
        of_the_app.start()
        self.roll_out_balancers()
        of_the_app.join()

    def roll_out_app(self) -> None:
        """Replace each pod, as a Deployment does without ever a pod fewer than there should be.

        It does not wait for a pod to end.
        """
        ending = []
        for old in list(self.apps):
            self.apps.append(new := self._app())
            wait_until_ready(new)
            ending.append(threading.Thread(target=self._end_app, args=(old,)))
            ending[-1].start()
        for thread in ending:
            thread.join()

    def roll_out_balancers(self) -> None:
        """Replace each load balancer the same way; clients learn of changes with a delay."""
        for old in list(self.balancers):
            self.balancers.append(new := self._balancer())
            wait_until_ready(new)
            self.endpoints.add(url_of(new))
            self.balancers.remove(old)
            self.ended.append(old)
            later(ENDPOINTS_LATE_S, self.endpoints.discard, url_of(old))
            old.delete()

    def drain_a_node(self) -> None:
        """Evict all pods of the app as soon as the budget allows, and start others elsewhere."""
        budget = named(self.manifests, "PodDisruptionBudget", "app")["spec"]["maxUnavailable"]
        wanted, there = len(self.apps), list(self.apps)
        ending = []
        for pod in there:
            wait_until(lambda: sum(one.ready and not one.terminating for one in self.apps) > wanted - budget)
            pod.terminating = True  # which `delete` says a moment later
            ending.append(threading.Thread(target=self._end_app, args=(pod,)))
            ending[-1].start()
            self.apps.append(self._app())
        for thread in ending:
            thread.join()
        wait_until_ready(*self.apps)

    def kill_an_app(self) -> None:
        """Kill a container; wait until the node has restarted it and it is ready."""
        pod = self.apps[0]
        pod.kill()
        wait_until(lambda: pod.restarts)
        wait_until_ready(pod)

    def client(self, url: str | None = None, key: str | None = None) -> httpx.Client:
        """A client of this URL or of a load balancer, with a key for all scopes."""
        headers = {"authorization": f"Bearer {key}"} if key else self.headers
        return httpx.Client(base_url=url or min(self.endpoints), headers=headers, timeout=PATIENCE_S)

    def _app(self) -> Pod:
        self._count += 1
        address = IPv4Address("127.0.0.20") + self._count
        pod = self._pod(
            "app",
            str(address),
            ports={"http": self._app_port},
            variables={"LISAREC_HOST": str(address), "LISAREC_PORT": str(self._app_port)},
            replacements=self._redis_address,
        )
        later(self.names_late_s, self.names.addresses.add, address)
        return pod

    def _end_app(self, pod: Pod) -> None:
        self.ended.append(pod)
        pod.delete()
        self.apps.remove(pod)
        later(self.names_late_s, self.names.addresses.discard, IPv4Address(pod.place.address))

    def _balancer(self) -> Pod:
        ports = {"http": free_port(), "metrics": free_port()}
        self._names_of_balancers.append(names := ClusterNames())  # of replicas that it can reach
        later(POLICIES_LATE_S, setattr, names, "addresses", self.names.addresses)
        variables = {
            "LISAREC_APP_PORT": str(self._app_port),
            "LISAREC_BIND": f"127.0.0.1:{ports['http']}",
            "LISAREC_METRICS_BIND": f"127.0.0.1:{ports['metrics']}",
            "LISAREC_DNS": names.address,
        }
        return self._pod("balancer", ports=ports, variables=variables)

    def _pod(
        self,
        component: str,
        address: str = "127.0.0.1",
        *,
        ports: Mapping[str, int],
        variables: Mapping[str, str] = MappingProxyType({}),
        replacements: Mapping[str, str] = MappingProxyType({}),
        arguments: Sequence[str] = (),
    ) -> Pod:
        root = Path(mkdtemp(prefix=f"{component}-", dir=self._root))
        of_the_keys = secret("lisarec-keys", {"keys": self.keys.read_bytes()})
        objects = [*self.manifests, of_the_keys, *self.secrets.values()]
        place = Place(root, address, ports, variables, replacements, arguments, objects, self._volumes)
        return Pod(self.specs[component], place)


def url_of(pod: Pod) -> str:
    """URL of the pod."""
    return f"{scheme_of(pod.container['readinessProbe'])}://{pod.place.address}:{pod.place.ports['http']}"


def later(after_s: float, action: Callable[..., object], *arguments: object) -> None:
    """Call the action after this delay."""
    timer = threading.Timer(after_s, action, arguments)
    timer.daemon = True
    timer.start()
