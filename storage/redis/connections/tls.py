"""TLS to Redis: the URL parameters that name its files, and remedies for rejected certificates."""

from pathlib import Path

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import parse_url

FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
REMEDIES = {  # by OpenSSL's message, specific ones before general ones
    "certificate is not valid for": (
        "Use a host name of the certificate in the URL, or a certificate with this host name (subjectAltName)"
    ),
    "certificate has expired": "Renew the server's certificate",
    "CERTIFICATE_VERIFY_FAILED": "Add the certificate authority to the URL: ?ssl_ca_certs=FILE",
    "CERTIFICATE_REQUIRED": "Add a client certificate to the URL: &ssl_certfile=FILE&ssl_keyfile=FILE",
    "[SSL:": "Use the TLS port, or redis:// in the URL",
}


def tls_remedy(failure: Exception) -> str | None:
    """Return the remedy for a TLS failure; None for other failures."""
    text = str(failure)
    return next((remedy for sign, remedy in REMEDIES.items() if sign in text), None)


def require_usable(url: str) -> None:
    """Raise ValueError if the URL has an unknown parameter, or names a missing file."""
    try:
        ConnectionPool.from_url(url, driver_info=None).make_connection()
    except TypeError as exc:
        raise ValueError(f"the URL of Redis has an unknown option: {exc}") from exc
    options = dict(parse_url(url))
    for name in FILES:
        if name in options and not Path(str(options[name])).exists():
            raise ValueError(f"'{options[name]}', the {name} in the URL of Redis, does not exist")
