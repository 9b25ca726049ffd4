"""The part of the settings page about variables that containers read, generated from the files that read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from app.settings import PREFIX, Settings
from website.markdown import code, table, with_code

ROOT = Path(__file__).parents[1]
READERS = {
    "Compose": ROOT / "docker-compose.yml",
    "HAProxy": ROOT / "docker" / "haproxy.cfg",
    "`redis-cluster-keep`": ROOT / "docker" / "redis" / "redis-cluster-keep",
}
VARIABLE = re.compile(r"\$\{([A-Z_]+):?-([^}]*)\}")
HEADING = "Variables of the containers"
INTRODUCTION = """`docker-compose.yml`, `docker/haproxy.cfg` and `docker/redis/redis-cluster-keep` read these variables; the second column has the defaults of these files.
[Set variables](../how-to/deploy/docker-compose.md#set-variables) explains where to write them.
`docker-compose.yml` itself sets those that only `docker/haproxy.cfg` reads.
`lisarec retrain` itself reads `LISAREC_RETRAIN_FULL_EVERY` and the four after it, so they work without containers, too.
"""
GROUPS = {  # headings, and what the variables below them mean; of a setting, what its description does not say
    "Service": {
        "LISAREC_PUBLISH": "Address and port of the service on the host.",
        "LISAREC_VERSION": "Tag of the image `lisarec`, see [Upgrade](../how-to/deploy/upgrade.md).",
        "TORCH_INDEX": "Package index from which the image takes torch. `default` takes the build with CUDA.",
        "LISAREC_REPLICAS": "Number of replicas of the service.",
        "LISAREC_WORKERS": "",
        "LISAREC_MODEL": "Model in the volume `models` to start with. `train` writes it, or `current` if it is unset.",
        "LISAREC_DATA": "Data directory of `train`.",
        "LISAREC_RETRAIN_EVERY": "Interval of the trainer, such as 30m or 7d.",
        "LISAREC_RETRAIN_FULL_EVERY": "Train every nth model in full, see [Train on large data](../how-to/models/train-on-large-data.md).",
        "LISAREC_RETRAIN_MAX_EVENTS": "Number of the newest events that a round reads, see [Retrain the model](../how-to/models/retrain.md#bound-the-memory).",
        "LISAREC_RETRAIN_EVENTS_PER_USER": "Maximum events per user and epoch. Default: no limit.",
        "LISAREC_RETRAIN_USERS_SAMPLE": "Share of users to train on.",
        "LISAREC_RETRAIN_MEMORY": "Memory limit of each training, such as 3GiB. Default: events are in memory.",
        "LISAREC_KEEP_TAIL": "Seconds that an archived event stays in Redis, see [Archive](../how-to/operate/archive.md).",
        "LISAREC_STATE_TTL_DAYS": "Events stay, and the state is folded again when the user returns.",
        "LISAREC_TENANT": "",
        "LISAREC_TENANTS": "See [Serve several tenants](../how-to/operate/tenants.md).",
        "LISAREC_SEAL_KEYS_FILE": "See [Sealed states](../how-to/integrate/sealed-states.md).",
        "LISAREC_SEALED_STATE_DAYS": "",
        "LISAREC_LOG_LEVEL": "",
        "LISAREC_LOG_FORMAT": "",
    },
    "Redis": {
        "LISAREC_REDIS_MAXMEMORY": "Limit of the data in Redis, see [Capacity planning](../how-to/deploy/capacity-planning.md).",
        "LISAREC_REDIS_URL": "See [Managed Redis](../how-to/deploy/managed-redis.md).",
        "LISAREC_OWN_REDIS": "Number of containers of the service `redis`. 0 for a Redis of your own or a cluster.",
        "LISAREC_REDIS_PASSWORD": "",
        "LISAREC_REDIS_PASSWORD_FILE": "Set it to nothing for a Redis without a password.",
        "LISAREC_REDIS_PREFIX": "",
        "LISAREC_REDIS_REPLICAS": "See [Redis Cluster](../how-to/deploy/redis-cluster.md).",
        "LISAREC_REDIS_REPLICAS_TIMEOUT_S": "",
        "LISAREC_REDIS_REPLICAS_SYNCED": "",
        "LISAREC_KEEP_EVERY_S": "Seconds after which the nodes of a cluster are introduced to each other again.",
        "LISAREC_KEEP_REPLICAS": "Replicas of each primary in the cluster that it creates.",
    },
    "Load balancer": {
        "LISAREC_BIND": "Address to listen on. `:8000` is all of IPv4, `[::]:8000` all of IPv6 and IPv4.",
        "LISAREC_METRICS_BIND": "Address of the load balancer's metrics for Prometheus.",
        "LISAREC_DNS": "Name server, as ADDRESS:PORT.",
        "LISAREC_APP": "Name that resolves to all replicas.",
        "LISAREC_APP_CA": "File of the authorities whose certificates the replicas show; they must name LISAREC_APP. Default: replicas have no TLS.",
        "LISAREC_APP_PORT": "Port of the replicas.",
        "LISAREC_MAX_REPLICAS": "Maximum number of replicas that are found.",
        "LISAREC_MAX_CONNECTIONS": "Maximum number of connections of all clients. Each may take 0.8 MiB of LISAREC_HAPROXY_MEMORY.",
        "LISAREC_MAX_CONNECTIONS_PER_SOURCE": "Maximum number of connections of one IPv4 address or IPv6 /64 network. Further ones are closed at once.",
        "LISAREC_MAX_REQUESTS_PER_REPLICA": "Requests that one replica works on. Further ones wait for up to 10 s. Keep it below LISAREC_MAX_REQUESTS times the workers of a replica.",
        "LISAREC_PROXY_PROTOCOL_FROM": "Addresses and networks, separated by spaces, of proxies in front that name their clients with the PROXY protocol, see [TLS](../how-to/deploy/tls.md).",
        "LISAREC_FORWARDED_FOR_FROM": "Addresses and networks, separated by spaces, of proxies in front that name their clients in `X-Forwarded-For`.",
    },
    "Kafka": {
        "LISAREC_KAFKA_BROKERS": "Brokers of the profiles `kafka` and `publish`, see [Kafka](../how-to/integrate/kafka.md).",
        "LISAREC_KAFKA_TOPIC": "Topic with the events to consume.",
        "LISAREC_KAFKA_GROUP": "Consumer group.",
        "LISAREC_KAFKA_LOG_TOPIC": "Topic to which the log is published.",
        "LISAREC_KAFKA_PROPERTIES": "File with options of the client, such as its login.",
    },
    "Memory, processors and monitoring": {
        "LISAREC_APP_MEMORY": "Memory of each replica, and of the archiver.",
        "LISAREC_REDIS_MEMORY": "Memory of each Redis container. Choose a little more than twice LISAREC_REDIS_MAXMEMORY.",
        "LISAREC_TRAINER_MEMORY": "Memory of the trainer, which has one core.",
        "LISAREC_TRAIN_MEMORY": "Memory of `train`.",
        "LISAREC_HAPROXY_MEMORY": "Memory of the load balancer.",
        "LISAREC_CPUS": "Processors for each container. 0 for all of them.",
        "LISAREC_GRAFANA_PUBLISH": "Address and port of the dashboard on the host. It is read-only and asks for no password.",
        "LISAREC_METRICS_DAYS": "Days that Prometheus keeps metrics.",
    },
}


def section() -> str:
    """Return the section."""
    tables = [f"### {heading}\n\n{_table(meanings)}\n" for heading, meanings in GROUPS.items()]
    return "\n".join([f"## {HEADING}\n", INTRODUCTION, *tables])


def variables() -> dict[str, dict[str, str]]:
    """Return the default of each variable, by variable and by the file that reads it."""
    found: dict[str, dict[str, str]] = {}
    for reader, file in READERS.items():
        for name, default in VARIABLE.findall(file.read_text(encoding="utf-8")):
            found.setdefault(name, {}).setdefault(reader, default)
    return found


def _table(meanings: dict[str, str]) -> str:
    return table(["variable", "default", "read by", "meaning"], _rows(meanings))


def _rows(meanings: dict[str, str]) -> Iterator[list[str]]:
    found = variables()
    for name, meaning in meanings.items():
        setting = Settings.model_fields.get(name.removeprefix(PREFIX).lower())
        text = " ".join(filter(None, [setting and setting.description, meaning]))
        default = next(iter(found[name].values()))
        yield [code(name), code(default) or "none", ", ".join(found[name]), with_code(text)]
