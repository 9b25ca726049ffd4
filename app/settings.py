"""The settings. This is the only file that reads the environment."""

import json
import os
import re
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.observability.log_format import LogFormat
from app.schemas.events import MAX_VALUE
from app.schemas.fields import Id
from storage.folders.folder import Folder
from storage.folders.place import Place, open_folder, parse_place
from storage.records import MAIN_TENANT, MAX_SEEN_ENTRIES

PREFIX = "LISAREC_"
SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"

# Variables with the same prefix that other programs read: the compose file, the load balancer, clients, tests.
NAMES_OF_OTHERS = (
    "APP APP_MEMORY APP_PORT BIND CPUS DATA DNS FORWARDED_FOR_FROM GRAFANA_PUBLISH HAPROXY_MEMORY KAFKA_BROKERS "
    "KAFKA_GROUP KAFKA_PROPERTIES KAFKA_TOPIC KEEP_EVERY_S KEEP_TAIL KEY MAXMEMORY MAX_CONNECTIONS "
    "MAX_CONNECTIONS_PER_SOURCE MAX_REPLICAS MAX_REQUESTS_PER_REPLICA "
    "METRICS_BIND METRICS_DAYS MODEL OWN_REDIS PROXY_PROTOCOL_FROM PUBLISH REDIS_MAXMEMORY REDIS_MEMORY REDIS_SERVERS "
    "REPLICAS RETRAIN_EVERY TRAINER_MEMORY TRAIN_MEMORY URL VERSION"
)

# Variables that Kubernetes gives every container for a Service whose name begins with "lisarec".
OF_KUBERNETES = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
ADDRESS_OF_KUBERNETES = re.compile(r"(tcp|udp|sctp)://\S+:\d+")  # of a Service named "lisarec", in LISAREC_PORT


PlaceSetting = Annotated[Place, BeforeValidator(parse_place), PlainSerializer(str, return_type=str)]


class StoreSettings(BaseSettings):
    """Where users, log and models are stored. Each field is also an environment variable, as ``LISAREC_DATA_DIR``.

    Arguments win over the environment.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        frozen=True,
        protected_namespaces=(),
        hide_input_in_errors=True,  # it has passwords
    )

    model_dir: PlaceSetting | None = None  # at the start; default: the active model, or none yet
    models_dir: PlaceSetting | None = None  # of the models that can be activated; default: the parent of model_dir
    data_dir: Path = Path("state")  # of the embedded store
    redis_url: str | None = Field(None, repr=False)  # instead of the embedded store; see RedisStore.open
    redis_password: str | None = Field(None, repr=False)  # instead of one in the URL
    redis_password_file: Path | None = None  # or in a file, if neither has it; new connections read it again
    redis_prefix: str = "lisarec"  # of every key; several services may share a server
    redis_replicas: int = Field(0, ge=0, le=10)  # that must have an event before it is acknowledged
    redis_replicas_timeout_s: float = Field(1.0, gt=0, le=30)  # after that the event gets a 503, and may be sent again
    redis_replicas_synced: bool = False  # they must also have synced it to disk; needs Redis 7.2
    archive_dir: PlaceSetting | None = None  # where 'lisarec archive' moves the older part of the log; a path or a URL
    cache_dir: Path = Path("cache")  # of copies of what is at URLs such as s3://bucket/prefix
    keys_file: Path | None = None  # 'lisarec keys add' makes it; default: no keys, and only this machine has access
    seal_keys_file: Path | None = None  # 'lisarec keys seal' makes it; default: visitors cannot keep states themselves
    tenant: str = MAIN_TENANT
    state_ttl_days: int | None = Field(None, ge=1, le=36_500)  # without events; default: states never expire
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
    log_format: LogFormat = "text"

    @property
    def models_folder(self) -> Place:
        """The folder of the models that can be activated."""
        if self.models_dir is not None:
            return self.models_dir
        return Path("models") if self.model_dir is None else _parent(self.model_dir)

    @property
    def archive(self) -> Folder | None:
        """The archive; None where there is none."""
        return None if self.archive_dir is None else open_folder(self.archive_dir, self.cache_dir)

    @property
    def store_name(self) -> str:
        """The store, as it can be shown."""
        if self.redis_url is None:
            return f"SQLite in '{self.data_dir}'"
        return f"Redis at {without_password(self.redis_url)}"

    @property
    def redis_url_with_password(self) -> str:
        """The URL of Redis, with the password of the other settings, or its file, if it has none itself."""
        assert self.redis_url is not None
        if self.redis_password is not None:
            return with_password(self.redis_url, self.redis_password)
        if self.redis_password_file is not None and urlsplit(self.redis_url).password is None:
            parts = urlsplit(self.redis_url)
            options = [*parse_qsl(parts.query), ("password_file", str(self.redis_password_file))]
            return urlunsplit(parts._replace(query=urlencode(options)))
        return self.redis_url


class Settings(StoreSettings):
    """The settings of one service."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)  # 0: any free one
    workers: int = Field(1, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"

    insecure: bool = False  # serve other machines without keys
    tenants: dict[Id, PlaceSetting] = {}  # model directories of further tenants, by tenant; JSON in the environment
    playground: bool = False  # serve a page at /playground that shows users' states
    open_metrics: bool = False  # serve /metrics without a key, where the network restricts access

    max_open_connections: int = Field(800, ge=1)  # of one process; the limit of open files is often 1,024
    max_requests: int = Field(128, ge=1)  # in progress at a time, of one process
    max_head_bytes: int = Field(32 << 10, ge=1)  # of a request's address and headers
    head_timeout_s: float = Field(10.0, gt=0)  # for them to arrive
    answer_timeout_s: float = Field(30.0, gt=0)  # for a client to take an answer
    max_cost: int = Field(200, ge=1)  # of one call, in plain requests for recommendations
    new_users_per_hour: int = Field(100_000, ge=0)  # of each tenant, where keys are
    max_body_bytes: int = Field(1 << 20, ge=1)
    body_timeout_s: float = Field(10.0, gt=0)  # for a request's body to arrive; shorter than the shutdown
    drain_s: float = Field(1.0, ge=0)  # after SIGTERM: still answering, no longer ready
    shutdown_timeout_s: int = Field(30, ge=1)  # for what was accepted before the door closed
    max_seen_events: int = Field(MAX_SEEN_ENTRIES, ge=1, le=1_000_000)  # newest ones that exclude_seen=all goes by
    sealed_state_days: int = Field(30, ge=1, le=36_500)  # after that a visitor's state cannot be opened
    max_value: float = Field(MAX_VALUE, gt=0, le=MAX_VALUE)  # of an event
    slow_request_s: float = Field(1.0, gt=0)  # a request that takes longer is logged

    @field_validator("port", mode="before")
    @classmethod
    def _without_address_of_kubernetes(cls, port: object) -> object:
        if isinstance(port, str) and ADDRESS_OF_KUBERNETES.fullmatch(port):
            return cls.model_fields["port"].default
        return port

    @model_validator(mode="after")
    def _keys_or_none(self) -> Self:
        if self.insecure and self.keys_file is not None:
            raise ValueError(
                "--insecure lets everybody in, and --keys only those who have a key; leave one of them out "
                "(LISAREC_INSECURE, LISAREC_KEYS_FILE)"
            )
        return self

    @model_validator(mode="after")
    def _tenants_are_apart(self) -> Self:
        if self.tenants and self.keys_file is None:
            raise ValueError("several tenants need keys, which say whose a request is; give them with --keys FILE")
        if self.tenant in self.tenants:
            raise ValueError(f"tenant {self.tenant!r} has two models; --model is the one of LISAREC_TENANT")
        folder = self.models_folder
        own = folder.absolute() if isinstance(folder, Path) else folder
        folders = [own, *(_parent(model) for model in self.tenants.values())]
        if len(set(folders)) < len(folders):
            raise ValueError(
                "two tenants have one folder of models; give each its own, as models/TENANT/NAME: "
                "who may activate models for one could serve the other's"
            )
        return self

    @property
    def model_dirs(self) -> dict[str, Place | None]:
        """The model directory of each tenant; None for a tenant without a model."""
        return {self.tenant: self.model_dir, **self.tenants}

    def for_tenant(self, tenant: str) -> Self:
        """Return the settings for a process that serves only this tenant."""
        if tenant == self.tenant:
            return self.model_copy(update={"tenants": {}})
        return self.model_copy(
            update={"tenant": tenant, "model_dir": self.tenants[tenant], "models_dir": None, "tenants": {}}
        )

    def export(self) -> None:
        """Put these settings into the environment of the worker processes that are started next."""
        for name, value in self.model_dump(mode="json", exclude_none=True).items():
            os.environ[PREFIX + name.upper()] = value if isinstance(value, str) else json.dumps(value)


def _parent(model: Place) -> Place:
    return model.absolute().parent if isinstance(model, Path) else model.parent


def problem_of_unknown_variables() -> str | None:
    """Return what is wrong with variables that are named like settings and are none; None where there are no such.

    They would be ignored, and who misspells a limit would not have it.
    """
    settings = {name.upper() for name in Settings.model_fields}
    known = settings.union(NAMES_OF_OTHERS.split())
    found = {name for name, value in os.environ.items() if name.upper().startswith(PREFIX) and value}
    names = {name: name.upper().removeprefix(PREFIX) for name in found}
    unknown = sorted(name for name, own in names.items() if own not in known and not OF_KUBERNETES.fullmatch(own))
    problems = []
    for name in unknown:
        similar = get_close_matches(name.upper().removeprefix(PREFIX), sorted(settings), 1)
        meant = f"; is {PREFIX}{similar[0]} meant?" if similar else ""
        problems.append(f"{name} in the environment is no setting{meant}")
    return ". ".join(problems) or None


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches what listens on the host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def share_metrics(directory: Path) -> None:
    """Let the worker processes that are started next keep their metrics there, by prometheus_client's own variable."""
    os.environ[SHARED_METRICS] = str(directory)


def shared_metrics() -> Path | None:
    """Return the folder that this process shares metrics in; None if it keeps its own."""
    directory = os.environ.get(SHARED_METRICS)
    return None if directory is None else Path(directory)


def without_password(url: str) -> str:
    """Return the URL with the word PASSWORD in the place of its password, so that it can be shown."""
    return url if urlsplit(url).password is None else with_password(url, "PASSWORD")


def with_password(url: str, password: str) -> str:
    """Return the URL with this password for its user, or for the default user."""
    parts = urlsplit(url)
    credentials, _, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}"))
