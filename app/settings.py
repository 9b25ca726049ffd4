"""What an operator can set. The only reader of the environment."""

import json
import os
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.logs import LogFormat
from app.schemas.fields import Id
from storage.records import MAIN_TENANT

PREFIX = "LISAREC_"
SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"


class StoreSettings(BaseSettings):
    """Where users and log are kept, and where models lie. Each field is also an environment variable,
    ``LISAREC_DATA_DIR`` and so on; arguments win."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        frozen=True,
        protected_namespaces=(),
        hide_input_in_errors=True,  # there are passwords among it
    )

    model_dir: Path | None = None  # to begin with; default: what is active, and no model before the first one is
    models_dir: Path | None = None  # of the models that can be activated; default: the folder that model_dir is in
    data_dir: Path = Path("state")  # of the embedded store
    redis_url: str | None = Field(None, repr=False)  # instead of it, see RedisStore.open
    redis_password: str | None = Field(None, repr=False)  # instead of one in the URL
    redis_password_file: Path | None = None  # or the file that it stands in, where neither says it
    redis_prefix: str = "lisarec"  # of every key; several services may share a server
    redis_replicas: int = Field(0, ge=0, le=10)  # of Redis that must have an event before it is acknowledged
    redis_replicas_timeout_s: float = Field(1.0, gt=0, le=30)  # then the event gets a 503, and may be sent again
    redis_replicas_synced: bool = False  # and must have synced it to their disks: Redis 7.2 or later
    archive_dir: Path | None = None  # where 'lisarec archive' moves the older part of the log
    keys_file: Path | None = None  # 'lisarec keys add' makes it; default: no keys, and only this machine gets in
    tenant: str = MAIN_TENANT
    state_ttl_days: int | None = Field(None, ge=1, le=36_500)  # without events; default: kept for ever
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
    log_format: LogFormat = "text"

    @property
    def models_folder(self) -> Path:
        if self.models_dir is not None:
            return self.models_dir
        return Path("models") if self.model_dir is None else self.model_dir.absolute().parent

    @property
    def redis_url_with_password(self) -> str:
        """For a service on Redis: its URL, with the password that may be given apart from it."""
        assert self.redis_url is not None
        password = self.redis_password
        if password is None and self.redis_password_file is not None and urlsplit(self.redis_url).password is None:
            password = self.redis_password_file.read_text(encoding="utf-8").strip()
        return self.redis_url if password is None else with_password(self.redis_url, password)


class Settings(StoreSettings):
    """One service."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)  # 0: any free one
    workers: int = Field(1, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"

    insecure: bool = False  # let others in without keys
    tenants: dict[Id, Path] = {}  # model directories of further tenants, by tenant; JSON in the environment
    playground: bool = False  # a page at /playground that shows users' states
    open_metrics: bool = False  # /metrics without a key, where the network keeps others out

    max_open_connections: int = Field(800, ge=1)  # of one process; the limit of open files is often 1,024
    max_requests: int = Field(128, ge=1)  # that one process works on at a time
    max_head_bytes: int = Field(32 << 10, ge=1)  # of a request's address and headers
    head_timeout_s: float = Field(10.0, gt=0)  # for them to arrive
    answer_timeout_s: float = Field(30.0, gt=0)  # for a client to take an answer
    max_body_bytes: int = Field(1 << 20, ge=1)
    body_timeout_s: float = Field(10.0, gt=0)  # for a request's body to arrive; shorter than the shutdown
    drain_s: float = Field(1.0, ge=0)  # after SIGTERM: still answering, no longer ready
    shutdown_timeout_s: int = Field(30, ge=1)  # for what was accepted before the door closed
    slow_request_s: float = Field(1.0, gt=0)  # a request that takes longer is logged

    @model_validator(mode="after")
    def _tenants_are_apart(self) -> Self:
        if self.tenants and self.keys_file is None:
            raise ValueError("several tenants need keys, which say whose a request is; give them with --keys FILE")
        if self.tenant in self.tenants:
            raise ValueError(f"tenant {self.tenant!r} has two models; --model is the one of LISAREC_TENANT")
        folders = [self.models_folder.absolute(), *(model.absolute().parent for model in self.tenants.values())]
        if len(set(folders)) < len(folders):
            raise ValueError(
                "two tenants have one folder of models; give each its own, as models/TENANT/NAME: "
                "who may activate models for one could serve the other's"
            )
        return self

    @property
    def model_dirs(self) -> dict[str, Path | None]:
        """By tenant; None: no model yet."""
        return {self.tenant: self.model_dir, **self.tenants}

    def of(self, tenant: str) -> Self:
        """The settings of a process that serves just this one of the tenants."""
        if tenant == self.tenant:
            return self.model_copy(update={"tenants": {}})
        return self.model_copy(
            update={"tenant": tenant, "model_dir": self.tenants[tenant], "models_dir": None, "tenants": {}}
        )

    def export(self) -> None:
        """Put these settings into the environment, where the worker processes started next find them."""
        for name, value in self.model_dump(mode="json", exclude_none=True).items():
            os.environ[PREFIX + name.upper()] = value if isinstance(value, str) else json.dumps(value)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def share_metrics(directory: Path) -> None:
    """Let the worker processes started next keep their numbers there; the library has a variable of its own."""
    os.environ[SHARED_METRICS] = str(directory)


def shared_metrics() -> Path | None:
    """Where this process keeps its numbers together with others; None: for itself."""
    directory = os.environ.get(SHARED_METRICS)
    return None if directory is None else Path(directory)


def with_password(url: str, password: str) -> str:
    """The URL with this password for the user that it names, else for the default user."""
    parts = urlsplit(url)
    credentials, _, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}"))
