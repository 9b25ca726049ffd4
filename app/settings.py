"""What an operator can set. The only reader of the environment."""

import os
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "LISAREC_"


class StoreSettings(BaseSettings):
    """Where users and log are kept, and where models lie. Each field is also an environment variable,
    ``LISAREC_DATA_DIR`` and so on; arguments win."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, protected_namespaces=())

    model_dir: Path | None = None
    models_dir: Path | None = None  # of the models that can be activated; default: the folder that model_dir is in
    data_dir: Path = Path("state")  # of the embedded store
    redis_url: str | None = Field(None, repr=False)  # instead of it, see RedisStore.open
    redis_password: str | None = Field(None, repr=False)  # instead of one in the URL
    redis_prefix: str = "lisarec"  # of every key; several services may share a server
    redis_replicas: int = Field(0, ge=0, le=10)  # of Redis that must have an event before it is acknowledged
    redis_replicas_timeout_s: float = Field(1.0, gt=0, le=30)  # then the event gets a 503, and may be sent again
    redis_replicas_synced: bool = False  # and must have synced it to their disks: Redis 7.2 or later
    archive_dir: Path | None = None  # where 'lisarec archive' moves the older part of the log
    tenant: str = "main"
    state_ttl_days: int | None = Field(None, ge=1, le=36_500)  # without events; default: kept for ever

    @property
    def models_folder(self) -> Path:
        if self.models_dir is not None:
            return self.models_dir
        return Path("models") if self.model_dir is None else self.model_dir.absolute().parent

    @property
    def redis_url_with_password(self) -> str:
        """For a service on Redis: its URL, with the password that may be given apart from it."""
        assert self.redis_url is not None
        return self.redis_url if self.redis_password is None else with_password(self.redis_url, self.redis_password)


class Settings(StoreSettings):
    """One service."""

    model_dir: Path

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)  # 0: any free one
    workers: int = Field(1, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"

    max_body_bytes: int = Field(1 << 20, ge=1)
    body_timeout_s: float = Field(10.0, gt=0)  # for a request's body to arrive; shorter than the shutdown
    drain_s: float = Field(1.0, ge=0)  # after SIGTERM: still answering, no longer ready
    shutdown_timeout_s: int = Field(30, ge=1)  # for what was accepted before the door closed
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"

    def export(self) -> None:
        """Put these settings into the environment, where the worker processes started next find them."""
        for name, value in self.model_dump(mode="json", exclude_none=True).items():
            os.environ[PREFIX + name.upper()] = str(value)


def with_password(url: str, password: str) -> str:
    """The URL with this password for the user that it names, else for the default user."""
    parts = urlsplit(url)
    credentials, _, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}"))
