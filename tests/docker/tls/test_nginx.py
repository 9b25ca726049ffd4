"""nginx as docs/how-to/deploy/tls.md configures it, in front of a process without the load balancer."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.compose import ROOT
from benchmarks.harness.service_process import free_port
from benchmarks.harness.topology import program
from tests.app.service_process import Process, running
from tests.waiting import PATIENCE_S, wait_until

PAGE = ROOT / "docs" / "how-to" / "deploy" / "tls.md"
OPERATORS = ["/metrics", "/v1/admin/experiment"]
ODD_IDS = ["a/b", "../../admin/experiment", "a/recommendations?k=1", "100%", "%2F", "Größe 42", "{p1}*[?]"]
BEGINNINGS = ["", "/", "/.", "/x/..", "/%2e", "http://service", "HTTP://a@service:80", "%0a", "/%00", "*"]
ENDINGS = ["/", "?", "?x=1", "#", "#x", ";x", "%23", "%20", "%0a", "%00", "%2f", "%2f..", "%c2%85", "%ff", ".", "%"]
AROUND = """
daemon off;
master_process off;
pid {folder}/pid;
error_log stderr;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/responses;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{site}
}}
"""


@pytest.fixture(scope="module")
def service(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with running(tmp_path_factory.mktemp("service"), model_dir) as process:
        yield process


@pytest.fixture(scope="module")
def port(service: Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of nginx with the page's site and its rules for a process without the load balancer."""
    try:
        nginx = program("nginx")
    except FileNotFoundError as exc:  # CI turns this into a failure
        pytest.skip(str(exc))
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    key = ("-newkey", "rsa:2048", "-nodes", "-keyout", str(folder / "privkey.pem"))
    subject = ("-subj", "/CN=recs.shop.example", "-out", str(folder / "fullchain.pem"))
    subprocess.run(["openssl", "req", "-x509", *subject, *key], check=True, capture_output=True)
    found = re.findall(r"^ *```nginx\n(.*?)^ *```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (site,), (rules,) = ([block for block in found if word in block] for word in ("upstream lisarec", "/v1/admin"))
    for ours, theirs in {
        "        location / {": f"{rules}        location / {{",
        "127.0.0.1:8000": f"127.0.0.1:{service.address[1]}",
        "listen 443 ": f"listen 127.0.0.1:{port} ",
        "/etc/letsencrypt/live/recs.shop.example": str(folder),
    }.items():
        assert ours in site
        site = site.replace(ours, theirs)
    (folder / "nginx.conf").write_text(AROUND.format(folder=folder, site=site))
    process = subprocess.Popen([nginx, "-c", folder / "nginx.conf", "-p", folder])
    try:
        wait_until(lambda: ask(port, "/readyz")[0] == 200)
        yield port
    finally:
        process.terminate()
        process.wait()


def ask(port: int, target: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and body of the response; 0 if the connection ends without one."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    method, length = ("GET", "") if body is None else ("POST", f"Content-Length: {len(body)}\r\n")
    head = f"{method} {target} HTTP/1.1\r\nHost: recs.shop.example\r\nConnection: close\r\n{length}\r\n"
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain,
            context.wrap_socket(plain) as connection,
        ):
            connection.sendall(head.encode("latin-1") + (body or b""))
            head_, _, content = b"".join(iter(lambda: connection.recv(65_536), b"")).partition(b"\r\n\r\n")
    except ConnectionError:
        return 0, b""
    return int(head_.split(b" ")[1]), content


def spellings(path: str) -> list[str]:
    """Variants of the path: prefixes, suffixes, and each character encoded or doubled."""
    encoded = [f"{path[:n]}%{ord(path[n]):02x}{path[n + 1 :]}" for n in range(len(path))]
    changed = [f"{beginning}{path}" for beginning in BEGINNINGS] + [f"{path}{ending}" for ending in ENDINGS]
    return [*encoded, *changed, path.upper(), path.replace("/", "//")]


@pytest.mark.parametrize("path", OPERATORS)
def test_no_spelling_reaches_operator_paths(port: int, path: str) -> None:
    passed = {spelling for spelling in spellings(path) if ask(port, spelling)[0] not in range(400, 500)}
    assert passed == set()


@pytest.mark.parametrize("user_id", ODD_IDS)
def test_ids_arrive_unchanged(port: int, user_id: str) -> None:
    encoded = "".join(f"%{byte:02X}" for byte in user_id.encode())
    status, content = ask(port, f"/v1/users/{encoded}/recommendations?k=1")
    assert (status, json.loads(content)["user_id"]) == (200, user_id)


def test_a_too_large_body_gets_the_error_format_of_the_service(port: int) -> None:
    status, content = ask(port, "/v1/events", body=b" " * 1_500_000)
    assert (status, json.loads(content)["error"]["code"]) == (413, "body_too_large")
