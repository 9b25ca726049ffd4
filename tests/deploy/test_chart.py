"""The rendered Helm chart: valid for the last three versions of Kubernetes, hardened, and isolated."""

from __future__ import annotations

import base64
import importlib
import json
import re
from typing import Any

import pytest
import yaml

from app.settings import Settings
from benchmarks.harness.compose import ROOT
from tests.deploy.chart import (
    CHART,
    EVERYTHING,
    RELEASE,
    VARIANTS,
    Manifest,
    environment_of,
    helm,
    named,
    peers,
    pods,
    render,
    rendered_variant,
)

DOCKER = ROOT / "docker"
VALUES = yaml.load((CHART / "values.yaml").read_text(), yaml.CSafeLoader)
VERSIONS = ("1.35", "1.36", "1.37")
OF_THE_OPERATOR = "monitoring.coreos.com/v1"  # whose schemas are not Kubernetes's


@pytest.fixture(scope="module")
def kubernetes() -> Any:
    """The package kubernetes_validate, imported here because its import takes seconds."""
    return importlib.import_module("kubernetes_validate")


@pytest.fixture(scope="module", params=VARIANTS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered_variant(request.param)


def test_helm_lint_passes() -> None:
    for values in VARIANTS.values():
        linted = helm("lint", str(CHART), "--strict", values=values)
        assert linted.returncode == 0, linted.stdout + linted.stderr


def test_the_tested_kubernetes_versions_are_the_newest_with_schemas(kubernetes: Any) -> None:
    newest = [".".join(version.split(".")[:2]) for version in kubernetes.utils.all_versions()]
    assert tuple(dict.fromkeys(newest))[-3:] == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_matches_its_schema(version: str, kubernetes: Any) -> None:
    objects = {json.dumps(one): one for values in VARIANTS.values() for one in render(values, version)}
    for manifest in objects.values():
        if manifest["apiVersion"] != OF_THE_OPERATOR:
            assert kubernetes.validate(manifest, version, strict=True) == version


def test_an_unknown_field_is_detected(kubernetes: Any) -> None:
    deployment = named(render(), "Deployment", "app")
    deployment["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(deployment, VERSIONS[-1], strict=True)


def test_older_clusters_are_refused() -> None:
    refused = helm("template", RELEASE, str(CHART), "--kube-version", "1.29")
    assert refused.returncode != 0
    assert "1.30" in refused.stderr


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"app": {"replica": 3}}, "additional properties 'replica' not allowed"),
        ({"settings": {"LISAREC_MAX_COST": 100}}, "got number, want string"),
        ({"settings": {"MAX_COST": "100"}}, "invalid propertyName 'MAX_COST'"),
        ({"redis": {"url": "localhost:6379"}}, "/redis/url"),
        ({"redis": {"cluster": {"primaries": 2}}}, "/redis/cluster/primaries"),
        ({"redis": {"cluster": {"primaries": 3}, "url": "redis://a"}}, "redis.url names another Redis, and"),
        (
            {"redis": {"tlsSecret": "redis-tls", "url": "redis://a"}},
            "redis.url names another Redis, and redis.tlsSecret",
        ),
        ({"storage": {"archive": {"url": "https://shop/archive"}}}, "/storage/archive/url"),
        ({"ingress": {"enabled": True, "host": "a.example"}}, "ingress.tlsSecret is the Secret of the certificate"),
        ({"ingress": {"enabled": True, "tlsSecret": "a"}}, "ingress.host is the name of your service"),
    ],
)
def test_invalid_values_are_refused_and_named(values: dict[str, Any], reason: str) -> None:
    refused = helm("template", RELEASE, str(CHART), values=values)
    assert refused.returncode != 0
    assert reason in refused.stderr


def test_the_chart_ships_the_files_of_docker() -> None:
    """Links, which Helm follows; copies would diverge."""
    for file in (CHART / "files").iterdir():
        assert file.is_symlink()
        assert file.resolve().is_relative_to(DOCKER)
    manifests = rendered_variant("everything")
    assert named(manifests, "ConfigMap", "balancer")["data"] == {"haproxy.cfg": (DOCKER / "haproxy.cfg").read_text()}
    names = ("make-secrets", "redis-load-users", "redis-start", "redis.conf")
    of_redis = {name: (DOCKER / "redis" / name).read_text() for name in names}
    assert named(manifests, "ConfigMap", "redis")["data"] == of_redis


def test_every_pod_is_hardened_and_has_limits(manifests: list[Manifest]) -> None:
    for component, pod in pods(manifests).items():
        assert pod["enableServiceLinks"] is False, component
        assert pod["automountServiceAccountToken"] is False, component
        assert pod["securityContext"]["runAsNonRoot"] is True, component
        assert pod["securityContext"]["runAsUser"] > 0, component
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, component
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, component
            assert "memory" in container["resources"]["limits"], component
            assert ":" in container["image"].rpartition("/")[2], component


def test_no_environment_or_command_contains_secrets(manifests: list[Manifest]) -> None:
    secrets = [
        base64.b64decode(text).decode()
        for manifest in manifests
        if manifest["kind"] == "Secret"
        for text in manifest["data"].values()
    ]
    for manifest in manifests:
        if manifest["kind"] != "Secret":
            assert not any(secret in yaml.safe_dump(manifest) for secret in secrets)
    for component, pod in pods(manifests).items():
        names = {variable["name"] for container in pod["containers"] for variable in container.get("env", ())}
        assert not any(name.endswith("PASSWORD") for name in names), component


def test_every_referenced_object_exists_or_comes_from_a_value() -> None:
    manifests = rendered_variant("defaults")
    there = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    there.add(("Secret", VALUES["keys"]["secret"]))
    for pod in pods(manifests).values():
        for volume in pod["volumes"]:
            for kind, source, name in (
                ("ConfigMap", "configMap", "name"),
                ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
                ("Secret", "secret", "secretName"),
            ):
                if source in volume:
                    assert (kind, volume[source][name]) in there
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        claimed = {"data"} if "redis" in str(pod["containers"]) else set()
        assert mounted - claimed <= {volume["name"] for volume in pod["volumes"]}


def test_selectors_match_pods_and_ports_exist(manifests: list[Manifest]) -> None:
    labels = {component: {"app.kubernetes.io/component": component} for component in pods(manifests)}
    for manifest in manifests:
        if manifest["kind"] in ("Service", "PodDisruptionBudget", "Deployment", "StatefulSet"):
            selector = manifest["spec"]["selector"]
            selected = selector.get("matchLabels", selector)
            assert selected["app.kubernetes.io/instance"] == RELEASE
            assert any(selected.items() >= one.items() for one in labels.values()), manifest["metadata"]["name"]
        if manifest["kind"] == "Service":
            component = manifest["spec"]["selector"]["app.kubernetes.io/component"]
            ports = {
                port["name"] for container in pods(manifests)[component]["containers"] for port in container["ports"]
            }
            assert {port["targetPort"] for port in manifest["spec"]["ports"]} <= ports


def test_with_model_keys_pods_load_signed_models_and_only_the_trainer_signs() -> None:
    digest = "sha256:" + 64 * "a"
    signing = {"modelKeys": {"secret": "public"}, "trainer": {"signingKey": {"secret": "private"}}}
    found = pods(render({**signing, "image": {"repository": "registry.example/lisarec", "digest": digest}}))
    for component in ("app", "archive", "trainer"):
        (container,), volumes = found[component]["containers"], found[component]["volumes"]
        assert container["image"] == f"registry.example/lisarec@{digest}"
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        secrets = {one["secret"]["secretName"]: one["name"] for one in volumes if "secret" in one}
        keys_file = environment_of(container)["LISAREC_MODEL_KEYS_FILE"]
        assert keys_file == f"{mounted[secrets['public']]}/model_keys.pem"
        assert ("private" in secrets) == (component == "trainer")
        assert ("LISAREC_MODEL_SIGNING_KEY_FILE" in environment_of(container)) == (component == "trainer")
    signing_key = environment_of(found["trainer"]["containers"][0])["LISAREC_MODEL_SIGNING_KEY_FILE"]
    assert signing_key.startswith("/signing-key/")


def test_trainer_limits_may_be_settings() -> None:
    (trainer,) = pods(render({"settings": {"LISAREC_RETRAIN_MEMORY": "3GiB"}}))["trainer"]["containers"]
    assert [one["value"] for one in trainer["env"] if one["name"] == "LISAREC_RETRAIN_MEMORY"] == ["3GiB"]


def test_with_buckets_no_volume_is_shared() -> None:
    manifests = rendered_variant("buckets")
    assert not any(manifest["kind"] == "PersistentVolumeClaim" for manifest in manifests)
    for component in ("app", "archive", "trainer"):
        pod = pods(manifests)[component]
        (container,) = pod["containers"]
        environment = environment_of(container)
        assert environment["LISAREC_ARCHIVE_DIR"] == "s3://shop/archive"
        assert environment["LISAREC_MODELS_DIR"] == "s3://shop/models"
        assert environment["LISAREC_MODEL_DIR"] == "s3://shop/models/shop"
        assert container["envFrom"] == [{"secretRef": {"name": "bucket-keys"}}]
        assert pod["serviceAccountName"] == "recommender"
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted - {"/keys"} == {"/tmp", "/secrets", environment["LISAREC_CACHE_DIR"]}
        policy = named(manifests, "NetworkPolicy", component)["spec"]
        *_, bucket, identity = policy["egress"]
        assert (bucket, identity["ports"]) == ({"ports": [{"port": 443}]}, [{"port": 80}, {"port": 988}])
        assert {"169.254.169.254/32", "169.254.170.23/32"} < {one["ipBlock"]["cidr"] for one in identity["to"]}
    assert "envFrom" not in pods(manifests)["redis"]["containers"][0]


def test_without_a_service_account_pods_cannot_reach_node_credentials() -> None:
    storage = {"models": {"url": "s3://shop/models"}, "bucket": {"secret": "bucket-keys"}}
    assert "ipBlock" not in str(render({"storage": storage}))


def test_network_policies_allow_only_required_traffic() -> None:
    manifests = rendered_variant("defaults")
    policies = {
        manifest["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: manifest["spec"]
        for manifest in manifests
        if manifest["kind"] == "NetworkPolicy"
    }
    assert policies.keys() == pods(manifests).keys()
    assert all(policy["policyTypes"] == ["Ingress", "Egress"] for policy in policies.values())
    reached = {
        component: [(rule["ports"][0]["port"], peers(rule, "from")) for rule in policy["ingress"]]
        for component, policy in policies.items()
    }
    assert reached == {
        "balancer": [("http", {"anybody"}), ("metrics", {"others"})],
        "app": [("http", {"others"}), ("http", {"balancer"})],
        "archive": [("metrics", {"others"})],
        "trainer": [("metrics", {"others"})],
        "redis": [("redis", {"app", "archive", "trainer"})],
    }
    reaches = {
        component: [(rule["ports"][0]["port"], peers(rule, "to")) for rule in policy["egress"]]
        for component, policy in policies.items()
    }
    of_the_store = [(53, {"anybody"}), (6379, {"redis"})]
    assert reaches == {
        "balancer": [(53, {"anybody"}), (8000, {"app"})],
        "app": of_the_store,
        "archive": of_the_store,
        "trainer": of_the_store,
        "redis": [],
    }


def test_a_publisher_reaches_redis_and_the_brokers_alone() -> None:
    policies = {
        component: named(rendered_variant("a publisher"), "NetworkPolicy", component)["spec"]
        for component in ("publish", "redis")
    }
    reaches = [(rule["ports"][0]["port"], peers(rule, "to")) for rule in policies["publish"]["egress"]]
    assert reaches == [(53, {"anybody"}), (6379, {"redis"}), (9092, {"anybody"})]
    assert "publish" in peers(policies["redis"]["ingress"][0], "from")


def test_ingress_uses_tls_through_the_load_balancer() -> None:
    manifests = rendered_variant("everything")
    ingress = named(manifests, "Ingress", "balancer")["spec"]
    assert ingress["tls"] == [{"hosts": ["recs.shop.example"], "secretName": "recs-tls"}]
    (rule,) = ingress["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": f"{RELEASE}-balancer", "port": {"name": "http"}}
    assert not any(manifest["kind"] == "Ingress" for manifest in rendered_variant("defaults"))
    kinds = {manifest["spec"].get("type", "ClusterIP") for manifest in manifests if manifest["kind"] == "Service"}
    assert kinds == {"ClusterIP"}


def test_pods_scale_by_cpu_and_queue_up_to_the_slots_of_the_load_balancer() -> None:
    manifests = rendered_variant("everything")
    scaler = named(manifests, "HorizontalPodAutoscaler", "app")["spec"]
    by_type = {metric["type"]: metric for metric in scaler["metrics"]}
    assert by_type["Resource"]["resource"]["target"] == {"type": "AverageValue", "averageValue": "500m"}
    queue = by_type["Pods"]["pods"]
    assert queue["metric"] == {"name": "lisarec_queue_depth", "selector": {"matchLabels": {"queue": "requests"}}}
    assert int(queue["target"]["averageValue"]) < Settings.model_fields["max_requests"].default
    deployment = named(manifests, "Deployment", "app")["spec"]
    assert "replicas" not in deployment  # each upgrade would undo what the autoscaler has done
    balancer = environment_of(pods(manifests)["balancer"]["containers"][0])
    assert int(balancer["LISAREC_MAX_REPLICAS"]) >= 2 * scaler["maxReplicas"]
    retries = int(re.findall(r"^ *retries (\d+)$", (DOCKER / "haproxy.cfg").read_text(), re.M)[0])
    assert scaler["behavior"]["scaleUp"]["policies"][0]["value"] <= retries
    fixed = named(rendered_variant("another Redis"), "Deployment", "app")["spec"]
    assert fixed["replicas"] == VALUES["app"]["replicas"]


def test_pods_drain_before_termination(manifests: list[Manifest]) -> None:
    pod = pods(manifests)["app"]
    drain_s = float(environment_of(pod["containers"][0])["LISAREC_DRAIN_S"])
    assert pod["terminationGracePeriodSeconds"] > drain_s + Settings.model_fields["shutdown_timeout_s"].default
    balancer = pods(manifests)["balancer"]
    sleep_s = balancer["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    hard_stop_s = int(re.findall(r"hard-stop-after (\d+)s", (DOCKER / "haproxy.cfg").read_text())[0])
    assert balancer["terminationGracePeriodSeconds"] > sleep_s + hard_stop_s


def test_disruption_budgets_allow_one_pod_of_a_kind_at_a_time() -> None:
    manifests = rendered_variant("defaults")
    budgets = [one["spec"] for one in manifests if one["kind"] == "PodDisruptionBudget"]
    assert {budget["selector"]["matchLabels"]["app.kubernetes.io/component"] for budget in budgets} == {
        "app",
        "balancer",
    }
    for budget in budgets:
        assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    for component in ("app", "balancer"):
        spread = pods(manifests)[component]["topologySpreadConstraints"]
        assert [one["topologyKey"] for one in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


def test_monitoring_equals_the_compose_file() -> None:
    manifests = rendered_variant("everything")
    monitors = [manifest for manifest in manifests if manifest["kind"] == "ServiceMonitor"]
    services = {one["metadata"]["name"]: one for one in manifests if one["kind"] == "Service"}
    for monitor in monitors:
        service = services[monitor["metadata"]["name"]]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert monitor["metadata"]["labels"]["release"] == EVERYTHING["monitoring"]["labels"]["release"]  # type: ignore[index]
    of_the_trainer = named(manifests, "PodMonitor", "trainer")["spec"]
    (container,) = pods(manifests)["trainer"]["containers"]
    assert [one["name"] for one in container["ports"]] == [one["port"] for one in of_the_trainer["podMetricsEndpoints"]]
    # the job of a target is the label of its Service, and alerts select by jobs
    jobs = {
        services[monitor["metadata"]["name"]]["metadata"]["labels"]["app.kubernetes.io/component"]
        for monitor in monitors
    }
    rules = named(manifests, "PrometheusRule", "app")["spec"]["groups"]
    asked = set(re.findall(r'job=~?"([\w|]+)"', str(rules)))
    assert {job for one in asked for job in one.split("|")} <= jobs
    written = yaml.safe_load((DOCKER / "prometheus" / "alerts.yml").read_text())["groups"]
    left_out = {"NoTrainer", "TrainingFails", "ModelOld"}  # the trainer is a Job
    assert [rule for group in written for rule in group["rules"] if rule["alert"] not in left_out] == [
        rule for group in rules for rule in group["rules"]
    ]
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    (balancer,) = (one for one in config["scrape_configs"] if one["job_name"] == "haproxy")
    endpoint = named(manifests, "ServiceMonitor", "balancer")["spec"]["endpoints"][0]
    (relabelling,) = balancer["metric_relabel_configs"]
    assert endpoint["metricRelabelings"] == [
        {"sourceLabels": relabelling["source_labels"], "regex": relabelling["regex"], "action": relabelling["action"]}
    ]
    board = named(manifests, "ConfigMap", "dashboard")
    assert board["data"]["lisarec.json"] == (DOCKER / "grafana" / "dashboards" / "lisarec.json").read_text()


def bytes_of(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+) ?([kMGT]i?[bB]?|gb)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"Mi": 2**20, "Gi": 2**30, "GiB": 2**30, "gb": 2**30}[unit]


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the table with this header."""
    lines = text.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.lstrip("# ").startswith(f"| {first}"))
    rows = []
    for line in lines[begin + 2 :]:
        if not line.lstrip("# ").startswith("|"):
            break
        rows.append([cell.strip() for cell in line.lstrip("# ").strip("|").split("|")])
    return rows


def test_sizes_equal_the_sizing_table() -> None:
    """Redis's memory in the table is twice its data; its disk holds a log and its replacement."""
    page = (ROOT / "docs" / "how-to" / "deploy" / "capacity-planning.md").read_text()
    begin = page.index("## What a shop needs")
    needed = {row[0]: row for row in table(page[begin:], "users")}
    sizes = table((CHART / "values.yaml").read_text(), "users")
    assert len(sizes) == 3
    for users, replicas, maxmemory, memory, disk, archive in sizes:
        _, _, _, service, of_redis, of_the_disk, of_the_archive = needed[users]
        assert int(replicas) >= int(service.split()[0])
        assert 2 * bytes_of(maxmemory) >= bytes_of(of_redis.split(", ")[1])
        assert bytes_of(memory) >= 2.5 * bytes_of(maxmemory)
        assert bytes_of(disk) >= bytes_of(of_the_disk)
        assert bytes_of(archive) >= bytes_of(of_the_archive)
    assert sizes[0][1:] == [
        str(VALUES["autoscaling"]["minReplicas"]),
        VALUES["redis"]["maxmemory"],
        VALUES["redis"]["resources"]["limits"]["memory"],
        VALUES["redis"]["storage"]["size"],
        VALUES["storage"]["archive"]["size"],
    ]
