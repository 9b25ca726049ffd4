"""TLS between clients and the service: the certificate, and connections that decrypt what the HTTP protocol reads."""

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from pathlib import Path

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.http.connection.lingering_transport import LingeringTransport

LATER_S = 1.0


class CertificateError(ValueError):
    """The certificate or its key cannot be used; the message names the files."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS context of the service's certificate, for TLS 1.2 or later.

    certificate  PEM file of the certificate, followed by those of its authorities
    key          PEM file of its key, without passphrase; it may be the same file

    raises  CertificateError  when a file cannot be read or used, or the key belongs to another certificate
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        for file in (certificate, key):
            file.read_bytes()
        context.load_cert_chain(certificate, key, password="")  # without one, OpenSSL would ask on the terminal
    except ssl.SSLError as exc:
        problem = f"LISAREC_TLS_CERTIFICATE='{certificate}' and LISAREC_TLS_KEY='{key}' cannot be used"
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise CertificateError(f"{problem}: the key belongs to another certificate") from exc
        raise CertificateError(f"{problem}: they must be PEM files, and the key must have no passphrase") from exc
    except OSError as exc:
        raise CertificateError(f"cannot read '{exc.filename}' ({exc.strerror}), which TLS needs") from exc
    return context


class TlsProtocol(SSLProtocol):
    """Decrypts a connection for the HTTP protocol.

    The HTTP protocol has the connection from its first moment, so its limits hold for the handshake, too: the time for
    the first head includes it, and a connection without a complete handshake counts as an idle one. Uvicorn's own TLS
    would not let the protocol know of such connections, and would wait for a minute.
    """

    max_size = 64 << 10  # bytes of the buffer that each connection has for reading

    def __init__(
        self, http: HttpToolsProtocol, context: ssl.SSLContext, head_timeout_s: float, answer_timeout_s: float
    ) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            Handshake(http),
            context,
            waiter=None,  # type: ignore[arg-type]
            server_side=True,
            # the HTTP protocol ends both before
            ssl_handshake_timeout=head_timeout_s + LATER_S,  # type: ignore[arg-type]
            ssl_shutdown_timeout=answer_timeout_s + LATER_S,
        )
        self._http = http
        self._is_paused = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._http.connection_made(transport)  # type: ignore[arg-type]
        super().connection_made(transport)

    @override
    def pause_writing(self) -> None:
        """Record that the connection is full. The base class would not tell, since it encrypts a response at once."""
        super().pause_writing()
        self._is_paused = True
        if self._http.scheme == "https":
            self._http.pause_writing()

    @override
    def resume_writing(self) -> None:
        """Send what has been encrypted meanwhile, after which the connection may be full again."""
        self._is_paused = False
        super().resume_writing()
        if not self._is_paused and self._http.scheme == "https":
            self._http.resume_writing()

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self._http.scheme != "https":  # the base class knows only of connections after their handshake
            self._http.connection_lost(exc)  # type: ignore[arg-type]


class Handshake(asyncio.Protocol):
    """Hands a connection to the HTTP protocol, which already knows it, when its handshake is complete."""

    def __init__(self, http: HttpToolsProtocol) -> None:
        self._http = http

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        assert isinstance(self._http.transport, LingeringTransport)
        self._http.transport.encrypt(transport)
        self._http.scheme = "https"
        transport.set_protocol(self._http)
