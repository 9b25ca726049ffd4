"""A container engine of the tests, and the images that the project's files name, without a registry."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from pathlib import Path

import yaml
from typing_extensions import override

from benchmarks.harness.compose import COMPOSE_FILE, ROOT
from tests.waiting import wait_until

HERE = Path(__file__).parent
PROGRAMS = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "mmdebstrap": "mmdebstrap",
    "iptables": "iptables",
}
DEBIAN = "lisarec-debian"
PYTHON_NEEDS = (
    "ca-certificates,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libnsl2,libreadline8,libsqlite3-0,libssl3,"
    "libuuid1,netbase,tzdata,zlib1g"
)
NOT_IN_SLIM = ("doc", "info", "locale", "man")
NOT_IN_PYTHON = ("site-packages", "test", "__pycache__", "config-3.11-x86_64-linux-gnu", "idlelib", "tkinter")
INDEX_PORT = 41509  # always the same: it is an argument of the build, and another one would make all layers anew
COMMAND_TIMEOUT_S = 1200.0
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")  # of version 1, which alone knows weights without being asked for them first
# what apt, mmdebstrap and pip say when they give up what they download; pip the last one, after five more attempts
NO_NETWORK = re.compile(
    r"Temporary failure resolving|Failed to fetch|Unable to fetch|apt-get update .*failed"
    r"|Retrying \(Retry\(total=0|IncompleteRead|Read timed out|5\d\d Server Error"
)


def check_machine() -> None:
    """Raise CannotTry if no engine can start on this machine."""
    if os.geteuid() != 0:
        raise CannotTry("only root starts an engine of containers")
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        raise CannotTry(f"an engine of containers needs Debian's packages {', '.join(missing)}")
    if python_of_image() is None:
        raise CannotTry("the image of Python is made of a Python 3.11.3 or newer of this machine")


@cache
def python_of_image() -> Path | None:
    """Prefix of a Python of the image's version: the running one, or one on the PATH."""
    ask = "import sys; print(sys.base_prefix, (3, 11, 3) <= sys.version_info < (3, 12), sep='\\n')"
    for program in (sys.executable, "python3.11", "python3"):
        with suppress(OSError):
            answer = subprocess.run([program, "-c", ask], capture_output=True, text=True).stdout.split("\n")
            if answer[1:2] == ["True"]:
                return Path(answer[0])
    return None


class EngineFailed(RuntimeError):
    """A command of the engine failed; the message has its output."""


class CannotTry(EngineFailed):
    """No engine runs containers here, or images cannot be downloaded.

    That says nothing about the project.
    """


class Engine:
    """A running dockerd with a socket of its own."""

    def __init__(self, folder: Path, socket: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "DOCKER_HOST": f"unix://{socket}", "DOCKER_CONFIG": str(folder / "config")}

    def run(self, *command: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Run the command; return its standard output, or raise EngineFailed."""
        done = subprocess.run(
            command,
            env={**self.environment, **(environment or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        if done.returncode != 0:
            raise EngineFailed(f"{' '.join(command)}: {done.stdout[-4000:]}{done.stderr[-4000:]}")
        return done.stdout

    def download(self, *command: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        """Run a command that downloads, with one retry; raise CannotTry if the network fails."""
        for attempts_left in (1, 0):
            try:
                self.run(*command, environment=environment, cwd=cwd)
                return
            except EngineFailed as exc:
                reason = NO_NETWORK.search(str(exc))
                if reason is None:
                    raise
                if not attempts_left:
                    raise CannotTry(f"the network is away: {reason[0]!r}, says {command[0]}") from exc

    def docker(self, *command: str) -> str:
        """Run a docker command; return its output."""
        return self.run("docker", *command).strip()

    def inspect(self, kind: str, name: str, template: str) -> str:
        """Return a field of an image, a container or a volume."""
        return self.docker(kind, "inspect", "--format", template, name)

    def has_image(self, name: str) -> bool:
        """Return whether the image exists."""
        return bool(self.docker("image", "ls", "--quiet", name))

    @property
    def gateway(self) -> str:
        """Address of this machine for containers during a build."""
        # not its field Gateway, which is empty where the network's bridge was there before the engine
        subnet = self.docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Subnet}}")
        return str(ip_network(subnet)[1])


@contextmanager
def running_engine(folder: Path, idle: bool = False) -> Iterator[Engine]:
    """Start dockerd with its data in the folder, which keeps images from run to run; CannotTry where it does not.

    Containers of one that is `idle` have what other work leaves of the processors, as far as the kernel can tell.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lisarec-engine-") as name:  # a socket's path has to be short
        place, log = Path(name), folder / "dockerd.log"
        options = ["--data-root", folder / "data", "--exec-root", place / "exec", "--pidfile", folder / "dockerd.pid"]
        options += ["--cgroup-parent", control_group(idle)]
        command = ["dockerd", *map(str, options), "--host", f"unix://{place}/docker.sock"]
        forwarding = forward_policy()
        with log.open("w") as output:
            dockerd = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command], stdout=output, stderr=output, start_new_session=True
            )
        engine = Engine(folder, place / "docker.sock")
        try:
            wait_until(lambda: is_up(engine) or dockerd.poll() is not None, log.read_text)
            if dockerd.poll() is not None:
                raise CannotTry(f"dockerd ended: {last_line(log.read_text())}")
            set_forward_policy(forwarding)  # dockerd forbids what others on this machine may need
            engine.docker("container", "prune", "--force")  # what a build that was killed has left in the folder
            yield engine
        finally:
            dockerd.terminate()
            dockerd.wait()


def control_group(idle: bool) -> str:
    """The cgroup of containers, which inherits no niceness; an idle one has minimal weight."""
    name = f"lisarec-containers{'-idle' if idle else ''}"
    if idle and CPU_GROUPS.is_dir():
        (CPU_GROUPS / name).mkdir(exist_ok=True)
        (CPU_GROUPS / name / "cpu.shares").write_text("2")  # of 1024
    return f"/{name}"


def is_up(engine: Engine) -> bool:
    """Return whether the engine responds."""
    try:
        return bool(engine.docker("version", "--format", "{{.Server.Version}}"))
    except EngineFailed:
        return False


def last_line(text: str) -> str:
    """The last non-empty line, where programs report why they ended."""
    return text.strip().rpartition("\n")[2]


def forward_policy() -> str:
    """The kernel's default policy for forwarded packets."""
    listed = subprocess.run(["iptables", "-S", "FORWARD"], capture_output=True, text=True)
    if listed.returncode != 0:
        raise CannotTry(f"iptables ended: {last_line(listed.stderr)}")
    return listed.stdout.split()[2]


def set_forward_policy(policy: str) -> None:
    """Set the default policy for forwarded packets."""
    subprocess.run(["iptables", "-P", "FORWARD", policy], check=True)


def make_base(engine: Engine) -> None:
    """Build the base image of docker/Dockerfile and its own base, unless they exist."""
    context = engine.folder / "images"
    context.mkdir(exist_ok=True)
    if not engine.has_image(DEBIAN):
        make_debian(engine, context / "debian.tar")
    try:
        engine.docker("run", "--rm", DEBIAN, "true")
    except EngineFailed as exc:
        raise CannotTry(f"the engine runs no container: {last_line(str(exc))}") from exc
    begins = re.search("^FROM (\\S+)", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert begins is not None
    if engine.has_image(begins[1]):
        return
    with tarfile.open(context / "python.tar", "w") as tar_file:
        prefix = python_of_image()
        assert prefix is not None
        tar_file.add(prefix / "bin" / "python3.11", "bin/python3.11")
        tar_file.add(prefix / "lib", "lib", filter=without_tests)
    certificates = os.environ.get("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt")
    shutil.copy(certificates, context / "certificates.crt")
    (context / "pip.conf").write_text(pip_configuration(engine.gateway))
    make_image(engine, "python", begins[1])


def make_images_of_others(engine: Engine) -> None:
    """Build every third-party image of docker-compose.yml, unless it exists."""
    services = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
    for name in ("redis", "haproxy", "prometheus", "grafana"):
        if not engine.has_image(services[name]["image"]):
            make_image(engine, name, services[name]["image"])


def make_image(engine: Engine, target: str, name: str) -> None:
    """Build an image from a Dockerfile beside this file."""
    context = engine.folder / "images"
    command = ["docker", "build", "--target", target, "--tag", name, "--file", str(HERE / "Dockerfile"), str(context)]
    engine.download(*command, environment={"DOCKER_BUILDKIT": "0"})


def make_debian(engine: Engine, tar: Path) -> None:
    """Build a Debian image with the libraries of Python, as small as the official slim one."""
    sources = "/etc/apt/sources.list.d/debian.sources"
    options = [
        f"--include={PYTHON_NEEDS}",
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in NOT_IN_SLIM),
    ]
    engine.download("mmdebstrap", "--quiet", "--variant=minbase", *options, "bookworm", str(tar), sources)
    engine.docker("import", str(tar), DEBIAN)
    tar.unlink()


def without_tests(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Remove from Python what its official slim image lacks, too."""
    path = Path(entry.name)
    return None if path.suffix == ".a" or set(path.parts) & set(NOT_IN_PYTHON) else entry


def pip_configuration(torch_host: str) -> str:
    """Configuration of pip for builds: the machine's index, and the server of `torch_index`."""
    lines = ["[global]", "cert = /etc/ssl/certs/ca-certificates.crt", f"trusted-host = {torch_host}"]
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if index := os.environ.get("PIP_INDEX_URL", configured):
        lines.append(f"index-url = {index}")
    return "\n".join([*lines, ""])


@contextmanager
def torch_index(engine: Engine) -> Iterator[str]:
    """Serve the wheel of torch for CPUs that this machine's pip finds; `default`, gigabytes of CUDA, without one.

    torch's own index of CPU builds may be out of reach. The hash of the wheel is in docker/requirements/torch.txt.
    """
    wheels = engine.folder / "index" / "simple" / "torch"
    wheels.mkdir(parents=True, exist_ok=True)
    if not list(wheels.glob("*+cpu-*.whl")):
        pinned = (ROOT / "docker" / "requirements" / "torch.txt").read_text().split()[0]
        engine.download(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels), pinned)
    if not list(wheels.glob("*+cpu-*.whl")):
        yield "default"
        return
    handler = partial(QuietFiles, directory=str(engine.folder / "index"))
    with ThreadingHTTPServer((engine.gateway, INDEX_PORT), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{engine.gateway}:{INDEX_PORT}/simple"
        server.shutdown()


class QuietFiles(SimpleHTTPRequestHandler):
    """Serves files of a directory without logging."""

    @override
    def log_message(self, format: str, *args: object) -> None: ...
