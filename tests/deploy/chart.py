"""The chart as rendered by Helm."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from benchmarks.harness.compose import ROOT
from tests.waiting import PATIENCE_S

CHART = ROOT / "deploy" / "helm" / "lisarec"
RELEASE = "lisarec"  # the name whose Services give containers variables LISAREC_...
NAMESPACE = "shop"

Manifest = dict[str, Any]

PUBLISH = {"publish": {"brokers": "kafka-1:9092,kafka-2:9092", "secret": "kafka"}}
# Everything that can be switched on.
EVERYTHING = {
    "autoscaling": {"queueDepth": 30},
    "consume": {"brokers": "kafka-1:9092,kafka-2:9092"},
    "imagePullSecrets": [{"name": "registry"}],
    "ingress": {
        "enabled": True,
        "host": "recs.shop.example",
        "tlsSecret": "recs-tls",
        "className": "nginx",
        "annotations": {"cert-manager.io/cluster-issuer": "letsencrypt"},
    },
    "modelKeys": {"secret": "model-keys"},
    "monitoring": {"enabled": True, "labels": {"release": "kube-prometheus-stack"}},
    "networkPolicy": {"clients": [{"podSelector": {}}]},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    **PUBLISH,
    "redis": {"storage": {"storageClass": "fast"}},
    "storage": {"models": {"storageClass": "shared"}, "archive": {"claim": "an-archive"}},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "trainer": {"signingKey": {"secret": "model-signing-key"}},
}
OTHER_REDIS = {
    "autoscaling": {"enabled": False},
    "networkPolicy": {"redis": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "redisPorts": [6379, 16379]},
    "redis": {"url": "rediss://lisarec@a:6379,b:6379", "passwordSecret": "managed-redis"},
    "trainer": {"enabled": False},
}
OPEN_REDIS = {"networkPolicy": {"enabled": False}, "redis": {"url": "redis://redis.other:6379/0"}}
BUCKETS = {
    "model": "shop",
    "storage": {
        "models": {"url": "s3://shop/models"},
        "archive": {"url": "s3://shop/archive"},
        "bucket": {"secret": "bucket-keys", "serviceAccount": "recommender"},
    },
}
CLUSTER = {"redis": {"cluster": {"primaries": 3}}}
TLS = {"app": {"tlsSecret": "app-tls"}, "redis": {"tlsSecret": "redis-tls"}, **PUBLISH}
TLS_CLUSTER = {**TLS, "redis": {"tlsSecret": "redis-tls", "cluster": {"primaries": 3}}}
VARIANTS: dict[str, Mapping[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "a publisher": PUBLISH,
    "another Redis": OTHER_REDIS,
    "a Redis without a password": OPEN_REDIS,
    "buckets": BUCKETS,
    "a cluster": CLUSTER,
    "TLS": {**TLS, "monitoring": {"enabled": True}},
    "TLS and a cluster": TLS_CLUSTER,
}


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Helm with arguments and additional values; return its output."""
    program = shutil.which("helm")
    if program is None:
        pytest.skip("Helm is not installed; .ci/install brings it")
    with TemporaryDirectory() as directory:
        file = Path(directory) / "values.json"
        file.write_text(json.dumps(values or {}))
        command = [program, *arguments, "--values", str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def render(values: Mapping[str, Any] | None = None, kubernetes: str = "1.37") -> list[Manifest]:
    """All objects of the release, for a cluster with the Prometheus operator."""
    options = ["--namespace", NAMESPACE, "--kube-version", kubernetes]
    rendered = helm("template", RELEASE, str(CHART), *options, values=values)
    assert rendered.returncode == 0, rendered.stderr
    return [manifest for manifest in yaml.load_all(rendered.stdout, yaml.CSafeLoader) if manifest]


@cache
def rendered_variant(name: str) -> list[Manifest]:
    """The objects of one of VARIANTS."""
    return render(VARIANTS[name])


def named(manifests: list[Manifest], kind: str, component: str) -> Manifest:
    """The object of a component with this kind."""
    name = f"{RELEASE}-{component}"
    (found,) = (one for one in manifests if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Pod specifications by component."""
    found = {}
    for manifest in manifests:
        spec = manifest.get("spec", {})
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template")
        if template is not None:
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template["spec"]
    return found


def secret(name: str, files: Mapping[str, bytes]) -> Manifest:
    """A Secret as created by the operator."""
    data = {entry: base64.b64encode(content).decode() for entry, content in files.items()}
    return {"kind": "Secret", "metadata": {"name": name}, "data": data}


def environment_of(container: Manifest) -> dict[str, str]:
    """Environment variables of a container."""
    return {variable["name"]: variable["value"] for variable in container["env"]}


def peers(rule: Manifest, direction: str) -> set[str]:
    """Components that a rule admits; `anybody` if it names none."""
    if not rule.get(direction):
        return {"anybody"}
    return {
        peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component", "others")
        for peer in rule[direction]
    }
