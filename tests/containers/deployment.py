"""A checkout of the project, deployed with docker-compose.yml as docs/how-to/deploy describes."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.compose import ROOT
from benchmarks.harness.service_process import free_port
from tests.containers.engine import Engine, EngineFailed, torch_index

PATIENCE_S = 900.0  # a first model on a busy machine
POLL_EVERY_S = 0.5
IMAGE = "lisarec:local"
CLUSTER = ("--env-file", ".env", "--env-file", "docker/cluster.env")


class Deployment:
    """`docker compose` in a folder of its own, with the project name `lisarec`."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.port = free_port()
        self.files: tuple[str, ...] = ()  # options that name environments
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "secrets").mkdir(parents=True)
        self.check_out()
        self.set(
            LISAREC_PUBLISH=f"127.0.0.1:{self.port}",
            LISAREC_GRAFANA_PUBLISH=f"127.0.0.1:{free_port()}",
            LISAREC_RETRAIN_EVERY="20s",
            LISAREC_REPLICAS="2",
        )

    def check_out(self) -> None:
        """Copy the files of the working tree."""
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.splitlines():
            if (ROOT / name).exists():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)

    def remove(self) -> None:
        """Stop all containers and remove the volumes."""
        self.files = ()
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5")

    def set(self, **variables: str) -> None:
        """Add lines to .env; the last line of a name counts."""
        with (self.folder / ".env").open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in variables.items())

    def override(self, **parts: object) -> None:
        """Merge services and volumes into docker-compose.yml from the next command on."""
        (self.folder / "docker-compose.override.yml").write_text(json.dumps(parts))  # YAML includes JSON

    def compose(self, *command: str) -> str:
        """Run a Docker Compose command; return its output."""
        return self.engine.run("docker-compose", *self.files, *command, cwd=self.folder).strip()

    def build(self) -> None:
        """Build the image of the compose file."""
        with torch_index(self.engine) as index:
            command = ["docker-compose", "--progress", "plain", "build"]
            self.engine.download(*command, cwd=self.folder, environment={"TORCH_INDEX": index})

    def containers(self, *services: str) -> list[str]:
        """Ids of the running containers of the services, or of all."""
        return self.compose("ps", "--quiet", *services).split()

    def container(self, service: str) -> str:
        """Id of the service's container, or of one of several."""
        return self.containers(service)[0]

    def execute(self, container: str, *command: str) -> str:
        """Run a command in a container; return its output."""
        return self.engine.docker("exec", container, *command)

    def processor_s(self, container: str) -> float:
        """CPU seconds of the container, from cgroups v1 or v2."""
        folder = "/sys/fs/cgroup"
        either = f"cat {folder}/cpuacct/cpuacct.usage 2>/dev/null || grep usage_usec {folder}/cpu.stat"
        *name, used = self.execute(container, "sh", "-c", either).split()
        return int(used) / (1e6 if name else 1e9)

    def state(self, container: str, field: str) -> str:
        """A field of the container's state, such as `Health.Status`."""
        return self.engine.inspect("container", container, f"{{{{.State.{field}}}}}")

    def wait_for_state(self, container: str, field: str, wanted: str) -> None:
        """Wait until a field of the container's state has this value."""
        self.wait_for(lambda: self.state(container, field) == wanted)

    def wait_until_healthy(self, service: str, containers: int = 1) -> None:
        """Wait until this many containers of the service are healthy."""

        healthy = ["healthy"] * containers
        self.wait_for(lambda: [self.state(one, "Health.Status") for one in self.containers(service)] == healthy)

    def rolling_restart(self, service: str = "app") -> None:
        """Restart the service's containers one by one, as docs/how-to/deploy/scale.md does."""
        for container in self.containers(service):
            self.engine.docker("restart", container)
            self.wait_for_state(container, "Health.Status", "healthy")

    def renew(self) -> None:
        """Replace every container of lisarec's image, as docs/how-to/deploy/upgrade.md does after a build."""
        old = self.containers("app")
        self.compose("up", "--detach", "--no-recreate", "--scale", f"app={2 * len(old)}", "app")
        self.wait_until_healthy("app", 2 * len(old))
        self.engine.docker("stop", *old)
        self.engine.docker("rm", *old)
        self.compose("up", "--detach", "--no-deps", "secrets", "archive", "trainer")
        self.compose("up", "--wait")  # which has nothing left to do

    def add_key(self, *scopes: str) -> str:
        """Create a key, and return it."""
        options = [word for scope in scopes for word in ("--scope", scope)]
        return self.compose("run", "--rm", "keys", "add", *options).splitlines()[-1].strip()

    def generation(self, key: str) -> str:
        """Name of the model that a replica serves, `none` before the first."""
        return str(self.ask_replica("/v1/model", key)["generation"])

    def address(self, container: str) -> str:
        """Address of the container in the network of load balancer and replicas."""
        field = '{{(index .NetworkSettings.Networks "lisarec_middle").IPAddress}}'
        return self.engine.inspect("container", container, field)

    def log(self, container: str) -> list[str]:
        """Lines of the container's output."""
        return self.engine.run("sh", "-c", f"docker logs {container} 2>&1").splitlines()

    def ask_replica(self, path: str, key: str = "") -> dict[str, object]:
        """Send a request to one of the replicas directly."""
        code = (
            "import sys, urllib.request as r;"
            "h = {'Authorization': 'Bearer ' + sys.argv[2]} if sys.argv[2] else {};"
            "print(r.urlopen(r.Request(sys.argv[1], headers=h)).read().decode())"
        )
        answer = self.execute(self.container("app"), "python", "-c", code, f"http://127.0.0.1:8000{path}", key)
        found: dict[str, object] = json.loads(answer)
        return found

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that may raise while containers come and go."""

        def holds() -> bool:
            try:
                return condition()
            except EngineFailed:
                return False

        give_up_at_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < give_up_at_s, self.compose("ps", "--all")
            time.sleep(POLL_EVERY_S)
