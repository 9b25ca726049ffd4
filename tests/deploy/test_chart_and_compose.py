"""The chart and docker-compose.yml run the same parts: commands, settings, limits, volumes and health checks.

Where they differ on purpose the difference stands here, with its reason.
"""

from __future__ import annotations

import re

import pytest

from benchmarks.harness.compose import ROOT
from tests.deploy.chart import Manifest, environment_of, named, pods, rendered_variant
from tests.deploy.compose_values import COMPOSE, filled_in, seconds_of

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
SERVICE_OF = {
    "app": "app",
    "archive": "archive",
    "trainer": "trainer",
    "redis": "redis",
    "balancer": "haproxy",
    "consume": "consume",
    "publish": "publish",
    "redis-node": "redis-1",
    "redis-cluster": "redis-cluster",
}
# without brokers, and without primaries, there is none
VARIANT_OF = {
    "consume": "everything",
    "publish": "a publisher",
    "redis-node": "a cluster",
    "redis-cluster": "a cluster",
}
OF_THE_IMAGE = ("app", "archive", "trainer", "consume", "publish")
STAYING = ("app", "archive", "redis", "balancer")

# What only one of the two has, or has otherwise: (the chart's, the compose file's); None is neither.
DIFFERENT_SETTINGS: dict[str, dict[str, tuple[str | None, str | None]]] = {
    "app": {
        "LISAREC_DRAIN_S": ("10", None),  # others than one HAProxy have to notice, too
        "LISAREC_REDIS_PASSWORD": (None, ""),  # in a Secret only
        "LISAREC_REDIS_URL": ("redis://lisarec@lisarec-redis:6379/0", "redis://lisarec@redis:6379/0"),
    },
    "archive": {
        "LISAREC_REDIS_PASSWORD": (None, ""),
        "LISAREC_REDIS_URL": ("redis://lisarec@lisarec-redis:6379/0", "redis://lisarec@redis:6379/0"),
    },
    "trainer": {
        "LISAREC_PORT": (None, "9465"),  # a Job that ends has no health
        "LISAREC_REDIS_PASSWORD": (None, ""),
        "LISAREC_REDIS_URL": ("redis://lisarec@lisarec-redis:6379/0", "redis://lisarec@redis:6379/0"),
    },
    "consume": {},
    "publish": {
        "LISAREC_REDIS_PASSWORD": (None, ""),
        "LISAREC_REDIS_URL": ("redis://lisarec@lisarec-redis:6379/0", "redis://lisarec@redis:6379/0"),
    },
    "balancer": {
        "LISAREC_APP": ("lisarec-app.shop.svc.cluster.local", "app"),
        "LISAREC_DNS": (None, "127.0.0.11:53"),  # of the pod's /etc/resolv.conf
        "LISAREC_MAX_CONNECTIONS_PER_SOURCE": ("2000", "1000"),  # behind an ingress all clients are one source
    },
}


def service(component: str) -> Manifest:
    """The service of the compose file with default values."""
    found: Manifest = filled_in(COMPOSE[SERVICE_OF[component]])
    return found


def pod(component: str) -> Manifest:
    found: Manifest = pods(rendered_variant(VARIANT_OF.get(component, "defaults")))[component]
    return found


def container(component: str) -> Manifest:
    (found,) = pod(component)["containers"]
    assert isinstance(found, dict)
    return found


def bytes_of(size: str) -> int:
    """Bytes of Kubernetes's Mi and Gi, or of Docker's m and g, which are equal."""
    number, unit = re.fullmatch(r"(\d+)([a-zA-Z]+)", size).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 2**20, "Gi": 2**30, "m": 2**20, "g": 2**30}[unit]


@pytest.mark.parametrize("component", [*OF_THE_IMAGE, "balancer"])
def test_settings_are_the_same(component: str) -> None:
    of_the_chart = environment_of(container(component))
    of_compose = {name: str(value) for name, value in service(component)["environment"].items()}
    names = of_the_chart.keys() | of_compose.keys()
    different = {
        name: (of_the_chart.get(name), of_compose.get(name))
        for name in names
        if of_the_chart.get(name) != of_compose.get(name)
    }
    assert different == DIFFERENT_SETTINGS[component]


@pytest.mark.parametrize("component", OF_THE_IMAGE)
def test_commands_of_the_service_are_the_same(component: str) -> None:
    """The trainer of the compose file loops; in the chart it starts once per round."""
    command = service(component)["command"]
    if component == "trainer":
        assert command[:3] == ["retrain", "--every", "24h"]
        command = ["retrain", *command[3:]]
    if component in VARIANT_OF:
        there = {
            "--brokers=": "--brokers=kafka-1:9092,kafka-2:9092",
            "--url=http://haproxy:8000": "--url=http://lisarec-balancer",
        }
        command = [there.get(word, word) for word in command]
    assert container(component)["args"] == command
    assert "command" not in container(component)  # the image's own ENTRYPOINT
    assert container(component)["image"].partition(":")[0] == service(component)["image"].partition(":")[0]


@pytest.mark.parametrize("component", ["redis", "redis-node"])
def test_redis_has_the_same_command_and_files(component: str) -> None:
    composed = service(component)
    assert container(component)["args"] == composed["command"]
    assert container(component)["image"] == composed["image"]
    assert environment_of({"env": [], **container(component)}) == composed.get("environment", {})
    mounted = {mount["mountPath"] for mount in container(component)["volumeMounts"]}
    of_compose = {volume.split(":")[1] for volume in composed["volumes"]}
    assert of_compose - mounted == ({"/etc/redis-cluster.conf"} if component == "redis" else set())
    # who makes the passwords is a container of the same pod
    assert mounted - of_compose == {"/given", "/secrets", "/usr/local/bin/make-secrets"}
    (secrets,) = pod(component)["initContainers"]
    assert secrets["command"] == filled_in(COMPOSE["secrets"]["entrypoint"])
    assert bytes_of(secrets["resources"]["limits"]["memory"]) == bytes_of(COMPOSE["secrets"]["mem_limit"])


def test_a_cluster_has_the_same_command_and_settings() -> None:
    """The password of `admin` comes from the Secret, because each node has its own /acl."""
    keeper, composed = container("redis-cluster"), service("redis-cluster")
    assert keeper["image"] == composed["image"]
    assert [word.replace("/given/", "/acl/") for word in keeper["command"]] == composed["entrypoint"]
    nodes = {f"lisarec-redis-node-{n}.lisarec-redis-node:6379": f"redis-{n + 1}:6379" for n in range(6)}
    assert [nodes[word] for word in keeper["args"]] == composed["command"]
    stateful_set = named(rendered_variant("a cluster"), "StatefulSet", "redis-node")["spec"]
    assert (stateful_set["replicas"], stateful_set["serviceName"]) == (len(nodes), "lisarec-redis-node")
    assert environment_of(keeper) == {"LISAREC_KEEP_REPLICAS": "1"}  # its default
    lines = (ROOT / "docker" / "cluster.env").read_text().splitlines()
    of_compose = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    of_the_app = environment_of(pods(rendered_variant("a cluster"))["app"]["containers"][0])
    assert of_the_app["LISAREC_REDIS_REPLICAS"] == of_compose["LISAREC_REDIS_REPLICAS"]
    url = of_the_app["LISAREC_REDIS_URL"]
    for here, there in nodes.items():
        url = url.replace(here, there)
    assert url == of_compose["LISAREC_REDIS_URL"]


def test_haproxy_has_the_same_configuration_and_image_options() -> None:
    (volume,) = service("balancer")["volumes"]
    mount_path = container("balancer")["volumeMounts"][0]["mountPath"]
    assert volume.split(":")[1] == f"{mount_path}/haproxy.cfg"
    assert container("balancer")["command"][2].endswith(f"exec haproxy -W -db -f {mount_path}/haproxy.cfg")
    assert container("balancer")["image"] == service("balancer")["image"]


@pytest.mark.parametrize("component", SERVICE_OF)
def test_limits_are_the_same(component: str) -> None:
    limits = container(component)["resources"]["limits"]
    assert bytes_of(limits["memory"]) == bytes_of(service(component)["mem_limit"])
    cpus = float(service(component)["cpus"])
    assert limits.get("cpu") == (f"{cpus:g}" if cpus else None)


@pytest.mark.parametrize("component", OF_THE_IMAGE)
def test_volumes_are_the_same(component: str) -> None:
    of_the_chart = {mount["mountPath"]: mount.get("readOnly", False) for mount in container(component)["volumeMounts"]}
    (tmpfs,) = service(component)["tmpfs"]
    of_compose = {volume.split(":")[1]: volume.endswith(":ro") for volume in service(component)["volumes"]}
    assert of_the_chart == {tmpfs: False, **of_compose}
    (tmp,) = (volume for volume in pod(component)["volumes"] if volume["name"] == "tmp")
    assert tmp["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("component", SERVICE_OF)
def test_hardening_is_the_same(component: str) -> None:
    composed, security = service(component), container(component)["securityContext"]
    assert security["readOnlyRootFilesystem"] is composed["read_only"]
    assert security["capabilities"]["drop"] == composed["cap_drop"]
    assert (not security["allowPrivilegeEscalation"]) == ("no-new-privileges:true" in composed["security_opt"])
    # nobody's command is process 1 where Docker's init is
    assert pod(component).get("shareProcessNamespace", False) == composed.get("init", False)


@pytest.mark.parametrize("component", OF_THE_IMAGE)
def test_users_equal_those_of_the_image(component: str) -> None:
    (user,) = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.M)
    security = pod(component)["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == tuple(map(int, user))
    assert security["fsGroup"] == int(user[1])  # so that files of a Secret can be read


@pytest.mark.parametrize("component", SERVICE_OF)
def test_termination_grace_periods_are_the_same(component: str) -> None:
    """Plus the pre-stop sleep and a longer drain than Docker's second."""
    grace_s = pod(component)["terminationGracePeriodSeconds"]
    waiting_s = container(component).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    draining_s = int(environment_of(container("app"))["LISAREC_DRAIN_S"]) if component == "app" else 0
    assert grace_s - waiting_s - draining_s == seconds_of(service(component)["stop_grace_period"])


@pytest.mark.parametrize("component", ["app", "archive", "consume", "publish"])
def test_readiness_probes_equal_the_healthcheck_of_the_image(component: str) -> None:
    (interval, timeout, start, retries) = re.findall(
        r"HEALTHCHECK --interval=(\d+)s --timeout=(\d+)s --start-period=(\d+)s --retries=(\d+)", DOCKERFILE
    )[0]
    probe = container(component)["readinessProbe"]
    assert (probe["periodSeconds"], probe["timeoutSeconds"]) == (int(interval), int(timeout))
    assert probe.get("failureThreshold", 3) == int(retries)
    (path,) = re.findall(r"GET (/\w+) HTTP", DOCKERFILE)
    (port,) = (port for port in container(component)["ports"] if port["name"] == probe["httpGet"]["port"])
    served = environment_of(container(component)).get("LISAREC_PORT", re.findall(r"LISAREC_PORT=(\d+)", DOCKERFILE)[0])
    assert (probe["httpGet"]["path"], port["containerPort"]) == (path, int(served))
    if starting := container(component).get("startupProbe"):
        assert starting["periodSeconds"] * starting["failureThreshold"] == int(start)


@pytest.mark.parametrize("component", ["redis", "redis-node"])
def test_redis_probes_equal_its_healthcheck(component: str) -> None:
    """A cluster node also checks its role, because roll-outs and evictions wait for readiness."""
    check, probe = service(component)["healthcheck"], container(component)["readinessProbe"]
    ping = check["test"][1]
    questions = ("role | grep -Eqx 'master|connected'", "cluster info | grep -q cluster_state:ok")
    of_a_node = [ping.replace("ping | grep -q PONG", question) for question in questions]
    script = ping if component == "redis" else " && ".join([ping, *of_a_node])
    assert probe["exec"]["command"] == ["sh", "-c", script]
    assert check["test"][0] == "CMD-SHELL"
    assert (probe["periodSeconds"], probe["timeoutSeconds"]) == (
        seconds_of(check["interval"]),
        seconds_of(check["timeout"]),
    )
    assert "livenessProbe" not in container(component)


def test_long_running_services_are_the_same() -> None:
    staying = {name for name, service in COMPOSE.items() if "restart" in service and "profiles" not in service}
    of_watching = {"prometheus", "grafana"}  # the cluster's own
    assert {SERVICE_OF[component] for component in pods(rendered_variant("defaults"))} == staying - of_watching
    variants = ("everything", "a cluster")
    assert {component for name in variants for component in pods(rendered_variant(name))} == SERVICE_OF.keys()
    kinds = {component: "StatefulSet" if component == "redis" else "Deployment" for component in STAYING}
    for component, kind in kinds.items():
        assert named(rendered_variant("defaults"), kind, component)
    assert named(rendered_variant("defaults"), "CronJob", "trainer")["spec"]["concurrencyPolicy"] == "Forbid"
