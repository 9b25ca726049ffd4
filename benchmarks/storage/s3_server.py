"""An S3 server in its own process: moto's, which is wrapped to keep three guarantees of S3 that it breaks.

A put and its condition are atomic. A put whose body does not arrive completely stores nothing. A get during a put
returns the object from before or after it.

    python -m benchmarks.storage.s3_server PORT [ADDRESS]
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from io import BytesIO
from typing import Any

import httpx

from benchmarks.harness.compose import ROOT
from benchmarks.harness.service_process import free_port, wait_for

BUCKET = "lisarec"

StartResponse = Callable[..., Any]


class OneByOne:
    """Passes requests to moto's application one at a time, each once its body is complete."""

    def __init__(self, app: Callable[[dict[str, Any], StartResponse], Iterable[bytes]]) -> None:
        self._app = app
        self._working = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer a WSGI request."""
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        if len(body) < length:
            status = HTTPStatus.BAD_REQUEST
            start_response(f"{status.value} {status.phrase}", [("Content-Length", "0")])
            return []
        with self._working:
            return list(self._app({**environ, "wsgi.input": BytesIO(body)}, start_response))


def serve(port: int, address: str = "127.0.0.1") -> None:
    """Serve until killed."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *_: object) -> None:
            """Log nothing."""

    app = OneByOne(DomainDispatcherApplication(create_backend_app))
    make_server(address, port, app, threaded=True, request_handler=Handler).serve_forever()


class S3Server:
    """A running server with an empty bucket.

    environment  the address and credentials for programs
    """

    def __init__(self, host: str = "127.0.0.1", port: int | None = None) -> None:
        port = port or free_port()
        self.address = f"http://{host}:{port}"
        self.environment = environment_for(self.address)
        command = [sys.executable, "-m", "benchmarks.storage.s3_server", str(port), host]
        self._process = subprocess.Popen(command, cwd=ROOT)
        wait_for(self._makes_bucket, self._process)

    def _makes_bucket(self) -> bool:
        try:
            return httpx.put(f"{self.address}/{BUCKET}", timeout=5.0).is_success
        except httpx.TransportError:
            return False

    def url(self, prefix: str) -> str:
        """Return the URL of a prefix in the bucket."""
        return f"s3://{BUCKET}/{prefix}"

    def freeze(self) -> None:
        """Stop responding; connections are still accepted."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server, which deletes its data."""
        self._process.kill()
        self._process.wait()


def environment_for(address: str) -> dict[str, str]:
    """Return the environment with which programs use the server at this address."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "lisarec",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    }


if __name__ == "__main__":
    serve(int(sys.argv[1]), *sys.argv[2:])
