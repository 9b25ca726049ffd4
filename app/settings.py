"""The settings. This is the only file that reads the environment."""

import json
import os
import re
import socket
from contextlib import suppress
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.observability.log_format import LogFormat
from app.schemas.events import MAX_VALUE
from app.schemas.fields import Name
from storage.folders.folder import Folder
from storage.folders.place import Place, open_folder, parse_place
from storage.records import MAIN_TENANT, MAX_SEEN_ENTRIES

PREFIX = "LISAREC_"
SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"

# Variables with the same prefix that are no settings: of the compose file, the load balancer, clients, tests, and the
# limits of `lisarec retrain`, whose options read them.
NAMES_OF_OTHERS = (
    "APP APP_CA APP_MEMORY APP_PORT BIND CPUS DATA DNS FORWARDED_FOR_FROM GRAFANA_PUBLISH HAPROXY_MEMORY KAFKA_BROKERS "
    "KAFKA_GROUP KAFKA_LOG_TOPIC KAFKA_PROPERTIES KAFKA_TOPIC KEEP_EVERY_S KEEP_REPLICAS KEEP_TAIL KEY MAXMEMORY "
    "MAX_CONNECTIONS MAX_CONNECTIONS_PER_SOURCE MAX_REPLICAS MAX_REQUESTS_PER_REPLICA "
    "METRICS_BIND METRICS_DAYS MODEL OWN_REDIS PROXY_PROTOCOL_FROM PUBLISH REDIS_MAXMEMORY REDIS_MEMORY REDIS_SERVERS "
    "REPLICAS RETRAIN_EVENTS_PER_USER RETRAIN_EVERY RETRAIN_FULL_EVERY RETRAIN_MAX_EVENTS RETRAIN_MEMORY "
    "RETRAIN_USERS_SAMPLE TRAINER_MEMORY TRAIN_MEMORY URL VERSION"
)

# Variables that Kubernetes gives every container for a Service whose name begins with "lisarec".
OF_KUBERNETES = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
ADDRESS_OF_KUBERNETES = re.compile(r"(tcp|udp|sctp)://\S+:\d+")  # of a Service named "lisarec", in LISAREC_PORT


SCHEMES_OF_REDIS = ("redis://", "rediss://", "unix://")
_HOST = r"(\[[0-9a-fA-F:.%]+\]|[^\s:/?#@,\[\]]+)(:\d+)?"
URL_OF_REDIS = re.compile(rf"rediss?://([^\s/?#]*@)?{_HOST}(,{_HOST})*(/\d*)?(\?[^\s#]*)?")


def listening_host(host: str) -> str:
    """Return the host to bind: without an IPv6 address's brackets, and 0.0.0.0 for `::` if the kernel has no IPv6."""
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return "0.0.0.0" if host == "::" and not socket.has_dualstack_ipv6() else host  # noqa: S104  # as the user asks


PlaceSetting = Annotated[Place, BeforeValidator(parse_place), PlainSerializer(str, return_type=str)]


class StoreSettings(BaseSettings):
    """Where users, log and models are stored. Each field is also an environment variable, such as ``LISAREC_DATA_DIR``.

    Arguments override the environment.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        frozen=True,
        protected_namespaces=(),
        hide_input_in_errors=True,  # it has passwords
    )

    model_dir: PlaceSetting | None = Field(
        None, description="Model to serve at startup. Default: the active model, if there is one."
    )
    models_dir: PlaceSetting | None = Field(
        None,
        description="Folder of models that can be activated. Default: the folder of LISAREC_MODEL_DIR, else `models`.",
    )
    data_dir: Path = Field(Path("state"), description="Directory of the embedded store (SQLite).")
    redis_url: str | None = Field(
        None,
        repr=False,
        description="Redis that stores users and the event log, instead of SQLite. `rediss://` uses TLS. "
        "Several addresses, separated by commas, name a cluster.",
    )
    redis_password: str | None = Field(None, repr=False, description="Password for Redis, if the URL has none.")
    redis_password_file: Path | None = Field(
        None, description="File with the password for Redis. Every new connection rereads it."
    )
    redis_prefix: str = Field(
        "lisarec", description="Prefix of all keys in Redis. Several services can share one server."
    )
    redis_replicas: int = Field(
        0, ge=0, le=10, description="Number of Redis replicas that must have an event before it is acknowledged."
    )
    redis_replicas_timeout_s: float = Field(
        1.0, gt=0, le=30, description="Seconds to wait for these replicas. After that, the event gets a 503."
    )
    redis_replicas_synced: bool = Field(
        False, description="Wait until the server and these replicas have synced to disk. Needs Redis 7.2 or later."
    )
    archive_dir: PlaceSetting | None = Field(None, description="Archive of older events, written by `lisarec archive`.")
    cache_dir: Path = Field(
        Path("cache"),
        description="Directory for local copies of files from a bucket, and of mapped tables while a command runs.",
    )
    keys_file: Path | None = Field(
        None, description="File of the API keys. Default: no keys; then only this machine can reach the service."
    )
    seal_keys_file: Path | None = Field(
        None, description="File of the seal keys for visitors' states. Default: no sealed states."
    )
    model_keys_file: Path | None = Field(
        None,
        description="File of trusted public keys. Each model must be signed by one of them. "
        "Default: models need no signature.",
    )
    model_signing_key_file: Path | None = Field(
        None, description="File of the private key that `lisarec sign` and `lisarec retrain` sign models with."
    )
    tenant: str = Field(MAIN_TENANT, description="Tenant of LISAREC_MODEL_DIR and of the commands.")
    state_ttl_days: int | None = Field(
        None,
        ge=1,
        le=36_500,
        description="Number of days without an event after which a state expires. Default: never.",
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        "info", description="Lowest level of log lines."
    )
    log_format: LogFormat = Field("text", description="Log format: `text`, or `json` for one JSON object per line.")

    @field_validator("redis_url")
    @classmethod
    def _url_of_redis(cls, url: str | None) -> str | None:
        if url is None or url.startswith("unix://") or URL_OF_REDIS.fullmatch(url):
            return url
        if not url.startswith(SCHEMES_OF_REDIS):
            raise ValueError("begin it with redis://, rediss:// or unix://, such as redis://127.0.0.1:6379/0")
        raise ValueError(
            "write redis://USER:PASSWORD@HOST:PORT/0, and a password with special characters encoded, as %2F for /; "
            "or write it to a file, and name that in LISAREC_REDIS_PASSWORD_FILE"
        )

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_small_letters(cls, level: object) -> object:
        return level.lower() if isinstance(level, str) else level

    @property
    def models_folder(self) -> Place:
        """The folder of the models that can be activated."""
        if self.models_dir is not None:
            return self.models_dir
        return Path("models") if self.model_dir is None else _parent(self.model_dir)

    @property
    def archive(self) -> Folder | None:
        """The archive, or None if none is configured."""
        return None if self.archive_dir is None else open_folder(self.archive_dir, self.cache_dir)

    @property
    def store_name(self) -> str:
        """The name of the store, without passwords."""
        if self.redis_url is None:
            return f"SQLite in '{self.data_dir}'"
        return f"Redis at {without_password(self.redis_url)}"

    @property
    def redis_url_with_password(self) -> str:
        """The URL of Redis, with the password or the password file from the other settings if it has none."""
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

    host: Annotated[str, AfterValidator(listening_host)] = Field(
        "127.0.0.1", description="Address to listen on; `0.0.0.0` is all of IPv4, `::` all of IPv6 and IPv4."
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on. 0 chooses a free port.")
    workers: int = Field(1, ge=1, description="Number of worker processes.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Device that ranks items.")
    tls_certificate: Path | None = Field(
        None,
        description="PEM file of the service's certificate, followed by those of its authorities. "
        "Default: the service has no TLS.",
    )
    tls_key: Path | None = Field(
        None, description="PEM file of the key of this certificate, without passphrase. It may be the same file."
    )

    insecure: bool = Field(False, description="Accept requests from other machines without API keys.")
    tenants: Annotated[dict[Name, PlaceSetting], NoDecode] = Field(
        {}, description="Model directories of additional tenants, by tenant. In the environment, a JSON object."
    )
    playground: bool = Field(False, description="Serve the playground. It shows users' states.")
    open_metrics: bool = Field(
        False, description="Serve `/metrics` without a key. Restrict access in the network instead."
    )

    max_open_connections: int = Field(
        800, ge=1, description="Maximum number of open connections per process. Keep it below the limit of open files."
    )
    max_requests: int = Field(
        128, ge=1, description="Maximum number of concurrent requests per process. Further requests get a 503."
    )
    max_head_bytes: int = Field(
        32 << 10, ge=1, description="Maximum size of a request's URL and headers together, in bytes."
    )
    head_timeout_s: float = Field(10.0, gt=0, description="Seconds for the URL and the headers to arrive.")
    answer_timeout_s: float = Field(30.0, gt=0, description="Seconds for a client to read its response.")
    max_cost: int = Field(
        200,
        ge=1,
        description="Maximum cost of one call, in plain requests. A more expensive call gets 422 `too_costly`.",
    )
    new_users_per_hour: int = Field(
        100_000, ge=0, description="Maximum number of new users per hour and tenant, if the service has keys."
    )
    max_body_bytes: int = Field(1 << 20, ge=1, description="Maximum size of a request's body, in bytes.")
    body_timeout_s: float = Field(
        10.0, gt=0, description="Seconds for a body to arrive. Keep it below LISAREC_SHUTDOWN_TIMEOUT_S."
    )
    drain_s: float = Field(
        1.0, ge=0, description="Seconds after SIGTERM during which the process still answers, but is not ready."
    )
    shutdown_timeout_s: int = Field(30, ge=1, description="Seconds after that to finish accepted requests.")
    max_seen_events: int = Field(
        MAX_SEEN_ENTRIES,
        ge=1,
        le=1_000_000,
        description="Newest events per user that `exclude_seen=all`, `exclude_events` and `mode=repeat` read.",
    )
    sealed_state_days: int = Field(30, ge=1, le=36_500, description="Lifetime of a sealed state, in days.")
    max_value: float = Field(MAX_VALUE, gt=0, le=MAX_VALUE, description="Largest `value` of an event.")
    slow_request_s: float = Field(1.0, gt=0, description="Duration in seconds above which a request is logged as slow.")

    @field_validator("port", mode="before")
    @classmethod
    def _without_address_of_kubernetes(cls, port: object) -> object:
        if isinstance(port, str) and ADDRESS_OF_KUBERNETES.fullmatch(port):
            return cls.model_fields["port"].default
        return port

    @field_validator("tenants", mode="before")
    @classmethod
    def _tenants_of_json(cls, tenants: object) -> object:
        if not isinstance(tenants, str):
            return tenants
        with suppress(ValueError):
            found = json.loads(tenants)
            if isinstance(found, dict) and all(isinstance(model, str) for model in found.values()):
                return found
        raise ValueError("""write a JSON object of model directories, such as {"books": "models/books/june"}""")

    @model_validator(mode="after")
    def _keys_or_none(self) -> Self:
        if self.insecure and self.keys_file is not None:
            raise ValueError(
                "--insecure and --keys contradict each other; omit one of them (LISAREC_INSECURE, LISAREC_KEYS_FILE)"
            )
        return self

    @model_validator(mode="after")
    def _certificate_and_key_or_none(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            given, missing = ("key", "certificate") if self.tls_certificate is None else ("certificate", "key")
            raise ValueError(
                f"--tls-{given} needs --tls-{missing}; pass both or none (LISAREC_TLS_CERTIFICATE, LISAREC_TLS_KEY)"
            )
        return self

    @model_validator(mode="after")
    def _tenants_are_apart(self) -> Self:
        if self.tenants and self.keys_file is None:
            raise ValueError("several tenants need API keys, which identify the tenant of a request; pass --keys FILE")
        if self.tenant in self.tenants:
            raise ValueError(f"tenant {self.tenant!r} has two models; --model is the model of LISAREC_TENANT")
        folders = [self.models_folder, *(_parent(model) for model in self.tenants.values())]
        places = {folder.resolve() if isinstance(folder, Path) else folder for folder in folders}
        if len(places) < len(folders):
            raise ValueError(
                "two tenants share a folder of models; use one folder per tenant, such as models/TENANT/NAME: "
                "otherwise a key of one tenant could activate the other tenant's models"
            )
        return self

    @property
    def tls_files(self) -> tuple[Path, Path] | None:
        """The files of the certificate and its key; None without TLS."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return self.tls_certificate, self.tls_key

    @property
    def scheme(self) -> str:
        """How URLs of the service begin."""
        return "http" if self.tls_files is None else "https"

    @property
    def model_dirs(self) -> dict[str, Place | None]:
        """The model directory of each tenant; None for a tenant without a model."""
        return {self.tenant: self.model_dir, **self.tenants}

    def for_tenant(self, tenant: str) -> Self:
        """Return the settings of a process that serves only this tenant."""
        if tenant == self.tenant:
            return self.model_copy(update={"tenants": {}})
        return self.model_copy(
            update={"tenant": tenant, "model_dir": self.tenants[tenant], "models_dir": None, "tenants": {}}
        )

    def export(self) -> None:
        """Export these settings to the environment, for worker processes that start later."""
        for name, value in self.model_dump(mode="json", exclude_none=True).items():
            os.environ[PREFIX + name.upper()] = value if isinstance(value, str) else json.dumps(value)


def _parent(model: Place) -> Place:
    return model.absolute().parent if isinstance(model, Path) else model.parent


def problem_of_unknown_variables() -> str | None:
    """Return the problem of environment variables that look like settings but aren't, or None if there are none.

    Without this check, a misspelt setting would have no effect.
    """
    settings = {name.upper() for name in Settings.model_fields}
    known = settings.union(NAMES_OF_OTHERS.split())
    found = {name for name, value in os.environ.items() if name.upper().startswith(PREFIX) and value}
    names = {name: name.upper().removeprefix(PREFIX) for name in found}
    unknown = sorted(name for name, own in names.items() if own not in known and not OF_KUBERNETES.fullmatch(own))
    problems = []
    for name in unknown:
        similar = get_close_matches(name.upper().removeprefix(PREFIX), sorted(settings), 1)
        meant = f"; did you mean {PREFIX}{similar[0]}?" if similar else ""
        problems.append(f"{name} in the environment is not a setting{meant}")
    return ". ".join(problems) or None


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches what listens on the host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_started_by_torchrun() -> bool:
    """Return whether torchrun has started this process, as torch finds out by the same variable."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def share_metrics(directory: Path) -> None:
    """Make workers that start later keep their metrics in this folder, through prometheus_client's own variable."""
    os.environ[SHARED_METRICS] = str(directory)


def shared_metrics() -> Path | None:
    """Return the folder that this process shares metrics in; None if it keeps its own."""
    directory = os.environ.get(SHARED_METRICS)
    return None if directory is None else Path(directory)


def without_password(url: str) -> str:
    """Return the URL for display, with the word PASSWORD in place of its password."""
    url = re.sub(r"(?<=[?&]password=)[^&]*", "PASSWORD", url)
    return url if urlsplit(url).password is None else with_password(url, "PASSWORD")


def with_password(url: str, password: str) -> str:
    """Return the URL with this password for its user, or for the default user."""
    parts = urlsplit(url)
    credentials, _, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}"))
