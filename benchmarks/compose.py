"""The Redis of docker-compose.yml as a process of this machine: its very command and its very users.

Only paths, address and port differ: where the containers have volumes, a directory of this machine stands.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
COMPOSE_FILE = ROOT / "docker-compose.yml"
MAKE_SECRETS = ROOT / "docker" / "make-secrets"
REDIS_CONFIG = ROOT / "docker" / "redis.conf"
REDIS_START = ROOT / "docker" / "redis-start"

DEFAULT_OF_VARIABLE = re.compile(r"\$\{\w+:?-([^}]*)\}")


@dataclass(frozen=True)
class RedisUsers:
    """The users that docker/make-secrets makes: where they stand, and the passwords of two of them."""

    acl_file: Path
    password: str
    admin_password: str

    def url(self, port: int, host: str = "127.0.0.1") -> str:
        """Return the URL by which services log in."""
        return f"redis://lisarec:{self.password}@{host}:{port}/0"

    def admin_url(self, port: int, host: str = "127.0.0.1") -> str:
        """Return the URL by which an operator logs in."""
        return f"redis://admin:{self.admin_password}@{host}:{port}/0"


def make_users(directory: Path) -> RedisUsers:
    """Make the users as the service `secrets` does, or return those that the directory has."""
    app, redis = directory / "secrets", directory / "acl"
    for folder in (app, redis):
        folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([MAKE_SECRETS, app, redis], check=True, timeout=30)
    read = Path.read_text
    return RedisUsers(redis / "users.acl", read(app / "redis_password"), read(redis / "admin_password"))


def redis_command(server: str, data: Path, users: RedisUsers, port: int, *options: str) -> list[str]:
    """Return the command of the service `redis`, for a server binary, a data directory and a port of this machine."""
    replaced = {
        "redis-start": str(REDIS_START),
        "redis-server": server,
        "/etc/redis.conf": str(REDIS_CONFIG),
        "/acl/users.acl": str(users.acl_file),
        "/data": str(data),
    }
    return [*_command_of("redis", replaced), "--bind", "127.0.0.1", "--port", str(port), *options]


def _command_of(service: str, replaced: Mapping[str, str]) -> list[str]:
    compose = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))
    words = [DEFAULT_OF_VARIABLE.sub(r"\1", word) for word in compose["services"][service]["command"]]
    if missing := replaced.keys() - set(words):
        raise ValueError(f"the command of {service!r} in {COMPOSE_FILE} has no {', '.join(sorted(missing))}")
    return [replaced.get(word, word) for word in words]
