"""A password in a file, which may change while services run."""

from __future__ import annotations

import logging
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio.connection import Connection
from redis.credentials import CredentialProvider, UsernamePasswordCredentialProvider
from redis.exceptions import AuthenticationError
from typing_extensions import override

OPTION = "password_file"  # of a URL, beside those of redis-py

logger = logging.getLogger(__name__)


class PasswordFile(CredentialProvider):
    """Logs every new connection in with what the file has then.

    A password that Redis does not know yet is followed by the one before it, so file and Redis may be changed in either
    order.
    """

    def __init__(self, user: str, path: Path) -> None:
        self._user = user
        self._path = path
        self._password = ""
        self._before = ""

    @override
    def get_credentials(self) -> tuple[str, str]:
        """Raise AuthenticationError where the file has never had a password."""
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
        """Prepare a new connection for use, with the password before this one if need be."""
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
    """Return the URL without user and password file, and what logs in by them; where it has no such file, itself."""
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    if OPTION not in options:
        return url, None
    (path,) = options.pop(OPTION)
    credentials, _, host = parts.netloc.rpartition("@")
    user = unquote(credentials.partition(":")[0]) or "default"
    bare = urlunsplit(parts._replace(netloc=host, query=urlencode(options, doseq=True)))
    return bare, PasswordFile(user, Path(path))
