"""TLS between the chart's pods, as in docker/tls.yml: which pod gets which file, and real pods with certificates."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.harness.compose import ROOT
from benchmarks.harness.service_process import fetch
from tests.deploy.certificates import Authority, answers_without_tls, certificate_of, shown_certificate
from tests.deploy.chart import CHART, Manifest, environment_of, named, pods, rendered_variant
from tests.deploy.cluster import Cluster, url_of
from tests.deploy.compose_values import filled_in
from tests.deploy.kubelet import wait_until_ready
from tests.waiting import wait_until

DOCKER = ROOT / "docker"
BY_TLS = yaml.load((DOCKER / "tls.yml").read_text(), yaml.CSafeLoader)["services"]
VARIANTS = ("TLS", "TLS and a cluster")
# Services by their full names, of which the certificates have to have one.
APP, REDIS, NODE = (f"lisarec-{component}.shop.svc.cluster.local" for component in ("app", "redis", "redis-node"))
CLIENTS = ("app", "archive", "publish", "trainer")
EVERY_ENTRY = {"tls.crt", "tls.key", "ca.crt"}
VALUES: dict[str, Any] = {
    "model": "tiny",
    "app": {"drainSeconds": 1, "tlsSecret": "app-tls"},
    "balancer": {"drainSeconds": 1},
    "redis": {"tlsSecret": "redis-tls"},
}


@pytest.fixture(scope="module", params=VARIANTS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered_variant(request.param)


def container(manifests: list[Manifest], component: str) -> Manifest:
    (found,) = pods(manifests)[component]["containers"]
    assert isinstance(found, dict)
    return found


def readable(manifests: list[Manifest], secret: str) -> dict[str, dict[str, str]]:
    """Paths of Secret entries in the pods of each component."""
    found: dict[str, dict[str, str]] = {}
    for component, pod in pods(manifests).items():
        volumes = [one for one in pod["volumes"] if one.get("secret", {}).get("secretName") == secret]
        assert str(pod).count(repr(secret)) == len(volumes)  # nothing else names it
        everything = [{"key": entry, "path": entry} for entry in EVERY_ENTRY]
        for volume in volumes:
            mounts = container(manifests, component)["volumeMounts"]
            (path,) = (one["mountPath"] for one in mounts if one["name"] == volume["name"])
            items = volume["secret"].get("items", everything)
            found.setdefault(component, {}).update({f"{path}/{item['path']}": item["key"] for item in items})
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_servers_get_the_key_of_a_certificate(variant: str) -> None:
    manifests = rendered_variant(variant)
    entries = {
        secret: {component: set(files.values()) for component, files in readable(manifests, secret).items()}
        for secret in ("app-tls", "redis-tls")
    }
    assert entries["app-tls"] == {"app": EVERY_ENTRY, "balancer": {"ca.crt"}}
    of_redis = {
        "TLS": {"redis": EVERY_ENTRY},
        "TLS and a cluster": {"redis-node": EVERY_ENTRY, "redis-cluster": {"ca.crt"}},
    }
    assert entries["redis-tls"] == {**{component: {"ca.crt"} for component in CLIENTS}, **of_redis[variant]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_clients_reach_redis_by_a_name_in_its_certificate(variant: str) -> None:
    manifests = rendered_variant(variant)
    is_cluster = variant != "TLS"
    service = named(manifests, "Service", "redis-node" if is_cluster else "redis")["metadata"]
    assert f"{service['name']}.{service['namespace']}.svc.cluster.local" == (NODE if is_cluster else REDIS)
    addresses = ",".join(f"lisarec-redis-node-{n}.{NODE}:6379" for n in range(6)) if is_cluster else f"{REDIS}:6379/0"
    for component in CLIENTS:
        url, _, authority = environment_of(container(manifests, component))["LISAREC_REDIS_URL"].partition("?")
        assert url == f"rediss://lisarec@{addresses}"
        (path,) = readable(manifests, "redis-tls")[component]
        assert authority == f"ssl_ca_certs={path}"
    for name in (APP, REDIS, f"*.{NODE}"):  # which the operator has to know
        assert name in (CHART / "values.yaml").read_text()
        assert name in (ROOT / "docs" / "how-to" / "deploy" / "tls.md").read_text()


def test_redis_has_files_and_command_of_the_compose_file() -> None:
    files = {target: ROOT / source for source, target, _ in (one.split(":") for one in BY_TLS["redis"]["volumes"])}
    assert files.keys() == {"/etc/redis-plain.conf", "/etc/redis.conf", "/usr/local/sbin/redis-cli"}
    for variant, component in (("TLS", "redis"), ("TLS and a cluster", "redis-node")):
        manifests = rendered_variant(variant)
        mounts = {one["mountPath"]: one.get("subPath") for one in container(manifests, component)["volumeMounts"]}
        data = named(manifests, "ConfigMap", component)["data"]
        assert {target: data[mounts[target]] for target in files} == {
            target: file.read_text() for target, file in files.items()
        }
    single, plain = (container(rendered_variant(variant), "redis") for variant in ("TLS", "defaults"))
    assert single["args"] == plain["args"]
    *shell, script = filled_in(BY_TLS["redis-1"]["command"])
    script = script.replace('"$HOSTNAME"', f'"$HOSTNAME.{NODE}"')  # which resolves without the pod's search list
    assert container(rendered_variant("TLS and a cluster"), "redis-node")["args"] == [*shell, script]
    keeper = container(rendered_variant("TLS and a cluster"), "redis-cluster")
    mounts = {one["mountPath"]: one.get("subPath") for one in keeper["volumeMounts"]}
    data = named(rendered_variant("TLS and a cluster"), "ConfigMap", "redis-cluster")["data"]
    wrapper = files["/usr/local/sbin/redis-cli"].read_text()
    assert data[mounts["/usr/local/sbin/redis-cli"]] == wrapper
    (path,) = readable(rendered_variant("TLS and a cluster"), "redis-tls")["redis-cluster"]
    assert f"--cacert {path} " in wrapper


def test_replicas_are_called_over_tls_by_the_name_in_their_certificate(manifests: list[Manifest]) -> None:
    app, balancer = (environment_of(container(manifests, component)) for component in ("app", "balancer"))
    entries = {name: readable(manifests, "app-tls")["app"][app[name]] for name in app if "_TLS_" in name}
    assert entries == {"LISAREC_TLS_CERTIFICATE": "tls.crt", "LISAREC_TLS_KEY": "tls.key"}
    assert entries.keys() <= BY_TLS["app"]["environment"].keys()
    (authority,) = BY_TLS["haproxy"]["environment"]
    assert readable(manifests, "app-tls")["balancer"] == {balancer[authority]: "ca.crt"}
    assert balancer["LISAREC_APP"] == APP
    schemes = {
        (component, one["httpGet"].get("scheme", "HTTP"))
        for component in pods(manifests)
        for name, one in container(manifests, component).items()
        if name.endswith("Probe") and "httpGet" in one
    }
    others = {(component, "HTTP") for component in ("archive", "balancer", "publish")}
    assert schemes == {("app", "HTTPS"), *others}


def test_prometheus_scrapes_replicas_like_the_compose_file() -> None:
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus-tls.yml").read_text())
    of_compose = {job["job_name"]: job.get("scheme", "http") for job in config["scrape_configs"]}
    for monitor in (one for one in rendered_variant("TLS") if one["kind"] == "ServiceMonitor"):
        (endpoint,) = monitor["spec"]["endpoints"]
        component = monitor["metadata"]["labels"]["app.kubernetes.io/component"]
        job = "haproxy" if component == "balancer" else component
        assert endpoint.get("scheme", "http") == of_compose[job]
        if job == "app":
            secret = {"name": "app-tls", "key": "ca.crt"}
            assert endpoint["tlsConfig"] == {"ca": {"secret": secret}, "serverName": APP}
        else:
            assert "tlsConfig" not in endpoint


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def cluster(tmp_path: Path, model_dir: Path, authority: Authority) -> Iterator[Cluster]:
    models = tmp_path / "models"
    shutil.copytree(model_dir, models / model_dir.name)
    secrets = {
        "app-tls": authority.secret("app-tls", f"DNS:{APP}"),
        "redis-tls": authority.secret("redis-tls", "IP:127.0.0.1"),
    }
    cluster = Cluster(tmp_path, models, VALUES, secrets)
    for name in ("app", "archive", "redis"):
        (one,) = cluster.specs[name]["containers"]
        one["readinessProbe"] |= {"periodSeconds": 1}  # the probe of the chart, asked more often
    try:
        yield cluster
    finally:
        cluster.close()


def test_pods_use_only_tls_and_a_restart_loads_a_renewed_certificate(
    cluster: Cluster, authority: Authority, tmp_path: Path
) -> None:
    cluster.start()
    (app, *_), numbers = cluster.apps, count()
    with cluster.client() as client:

        def status() -> int:
            event = {"event_id": f"e-{next(numbers)}", "user_id": "ada", "item_id": "item-1"}
            return client.post("/v1/events", json=event).status_code

        def logs() -> str:
            return "".join(pod.log() for pod in cluster.apps)

        assert client.get("/readyz").json() == {"status": "ready"}
        assert status() == 200
        assert client.get("/v1/users/ada/recommendations").json()["source"] != "popular"
        archiver = cluster.start_job("archive")
        wait_until_ready(archiver)
        wait_until(lambda: (tmp_path / "archive" / "archive.json").exists(), archiver.log)

        assert url_of(app).startswith("https://")
        with pytest.raises(httpx.TransportError):
            fetch(f"{url_of(app).replace('https', 'http')}/readyz")
        of_the_app = certificate_of(cluster.secrets["app-tls"])
        assert shown_certificate(app.place.address, app.place.ports["http"]) == of_the_app

        assert cluster.redis is not None
        redis = cluster.redis
        for secret, refused in (
            (cluster.secrets["redis-tls"], ""),
            (authority.secret("redis-tls", "IP:127.0.0.1"), ""),
            (authority.secret("redis-tls", "DNS:other.shop.svc.cluster.local"), "subjectAltName"),
            (Authority(tmp_path / "another").secret("redis-tls", "IP:127.0.0.1"), "Add the certificate authority"),
        ):
            if secret is not cluster.secrets["redis-tls"]:
                redis.delete()
                cluster.secrets["redis-tls"] = secret
                redis = cluster.start_redis()
            expected = 503 if refused else 200
            wait_until(lambda expected=expected: status() == expected, logs)  # type: ignore[misc]
            wait_until(lambda refused=refused: refused in logs(), logs)  # type: ignore[misc]
            assert shown_certificate("127.0.0.1", redis.place.ports["redis"]) == certificate_of(secret)
            assert not answers_without_tls("127.0.0.1", redis.place.ports["redis"])
    login = "REDISCLI_AUTH=$(cat /acl/admin_password) redis-cli --user admin"
    assert redis.execute("sh", "-c", f"{login} config get port").split() == ["port", "0"]
