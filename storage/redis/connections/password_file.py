"""A password in a file that may change while services run."""

from __future__ import annotations

import logging
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio.connection import Connection
from redis.credentials import CredentialProvider, UsernamePasswordCredentialProvider
from redis.exceptions import AuthenticationError
from typing_extensions import override

OPTION = "password_file"  # a URL parameter in addition to those of redis-py

logger = logging.getLogger(__name__)


class PasswordFile(CredentialProvider):
    """Authenticates every new connection with the current content of the file.

    If Redis rejects the password, the previous one is tried, so the file and Redis may be changed in either order.
    """

    def __init__(self, user: str, path: Path) -> None:
        self._user = user
        self._path = path
        self._password = ""
        self._before = ""

    @override
    def get_credentials(self) -> tuple[str, str]:
        """Raise AuthenticationError if the file has never contained a password."""
        try:
            found, problem = self._path.read_text(encoding="utf-8").strip(), "it is empty"
        except (OSError, ValueError) as exc:
            found, problem = "", str(exc)
        if not (found or self._password):
            raise AuthenticationError(f"no password in '{self._path}': {problem}")
        if found and found != self._password:
            if self._password:
                logger.info("new connections to Redis use the new password from '%s'", self._path)
            self._password, self._before = found, self._password
        return self._user, self._password

    @override
    async def get_credentials_async(self) -> tuple[str, str]:
        return self.get_credentials()

    async def log_in(self, connection: Connection) -> None:
        """Authenticate a new connection and prepare it for use, with the previous password if necessary."""
        try:
            await connection.on_connect()
        except AuthenticationError:
            if not self._before:
                raise
            connection.credential_provider = UsernamePasswordCredentialProvider(self._user, self._before)
            try:
                await connection.on_connect()
            finally:
                connection.credential_provider = self
            logger.warning("Redis does not accept the new password from '%s' yet; using the old one", self._path)


def split_password_file(url: str) -> tuple[str, PasswordFile | None]:
    """Return the URL without user and password file, and the credential provider; the same URL and None without one."""
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    if OPTION not in options:
        return url, None
    (path,) = options.pop(OPTION)
    credentials, _, host = parts.netloc.rpartition("@")
    user = unquote(credentials.partition(":")[0]) or "default"
    bare = urlunsplit(parts._replace(netloc=host, query=urlencode(options, doseq=True)))
    return bare, PasswordFile(user, Path(path))
