"""Certificates in Secrets of the chart, signed like cert-manager does, and the certificates that servers present."""

from __future__ import annotations

import base64
import socket
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.deploy.chart import Manifest, secret
from tests.waiting import PATIENCE_S


class Authority:
    """A certificate authority with certificate and key in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.certificate = folder / "ca.crt"
        self._folder = folder
        self._sign("authority", self.certificate, folder / "ca.key")

    def secret(self, name: str, names: str) -> Manifest:
        """Sign a new certificate for these names; return its Secret of type kubernetes.io/tls."""
        certificate, key = self._folder / "tls.crt", self._folder / "tls.key"
        by = ["-CA", str(self.certificate), "-CAkey", str(self._folder / "ca.key")]
        self._sign(name, certificate, key, *by, "-addext", f"subjectAltName={names}")
        return secret(name, {file.name: file.read_bytes() for file in (certificate, key, self.certificate)})

    @staticmethod
    def _sign(subject: str, certificate: Path, key: Path, *options: str) -> None:
        new_key = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj"
        files = ["-keyout", str(key), "-out", str(certificate)]
        command = [*new_key.split(), f"/CN={subject}", *options, *files]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)


def certificate_of(secret: Manifest) -> bytes:
    """The certificate in a Secret."""
    return ssl.PEM_cert_to_DER_cert(base64.b64decode(secret["data"]["tls.crt"]).decode())


def shown_certificate(host: str, port: int) -> bytes:
    """The certificate that a server presents."""
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, port), timeout=PATIENCE_S))


def answers_without_tls(host: str, port: int) -> bool:
    """Return whether Redis responds without TLS, even with an error."""
    with socket.create_connection((host, port), PATIENCE_S) as connection:
        connection.sendall(b"PING\r\n")
        with suppress(ConnectionError):
            return connection.recv(64).startswith((b"+", b"-"))
    return False
